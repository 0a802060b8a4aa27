"""Dashboards: completions as tables, text and histograms; where they go; a resumed run goes on in its own."""

import json

import pytest

from runners.config.sections import LogConfig
from runners.telemetry.dashboards import CompletionTable
from runners.telemetry.log import MetricsLog
from tests.runners.telemetry.test_metrics import fake_dashboards

NAN = float("nan")
ALL = {"jsonl": False, "completions": False, "tensorboard": True, "wandb": True, "trackio": True}


def record(number, **more):
    """A completion as completions.jsonl has it."""
    return {
        "batch_step": 3,
        "update": 3,
        "prompt": f"question {number}",
        "completion": "half \ud800 of a pair\n# no heading",
        "answer": "7",
        "reward": 0.5 * number,
        "rewards": {"f": 1.0, "judge.g": None},
        "advantage": -1.0,
        "tokens": 9,
        "finished": True,
        **more,
    }


def test_a_table_has_the_first_completions_and_histograms_all():
    """Missing numbers are None in the table and absent from histograms; texts are bounded and can be sent."""
    batch = CompletionTable.of([record(0), record(1, reward=NAN), record(2, completion="x" * 20_000)], 2)
    assert len(batch.rows) == 2
    assert batch.rows[1]["reward"] is None and batch.rows[0]["rewards/judge.g"] is None
    assert batch.rows[0]["completion"].encode() == b"half \\ud800 of a pair\n# no heading"
    assert batch.numbers["reward"] == [0.0, 1.0] and batch.numbers["rewards/f"] == [1.0] * 3
    assert batch.numbers["rewards/judge.g"] == [] and batch.numbers["tokens"] == [9] * 3
    assert len(CompletionTable.of([record(0, completion="x" * 20_000)], 1).rows[0]["completion"]) == 10_003


def test_all_three_get_the_completions(tmp_path, monkeypatch):
    """At the update; not where log.table_rows is 0."""
    calls = fake_dashboards(monkeypatch)
    with MetricsLog(tmp_path, LogConfig(**ALL, table_rows=1)) as log:
        log.completions(map(record, range(3)))
    tables = [call for call in calls if "completions" in str(call[1:2]) and call[0] in ("wandb", "trackio")]
    assert [call[0] for call in tables] == ["wandb", "trackio"]
    assert all(call[1]["completions"][2][0][1] == "question 0" for call in tables)
    assert tables[0][1]["update"] == 3 and tables[1][2] == 3
    assert ("text", "completions/0") in calls and ("text", "completions/1") not in calls
    assert ("histogram", "histograms/advantage", 3) in calls
    calls.clear()
    with MetricsLog(tmp_path, LogConfig(**ALL, table_rows=0)) as log:
        log.completions([record(0)])
    assert not [call for call in calls if call[0] in ("wandb", "trackio", "histogram")]


def test_a_resumed_run_goes_on_in_its_own(tmp_path, monkeypatch):
    """Project, entity and name are the config's; the id is the folder's; a new run has a new one."""
    calls = fake_dashboards(monkeypatch)
    settings = LogConfig(**ALL, project="p", entity="team", run_name="shown")

    def started(**more):
        calls.clear()
        MetricsLog(tmp_path, settings, name="mine", **more).close()
        return {call[0]: call[1:] for call in calls}

    first, resumed, anew = started(), started(keep={}, update=4), started()
    (wandb,), (trackio,) = first["wandb init"], first["trackio init"]
    assert (wandb["project"], wandb["entity"], wandb["name"]) == ("p", "team", "shown")
    assert (trackio["project"], trackio["name"], trackio["resume"]) == ("p", "shown", "never")
    assert wandb["resume"] is None and first["writer"] == ("tensorboard", None)
    (again,) = resumed["wandb init"]
    assert (again["id"], again["resume"]) == (wandb["id"], "allow")
    assert resumed["trackio init"][0]["resume"] == "allow" and resumed["writer"] == ("tensorboard", 5)
    assert anew["wandb init"][0]["id"] != wandb["id"]
    calls.clear()
    MetricsLog(tmp_path, LogConfig(**ALL), name="mine").close()
    assert {call[1]["name"] for call in calls if call[0].endswith("init")} == {"mine"}


def test_what_dashboards_have_is_not_sent_again(tmp_path, monkeypatch):
    """After a resume: lines that the log is cut by are in W&B and Trackio; TensorBoard replaces them."""
    calls = fake_dashboards(monkeypatch)
    settings = LogConfig(**ALL | {"jsonl": True})

    def session(updates, evaluated, **more):
        calls.clear()
        with MetricsLog(tmp_path, settings, **more) as log:
            keep = None
            for update in updates:
                log.completions([record(0, update=update)])
                log.log({"update": update, "reward": 0.5})
                if update in evaluated:
                    log.log({"update": update, "em": 0.5})
                keep = log.positions() if update == 2 else keep
        return keep

    def sent(name):
        return [(call[1]["update"], *(call[1].keys() - {"update"})) for call in calls if call[0] == name]

    keep = session([1, 2, 3, 4], [3])
    assert sent("wandb")[-2:] == [(4, "completions"), (4, "reward")]
    with open(tmp_path / "training_log.jsonl", "a") as stream:
        stream.write('{"update": 5, "rew')  # the process was killed
    session([3, 4, 5], [3, 4], keep=keep, update=2)
    assert sent("wandb") == [(4, "em"), (5, "completions"), (5, "reward")]
    assert [call[2] for call in calls if call[0] == "trackio"] == [4, 5, 5]
    steps = [call[3] for call in calls if call[:2] == ("scalar", "reward")]
    assert steps == [3, 4, 5]


def test_the_real_tensorboard_reads_it_back(tmp_path):
    """Text and histograms are in its files."""
    pytest.importorskip("tensorboardX")
    settings = LogConfig(jsonl=False, completions=False, tensorboard=True)
    for keep, update in ((None, 0), ({}, 1)):
        with MetricsLog(tmp_path, settings, keep=keep, update=update) as log:
            log.log({"update": 3, "reward": 0.5})
            log.completions([record(0), record(1)])
    content = b"".join(file.read_bytes() for file in (tmp_path / "tensorboard").iterdir())
    for name in (b"completions/0", b"histograms/advantage", b"question 0", b"# no heading"):
        assert name in content


def test_the_real_wandb_takes_it_offline(tmp_path, monkeypatch):
    """A table is written, and a resume has the same id."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = LogConfig(jsonl=False, completions=False, wandb=True, project="p")
    for keep in (None, {}):
        with MetricsLog(tmp_path, settings, name="mine", keep=keep) as log:
            log.log({"update": 3, "reward": 0.5})
            log.completions([record(0), record(1)])
    run_id = (tmp_path / "wandb_run_id").read_text().strip()
    folders = list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))
    assert folders
    (table, *_) = [json.loads(file.read_text()) for file in tmp_path.rglob("*.table.json")]
    assert table["columns"][:3] == ["update", "prompt", "completion"] and len(table["data"]) == 2


def test_the_real_trackio_keeps_it(tmp_path, monkeypatch):
    """In a process of its own, as it chooses its folder when it is imported: two starts, one run."""
    pytest.importorskip("trackio")
    from tests.support.processes.new_process import in_new_process

    code = f"""
from runners.config.sections import LogConfig
from runners.telemetry.log import MetricsLog
from tests.runners.telemetry.test_dashboards import record
settings = LogConfig(jsonl=False, completions=False, trackio=True, project="p")
from pathlib import Path
for keep in (None, {{}}):
    with MetricsLog(Path({str(tmp_path)!r}), settings, name="mine", keep=keep) as log:
        log.log({{"update": 3, "reward": 0.5}})
        log.completions([record(0), record(1)])
import trackio
runs = list(trackio.Api().runs("p"))
print("RUNS", [run.name for run in runs])
"""
    printed = in_new_process(code, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert "RUNS ['mine']" in str(printed)
