"""A run's folder is one process's own; what is not the run's is untouched."""

import shutil

import pytest

from runners.checkpoints.run_folder import locked
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
