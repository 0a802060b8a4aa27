"""Atomic writes: a crash at any moment leaves the old or the new folder, and no other file is touched."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runners.errors import UserError
from runners.files import durable
from tests.support.files.decoys import look, plant

ROOT = Path(__file__).resolve().parents[3]

# Counts the calls that the action asks of the disk; then a child for each, which ends there as by SIGKILL.
KILLED = """
import fcntl, os, shutil, sys
from pathlib import Path
from runners.files import durable

def act(target, action):
    if action == "text":
        durable.save_text(target, "new")
    elif action == "removal":
        durable.remove_folder(target)
    else:
        with durable.new_folder(target) as folder:
            (folder / "one").write_text("new")
            (folder / "two").write_text("new")

def watch(owner, name, at, count):
    function = getattr(owner, name)
    def call(*args, **kwargs):
        count[0] += 1
        if count[0] == at:
            os._exit(9)
        return function(*args, **kwargs)
    setattr(owner, name, call)

base, action, calls = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for at in range(1, calls + 1) if calls else [0]:
    child = os.fork()
    if not child:
        count = [0]
        for name in ("rename", "mkdir", "open", "fsync", "unlink", "rmdir"):
            watch(os, name, at, count)
        watch(fcntl, "flock", at, count)
        act(base / str(at) / "target", action)
        os._exit(0 if calls else count[0])
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 9 or not calls
if not calls:
    print(code)
"""


def kill_everywhere(tmp_path, action, prepare):
    """Repeats an action in new folders, killed at its first, second, … call; returns the targets."""

    def run(calls):
        targets = [tmp_path / str(at) / "target" for at in range(1, calls + 1) or [0]]
        for target in targets:
            target.parent.mkdir()
            prepare(target)
        command = [sys.executable, "-c", KILLED, str(tmp_path), action, str(calls)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return targets, done.stdout

    calls = int(run(0)[1])
    assert 4 < calls < 200
    return run(calls)[0]


def debris(folder, ours):
    """The names in a folder, except these."""
    return {path.name for path in folder.iterdir()} - ours


def made(target):
    """The content that identifies a file or folder; None if it does not exist."""
    if not target.is_dir():
        return target.read_text() if target.exists() else None
    contents = {file.name: file.read_text() for file in target.iterdir()}
    assert contents in ({"one": "old"}, {"one": "new", "two": "new"})
    return contents["one"]


@pytest.mark.parametrize(
    ("action", "before", "after"),
    [("folder", "old", "new"), ("folder", None, "new"), ("text", "old", "new"), ("removal", "old", None)],
)
def test_a_kill_at_any_call_leaves_what_was_or_what_will_be(tmp_path, action, before, after):
    """The target is complete, at once or after the next start, which removes leftovers but no decoys."""

    def prepare(target):
        decoys[target] = plant(target.parent, "target")
        looks[target] = look(decoys[target])
        if before and action == "text":
            target.write_text(before)
        elif before:
            target.mkdir()
            (target / "one").write_text(before)

    decoys, looks, found = {}, {}, []
    for target in kill_everywhere(tmp_path, action, prepare):
        first = made(target)
        durable.check_target(target, True)
        found.append(made(target))
        assert first in (found[-1], None)
        left = debris(target.parent, {"target", *(path.name for path in decoys[target])})
        assert not any(any((target.parent / name).iterdir()) for name in left)  # empty: killed at its end
        assert look(decoys[target]) == looks[target], target
    assert found == [before] * found.count(before) + [after] * found.count(after) and len({*found}) == 2


def killed(folder, content):
    """A staging folder for `target` left by a dead process, which contains folders with one file."""
    stage = folder / f"{durable.PREFIX}0123456789ab-target"
    stage.mkdir()
    for name, text in content.items():
        (stage / name).mkdir()
        (stage / name / "one").write_text(text)
    return stage


@pytest.mark.parametrize("name", [".", "..", "a/..", "/"])
def test_a_folder_that_cannot_be_renamed_is_refused_before_the_work(name):
    """This holds with --force too, because the rename would only fail after the work."""
    with pytest.raises(UserError, match="this folder cannot be replaced; expected the name of a new folder"):
        durable.check_target(Path(name), True)


def test_what_was_moved_aside_comes_back(tmp_path):
    """A kill between the renames: the old folder is restored, unless its owner lives or its name is used."""
    stage = killed(tmp_path, {"old": "old", "new": "half"})
    owner = os.open(stage, os.O_RDONLY)
    fcntl.flock(owner, fcntl.LOCK_EX)
    durable.sweep(tmp_path)
    assert made(stage / "old") == "old"
    os.close(owner)
    (tmp_path / "target").mkdir()  # by the user
    durable.sweep(tmp_path)
    assert made(stage / "old") == "old"
    (tmp_path / "target").rmdir()
    with pytest.raises(UserError, match="target: this already exists; --force replaces it"):
        durable.check_target(tmp_path / "target", False)
    assert made(tmp_path / "target") == "old" and debris(tmp_path, {"target"}) == set()


def test_a_living_owners_work_is_left_alone(tmp_path):
    """Three writers for two names: each folder is complete, and the last rename determines the content."""
    with durable.new_folder(tmp_path / "target") as first:
        (first / "one").write_text("old")
        with durable.new_folder(tmp_path / "other") as second:
            (second / "one").write_text("old")
        with durable.new_folder(tmp_path / "target") as third:
            (third / "one").write_text("new")
            (third / "two").write_text("new")
        assert made(tmp_path / "target") == "new" and (first / "one").exists()
    assert made(tmp_path / "target") == made(tmp_path / "other") == "old"
    assert debris(tmp_path, {"target", "other"}) == set()


def test_everything_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    """The order is: each file, the folder, then the rename, then the parent."""
    log = []
    rename, fsync = os.rename, os.fsync
    monkeypatch.setattr(os, "rename", lambda a, b, **more: log.append("rename") or rename(a, b, **more))
    monkeypatch.setattr(
        os, "fsync", lambda fd: log.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name) or fsync(fd)
    )
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to tell which file a descriptor is")
    with durable.new_folder(tmp_path / "made") as folder:
        (folder / "one").write_text("1")
        (folder / "two").write_text("2")
    assert {*log[:2]} == {"one", "two"} and log[2:] == ["new", "rename", tmp_path.name]
