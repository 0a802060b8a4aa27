"""Every attempt on the sandbox, as root and as an ordinary user: on a whole machine, in a container without
namespaces, and without Landlock as well. Entering all settings needs root; others are skipped."""

import json
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from runners.machine.bounded_process import python_command
from tests.support.sandbox.attempts import ATTEMPTS, FILES, NAMES
from tests.support.sandbox.settings import ROOT, SETTINGS, available, command

ALLOWED: dict[str, set[str]] = {"": set(), " in a container": NAMES, " without Landlock": FILES}
MISSING = {"": [], " in a container": ["namespaces"], " without Landlock": ["namespaces", "Landlock"]}


def outcome(setting: str, *arguments: str) -> dict[str, Any]:
    """What all attempts print in a setting, what was touched, and what protection is missing."""
    if not available(setting):
        pytest.skip("needs root, on Linux")
    runner = command(setting, "-m", "tests.support.sandbox.outside", *arguments)
    given = json.dumps(ATTEMPTS)
    done = subprocess.run(runner, input=given, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def escapes(found: dict[str, Any]) -> set[str]:
    """The attempts that reached what is outside."""
    return {name for name, text in found["printed"].items() if "out\n" in text}


@pytest.mark.parametrize("setting", SETTINGS)
def test_attempts_get_no_further_than_the_setting_says(setting):
    """Nothing outside is touched, and the missing protections are named."""
    found, place = outcome(setting), setting.removeprefix("root").removeprefix("user")
    assert [name for name in ATTEMPTS if not found["printed"][name]] == [], "they did not run"
    assert escapes(found) <= ALLOWED[place]
    assert found["touched"] == []
    assert [line.split()[0] for line in found["missing"]] == MISSING[place]


def test_without_a_sandbox_most_attempts_succeed():
    """As an ordinary user, who may do the least: the attempts can fail."""
    if not available("root"):
        pytest.skip("needs root, on Linux: they are another user's")
    reached = escapes(outcome("user", "plain"))
    for left in ("/tmp/new", "/dev/shm/new"):
        Path(left).unlink(missing_ok=True)
    assert len(reached) > 100


# In a mount namespace: a file system with a secret below the standard library, as a container's volume is.
MOUNTS = """
import ctypes, subprocess
from runners.sandbox.sandbox import run_program
assert ctypes.CDLL(None).unshare(0x20000) == 0
for step in (["--make-rprivate", "/"], ["-t", "tmpfs", "none", {folder!r}]):
    subprocess.run(["mount", *step], check=True)
open({folder!r} + "/.env", "w").write("SECRET")
text = "import os; print(os.listdir({folder!r}))\\nopen({folder!r} + '/new', 'w')"
print(run_program(text).output.decode())
"""


def test_a_mount_below_the_library_is_not_part_of_the_root():
    """A volume in a container, for instance: neither read nor written."""
    if not available("root"):
        pytest.skip("needs root, on Linux, to mount")
    folder = str(Path(sysconfig.get_path("stdlib")) / "pydoc_data")
    done = subprocess.run(python_command(MOUNTS.format(folder=folder)), capture_output=True, text=True)
    assert "__init__.py" in done.stdout and ".env" not in done.stdout, done.stderr
