"""Every attempt on the sandbox, as root and as an ordinary user: on a whole machine, in a container without
namespaces, and without Landlock as well. Entering all settings needs root; others are skipped."""

import functools
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


def place_of(setting: str) -> str:
    """The machine of a setting, without its user."""
    return setting.removeprefix("root").removeprefix("user")


@functools.cache
def outcome(setting: str, *arguments: str) -> dict[str, Any]:
    """What all attempts print in a setting."""
    if not available(setting):
        pytest.skip("needs root, on Linux")
    runner = command(setting, "-m", "tests.support.sandbox.outside", *arguments)
    given = json.dumps(ATTEMPTS)
    done = subprocess.run(runner, input=given, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_gets_no_further_than_the_setting_says(setting, name):
    printed = outcome(setting)["printed"][name]
    assert printed, "the attempt did not run"
    assert name in ALLOWED[place_of(setting)] or "out\n" not in printed


@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_outside_is_touched_and_what_is_missing_is_named(setting):
    found = outcome(setting)
    assert found["touched"] == []
    assert [line.split()[0] for line in found["missing"]] == MISSING[place_of(setting)]


def test_without_a_sandbox_most_attempts_succeed():
    """As an ordinary user, who may do the least: the attempts can fail."""
    if not available("root"):
        pytest.skip("needs root, on Linux: they are another user's")
    printed = outcome("user", "plain")["printed"]
    for left in ("/tmp/new", "/dev/shm/new"):
        Path(left).unlink(missing_ok=True)
    assert sum("out\n" in each for each in printed.values()) > 100


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
