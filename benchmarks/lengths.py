"""A run whose completions shrink and grow again: each step against the time that its tokens need.

The real model (GRPO_REAL_MODEL; without it random weights) takes steps of 32 × 16 completions, on a CPU
2 × 4, whose mean length falls from 175 to 17 tokens and rises again; a completion's own length is 0.7 to 1.3
times that. What a step's tokens *need* follows from the run's longest step, repeated when everything is
compiled: its seconds for each decoding step, for each token that the learner computes, and for the rest. A
*repeated step* has a length of the run once more, when all its programs exist.

**What limits it.** Launching: with LoRA the host needs .18 s for a micro-batch of any size (H100, 30 blocks),
and .35 s more for the first of a shape. So micro-batches are few, and a shape that fits is used again.
`MLX_CUDA_GRAPH_CACHE_SIZE` (10,000) and `MLX_MAX_OPS_PER_BUFFER` (100) change nothing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import attrs
import click

from benchmarks.first_update import LORA, REAL, REAL_MODEL, Case, write_run
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.machine import backend
from benchmarks.harness.record import Figure
from runners.config.loading import load_config
from runners.machine.startup import prepare
from runners.profiling import Stepping
from runners.training.setup import SetUp

FALL = (175, 175, 175, 120, 80, 55, 37, 25, 17, 17)  # tokens; then they rise again
SCHEDULE = (*FALL, *FALL[-3::-1][:-2])
FREE = 3  # steps at the beginning that may take longer


class Forced:
    """Ends completions at 0.7 to 1.3 times `mean` tokens, by a hash of their first four."""

    def __init__(self) -> None:
        self.mean = 0

    def __call__(self, tokens: Sequence[int], start: int) -> int | None:
        """As `FindStop`."""
        share = 0.7 + 0.6 * zlib.crc32(repr(tokens[:4]).encode()) / 2**32
        end = max(4, round(self.mean * share))
        return end if len(tokens) >= end else None


def needed(row: Mapping[str, float], longest: Mapping[str, float]) -> float:
    """Seconds that a step's tokens need, by the rates of the longest step."""
    rest = longest["step_time"] - longest["time/rollout"] - longest["time/learner"]
    rollout = longest["time/rollout"] * row["columns"] / longest["columns"]
    return rollout + longest["time/learner"] * row["learned"] / longest["learned"] + rest


def measure(title: str, case: Case, schedule: Sequence[int], folder: Path) -> list[Figure]:
    """The replay, then each of its lengths twice again."""
    write_run(folder, case)
    config = load_config(
        str(folder / "train.toml"), [*case.settings, f"run.output_dir={folder / 'out'}"]
    ).check()
    run, ends = SetUp(config, prepare(0.0, config), say).build(), Forced()
    sampling = attrs.evolve(run.collector.sampling, eos_ids=(), find_stop=ends)
    stepping = Stepping(attrs.evolve(run, collector=attrs.evolve(run.collector, sampling=sampling)))
    del run

    def step(mean: int) -> dict[str, float]:
        ends.mean = mean
        row = stepping.step()
        shown = [f"{key.removeprefix('time/')} {row[key]:.3g}" for key in row if row[key]]
        say(f"{title}: {mean} tokens: {', '.join(shown)}")
        return row

    rows = [step(mean) for mean in schedule]
    say(f"{title}: repeated")
    again = {
        mean: min((step(mean) for _ in range(2)), key=lambda row: row["step_time"])
        for mean in sorted({*schedule}, reverse=True)
    }
    longest, shortest = again[max(again)], again[min(again)]
    ratios = [row["step_time"] / needed(row, longest) for row in rows]
    steady = {mean: row["step_time"] / needed(row, longest) for mean, row in again.items()}
    worst = max(range(min(FREE, len(rows) - 1), len(rows)), key=ratios.__getitem__)
    curve = list(enumerate(ratios, 1))
    return [
        Figure(
            name=f"{title}: slowest step after the third, over its need",
            value=ratios[worst],
            unit="x",
            at_most=None if title == "quick" else 2.0,
            note=f"step {worst + 1}, {schedule[worst]} tokens",
            curve=curve,
        ),
        Figure(name=f"{title}: slowest repeated step, over its need", value=max(steady.values()), unit="x"),
        *(
            Figure(name=f"{title}: {name} step: {what}", value=value, unit=unit)
            for name, row in (("longest", longest), ("shortest", shortest))
            for what, value, unit in (
                ("tokens", row["tokens"], ""),
                ("time", row["step_time"], "s"),
                ("rollout", row["time/rollout"], "s"),
                ("learner", row["time/learner"], "s"),
            )
        ),
    ]


@benchmark("lengths", parts=("chosen",))
@click.option("--case", "chosen", type=click.Choice(["LoRA", "full"]), multiple=True, help="Only this one.")
def main(quick: bool, chosen: Sequence[str]) -> Iterator[list[Figure]]:
    """A run whose completions shrink and grow again: each step against the time that its tokens need."""
    model = REAL if os.environ.get(REAL_MODEL) else "qwen2.5-0.5b" if backend() != "cpu" else "qwen2-6x256"
    sizes = (32, 16) if backend() != "cpu" else (2, 4)
    case = Case(model=model, prompts=sizes[0], generations=sizes[1], updates=1000)
    cases = {"LoRA": attrs.evolve(case, settings=LORA), "full": case}
    if quick:
        cases = {"quick": Case(model="tiny", prompts=2, generations=2, new=32, updates=1000)}
    for title, each in cases.items():
        if title not in (chosen or cases):
            continue
        folder = Path(tempfile.mkdtemp(prefix="lengths-"))
        schedule = (16, 16, 16, 8, 16) if quick else SCHEDULE
        try:  # a process of its own: what one run leaves in the memory decides on the next micro-batches
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                yield pool.submit(measure, title, each, schedule, folder).result()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
