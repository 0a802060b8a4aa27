"""Runs processes in parallel, each on separate cores if there are enough, and measures their time
and peak memory.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import attrs

from runners.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_LAST_LINES = 20  # of a failed process's output, in its error


@attrs.frozen(kw_only=True)
class Job:
    """A process to run: its name in messages, its command, and the file for its output."""

    name: str
    command: Sequence[str]
    printed: Path
    environment: Mapping[str, str] = attrs.field(factory=dict)  # in addition to this process's


@attrs.frozen(kw_only=True)
class Usage:
    """The time and memory of a process."""

    seconds: float  # from its start to its end
    resident: float  # bytes, its largest resident set
    cores: int  # that it could use


def side_by_side(
    jobs: Sequence[Job], number: int, *, until: float
) -> Iterator[tuple[Job, Usage | UserError]]:
    """Runs the jobs in order, `number` at a time; yields each with its outcome when it ends.

    The cores of this process are divided among the jobs. A job is pinned to its cores with
    `taskset`, if available, and the threads of BLAS and OpenMP are limited to their number.

    Args:
        jobs: the jobs to run.
        number: the number of parallel jobs.
        until: time.monotonic() at which running jobs are ended; afterwards, no job starts.
    """
    slots: queue.SimpleQueue[tuple[int, ...]] = queue.SimpleQueue()
    for cores in divided(sorted(_available()), number):
        slots.put(cores)

    left = threading.Event()  # nobody waits for the jobs any more

    def run(job: Job) -> Usage:
        cores = slots.get()
        try:
            return _run(job, cores, lambda: left.is_set() or time.monotonic() >= until)
        finally:
            slots.put(cores)

    with ThreadPoolExecutor(number) as pool:
        begun = {pool.submit(run, job): job for job in jobs}
        try:
            for future in as_completed(begun):
                try:
                    yield begun[future], future.result()
                except UserError as error:
                    yield begun[future], error
        finally:
            left.set()


def divided(cores: Sequence[int], number: int) -> list[tuple[int, ...]]:
    """The cores for each of `number` jobs: the same number of distinct cores each, or all cores for
    each if there are too few.
    """
    each = len(cores) // number
    if each == 0:
        return [tuple(cores)] * number
    return [tuple(cores[each * place : each * (place + 1)]) for place in range(number)]


def _available() -> set[int]:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _run(job: Job, cores: Sequence[int], is_over: Callable[[], bool]) -> Usage:
    if is_over():
        raise UserError(f"{job.name}: not started: the time is over")
    pinned = ["taskset", "-c", ",".join(map(str, cores))] if shutil.which("taskset") else []
    environment = {
        **os.environ,
        **dict.fromkeys(_THREADS, str(len(cores))),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        **job.environment,
    }
    job.printed.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with job.printed.open("w", encoding="utf-8") as printed:
        process = subprocess.Popen(
            [*pinned, *job.command],
            cwd=job.printed.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it is ended with all that it started
        )
        ended, status, usage, resident = 0, 0, None, 0
        try:
            while not ended and not is_over():
                resident = max(resident, _resident(process.pid))
                ended, status, usage = os.wait4(process.pid, os.WNOHANG)
                if not ended:
                    time.sleep(0.05)
        finally:
            if not ended:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if not ended or usage is None:
        raise UserError(f"{job.name}: ended before it was done: the time is over")
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        lines = job.printed.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        raise UserError("\n".join([f"{job.name}: ended with code {process.returncode}:", *lines]))
    return Usage(
        seconds=time.perf_counter() - started,
        resident=resident or usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        cores=len(cores),
    )


def _resident(pid: int) -> int:
    """The process's peak memory so far in bytes; 0 if the system does not report it.

    `wait4` is not used, because on Linux its value is at least the memory of the process that
    started it.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s*(\d+) kB", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0
