"""The commands of evidence: their processes, what they read from logs, how a result grows, and the page."""

import json
import sys
import time
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from benchmarks.evidence import against_trl, command, page, pool, samplers
from benchmarks.evidence.pool import Job, side_by_side
from benchmarks.evidence.readings import learning, read_log, sampler
from benchmarks.harness import record
from benchmarks.harness.record import RESULTS, Figure
from runners.errors import UserError
from tests.support.processes.waiting import wait_until
from tests.support.ranks.launching import is_running

LATER = float("inf")


def job(tmp_path, name, code, **more):
    """A process of Python that runs these lines."""
    return Job(name=name, command=[sys.executable, "-c", code], printed=tmp_path / f"{name}.txt", **more)


def test_a_process_is_ended_when_the_time_is_over(tmp_path, monkeypatch):
    """It, what it started, and those that have not begun: all are named."""
    child = (
        "import subprocess, sys\n"
        "started = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(6000)'])\n"
        "print(started.pid, flush=True)\n"
        "started.wait()\n"
    )
    jobs = [job(tmp_path, "long", child), job(tmp_path, "next", "pass")]
    printed = tmp_path / "long.txt"
    over = SimpleNamespace(  # once the child has begun
        monotonic=lambda: float(printed.exists() and "\n" in printed.read_text()),
        **{name: getattr(time, name) for name in ("sleep", "perf_counter")},
    )
    monkeypatch.setattr(pool, "time", over)
    found = {done.name: str(outcome) for done, outcome in side_by_side(jobs, 1, until=1.0)}
    if sys.platform == "linux":  # a busy machine lets a killed process live on for a moment
        wait_until(lambda: not is_running(int(printed.read_text())))
    assert found == {
        "long": "long: ended before it was done: the time is over",
        "next": "next: not started: the time is over",
    }


def test_a_log_becomes_figures(tmp_path):
    """Exact match, rewards, tokens and the sampler's distance; a log without an end is refused."""
    lines = [
        {"update": 0, "em": 0.5, "em_subset": 200},
        *(
            {
                "update": n,
                "reward": float(n),
                "step_time": 0.5,
                "num_tokens": 100 * n,
                "sampling/sampling_logp_difference/mean": 0.1 * n,
                "sampling/effective_sample_size": 0.9,
            }
            for n in range(1, 11)
        ),
        {"update": 10, "em": 0.9, "em_subset": 200},
    ]
    path = tmp_path / "training_log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = {f.name: f for f in (*learning(read_log(tmp_path)), *sampler(lines))}
    assert {name: figure.value for name, figure in figures.items()} == pytest.approx(
        {
            "exact match before": 50.0,
            "exact match after": 90.0,
            "reward, last tenth": 10.0,
            "step": 0.5,
            "updates to 80 %": 7.5,
            "tokens sampled": 1000,
            "mismatch": 0.55,
            "effective sample size": 90.0,
        }
    )
    assert figures["exact match after"].curve == ((0, 50.0), (10, 90.0))
    with pytest.raises(UserError, match="went back to full precision: too far"):
        sampler([*lines, {"rollout/fallback": "too far"}])
    path.write_text(json.dumps(lines[0]))
    with pytest.raises(UserError, match="1 evaluations: wanted one before and one after"):
        read_log(tmp_path)


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


def test_the_trials_of_trl_get_the_quickstarts_settings():
    """Prompts by our loader, with their tokens; the held-out problems of the run."""
    from runners.config.loading import load_config

    config = load_config("quickstart", ["data.max_samples=10"])
    told = against_trl.side_settings(config)
    assert len(told["train"]) == 10 and len(told["test"]) == 200
    assert told["train"][0]["prompt"].endswith("<|assistant|><reasoning>")
    assert told["trl"]["epsilon_high"] == 0.28 and told["trl"]["warmup_steps"] == 3
    assert told["trl"]["loss_type"] == "dapo" and config.loss_spec().aggregation == "token_mean"


def test_the_sides_are_compared_by_their_means():
    """The target is the range of all values; one seed a side is no comparison."""

    def figures(case, values):
        return [
            Figure(name=f"{case}: seed {n}: exact match after", value=v, unit="%")
            for n, v in enumerate(values)
        ]

    (apart,) = against_trl.summary([*figures("grpo_fn", [96, 98]), *figures("TRL", [97, 99])])
    assert (apart.value, apart.at_most, apart.met) == (1.0, 3.0, True)
    assert against_trl.summary([*figures("grpo_fn", [96]), *figures("TRL", [97, 99])]) == []


def test_a_corrected_sampler_is_compared_with_full_precision():
    """Of the same depth, without a correction there; 2 points are the limit."""

    def figure(case, value, seed=0):
        return Figure(name=f"20 layers, {case}: seed {seed}: exact match after", value=value, unit="%")

    full = [figure("full precision, none", 95.0), figure("full precision, none", 97.0, 1)]
    (found,) = samplers.summary([*full, figure("affine-4, token_truncate", 93.0)])
    assert found.name == "all seeds: 20 layers, affine-4, token_truncate: below full precision"
    assert (found.value, found.met) == (3.0, False)
    assert samplers.summary([*full, figure("affine-4, none", 50.0)]) == []
