"""A run's folder is one process's own; where another has its path by then, that one is untouched."""

import shutil

import pytest

from runners.checkpoints.run_folder import LOCK, FolderGone, locked
from runners.errors import UserError
from runners.telemetry.events import Note
from runners.training.train import run_training
from tests.support.files.decoys import look
from tests.support.resuming import SHORT, Killer, config_in, straight_run


class Swapper(Killer):
    """In the midst of a run: renames its folder, and puts another run's in its place."""

    def __init__(self, what, count, folder, other=None):
        """At the `count`-th `what`; `other` is copied."""
        super().__init__(what, count)
        self.folder, self.other, self.lines, self.seen = folder, other, [], None

    def _tick(self, what):
        if what.startswith(self.what):
            self.left -= 1
            if self.left == 0:
                self.folder.rename(self.folder.with_name("moved"))
                if self.other:
                    shutil.copytree(self.other, self.folder)
                    (self.folder / LOCK).write_text("1\n")  # another run is in it
                    self.seen = look([self.folder])

    def handle(self, event):
        """Keeps lines as well."""
        super().handle(event)
        if isinstance(event, Note):
            self.lines.append(event.text)


@pytest.mark.parametrize("when", ["loading", "sampling"])
def test_another_run_at_the_old_path_is_untouched(tmp_path, when):
    """The run ends with a line: its checkpoints up to then are in the renamed folder."""
    folder, other = tmp_path / "out" / "tiny", straight_run(*SHORT).folder
    (other / LOCK).unlink(missing_ok=True)
    swapper = Swapper(when, 1 if when == "loading" else 3, folder, other)
    settings = [*SHORT, "log.report=false", "system.disable=['background_saving']"]
    with pytest.raises(UserError, match=r"tiny: the run's folder is gone"):
        run_training(config_in(tmp_path / "out", *settings), report=swapper)
    (folder / LOCK).write_text("1\n")  # nobody held it, so it was free to take
    assert {path: seen[-1] for path, seen in look([folder]).items()} == {
        path: seen[-1] for path, seen in swapper.seen.items()
    }
    if when == "sampling":
        assert any("the run's folder is gone; checkpoint-3 is not saved" in line for line in swapper.lines)
        assert (tmp_path / "out/moved/checkpoint-2/manifest.json").is_file()


def test_another_folder_at_the_path_is_not_the_runs(tmp_path):
    """What a run writes, bad batches too, asks for its folder first."""
    with locked(tmp_path / "run", "run.name") as folder:
        assert folder.here() == tmp_path / "run"
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()
        with pytest.raises(FolderGone, match="run: the run's folder is gone"):
            folder.here()


@pytest.mark.parametrize("kind", ["notes", "link"])
def test_a_lock_that_is_no_lock_is_left_alone(tmp_path, kind):
    """A link is not followed, and a file with something else in it is not written to."""
    precious, lock = tmp_path / "precious", tmp_path / "run" / LOCK
    precious.write_text("12" if kind == "link" else "my notes")
    lock.parent.mkdir()
    lock.symlink_to(precious) if kind == "link" else shutil.copy(precious, lock)
    before = lock.read_text()
    with pytest.raises(UserError, match=r"no run's lock|cannot be written"), locked(lock.parent, "run.name"):
        pass
    assert precious.read_text() == lock.read_text() == before


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
