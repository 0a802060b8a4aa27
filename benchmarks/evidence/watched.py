"""Runs a command whose figures are written while it runs; shared by `gsm8k`, `programs` and
`rates`.

A run is a process on one GPU with its own folder. Its log is read every second, and the known
figures are written to OUT/NAME.json: first the scores before training, then curves, then the last
scores.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from benchmarks.evidence.pool import ROOT
from benchmarks.evidence.readings import PEAK, REWARD, SECONDS, STEP, TOKENS
from benchmarks.harness.command import say
from benchmarks.harness.machine import backend, machine
from benchmarks.harness.record import Curve, Figure, make_record, save_record
from runners.errors import UserError
from runners.evaluation.comparison import wilson

LOG = "training_log.jsonl"
TO_EVALUATE = 45.0  # seconds that the evaluation after training and the final model may take
TO_SAVE = 20.0  # seconds between a signal and the end of a process that ignores it
Lines = Sequence[dict[str, Any]]


@attrs.frozen(kw_only=True)
class WatchedRun:
    """A training process, and a function that reads its log."""

    benchmark: str  # the name of the result
    title: str  # "CASE: seed N", before the names of its figures
    command: Sequence[str]
    folder: Path  # of its log
    read: Callable[[Lines], Sequence[Figure]]  # of a log that may have only a few lines yet
    packages: Sequence[str] = ()  # whose versions belong to the result


def watch(run: WatchedRun, out: Path, *, minutes: float, quick: bool = False) -> list[Figure]:
    """Starts the run, writes its figures while it runs, and returns them.

    Args:
        run: the run.
        out: folder for the result, a copy of the run's log and the process's output.
        minutes: time limit after which the process is ended.
        quick: marks the result as measured with sizes that are too small to be meaningful.

    Raises:
        UserError: the process failed or exceeded the time limit.
    """
    out.mkdir(parents=True, exist_ok=True)
    printed = out / f"{run.folder.name}.txt"
    started = time.monotonic()
    with printed.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            run.command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    surroundings = machine(run.packages)

    def written(figures: Sequence[Figure]) -> list[Figure]:
        named = [attrs.evolve(figure, name=f"{run.title}: {figure.name}") for figure in figures]
        record = make_record(run.benchmark, named, quick=quick, machine=surroundings, rates={})
        save_record(out, backend(), record, parts=[run.title])
        return named

    lines = 0
    try:
        while process.poll() is None and time.monotonic() - started < 60 * minutes:
            time.sleep(1.0)
            found = log_lines(run.folder)
            if len(found) > lines:
                lines = len(found)
                written(run.read(found))
                shutil.copy(run.folder / LOG, out / f"{run.folder.name}.jsonl")
    finally:
        over = process.poll() is None
        if over:
            _end(process)
    figures = list(run.read(log_lines(run.folder)))
    if figures:
        shutil.copy(run.folder / LOG, out / f"{run.folder.name}.jsonl")
    if not over and not process.returncode:
        figures.append(Figure(name=SECONDS, value=time.monotonic() - started, unit="s"))
    named = written(figures)
    if over or process.returncode:
        why = "the time is over" if over else f"ended with code {process.returncode}"
        last = printed.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        raise UserError("\n".join([f"{run.title}: {why}; see {printed}:", *last]))
    say(f"{run.title}: {time.monotonic() - started:.0f} s")
    return named


def log_lines(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's log; empty if there is no log yet."""
    path = folder / LOG
    if not path.is_file():
        return []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a run, which may first save its state and end its child processes."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(TO_SAVE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def time_limit(minutes: float) -> str:
    """The setting that ends training early enough for the final evaluation."""
    seconds = max(60 * minutes - TO_EVALUATE, 1.0)
    return f'stop.when=["time/elapsed >= {seconds:.0f}"]'


def share_figure(name: str, share: float, problems: int, **more: Any) -> Figure:
    """A share of right answers as a percentage, with its 95 % interval."""
    within = wilson(round(share * problems), problems)
    return Figure(
        name=name,
        value=100 * share,
        unit="%",
        low=100 * within.low,
        high=100 * within.high,
        samples=problems,
        **more,
    )


def step_figures(lines: Lines) -> list[Figure]:
    """Rewards over minutes, and the times of the steps in a log; empty before the first update."""
    steps = [line for line in lines if line.get("reward") is not None]
    if not steps:
        return []
    rewards = [(line["time/elapsed"] / 60, line["reward"]) for line in steps]
    last = rewards[-max(len(rewards) // 10, 1) :]
    mean = sum(reward for _, reward in last) / len(last)
    figures = [
        Figure(name="updates", value=steps[-1]["update"]),
        Figure(name=REWARD, value=mean, curve=over_minutes(rewards, 9)),
        _median(STEP, steps, "step_time", "s"),
        Figure(name=TOKENS, value=steps[-1].get("num_tokens", 0)),
    ]
    for part in ("rollout", "reward", "learner", "update", "sync"):
        if f"time/{part}" in steps[-1]:
            figures.append(_median(f"step: {part}", steps, f"time/{part}", "s"))
    if "memory/peak_gb" in steps[-1]:
        peak = max(line["memory/peak_gb"] for line in steps)
        figures.append(Figure(name=PEAK, value=peak, unit="GB"))
    return figures


def over_minutes(points: Sequence[tuple[float, float]], width: int = 1) -> Curve:
    """(minute, value) at every tenth of a minute, so that the curves of several runs can be joined.

    Each value is the mean of `width` neighbours.
    """
    minutes, values = zip(*points, strict=True)
    half = width // 2
    places = range(len(values))
    means = [statistics.fmean(values[max(place - half, 0) : place + half + 1]) for place in places]
    ticks = range(math.ceil(10 * minutes[0]), math.floor(10 * minutes[-1]) + 1)
    grid = [tick / 10 for tick in ticks]
    return tuple(zip(grid, np.interp(grid, minutes, means).round(4).tolist(), strict=True))


def _median(name: str, steps: Lines, key: str, unit: str) -> Figure:
    values = sorted(line[key] for line in steps)
    return Figure(
        name=name,
        value=values[len(values) // 2],
        unit=unit,
        low=values[0],
        high=values[-1],
        samples=len(values),
    )
