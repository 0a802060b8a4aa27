"""A run's folder is one process's own; what is not the run's is untouched."""

import shutil

import pytest

from runners.checkpoints.run_folder import check_owned, locked
from runners.errors import UserError
from runners.files.run_files import LOCK


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


def test_nothing_is_saved_into_another_runs_folder(tmp_path):
    """Where the run's own was renamed; a missing one may be made again."""
    folder = tmp_path / "run"
    with locked(folder, "run.name"):
        check_owned(folder)
        folder.rename(tmp_path / "moved")
        check_owned(folder)
        for content in (None, "1\n"):
            folder.mkdir(exist_ok=True)
            if content:
                (folder / LOCK).write_text(content)
            with pytest.raises(UserError, match="another one is there; nothing is saved into it"):
                check_owned(folder)
