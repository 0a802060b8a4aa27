"""The commands of evidence: their processes, what they read from logs, how a result grows, and the page."""

import json
import re
import sys
import time
from types import SimpleNamespace

import attrs
import click
import mlx.core as mx
import pytest
from click.testing import CliRunner

from benchmarks.evidence import NAMES, against_trl, command, masters, page, pictures, pool, presets, samplers
from benchmarks.evidence.deep_models import deepened, phases
from benchmarks.evidence.pool import Job, divided, side_by_side
from benchmarks.evidence.readings import learning, reach, read_log, sampler, thinned
from benchmarks.harness import record
from benchmarks.harness.record import RESULTS, Figure
from grpo_fn import PRESETS
from runners.errors import UserError
from runners.quickstart import DATA_DIR
from tests.support.pages import ROOT
from tests.support.processes.waiting import wait_until
from tests.support.ranks.launching import is_running

LATER = float("inf")


def job(tmp_path, name, code, **more):
    """A process of Python that runs these lines."""
    return Job(name=name, command=[sys.executable, "-c", code], printed=tmp_path / f"{name}.txt", **more)


def test_processes_run_side_by_side_and_tell_what_they_took(tmp_path, monkeypatch):
    """Two that wait for each other, and until their memory was looked at, both end; one that fails has its
    last words in its error.
    """
    wait = (
        "import os, pathlib, time, sys\n"
        "mine, other, seen = (pathlib.Path('{0}') / name for name in ('{1}', '{2}', str(os.getpid())))\n"
        "mine.touch()\n"
        "block = bytearray(60_000_000)\n"
        "while not (other.exists() and seen.exists()): time.sleep(0.01)\n"
    )
    resident = pool._resident

    def looked_at(pid):
        found = resident(pid)
        if found > 60_000_000 or sys.platform != "linux":
            (tmp_path / str(pid)).touch()
        return found

    monkeypatch.setattr(pool, "_resident", looked_at)
    jobs = [
        job(tmp_path, "a", wait.format(tmp_path, "x", "y")),
        job(tmp_path, "b", wait.format(tmp_path, "y", "x")),
        job(tmp_path, "c", "import sys; print('the last words'); sys.exit(3)"),
        job(tmp_path, "d", "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['MORE'])"),
    ]
    jobs[3] = attrs.evolve(jobs[3], environment={"MORE": "yes"})
    found = {done.name: outcome for done, outcome in side_by_side(jobs, 2, until=LATER)}
    assert found["a"].seconds > 0 and found["a"].resident > 60_000_000
    assert found["d"].resident < found["a"].resident  # not the memory of this process
    assert "c: ended with code 3" in str(found["c"]) and "the last words" in str(found["c"])
    assert (tmp_path / "d.txt").read_text().split() == [str(found["d"].cores), "yes"]


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


def test_cores_are_divided_among_the_jobs():
    """As many for each and none twice; where there are too few, all for each."""
    assert divided(range(16), 7) == [(2 * n, 2 * n + 1) for n in range(7)]
    assert divided([3, 5], 4) == [(3, 5)] * 4


def test_the_update_at_which_a_curve_gets_there():
    """Between two evaluations by a straight line; at the start if it begins there; None if it never does."""
    assert reach([(0, 40.0), (20, 60.0), (40, 100.0)], 80.0) == 30
    assert reach([(0, 90.0), (20, 60.0)], 80.0) == 0
    assert reach([(0, 40.0), (20, 79.9)], 80.0) is None


def test_a_curve_is_thinned_to_means_of_neighbours():
    """Twenty points of five each; what is not finite is left out; a short one stays."""
    curve = thinned([(n, 2.0 * n) for n in range(1, 101)])
    assert len(curve) == 20 and curve[0] == (3.0, 6.0) and curve[-1] == (98.0, 196.0)
    assert thinned([(1, 1.0), (2, float("nan"))]) == ((1.0, 1.0),)


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


def test_a_curve_stands_in_one_line_of_the_result(tmp_path):
    """And comes back as it was; figures without one have no field for it."""
    figures = [Figure(name="a", value=1.0, curve=((0, 1.5), (2, 3.0))), Figure(name="b", value=2.0)]
    one = record.make_record("presets", figures, quick=True, machine={}, rates={})
    record.save_record(tmp_path, "cpu", one)
    text = (tmp_path / "presets.json").read_text()
    assert '"curve": [[0, 1.5], [2, 3.0]]' in text and text.count("curve") == 1
    assert record.load_records(tmp_path / "presets.json") == {"cpu": one}


def test_curves_of_seeds_become_a_mean_and_a_range():
    """At the updates that all have."""
    found = pictures.joined([((0, 1.0), (1, 2.0)), ((0, 3.0), (2, 9.0))])
    assert found == [(0, 2.0, 1.0, 3.0)]


def test_a_cell_has_the_mean_the_range_and_how_many_got_there():
    """One seed has no range; of a figure that not every seed has, the cell says how many."""
    seeds = {n: {"x": Figure(name="x", value=float(n))} for n in (2, 4)}
    assert page.cell(page.Column("x", "x"), seeds) == "3 (2 – 4)"
    assert page.cell(page.Column("x", "x"), {2: seeds[2]}) == "2"
    reached = page.Column("x", "x", of_reached=True)
    assert page.cell(reached, {**seeds, 5: {}}) == "3 (2 – 4), 2 of 3"
    assert page.cell(reached, {5: {}}) == "none of 1"


def test_the_page_has_what_the_results_hold():
    """docs/evidence.md is what `python -m benchmarks.report` would write."""
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.rendered(text, RESULTS) == text, "out of date: run python -m benchmarks.report"


def test_the_page_names_every_command():
    """A heading's text has it, and the Makefile runs them all."""
    text = page.PAGE.read_text(encoding="utf-8")
    assert re.findall(r"`python -m benchmarks\.evidence\.(\w+)`", text) == list(NAMES)
    assert f"EVIDENCE := {' '.join(NAMES)}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


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


def test_hard_problems_are_shipped_ones():
    """Some 11 of 20, by their kind; the packaged rows have each."""
    hard = presets.hard_rows("test")
    shipped = [json.loads(line) for line in (DATA_DIR / "test.jsonl").read_text().splitlines()]
    assert 180 <= len(hard) <= 260 and all(row in shipped for row in hard)
    assert presets.main.name == "presets" and len(PRESETS) == 9


def test_a_deeper_model_keeps_the_shipped_blocks_between_random_ones():
    """First and last stay so; what a random block adds is small."""
    block = {"self_attn.o_proj.weight": mx.ones((64, 64)), "input_layernorm.weight": 2 * mx.ones((64,))}
    leaves = {f"model.layers.{n}.{name}": leaf * (n + 1) for n in range(3) for name, leaf in block.items()}
    found = deepened({**leaves, "model.norm.weight": mx.ones((64,))}, 21)
    assert len(found) == 2 * 21 + 1
    for number, place in enumerate((0, 10, 20)):
        assert found[f"model.layers.{place}.self_attn.o_proj.weight"][0, 0].item() == number + 1
    assert mx.all(found["model.layers.5.input_layernorm.weight"] == 1).item()
    spread = mx.std(found["model.layers.5.self_attn.o_proj.weight"]).item()
    assert spread == pytest.approx(1 / 8 / 42**0.5, rel=0.1)
    assert [(phase.name, phase.steps) for phase in phases((0, 5))] == [("habits", 5)]


def test_how_far_weights_have_moved():
    """In thousandths of their norm."""
    before, after = {"a": mx.array([3.0, 4.0])}, {"a": mx.array([3.0, 4.005])}
    assert masters.moved(before, after).value == pytest.approx(1.0, rel=1e-3)
