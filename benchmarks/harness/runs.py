"""Runs processes, alone or in parallel on separate cores, and measures their time and memory."""

from __future__ import annotations

import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import attrs

from runners.errors import UserError
from runners.files.json_files import read_lines
from runners.files.run_files import METRICS

ROOT = Path(__file__).resolve().parents[2]
REAL_MODEL = "GRPO_REAL_MODEL"  # the variable with the folder of a pretrained model
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_LAST_LINES = 20  # of a failed process's output, in its error
_BETWEEN_LOOKS = 0.02  # seconds
Lines = Sequence[dict[str, Any]]  # of a run's log


@attrs.frozen(kw_only=True)
class Job:
    """A process to run: its name in messages, its command, and the file for its output."""

    name: str
    command: Sequence[str]
    printed: Path
    environment: Mapping[str, str | None] = attrs.field(factory=dict)  # added; None removes a name
    cwd: Path | None = None
    heard: Callable[[float, str], None] | None = None  # receives (seconds, line) of the output
    until: float = math.inf  # time.monotonic() at which it is ended
    grace: float = 0.0  # seconds between an interrupt, after which it saves its state, and its end


@attrs.frozen(kw_only=True)
class Usage:
    """The time and memory of a process."""

    seconds: float  # from its start to its end
    resident: float  # bytes, its largest resident set
    cores: int  # that it could use


def run_command(config: Path | str, settings: Sequence[str], *flags: str) -> list[str]:
    """The command of a run; if the package is not installed, it names the module."""
    script = Path(sys.executable).parent / "grpo-run"
    own = [str(script)] if script.is_file() else [sys.executable, "-m", "runners.cli", "run"]
    sets = [word for setting in settings for word in ("--set", setting)]
    return [*own, str(config), *sets, *flags]


def placed(folder: Path, seed: int = 0) -> list[str]:
    """Overrides that let a run write its log, without a report, to this folder."""
    place = [f"run.name={folder.name}", f"run.output_dir={folder.parent}", f"run.seed={seed}"]
    return [*place, "log.report=false"]


def log_lines(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's log; empty if there is no log yet."""
    return list(read_lines(folder / METRICS))


def step_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of a log that belong to updates."""
    return [line for line in log_lines(folder) if "reward" in line]


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a finished run's log.

    Raises:
        UserError: it contains neither two evaluations nor an update.
    """
    lines = log_lines(folder)
    evaluations = sum("em_subset" in line for line in lines)
    if evaluations < 2 or not any("reward" in line or "loss" in line for line in lines):
        found = f"{folder / METRICS} has {evaluations} evaluations"
        raise UserError(f"{found}: expected one before and one after training")
    return lines


def finish(job: Job) -> Usage:
    """Runs a process to its end. Raises UserError if it fails."""
    steps = running(job)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def running(job: Job, cores: Sequence[int] = ()) -> Generator[None, None, Usage]:
    """Runs a process, and yields again and again until it ends; closing the generator ends it.

    With `cores`, the process is pinned to them with `taskset`, if available, and the threads of
    BLAS and OpenMP are limited to their number.

    Raises:
        UserError: it failed, or its time was over.
    """
    if time.monotonic() >= job.until:
        raise UserError(f"{job.name}: not started: the time is over")
    pins = cores and shutil.which("taskset")
    pinned = ["taskset", "-c", ",".join(map(str, cores))] if pins else []
    paths = filter(None, [job.environment.get("PYTHONPATH"), str(ROOT), *sys.path])
    environment: dict[str, str | None] = {
        **os.environ,
        **(dict.fromkeys(_THREADS, str(len(cores))) if cores else {}),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **job.environment,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    job.printed.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    resident = 0
    ended = 0
    with job.printed.open("ab") as printed, job.printed.open("rb") as output:
        output.seek(0, os.SEEK_END)  # a resumed run adds to its earlier output
        process = subprocess.Popen(
            [*pinned, *job.command],
            cwd=job.cwd,
            env={name: value for name, value in environment.items() if value is not None},
            stdin=subprocess.PIPE,  # stays open: at its end, mlx.launch would never sleep
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it is ended with all processes that it started
        )
        try:
            waiting = b""
            while not ended and time.monotonic() < job.until:
                resident = max(resident, _resident(process.pid))
                ended, status, usage = os.wait4(process.pid, os.WNOHANG)
                waiting = _listened(job, time.perf_counter() - started, waiting + output.read())
                yield
                if not ended:
                    time.sleep(_BETWEEN_LOOKS)
            seconds = time.perf_counter() - started
            _listened(job, seconds, waiting + output.read())
            if ended:
                process.returncode = os.waitstatus_to_exitcode(status)
                resident = resident or usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        finally:
            if not ended:
                _end(process, job.grace)
            assert process.stdin is not None
            process.stdin.close()
    if not ended or process.returncode:
        why = f"ended with code {process.returncode}" if ended else "the time is over"
        last = job.printed.read_text(encoding="utf-8", errors="replace").splitlines()
        raise UserError("\n".join([f"{job.name}: {why}; see {job.printed}:", *last[-_LAST_LINES:]]))
    return Usage(seconds=seconds, resident=resident, cores=len(cores) or os.cpu_count() or 1)


def _listened(job: Job, seconds: float, text: bytes) -> bytes:
    """Hands the complete lines of the output on; returns the text after them."""
    *lines, rest = text.split(b"\n")
    for line in lines if job.heard else ():
        job.heard(seconds, line.decode(errors="replace"))  # pyright: ignore[reportOptionalCall]
    return rest


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """Ends a process and all that it started; with `grace`, they may first save their state."""
    if grace:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(grace)
            return
        except subprocess.TimeoutExpired:
            pass
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _resident(pid: int) -> int:
    """The process's peak memory so far in bytes; 0 if the system does not report it.

    `wait4` is not used where /proc exists, because on Linux its value is at least the memory of the
    process that started it.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s*(\d+) kB", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def side_by_side(jobs: Sequence[Job], number: int) -> Iterator[tuple[Job, Usage | UserError]]:
    """Runs the jobs in order, `number` at a time, and yields each with its outcome when it ends.
    The cores of this process are divided among them.
    """
    slots: queue.SimpleQueue[tuple[int, ...]] = queue.SimpleQueue()
    for cores in divided(sorted(_available()), number):
        slots.put(cores)
    left = threading.Event()  # nobody waits for the jobs any more

    def run(job: Job) -> Usage:
        cores = slots.get()
        steps = running(job, cores)
        try:
            while not left.is_set():
                next(steps)
            raise UserError(f"{job.name}: ended before it was done")
        except StopIteration as end:
            return end.value
        finally:
            steps.close()
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
