"""The commands of evidence: their processes, what they read from logs, how a result grows, and the page."""

import sys

import click
from click.testing import CliRunner

from benchmarks.evidence import command, page
from benchmarks.harness import record
from benchmarks.harness.record import RESULTS, Figure


def made(cases=("a", "b"), fail=""):
    """A command of evidence whose trials print their seed, and fail where they are told to."""

    def total(figures):
        return [Figure(name="all seeds: sum", value=sum(f.value for f in figures if f.name.endswith(": x")))]

    @command.evidence("presets", cases=cases, quick_cases=cases, seeds="0,1", summary=total)
    @click.option("--more", default=1.0)
    def main(plan, more):
        def trial(case, seed):
            words = [sys.executable, "-c", f"raise SystemExit({int(f'{case}{seed}' == fail)})"]
            curve = ((0, 1.0), (1, 2.0))
            figure = Figure(name="x", value=seed + more, curve=curve)
            return command.Trial(case=case, seed=seed, command=words, read=lambda: [figure])

        return [trial(case, seed) for seed in plan.seeds for case in plan.cases]

    return main


def test_a_result_grows_trial_by_trial(tmp_path):
    """Each trial replaces its own figures, the others and the order stay; the sum is taken anew."""
    options = ["--out", str(tmp_path), "--jobs", "2"]

    def run(*more, fail="", code=0):
        done = CliRunner().invoke(made(fail=fail), [*options, *more])
        assert done.exit_code == code, done.output
        (found,) = record.load_records(tmp_path / "presets.json").values()
        return {f.name: f.value for f in found.figures if f.name.endswith((": x", ": sum"))}

    assert run("--case", "b", "--seeds", "1") == {"b: seed 1: x": 2.0, "all seeds: sum": 2.0}
    found = run("--seeds", "0,1", fail="a1", code=1)
    assert found == {"a: seed 0: x": 1.0, "b: seed 0: x": 1.0, "b: seed 1: x": 2.0, "all seeds: sum": 4.0}
    assert list(run()) == ["a: seed 0: x", "a: seed 1: x", "b: seed 0: x", "b: seed 1: x", "all seeds: sum"]
    assert run("--more", "5", "--seeds", "3") == {  # other work: nothing of before is kept
        "a: seed 3: x": 8.0,
        "b: seed 3: x": 8.0,
        "all seeds: sum": 16.0,
    }
    assert "b" in CliRunner().invoke(made(), [*options, "--case", "c"]).output
    assert (tmp_path / "evidence_presets.svg").is_file() is False  # no panel has a curve named x


def test_the_page_has_what_the_results_hold():
    """docs/evidence.md is what `python -m benchmarks.report` would write."""
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.rendered(text, RESULTS) == text, "out of date: run python -m benchmarks.report"
