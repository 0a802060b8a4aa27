"""The benchmarks measure what they say: their tools on known answers, and each command end to end."""

import getpass
import re
import socket
import time

import attrs
import click
import mlx.core as mx
import pytest
from click.testing import CliRunner

from benchmarks import mac
from benchmarks.harness import measure, record, report, runs
from benchmarks.harness.command import benchmark
from benchmarks.harness.headlines import headlines
from benchmarks.harness.record import Figure
from benchmarks.peers import WARM, Peer, Side, side_of
from benchmarks.report import main as report_command
from runners.errors import UserError
from tests.support.benchmark_runs import check_quick_run

TEXTS = "cpu device system blas blas_threads python mlx mlx-lm grpo_fn"
MACHINE = dict.fromkeys(TEXTS.split(), "x") | {"cores": 2, "memory_gb": 8.0, "load": 0.1}
RATES = {"matmul": 2e11, "exp": 1e8, "copy": 1e10}


def made(*figures):
    """A record of these figures."""
    return record.Record(name="loss", figures=figures, machine=MACHINE, rates=RATES)


def test_a_lazy_result_is_computed_inside_the_clock():
    """The time of a call that returns an unevaluated product is the product's, not the graph's."""
    a_nn = mx.random.normal((700, 700), key=mx.random.key(0))
    mx.eval(a_nn)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        mx.eval([a_nn @ a_nn for _ in range(8)])
        seconds.append(time.perf_counter() - started)
    lazy = measure.timed(lambda: {"nested": [a_nn @ a_nn for _ in range(8)]}, repeats=3)
    assert max(lazy.samples) > min(seconds) / 4


def test_peak_counts_what_a_call_adds():
    """Two arrays of 8 MB and their sum, all three results, peak at 24 MB, whatever was there before."""
    held = mx.ones((2**22,))
    mx.eval(held)

    def call():
        parts = [mx.random.uniform(shape=(2**21,), key=mx.random.key(i)) for i in range(2)]
        mx.eval(parts)
        return [*parts, parts[0] + parts[1]]

    assert 24 * 2**20 <= measure.peak_bytes(call) < 26 * 2**20


def test_a_result_stands_beside_other_backends_and_replaces_its_own(tmp_path):
    """Saving returns the record that it replaces and keeps the other backend's; a table shows the change."""
    slow, fast = made(Figure("x", 2.0, "s")), made(Figure("x", 1.0, "s"))
    assert record.save_record(tmp_path, "cpu", slow) == (None, slow)
    assert record.save_record(tmp_path, "cuda", fast) == (None, fast)
    assert record.save_record(tmp_path, "cpu", fast) == (slow, fast)
    assert record.load_records(tmp_path / "loss.json") == {"cpu": fast, "cuda": fast}
    assert "-50 %" in record.table(fast, slow)
    for other in ({"quick": True}, {"settings": {"seeds": "[0]"}}):
        assert "change" not in record.table(fast, attrs.evolve(slow, **other))


def test_the_pages_show_the_results():
    """All pages have what benchmarks/results holds as it is; the list is short."""
    result = CliRunner().invoke(report_command, ["--check"])
    assert result.exit_code == 0, result.output
    assert len(report.README.read_text(encoding="utf-8").splitlines()) <= 200


def test_check_turns_a_missed_target_into_an_exit_code(tmp_path):
    """--check ends with 1 where a target is missed, without it with 0; a file that is no result with 2."""

    @benchmark("made")
    @click.option("--size", default=1)
    @click.option("--repeats", default=1)
    def measured(quick, size, repeats):
        return [Figure("x", 3.0, at_most=2.0)]

    options = ["--quick", "--out", str(tmp_path)]
    assert CliRunner().invoke(measured, [*options, "--size", "2", "--repeats", "3"]).exit_code == 0
    (found,) = record.load_records(tmp_path / "made.json").values()
    assert found.settings == {"size": "2"}
    result = CliRunner().invoke(measured, [*options, "--check"])
    assert result.exit_code == 1 and "MISS x: 3" in result.output
    (tmp_path / "made.json").write_text("[")
    assert CliRunner().invoke(measured, options).exit_code == 2


def test_a_benchmark_runs_and_writes_its_result(tmp_path):
    """The shortest of them, as a process; tests/campaigns/test_benchmark_runs.py runs all."""
    check_quick_run("rollout", tmp_path)


def test_a_mac_is_measured_by_one_command(tmp_path, monkeypatch):
    """In small, on this machine: sampling, steps and memory of each model, a picture, no names or paths. The
    pages show the newest result that a Mac's owner sent."""
    lines = [{"update": n, "em": 0.5, "em_subset": 200, "reward": 1.0, "memory/peak_gb": 0.2} for n in (0, 1)]
    monkeypatch.setattr("benchmarks.quickstart.read_log", lambda folder: lines)
    monkeypatch.setattr(mac, "run_seed", lambda *_: runs.Usage(seconds=60.0, resident=3e8, cores=2))
    options = ["--quick", "--random", "--out", str(tmp_path / "metal" / "m9")]
    done = CliRunner().invoke(mac.main, options)
    assert done.exit_code == 0 and "4 of 4" in done.output, done.output
    file = tmp_path / "metal" / "m9" / "mac.json"
    (measured,) = record.load_records(file).values()
    values = {figure.name: figure.value for figure in measured.figures}
    parts = ("sampling", "steps", "measured peak", "predicted", "error")
    assert {f"{name}: {part}" for name in mac.MODELS for part in parts} <= values.keys()
    assert values["quickstart: from command to end"] == 60 and min(values.values()) >= 0
    assert file.with_suffix(".svg").is_file()
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"/(Users|home|private|tmp|work)/", text)
    assert socket.gethostname() not in text and f'"{getpass.getuser()}"' not in text
    for day, chip in (("2027-01-02", "Apple M9 Max"), ("2027-01-01", "Apple M9")):
        sent = attrs.evolve(measured, quick=False, date=day, machine=measured.machine | {"cpu": chip})
        record.save_record(tmp_path / "metal" / chip.replace(" ", "-"), "metal", sent)
    assert record.load_results(tmp_path, "mac")["metal"].machine["cpu"] == "Apple M9 Max"
    assert re.search(r"4 × 256 tokens, LoRA,\son Apple M9 Max: [\d,]+ tokens", headlines(tmp_path))


def test_parts_of_a_mac_that_come_too_late_or_do_not_fit_are_left_out(tmp_path, monkeypatch):
    """The others are measured."""

    def refuses(*_):
        raise UserError("not enough memory")

    monkeypatch.setattr(mac, "run_seed", refuses)
    monkeypatch.setattr(mac, "model_figures", lambda name, *_, **__: [Figure(name, 1.0)])
    for minutes, count in (("20", 3), ("0", 0)):
        out = tmp_path / minutes
        done = CliRunner().invoke(mac.main, ["--quick", "--minutes", minutes, "--out", str(out)])
        assert done.exit_code == 0, done.output
        records = record.load_records(out / "mac.json").values()  # without figures there is no result
        assert sum(len(measured.figures) for measured in records) == count
    assert "left out after 0 minutes" in done.output


SENT = sorted((record.RESULTS / "metal").glob("*/*.json"))


@pytest.mark.parametrize("file", SENT, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_what_was_sent_in_is_a_result_of_metal(file):
    """It loads, is of the backend metal alone, and names no folder of the sender's machine."""
    assert set(record.load_records(file)) == {"metal"}
    assert not re.search(r"/(Users|home|private)/", file.read_text(encoding="utf-8"))


def test_a_run_that_is_compared_has_its_steps(tmp_path):
    """All but the first ones count; also without the peers' packages."""
    small = ["optim.batch_size=2", "rollout.num_generations=4", "eval.samples=1", "data.max_samples=8"]
    small += [f"optim.max_steps={WARM + 2}", "rollout.max_new_tokens=8", "log.report=false"]
    settings = {**side_of(tmp_path, "quickstart", "quickstart", small), "repeats": 2}
    side = Side(Peer("ours", "ours"), settings)
    side.run(0)
    assert len(side.steps) == 2 and side.resident > 0 and side.peak > 0
    for step in side.steps:
        assert step["tokens"] > 0
        assert 0 < step["time/rollout"] < step["step_time"]
