"""The commands of evidence that are one run each: what they read of logs, join, and start."""

import json

import attrs
import pytest
from click.testing import CliRunner

from benchmarks.evidence import gsm8k, joined, programs, rates, watched
from benchmarks.evidence.slots import jobs_of
from benchmarks.harness import plots, report
from benchmarks.harness.record import Figure, Record, load_records, save_record
from benchmarks.harness.runs import log_lines
from runners.files.run_files import METRICS

EVALUATION = {"em": 0.1, "eval/rewards/last_number_reward": 0.25, "em_subset": 20, "time/elapsed": 30.0}
STEP = {"reward": 0.5, "step_time": 2.0, "num_tokens": 64, "time/elapsed": 60.0, "memory/peak_gb": 3.0}


def lines(*found):
    """Lines of a log at updates 0, 1, …"""
    return [{"update": update, **line} for update, line in enumerate(found)]


def test_a_log_tells_more_as_it_grows():
    """The scores before training first, then the steps, then the scores after them, with both curves."""
    names = [
        {figure.name for figure in gsm8k.figures_of(log)}
        for log in (lines(), lines(EVALUATION), lines(EVALUATION, STEP), lines(EVALUATION, STEP, EVALUATION))
    ]
    assert names[0] == set() and names[1] == {"strict before", "lenient before"}
    assert {"updates", "step", "peak memory of the GPU"} <= names[2] - names[1]
    assert names[3] - names[2] == {"strict after", "lenient after"}


def test_scores_are_shares_with_their_curve_over_minutes():
    """Strict is the form's own exact match, lenient the reward for the last number."""
    after = {**EVALUATION, "em": 0.5, "eval/rewards/last_number_reward": 0.5, "time/elapsed": 90.0}
    found = {figure.name: figure for figure in gsm8k.scores(lines(EVALUATION, STEP, after))}
    assert found["strict before"].value == 10 and found["lenient before"].value == 25
    strict = found["strict after"]
    assert strict.curve[0] == (0.5, 10.0) and strict.curve[-1] == (1.5, 50.0) and strict.samples == 20
    assert strict.low < 50 < strict.high


def test_a_line_that_is_still_written_is_not_read(tmp_path):
    """A log may be read at any time, also before it is there."""
    assert log_lines(tmp_path) == []
    (tmp_path / METRICS).write_text('{"update": 0}\n{"upd')
    assert log_lines(tmp_path) == [{"update": 0}]


def test_training_stops_in_time_for_the_last_scores(tmp_path):
    """As a condition that a run understands."""
    call = watched.Call(
        quick=False, work=tmp_path, model="m", data=tmp_path, seed=0, minutes=8.5, more=(), resume=False
    )
    assert call.stopping() == 'stop.when=["time/elapsed >= 465"]'
    assert call.folder("gsm8k-full, rate 1") == tmp_path / "gsm8k-full-rate-1-0"


@pytest.mark.parametrize("side", ["full", "lora"])
def test_the_name_of_a_case_tells_what_differs(side):
    """So that results of other settings never replace one another."""
    case = gsm8k.Case(side="grpo_fn", tune=side, rate=2e-6)
    more = [{"sampler": "affine-4"}, {"limit": 512}, {"supervised": 10}, {"form": "boxed"}, {"rate": 1e-6}]
    more.append({"side": "TRL"})
    names = {attrs.evolve(case, **changes).name for changes in ({}, *more)}
    assert len(names) == 7 and all(": " not in name for name in names)


def test_results_of_several_commands_are_joined(tmp_path):
    """A run that is there already is replaced by the later one; others stay."""
    for folder, seed, value in (("a", 0, 1.0), ("b", 1, 2.0), ("c", 0, 3.0)):
        figure = Figure(f"full: seed {seed}: step", value)
        record = Record(name="gsm8k", figures=[figure], machine={})
        save_record(tmp_path / folder, "cuda", record)
    folders = [str(tmp_path / name) for name in "abc"]
    done = CliRunner().invoke(joined.main, ["gsm8k", *folders, "--out", str(tmp_path / "all")])
    assert done.exit_code == 0, done.output
    found = load_records(tmp_path / "all" / "gsm8k.json")["cuda"].figures
    assert {figure.name: figure.value for figure in found} == {
        "full: seed 0: step": 3.0,
        "full: seed 1: step": 2.0,
    }
    missing = CliRunner().invoke(joined.main, ["rates", folders[0]])
    assert missing.exit_code == 2 and "expected a result of rates, found none" in missing.output


def test_slots_divide_the_gpus(tmp_path):
    """A line, a slot: its commands one after the other; comments and empty lines are none."""
    jobs = jobs_of("# first\na.b --x 'y z' ; c.d\n\ne.f # last\ng.h\n", 2, tmp_path, until=1.0)
    assert [job.environment["CUDA_VISIBLE_DEVICES"] for job in jobs] == ["0", "1", "0"]
    assert jobs[0].command[2].count(" -m ") == 2 and "a.b --x 'y z' ; " in jobs[0].command[2]
    assert jobs[1].name == "e.f"


def test_programs_are_scored_by_set(tmp_path):
    """Both sets are one file of held-out problems, told apart by their places in it."""
    for file in ("train.jsonl", "test.jsonl", "humaneval.jsonl"):
        (tmp_path / file).write_text('{"question": "q", "answer": "assert f()"}\n' * 3)
    counts = programs.joined_data(tmp_path, tmp_path / "joined", quick=False)
    assert counts == {"MBPP": 3, "HumanEval": 3}
    assert len((tmp_path / "joined" / "test.jsonl").read_text().splitlines()) == 6
    rows = [
        {"update": update, "problem": problem, "correct": problem < limit}
        for update, limit in ((0, 1), (9, 5))
        for problem in range(6)
    ]
    (tmp_path / "evaluations.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = {figure.name: round(figure.value) for figure in programs.scores(tmp_path, counts)}
    assert found == {"MBPP before": 33, "MBPP after": 100, "HumanEval before": 0, "HumanEval after": 67}


def test_every_point_of_the_grid_has_a_name_of_its_own():
    """Names of figures; a bad part is refused with what is wanted."""
    assert len({point.name for point in rates.GRID}) == len(rates.GRID)
    words = ["--out", "x", "--model", "embedded", "--data", ".", "--part", "3/2"]
    refused = CliRunner().invoke(rates.main, words)
    assert refused.exit_code == 2 and "expected K/N with 1 <= K <= N" in refused.output


def test_a_table_and_a_picture_are_made_of_results(tmp_path):
    """A row for each case with the range of its seeds; a figure of each part of a step."""
    log = [{"update": n, **line} for n, line in enumerate((EVALUATION, STEP, STEP, EVALUATION))]
    figures = [
        attrs.evolve(figure, name=f"full: seed {seed}: {figure.name}")
        for seed in (0, 1)
        for figure in gsm8k.figures_of(log)
    ]
    machine = {"device": "none", "mlx": "0"}
    record = Record(name="gsm8k", figures=figures, machine=machine)
    assert "| full | 2     | 25" in report.overview(record)
    pytest.importorskip("matplotlib")
    plots.draw_curves(record, tmp_path / "picture.svg")
    assert "minutes" in (tmp_path / "picture.svg").read_text()
    parts = [Figure("sync, first: moments", 2, "s"), Figure("sync, first: all", 3)]
    step = Record(name="gpu_step", figures=parts, machine=machine)
    assert "| sync, first | 2          | 3   |" in report.overview(step)


def test_pages_contain_the_results():
    """`python -m benchmarks.report` would change nothing."""
    assert report.refresh(write=False) == []
