"""The thread that writes checkpoints: what it holds up, and what becomes of its errors."""

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from runners.checkpoints import saving
from runners.checkpoints.saving import Saver
from runners.config.sections import CheckpointConfig
from runners.errors import UserError


class Snapshot:
    """Stands in for a checkpoint in memory."""

    step, nbytes = 7, 1000


@pytest.fixture
def slow(monkeypatch):
    """Writing waits for `gate`, then fails with what stands in `errors`, or succeeds."""
    gate, errors = threading.Event(), []

    def write(folder, snapshot):
        assert gate.wait(300)
        if errors:
            raise errors.pop()
        return folder / f"checkpoint-{snapshot.step}"

    monkeypatch.setattr(saving, "write_checkpoint", write)
    gate.errors = errors
    yield gate
    gate.set()


def saver(folder: Path, notes: list, **settings) -> Saver:
    """A saver into a folder, whose lines go to `notes`."""
    return Saver(folder, CheckpointConfig(**settings), [], notes.append)


def test_a_run_goes_on_while_a_checkpoint_is_written(tmp_path, slow, monkeypatch):
    """`save` and `poll` return at once; `wait` waits, says what was written, and counts the time."""
    notes, readings = [], iter([10.0, 10.5, 20.0, 23.0])

    def clock():
        now = next(readings)
        if now == 20.0:  # the wait has begun
            slow.set()
        return now

    monkeypatch.setattr(saving, "time", SimpleNamespace(perf_counter=clock))
    with saver(tmp_path, notes) as writer:
        writer.save(Snapshot, (7, 3))
        writer.poll()
        assert notes == [] and writer.done is None and writer.stopped_seconds() == 0.5
        writer.wait()
        assert notes == [f"saved {tmp_path / 'checkpoint-7'}"] and writer.done == (7, 3)
        assert writer.stopped_seconds() == 3.0 and writer.stopped_seconds() == 0.0


def test_new_weights_wait_only_where_memory_is_short(tmp_path, slow):
    """Twice the bytes being written have to be free; else the update waits until they are on the disk."""
    notes = []
    with saver(tmp_path, notes) as writer:
        writer.save(Snapshot, (7, 3))
        writer.wait_for_memory(lambda: 2000)
        assert notes == []
        threading.Timer(0.1, slow.set).start()
        writer.wait_for_memory(lambda: 1999)
        assert len(notes) == 1


@pytest.mark.parametrize(
    ("error", "settings", "strict", "waited", "ends"),
    [
        (UserError("full"), {}, False, True, False),
        (UserError("full"), {}, True, False, True),
        (UserError("full"), {"on_error": "stop"}, False, True, True),
        (UserError("full"), {"on_error": "stop"}, False, False, True),  # at the end of the block
        (ZeroDivisionError("a bug"), {}, False, True, True),  # a fault of the program, not of the disk
    ],
)
def test_an_error_is_told_or_ends_the_run(tmp_path, slow, error, settings, strict, waited, ends):
    """It is not lost with its thread: a line, or the error itself."""
    notes = []
    slow.set()
    slow.errors.append(error)
    with (
        pytest.raises(type(error)) if ends else nullcontext(),
        saver(tmp_path, notes, **settings) as writer,
    ):
        writer.save(Snapshot, (7, 3), strict=strict)
        if waited:
            writer.wait()
    assert notes == ([] if ends else ["full; the run goes on (checkpoint.on_error)"])
