"""Disk errors are reported in one line; the previous checkpoint stays complete."""

import contextlib
import errno
import os
import pathlib
import shutil

import mlx.core as mx
import pytest

from runners.checkpoints import checkpoint
from runners.checkpoints.checkpoint import load_trees, write_checkpoint
from runners.checkpoints.manifest import check_manifest
from runners.checkpoints.run_folder import list_checkpoints, locked
from runners.errors import UserError
from runners.files.json_files import JsonLines
from runners.telemetry.events import Updated
from runners.training.train import run_training
from tests.support.resuming import SHORT, Killer, config_in, lines_of, outcome, straight_run
from tests.support.tiny_runs import Notes
from tests.support.tiny_states import make_state, same_bits

# All functions through which a save accesses the disk.
CALLS = [(os, name) for name in ("fsync", "rename", "mkdir", "unlink", "rmdir")]
CALLS += [(mx, "save_safetensors"), (shutil, "copyfile"), (pathlib.Path, "write_text")]


@contextlib.contextmanager
def faulty(monkeypatch, code, at):
    """The `at`-th of these calls fails with the error `code`; yields the number of calls."""
    count = [0]

    def watched(function):
        def call(*args, **kwargs):
            count[0] += 1
            if count[0] == at:
                raise OSError(code, os.strerror(code))
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for owner, name in CALLS:
            patch.setattr(owner, name, watched(getattr(owner, name)))
        yield count


@pytest.mark.parametrize("step", [5, 6], ids=["replaced", "new"])
def test_whatever_call_fails_the_checkpoint_before_is_whole(llama, tmp_path, monkeypatch, step):
    """After each failing call, the old state can be loaded, and the next save succeeds and cleans up."""
    old, new = make_state(llama, seed=1), make_state(llama, seed=2)
    codes = (errno.ENOSPC, errno.EIO, errno.EROFS)
    with faulty(monkeypatch, 0, 0) as count:
        write_checkpoint(tmp_path / "dry", step, new, llama, {})
        write_checkpoint(tmp_path / "dry", step, new, llama, {})
    write_checkpoint(tmp_path / "before", 5, old, llama, {})
    for at in range(1, count[0] // 2 + 3):
        run, code = tmp_path / str(at), codes[at % len(codes)]
        shutil.copytree(tmp_path / "before", run)
        with faulty(monkeypatch, code, at):
            try:
                write_checkpoint(run, step, new, llama, {})
            except UserError as error:
                assert "cannot be written: " + os.strerror(code) in str(error) and "\n" not in str(error)
        with locked(run, "run.name"):  # as the next start does
            pass
        found = {path.name: load_trees(path)[0] for path in list_checkpoints(run) if not check_manifest(path)}
        assert step == 5 or same_bits(found["checkpoint-5"], old)
        assert any(same_bits([*found.values()][-1], state) for state in (old, new))
        check_manifest(write_checkpoint(run, step, new, llama, {}))
        assert same_bits(load_trees(run / f"checkpoint-{step}")[0], new)
        assert not [path for path in run.glob(".*/*")]  # a folder whose removal fails stays, empty
        shutil.rmtree(run)


def test_log_lines_wait_for_room(tmp_path, monkeypatch):
    """A disk becomes full within a line and has space again later: the file contains all lines."""
    lines = JsonLines(tmp_path / "log.jsonl")
    lines.write({"n": 0})
    write, budget = os.write, [4]

    def full(file, data):
        if budget[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(file, bytes(data)[: budget[0]])
        budget[0] -= count
        return count

    monkeypatch.setattr(os, "write", full)
    lines.write({"n": 1})
    assert lines.fault is not None and (tmp_path / "log.jsonl").stat().st_size == 9 + 4
    lines.write({"n": 2})
    budget[0] = 1000
    lines.write({"n": 3})
    lines.close()
    assert lines.fault is None and [line["n"] for line in lines_of(tmp_path / "log.jsonl")] == [0, 1, 2, 3]


def test_checkpoint_on_error_continues_or_stops_on_a_full_disk(tmp_path, monkeypatch):
    """Each failure is reported and later checkpoints are written, or the error ends the run.

    The result is the same, also if a stopped run is resumed once there is space.
    """
    settings = ["optim.max_steps=4"]
    straight = straight_run(*settings)
    write, left = checkpoint.write_trained, [2]

    def full(*args):  # a checkpoint's weights; those of the final model are written elsewhere
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*args)

    monkeypatch.setattr(checkpoint, "write_trained", full)
    notes = Notes()
    result = run_training(config_in(tmp_path / "b", *settings), report=notes)
    assert same_bits(result.state, straight.state) and outcome(result.folder) == outcome(straight.folder)
    assert [path.name for path in list_checkpoints(result.folder)] == ["checkpoint-3", "checkpoint-4"]
    told = [line for line in notes.lines if "No space left" in line]
    assert len(told) == 2 and "checkpoint-1: cannot be written" in told[0] and "the run continues" in told[0]
    config, left[0] = config_in(tmp_path / "c", *settings, "checkpoint.on_error=stop"), 100
    with pytest.raises(UserError, match="checkpoint-1: cannot be written: No space left on device"):
        run_training(config, report=Notes())
    assert not list_checkpoints(tmp_path / "c" / "tiny")
    left[0] = 0
    assert same_bits(run_training(config, report=Notes(), resume=True).state, straight.state)


@pytest.mark.parametrize("taken", [True, False], ids=["another run in its place", "nothing in its place"])
def test_a_run_whose_folder_is_renamed_saves_nothing_where_it_was(tmp_path, taken):
    """Another run that now has its path is not touched: each save is a message, and the end an error.
    The logs stay with the renamed folder; once it has its name back, the run can be resumed."""
    config = config_in(tmp_path / "b", "optim.max_steps=4", "eval.every=0")
    folder, moved = tmp_path / "b" / "tiny", tmp_path / "b" / "moved"

    class Renamer(Notes):
        def handle(self, event):
            super().handle(event)
            if isinstance(event, Updated) and event.metrics["update"] == 2:
                folder.rename(moved)
                if taken:
                    shutil.copytree(moved, folder)

    notes, line = Renamer(), "expected the folder in which this run started, found"
    with pytest.raises(UserError, match=line):
        run_training(config, report=notes)
    assert any(line in note and "the run continues" in note for note in notes.lines)
    assert len(lines_of(moved / "training_log.jsonl")) == 6  # with two evaluations
    assert [path.name for path in list_checkpoints(moved)] == ["checkpoint-1"]
    left = {path.name for path in folder.iterdir()} if taken else folder.exists()
    assert left == ({path.name for path in moved.iterdir()} if taken else False)
    shutil.rmtree(folder, ignore_errors=True)
    moved.rename(folder)
    resumed = run_training(config, report=Notes(), resume=True)
    assert list_checkpoints(resumed.folder)[-1].name == "checkpoint-4"


def test_the_training_state_is_saved_if_the_final_model_cannot_be_written(tmp_path, monkeypatch):
    """A resumed run only has to write the model, once the disk has space."""
    settings = [*SHORT, "checkpoint.every=0"]
    straight = straight_run(*settings)
    config, notes = config_in(tmp_path / "b", *settings), Notes()

    def full(*_, **__):
        raise UserError("final: cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("runners.training.session.save_model", full)
        with pytest.raises(UserError, match="No space left"):
            run_training(config, report=notes)
    assert any(line.startswith("could not save the final model, only the") for line in notes.lines)
    resumed = run_training(config, report=Killer("sampling", 1), resume=True)
    assert same_bits(resumed.state, straight.state)
    assert outcome(resumed.folder) == outcome(straight.folder)
