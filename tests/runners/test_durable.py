"""Files that survive: a crash at any moment leaves the old folder or the new one."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from runners import durable

ROOT = Path(__file__).resolve().parents[2]


KILLED = """
import os, sys
from pathlib import Path
from runners import durable
target, moment = Path(sys.argv[1]), sys.argv[2]
def die(*_): os._exit(9)
rename, count = os.rename, 0
def rename_once(a, b):
    if str(b) == str(target): die()
    rename(a, b)
if moment == "writing": durable._flush = die
else: os.rename = rename_once
with durable.new_folder(target) as folder:
    (folder / "content").write_text("new")
"""


@pytest.mark.parametrize("moment", ["writing", "between the renames"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_kill_leaves_the_old_folder_or_none(tmp_path, moment, exists):
    """Killed before the new folder has its name: the old one is there, and the next save cleans up."""
    target = tmp_path / "checkpoint-5"
    if exists:
        target.mkdir()
        (target / "content").write_text("old")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(target), moment],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert killed.returncode == 9
    assert not target.exists() or (target / "content").read_text() == "old"
    assert len(list(tmp_path.iterdir())) > exists  # the debris of the killed process

    with durable.new_folder(tmp_path / "checkpoint-6") as folder:
        (folder / "content").write_text("newer")
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoint-6",
        *(["checkpoint-5"] if exists else []),
    }
    assert not exists or (target / "content").read_text() == "old"


def test_half_a_file_of_a_killed_run_is_cleared_away(tmp_path):
    """What `save_text` had begun goes, like a folder; other files stay."""
    for name in (".latest.new-123", ".hidden", "latest"):
        (tmp_path / name).write_text("x")
    durable.sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".hidden", "latest"}


def test_everything_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    """The order is: each file, the folder, then the rename, then the parent."""
    log = []
    rename, fsync = os.rename, os.fsync
    monkeypatch.setattr(os, "rename", lambda a, b: log.append("rename") or rename(a, b))
    monkeypatch.setattr(
        os, "fsync", lambda fd: log.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name) or fsync(fd)
    )
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to tell which file a descriptor is")
    with durable.new_folder(tmp_path / "made") as folder:
        (folder / "one").write_text("1")
        (folder / "two").write_text("2")
    assert set(log[:2]) == {"one", "two"}
    assert log[2].startswith(".made.new-")
    assert log[3:] == ["rename", tmp_path.name]


def test_loaded_arrays_do_not_change_with_their_file(tmp_path):
    """mx.load is lazy and would read what lies there later: here it has been read."""
    file = tmp_path / "a.safetensors"
    durable.save_arrays(file, {"a": mx.ones((4096,))}, {})
    arrays, _ = durable.load_arrays(file)
    with open(file, "r+b") as stream:
        stream.seek(0, os.SEEK_END)
        size = stream.tell()
        stream.seek(size - 4096)
        stream.write(b"\xff" * 4096)
    assert mx.array_equal(arrays["a"], mx.ones((4096,)))
