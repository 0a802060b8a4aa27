"""What the system refuses: low limits, no room, a folder that is gone. Each is one line and exit code 2."""

import os
import resource
import shutil
import subprocess
import sys
import threading

import pytest
from click.testing import CliRunner

from runners import cli
from runners.errors import UserError, system_fault
from runners.machine import process_limits
from runners.machine.process_limits import memory_limit

GENERATE = ("generate", "embedded", "hi", "--max-tokens", "1")
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux's limits")


def refused(cwd, *arguments, before=lambda: None, **environment):
    """The last line of a `grpo` command in a process of its own, which ends within seconds with code 2."""
    done = subprocess.run(
        [sys.executable, "-c", "from runners.cli import main; main()", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        preexec_fn=before,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()[-1]


def limited(kind, value):
    """A function that sets a hard limit."""
    return lambda: resource.setrlimit(kind, (value, value))


@linux
@pytest.mark.parametrize(
    ("before", "line"),
    [
        (limited(resource.RLIMIT_AS, 1 << 29), "of address space for"),
        (limited(resource.RLIMIT_NOFILE, 32), "expected a hard limit of 4,096 open files"),
    ],
)
def test_low_limits(tmp_path, before, line):
    """MLX would hang or crash, mlx-lm would fail at its import."""
    assert line in refused(tmp_path, *GENERATE, before=before)
    assert line in refused(tmp_path, "runs", ".", before=before)


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
    assert "refused by the system: " in refused(tmp_path, *GENERATE, TMPDIR=str(tmp_path / "file"))


def test_no_more_threads(monkeypatch):
    """The threads are tried before MLX is imported: its own failure hangs."""
    monkeypatch.delitem(sys.modules, "mlx.core")
    start, left = threading.Thread.start, [3]

    def refuse(thread):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(UserError, match="expected room for 12 threads, found it for 3"):
        process_limits.check_limits(2)


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
        ("5:cpu,memory:/x\n4:pids:/x", {"memory/x/memory.limit_in_bytes": "200"}, 200),
        ("9:memory:/docker/1", {"memory/memory.limit_in_bytes": "100", "memory.max": "50"}, 100),
        ("0::/../../a", {"a/memory.max": "70"}, 70),
    ],
    ids=["none", "version 2, of a parent", "version 1", "version 1 in a container", "outside of the mount"],
)
def test_memory_limits_of_control_groups(tmp_path, own, files, limit):
    """The least one of the process's group and the groups around it."""
    (tmp_path / "cgroup").write_text(f"{own}\n")
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(f"{text}\n")
    assert memory_limit(tmp_path / "cgroup", tmp_path / "root") == limit
