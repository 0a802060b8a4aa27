"""A run's folder is one process's own; where another has its path by then, that one is untouched."""

import shutil

import pytest

from runners.checkpoints.run_folder import locked
from runners.errors import UserError
from runners.files.run_files import LOCK
from runners.telemetry.events import Note
from runners.training.train import run_training
from tests.support.files.decoys import look
from tests.support.resuming import SHORT, Killer, config_in, straight_run


class Swapper(Killer):
    """In the midst of a run: renames its folder, and puts a copy of another run's in its place, if any."""

    def __init__(self, what, count, folder, other=None):
        """At the `count`-th `what`."""
        super().__init__(what, count)
        self.folder, self.other, self.lines, self.seen = folder, other, [], None

    def _tick(self, what):
        if what.startswith(self.what):
            self.left -= 1
            if self.left == 0:
                self.folder.rename(self.folder.with_name("moved"))
                if self.other:
                    shutil.copytree(self.other, self.folder)
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
    swapper = Swapper(when, 1 if when == "loading" else 3, folder, other)
    settings = [*SHORT, "log.report=false", "system.disable=['background_saving']"]
    with pytest.raises(UserError, match=r"tiny: the run's folder is gone, and another run is there"):
        run_training(config_in(tmp_path / "out", *settings), report=swapper)
    assert look([folder]) == swapper.seen
    if when == "sampling":
        assert any("the run's folder is gone" in line for line in swapper.lines)
        assert (tmp_path / "out/moved/checkpoint-2/manifest.json").is_file()


def test_a_renamed_folder_is_made_again_for_the_final_model(tmp_path):
    """Checkpoints fail with a line, as the logs are in the old one."""
    swapper = Swapper("sampling", 3, tmp_path / "out" / "tiny")
    run_training(config_in(tmp_path / "out", *SHORT), report=swapper)
    assert any("checkpoint-3 cannot be saved" in line for line in swapper.lines)
    assert (tmp_path / "out/tiny/final/model.safetensors").is_file()
    assert (tmp_path / "out/moved/training_log.jsonl").is_file()


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


def test_only_the_own_lock_and_folder_are_removed_at_the_end(tmp_path):
    """What has the run's path by then may be somebody else's."""
    with locked(tmp_path / "a", "run.name"):
        (tmp_path / "a" / LOCK).unlink()
        (tmp_path / "a" / LOCK).write_text("1\n")
    with locked(tmp_path / "b" / "run", "run.name"):
        (tmp_path / "b" / "run").rename(tmp_path / "b" / "moved")
        (tmp_path / "b" / "run").mkdir()
    with locked(tmp_path / "c" / "run", "run.name"):
        pass
    assert (tmp_path / "a" / LOCK).read_text() == "1\n" and not (tmp_path / "c").exists()
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"run", "moved"}
