"""A run's folder that gets another path under the run: it goes on in its own, and touches no other."""

import fcntl
import os
import shutil

import pytest

from runners.checkpoints import run_folder
from runners.checkpoints.run_folder import LOCK, FolderGone, locked
from runners.checkpoints.saving import Saver
from runners.checkpoints.snapshot import list_checkpoints, take_snapshot
from runners.config.sections import CheckpointConfig
from runners.errors import UserError
from runners.telemetry.events import Note
from runners.training.bad_updates import BadUpdates
from runners.training.train import run_training
from tests.runners.checkpoints.test_save_faults import assert_whole, at_call
from tests.runners.training.test_bad_updates import experience, numbers
from tests.support.files.checkpoints import save_checkpoint
from tests.support.files.decoys import look
from tests.support.files.folders import held
from tests.support.resuming import SHORT, Killer, config_in, outcome, straight_run
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_states import load, make_state


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A loaded llama."""
    return load(make_model_folder(tmp_path_factory.mktemp("models") / "llama"))


class Swapper(Killer):
    """In the midst of a run: renames its folder (or removes it), and puts another run's in its place."""

    def __init__(self, what, count, folder, other=None, *, to="moved"):
        """At the `count`-th `what`; `other` is copied. With `to` = "" the run's own folder is removed."""
        super().__init__(what, count)
        self.folder, self.other, self.to, self.lines, self.seen = folder, other, to, [], None

    def _tick(self, what):
        if what.startswith(self.what):
            self.left -= 1
            if self.left == 0:
                moved = self.folder.rename(self.folder.with_name(self.to or "gone"))
                if not self.to:
                    shutil.rmtree(moved)
                if self.other:
                    shutil.copytree(self.other, self.folder)
                    (self.folder / LOCK).write_text("1\n")  # another run is in it
                    self.seen = look([self.folder])

    def handle(self, event):
        """Keeps lines as well."""
        super().handle(event)
        if isinstance(event, Note):
            self.lines.append(event.text)


@pytest.fixture
def straight():
    """A short run that nobody disturbed."""
    return straight_run(*SHORT).folder


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_renamed_run_goes_on_in_its_own_folder(tmp_path, straight, count):
    """Another run has its old path: that one is untouched, and nothing of ours is lost."""
    folder = tmp_path / "out" / "tiny"
    swapper = Swapper("sampling", count, folder, straight)
    result = run_training(config_in(tmp_path / "out", *SHORT), report=swapper)
    assert look([folder]) == swapper.seen
    moved = tmp_path / "out" / "moved"
    assert result.folder == moved and not (moved / LOCK).exists()
    assert outcome(moved) == outcome(straight)
    assert [path.name for path in list_checkpoints(moved)] == [f"checkpoint-{n}" for n in (1, 2, 3)]
    (told,) = [line for line in swapper.lines if "was renamed" in line]
    assert told == f"{folder} was renamed to {moved}; the run continues there"


def test_a_renamed_folder_whose_path_stays_free(tmp_path, straight):
    """Nothing appears under the old path."""
    swapper = Swapper("sampling", 2, tmp_path / "out" / "tiny")
    result = run_training(config_in(tmp_path / "out", *SHORT), report=swapper)
    assert outcome(result.folder) == outcome(straight)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"moved"}


def test_a_folder_that_is_gone_and_another_run_in_its_place(tmp_path, straight):
    """The final model does not go into the other run's folder: a line, and nothing is touched."""
    (straight / LOCK).unlink(missing_ok=True)
    folder = tmp_path / "out" / "tiny"
    swapper = Swapper("sampling", 2, folder, straight, to="")
    with pytest.raises(UserError, match=r"tiny: the run's folder is gone, and another run is there \(train"):
        run_training(config_in(tmp_path / "out", *SHORT), report=swapper)
    (folder / LOCK).write_text("1\n")  # nobody held it, so it was free to take
    assert {k: v[-1] for k, v in look([folder]).items()} == {k: v[-1] for k, v in swapper.seen.items()}
    assert any("the run's folder is gone; checkpoint-2 is not saved" in line for line in swapper.lines)


def test_a_folder_that_is_renamed_while_the_run_starts(tmp_path, straight):
    """Before the first step nothing is lost by stopping, with a line."""
    folder = tmp_path / "out" / "tiny"
    swapper = Swapper("loading", 1, folder, straight)
    with pytest.raises(UserError, match=r"tiny was renamed to .*moved while the run started; start it again"):
        run_training(config_in(tmp_path / "out", *SHORT), report=swapper)
    assert look([folder]) == swapper.seen and not list((tmp_path / "out" / "moved").iterdir())


def test_a_folder_that_is_swapped_at_any_moment_of_a_save(llama, tmp_path, monkeypatch):
    """Before each of the disk's calls in turn: the other folder is untouched, and nothing is lost."""
    state, at = make_state(llama, seed=1), 0
    other = tmp_path / "other"
    for step in (1, 2, 3):
        save_checkpoint(other, step, make_state(llama, seed=7), llama, {})
    for step in (1, 2):
        save_checkpoint(tmp_path / "before", step, state, llama, {})
    while True:
        at += 1
        folder, moved, notes, seen = tmp_path / f"run-{at}", tmp_path / f"moved-{at}", [], []
        shutil.copytree(tmp_path / "before", folder)
        (folder / "log").write_text("")

        def swap(folder=folder, moved=moved, seen=seen):
            os.rename(folder, moved)
            shutil.copytree(other, folder)
            seen.append(look([folder]))

        with Saver(held(folder), CheckpointConfig(keep_last=1), ["log"], notes.append) as saver:
            with at_call(monkeypatch, at, swap) as count:
                saver.save(lambda: take_snapshot(2, state, llama, {}), (2, 2))
                saver.wait()
            if not seen:
                assert count[0] < at
                break
            assert look([folder]) == seen[0], at
            saver.save(lambda: take_snapshot(3, state, llama, {}), (3, 3), strict=True)
        assert look([folder]) == seen[0], at
        assert_whole(moved / "checkpoint-3", state)
        assert {path.name for path in moved.iterdir()} == {"checkpoint-3", "latest", "log"}, at
        assert notes[0].startswith("saved") and notes[1] == f"saved {moved / 'checkpoint-3'}"
    assert at > 20


def test_a_bad_batch_goes_into_the_runs_own_folder(tmp_path):
    """Not into the one that has its path."""
    run = held(tmp_path / "run") if (tmp_path / "run").mkdir() is None else None
    os.rename(tmp_path / "run", tmp_path / "moved")
    (tmp_path / "run").mkdir()
    (line,) = BadUpdates(run, 2).see(numbers(1, update_skipped=True), [experience()])
    assert f"are in {tmp_path / 'moved' / 'bad_batches' / 'update-1'}" in line
    assert not list((tmp_path / "run").iterdir())


def test_a_lock_that_is_no_lock_is_left_alone(tmp_path):
    """A link is not followed, and a file with something else in it is not written to."""
    precious = tmp_path / "precious"
    for content, make in (
        ("my notes", lambda lock: lock.write_text("my notes")),
        ("12", lambda lock: lock.symlink_to(precious)),
    ):
        folder = tmp_path / content
        folder.mkdir()
        precious.write_text(content)
        make(folder / LOCK)
        with pytest.raises(UserError, match=r"no run's lock|cannot be written"), locked(folder, "run.name"):
            pass
        assert precious.read_text() == (folder / LOCK).read_text() == content


def test_a_lock_that_somebody_replaced_is_not_removed(tmp_path):
    """Only the file that this process locked goes."""
    with locked(tmp_path / "run", "run.name"):
        (tmp_path / "run" / LOCK).unlink()
        (tmp_path / "run" / LOCK).write_text("1\n")
    assert (tmp_path / "run" / LOCK).read_text() == "1\n"


def test_an_empty_folder_of_somebody_else_is_not_removed(tmp_path):
    """What has the run's path at the end may be another one."""
    with locked(tmp_path / "out" / "run", "run.name"):
        (tmp_path / "out" / "run").rename(tmp_path / "out" / "moved")
        (tmp_path / "out" / "run").mkdir()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"run", "moved"}


def test_where_a_folder_is_now(tmp_path, monkeypatch):
    """By its path, by what Linux or macOS says, or nowhere; never a folder that only has the name."""
    folder = tmp_path / "run"
    folder.mkdir()
    run = held(folder)
    assert run.here() == folder
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    assert run.here() == tmp_path / "moved"
    with monkeypatch.context() as patch:  # macOS
        answer = os.fsencode(tmp_path / "moved").ljust(1024, b"\0")
        patch.setattr(fcntl, "F_GETPATH", 50, raising=False)
        patch.setattr(fcntl, "fcntl", lambda descriptor, command, buffer: answer)
        patch.setattr(os, "readlink", None)
        assert run.here() == tmp_path / "moved"
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "_path_of", lambda descriptor: None)
        with pytest.raises(FolderGone, match="run: the run's folder is gone"):
            run.here()
    (tmp_path / "moved").rmdir()
    with pytest.raises(FolderGone):
        run.here()
