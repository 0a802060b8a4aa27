"""How much of a slow reward do rollouts ahead hide, by `rollout.max_staleness`?

Each case is a run of the quickstart's model with more prompts per step and an async reward that
sleeps, like a judge that is called over the network. *Step* is the median of its steps, starting
with the fourth. *Hidden* is the share of the reward's time that does not lengthen the step: 1 -
(step - step without that time) / seconds of the reward, both at the same staleness. *Bound* is the
shortest step that the schedule allows: the maximum of the device's own work W (a sequential step
without the reward's time) and (W + R) / (1 + staleness), because at most this number of batches is
in progress. For a plain reward, R itself is also a bound, because batches are then scored one after
another.

**What limits it.** One device samples and learns, so with a short reward a step takes as long as
both. A reward of 10 s is hidden up to staleness x W.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from benchmarks.harness.command import benchmark
from benchmarks.harness.record import Figure
from benchmarks.harness.runs import Job, finish, placed, run_command, step_lines

HIDDEN = 90.0  # per cent of a reward of 1 s: the target
FIRST = 4  # updates that are not counted: they compile, and fill the threads
REWARD = """
import asyncio
import zlib

async def slow(completions, **_):
    await asyncio.sleep({seconds})
    return [zlib.crc32(completion[0]["content"].encode()) % 97 / 97 for completion in completions]
"""


def step_seconds(folder: Path, prompts: int, updates: int, staleness: int, seconds: float) -> float:
    """The median step of one run."""
    reward = folder / "slow.py"
    reward.write_text(REWARD.format(seconds=seconds))
    run = folder / f"{staleness}-{seconds:g}"
    settings = [
        *placed(run),
        f'reward.functions=["{reward}:slow"]',
        f"rollout.max_staleness={staleness}",
        "loss.correction=token_truncate",
        f"optim.batch_size={prompts}",
        f"optim.max_steps={updates}",
        *("eval.every=0", "eval.at_start=false", "eval.samples=1"),
    ]
    printed = run.with_suffix(".txt")
    finish(Job(name=run.name, command=run_command("quickstart", settings), printed=printed))
    return statistics.median(step["step_time"] for step in step_lines(run)[FIRST - 1 :])


@benchmark("overlap")
@click.option("--prompts", type=click.IntRange(1), default=96, help="Prompts in each step.")
def main(quick: bool, prompts: int) -> Iterator[list[Figure]]:
    """Measure how much of a slow reward is hidden by rollouts ahead."""
    prompts, updates = (2, 5) if quick else (prompts, 14)
    work = 0.0
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        for staleness in (0, 1) if quick else (0, 1, 2, 4):
            without = 0.0
            for seconds in (0.0, 0.1) if quick else (0.0, 1.0, 10.0):
                step = step_seconds(Path(folder), prompts, updates, staleness, seconds)
                name = f"staleness {staleness}, reward of {seconds:g} s"
                if not seconds:
                    without = step
                    work = work or step
                    yield [Figure(f"{name}: step", step, "s")]
                    continue
                bound = max(work, (work + seconds) / (1 + staleness))
                hidden = max(100 * (1 - (step - without) / seconds), 0.0)
                judged = HIDDEN if staleness and seconds == 1.0 and bound == work else None
                yield [
                    Figure(f"{name}: step", step, "s", note=f"bound {bound:.2f} s"),
                    Figure(f"{name}: hidden", hidden, "%", at_least=judged),
                ]


if __name__ == "__main__":
    main()
