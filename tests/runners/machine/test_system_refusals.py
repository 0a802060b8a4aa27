"""What the system refuses: low limits, no room, a folder that is gone. Each is one line and exit code 2."""

import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from runners import cli
from runners.errors import system_fault
from runners.machine.memory_readings import memory_limit

GENERATE = ("generate", "embedded", "hi", "--max-tokens", "1")
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux's limits")


def refused(cwd, **environment):
    """The last line of a `grpo` command in a process of its own, which ends within seconds with code 2."""
    done = subprocess.run(
        [sys.executable, "-c", "from runners.cli import main; main()", *GENERATE],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("arguments", [GENERATE, ("run", "quickstart"), ("report", "x"), ("runs",)])
def test_a_working_folder_that_was_deleted(tmp_path, monkeypatch, arguments):
    """Every command says so before anything else."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 2 and result.stderr.startswith("the working folder cannot be used")


@linux
def test_a_temporary_folder_that_is_a_file(tmp_path):
    """MLX compiles there."""
    (tmp_path / "file").write_text("")
    assert "refused by the system: " in refused(tmp_path, TMPDIR=str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (OSError(28, "No space left on device", "x"), "OSError: [Errno 28] No space left on device: 'x'"),
        (
            RuntimeError("failed\na.cpp: No space left on device\nb"),
            "a.cpp: No space left on device",
        ),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (RuntimeError("shapes do not match"), None),
        (ValueError("No space left on device"), None),
    ],
)
def test_what_the_system_refuses_is_told_from_faults_of_the_program(error, fault):
    """Those keep their traceback."""
    assert system_fault(error) == fault


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/", {}, None),
        ("0::/a/b", {"a/memory.max": "300", "a/b/memory.max": "max", "memory.max": "400"}, 300),
        ("9:memory:/docker/1", {"memory/memory.limit_in_bytes": "100"}, 100),
        ("0::/../../a", {"a/memory.max": "70"}, 70),
    ],
    ids=["none", "of a parent", "version 1 in a container", "outside of the mount"],
)
def test_memory_limits_of_control_groups(tmp_path, own, files, limit):
    """The least one of the process's group and the groups around it."""
    (tmp_path / "cgroup").write_text(f"{own}\n")
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(f"{text}\n")
    assert memory_limit(tmp_path / "root", tmp_path / "cgroup") == limit
