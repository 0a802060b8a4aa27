"""What saving and resuming cost: the quickstart's share, how long a save holds the run up, the first step.

The quickstart with `checkpoint.every = 10`; a model of 33 million weights, 400 MB of weights and moments;
and the time to the first rollout, fresh and resumed. *Held up by saving* is the log's `time/checkpoint`.

**What limits it.** Small states: flushes. Large ones: the disk.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.command import benchmark, say
from benchmarks.harness.record import Figure
from benchmarks.memory import CASES, Case, write_case
from grpo_fn.trees import arrays_of
from runners.config.loading import Config, load_config
from runners.telemetry.events import Event, Status
from runners.telemetry.report import Quiet
from runners.training.train import run_training

SHARE = 3.0  # per cent of the quickstart's time at most
EVERY = 10
LATER = 2.0  # seconds by which a resumed run's first step may come later
LARGE = "weights, hardly any tokens"  # a case of the memory benchmark: 33 million parameters
SMALL = ("eval.at_start=false", "eval.every=0", "eval.samples=4", "optim.batch_size=4")


class Reached(BaseException):
    """Ends a run as a kill does: nothing handles it."""


class Until(Quiet):
    """Notes when the first rollout begins, and ends the run at the `stop`-th; 0: never."""

    def __init__(self, stop: int = 0) -> None:
        """The clock starts now."""
        self.started, self.first, self._left = time.perf_counter(), 0.0, stop

    def handle(self, event: Event) -> None:
        """Heeds the beginnings of rollouts."""
        if event == Status("sampling"):
            self.first = self.first or time.perf_counter() - self.started
            self._left -= 1
            if self._left == 0:
                raise Reached


def standstill(folder: Path) -> list[float]:
    """Seconds in each update of a run for which saving held it up."""
    lines = (folder / "training_log.jsonl").read_text().splitlines()
    return [line["time/checkpoint"] for line in map(json.loads, lines) if "loss" in line]


def share_of_quickstart(folder: Path, quick: bool) -> list[Figure]:
    """The quickstart with a checkpoint every ten batch steps."""
    less = ["optim.max_steps=4", *SMALL] if quick else []
    every = 2 if quick else EVERY
    config = load_config("quickstart", [f"run.output_dir={folder}", f"checkpoint.every={every}", *less])
    result = run_training(config, report=Quiet())
    held = standstill(result.folder)
    note = f"{sum(map(bool, held))} checkpoints in {result.seconds:.1f} s"
    return [
        Figure(
            name="quickstart: held up by saving",
            value=100 * sum(held) / result.seconds,
            unit="%",
            at_most=None if quick else SHARE,
            note=note,
        )
    ]


def large_state(folder: Path, quick: bool) -> list[Figure]:
    """A state of 400 MB."""
    case = Case(model=_smaller(CASES[LARGE].model)) if quick else CASES[LARGE]
    write_case(folder, case)
    config = _case_config(folder, case)
    result = run_training(config, report=Quiet())
    size = sum(array.nbytes for array in {id(a): a for a in arrays_of(result.state)}.values())
    return [
        Figure(name="large state: bytes", value=size / 1e6, unit="MB"),
        Figure(
            name="large state: a save holds the run up for",
            value=1e3 * max(standstill(result.folder)),
            unit="ms",
        ),
    ]


def first_step(folder: Path, quick: bool) -> list[Figure]:
    """From the call to the first rollout: a fresh start, and a resumed one."""
    settings = [f"run.output_dir={folder}", "checkpoint.every=1", "optim.max_steps=3", *SMALL]
    config = load_config("quickstart", settings)
    times: dict[str, list[float]] = {"fresh": [], "resumed": []}
    for _ in range(1 if quick else 5):
        for name, resume in (("fresh", False), ("resumed", True)):
            until = Until(2)
            try:
                run_training(config, report=until, resume=resume, overwrite=not resume)
            except Reached:
                times[name].append(until.first)
    fresh, resumed = (float(np.median(found)) for found in times.values())
    return [
        Figure(name="start: to the first rollout", value=fresh, unit="s"),
        Figure(name="resume: to the first rollout", value=resumed, unit="s"),
        Figure(
            name="resume: later than a start by",
            value=max(resumed - fresh, 0.0),
            unit="s",
            at_most=None if quick else LATER,
        ),
    ]


def _case_config(folder: Path, case: Case) -> Config:
    # Two updates between saves: what the second waits for is no save.
    return load_config(
        str(folder / "train.toml"),
        [
            "optim.max_steps=4",
            "checkpoint.every=2",
            "checkpoint.keep_last=1",
            "log.jsonl=true",
            *case.settings,
        ],
    )


def _smaller(model: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**(model or {}), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


@benchmark("checkpoint")
def main(quick: bool) -> Sequence[Figure]:
    """What checkpoints cost: share of the quickstart's time, standstill of a save, time to resume."""
    figures: list[Figure] = []
    parts = {"the quickstart": share_of_quickstart, "a large state": large_state, "resuming": first_step}
    for name, part in parts.items():
        say(f"checkpoint: {name}")
        with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder:
            figures += part(Path(folder), quick)
    return figures


if __name__ == "__main__":
    main()
