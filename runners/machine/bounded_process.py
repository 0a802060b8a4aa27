"""Runs work in a separate process with limits on its time and its memory."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import attrs

OUT_OF_MEMORY = 9  # the exit code of a `main` that raised MemoryError
_POLL = 0.02  # seconds between readings of the child's memory
_PATIENCE = 30.0  # seconds that a child may take in addition to ten times its computing time
_MEGABYTE = 1_000_000
# Not every system limits a process's address space: on others the parent checks the memory.
_CAN_LIMIT = sys.platform == "linux"


@attrs.frozen
class Ending:
    """How the process ended."""

    lines: tuple[str, ...]  # what it printed
    code: int  # its exit code; -N: signal N
    over: str = ""  # "time" or "memory": the limit that it exceeded


def run_bounded(module: str, *arguments: str, seconds: float, memory: int) -> Ending:
    """Runs `module.main(*arguments)` of this package in a new Python.

    `main` calls `limit` after its imports: from then on it may compute for `seconds` and use `memory`
    bytes. If the system cannot limit the memory, this process watches it.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; main(*sys.argv[1:])"
    process = subprocess.Popen(
        # -P: imports nothing from the current folder that this process would not import itself.
        [sys.executable, "-P", "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # a failing Rust library writes a backtrace there
        env={
            **os.environ,
            "TOKENIZERS_PARALLELISM": "false",
            "RAYON_NUM_THREADS": "1",
            "RUST_BACKTRACE": "0",
        },
    )
    try:
        over = _watch(process, seconds, memory)
    finally:
        process.kill()
        printed = process.communicate()[0].decode("utf-8", "replace")
    lines = tuple(printed.splitlines())
    if process.returncode == -signal.SIGPROF:
        over = "time"
    elif process.returncode in (-signal.SIGABRT, OUT_OF_MEMORY):
        over = "memory"  # Rust and C++ abort where Python has an exception
    return Ending(lines, process.returncode, over)


def limit(seconds: float, memory: int) -> None:
    """In the child: from now on allows so many seconds of computing, and so many bytes more than now."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The signal of this limit ends a process in any code.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if _CAN_LIMIT:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _watch(process: subprocess.Popen[bytes], seconds: float, memory: int) -> str:
    """Waits for the end; returns the limit that was exceeded, or ""."""
    # The child's own limit counts only computing. This one ends a child that sleeps, also on a busy machine.
    end = time.monotonic() + _PATIENCE + 10 * seconds
    while time.monotonic() < end:
        try:
            process.wait(_POLL)
            return ""
        except subprocess.TimeoutExpired:
            if _resident(process.pid) > memory + 200 * _MEGABYTE:
                return "memory"
    return "time"


def _resident(pid: int) -> int:
    """Bytes of memory that a process holds; 0 if unknown."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        pass
    try:
        output = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True)
        return int(output.stdout.strip() or 0) * 1024
    except (OSError, ValueError):
        return 0
