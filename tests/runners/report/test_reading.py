"""Reading a run's files while they grow, are truncated or renamed, or contain invalid JSON."""

import pytest

from runners.checkpoints.run_folder import locked
from runners.config.loading import load_config
from runners.files.json_files import read_lines
from runners.report.run_data import completion_parts
from runners.report.run_record import RunRecord, different_keys, flattened
from tests.support.runs.report_runs import make_run


def test_only_whole_lines_are_read(tmp_path):
    """Text after the last line feed is read once its line is complete."""
    path, bad = tmp_path / "a.jsonl", []
    assert list(read_lines(path)) == []
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a"')
    assert list(read_lines(path, bad=bad)) == [{"a": 1}, {"a": 2}]
    with open(path, "ab") as stream:
        stream.write(b": 3}\n")
    assert list(read_lines(path, bad=bad)) == [{"a": 1}, {"a": 2}, {"a": 3}] and bad == []


@pytest.mark.parametrize("line", [b"\xff\xfe", b"[1]", b"{", b'"x"', b"1},{2", b"[" * 100_000])
def test_a_line_that_is_no_object_is_counted(tmp_path, line):
    """The lines around it are read, and a blank line is not counted."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n\n{"a": 2}\n')
    bad = []
    assert list(read_lines(path, bad=bad)) == [{"a": 1}, {"a": 2}] and bad == [2]


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_a_runs_state_is_that_of_its_end_event(tmp_path, state):
    """The event has the state in which the run ended."""
    assert RunRecord(make_run(tmp_path / "run", end=state)).state() == state


def test_a_run_without_an_end_runs_or_was_broken_off(tmp_path):
    """It runs while a process holds its lock."""
    record = RunRecord(make_run(tmp_path / "run", end=None))
    assert record.state() == "interrupted"
    with locked(record.folder, "run.name"):
        assert record.state() == "running"
    assert record.state() == "interrupted"


def test_numbers_that_are_not_finite_are_named(tmp_path):
    """Their columns have None there, and their places are recorded."""
    record = RunRecord(make_run(tmp_path / "run", nan_at=3))
    line = record.columns["update"].index(3)
    assert (line, "loss") in record.nonfinite and (line, "grad_norm") in record.nonfinite
    assert record.columns["loss"][line] is None and record.columns["kl"][line] is None
    assert {len(column) for column in record.columns.values()} == {record.lines}


def test_what_differs_from_the_defaults():
    """Of the keys that a preset sets, only those that the config sets count."""
    flat = {"run.seed": 0, "optim.learning_rate": 7.0, "loss.beta": 0.04, "loss.level": "token"}
    assert different_keys(flat, ["loss.beta"]) == ["optim.learning_rate", "loss.beta"]
    plain = load_config("quickstart", ["model.tune=lora"]).to_dict()
    assert "model.tune" in different_keys(flattened(plain), [])
    assert not {"model.lora.keys", "judge"} & {*different_keys(flattened(plain), [])}


def test_groups_are_the_completions_of_a_prompt_in_a_batch_step():
    """The group size separates two consecutive groups of the same prompt."""
    asked = [(1, "a"), (1, "a"), (1, "a"), (1, "a"), (2, "a"), (2, "a"), (2, "b")]
    (part,) = completion_parts(({"batch_step": step, "prompt": prompt} for step, prompt in asked), 2)
    assert [record["_group"] for record in part] == [0, 0, 1, 1, 2, 2, 3]
    assert [record["_prompt"] for record in part] == [0, 0, 0, 0, 0, 0, 1]
