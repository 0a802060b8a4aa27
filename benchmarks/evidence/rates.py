"""Compares learning rates on GSM8K: all weights, and adapters of several ranks and scales, for a
few updates each.

Each case is a run of 40 updates of 16 problems × 8 completions with a constant learning rate after a short
warm-up; then all test problems are scored. The cases run one after another, in the order of the
table; with `--part K/N`, only every N-th case, so that N commands on N GPUs share them. Cases that
a result already contains are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import click

from benchmarks.evidence.gsm8k import CONFIG, QUICK, Case, figures_of
from benchmarks.evidence.watched import Call, single_runs, updates, watch
from benchmarks.harness.command import say
from benchmarks.harness.record import Figure, load_records
from runners.errors import UserError

SUPERVISED = 10  # updates before, so that the model writes ####
MINUTES_EACH = 2.5  # after which a run is ended; usually it takes one


@attrs.frozen
class Point:
    """One point of the grid; rank 0 means all weights."""

    rate: float
    rank: int = 0
    scale: float = 2.0
    more: tuple[str, ...] = ()
    note: str = ""

    @property
    def name(self) -> str:
        """The first part of the names of its figures."""
        who = f"LoRA rank {self.rank} scale {self.scale:g}" if self.rank else "full"
        return ", ".join(filter(None, [who, f"rate {self.rate:g}", self.note]))

    @property
    def settings(self) -> list[str]:
        """Overrides of the config of `gsm8k`."""
        tune = "lora" if self.rank else "full"
        case = Case(side="grpo_fn", tune=tune, rate=self.rate, supervised=SUPERVISED)
        lora = [f"model.lora.rank={self.rank}", f"model.lora.scale={self.scale}"] if self.rank else []
        usual = ["optim.schedule=constant", "eval.at_start=false", "optim.batch_size=16"]
        return [*case.settings, *lora, *usual, *self.more]


ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
GRID = (
    Point(2e-6),
    Point(4e-6),
    Point(1e-4, 32),
    Point(3e-4, 32),
    Point(8e-6),
    Point(2e-5, 8, 20.0),
    Point(1e-4, 8, 2.0),
    Point(1e-6),
    Point(1e-3, 32),
    Point(1e-4, 8, 20.0),
    Point(3e-4, 1, 2.0),
    Point(4e-6, more=("loss.beta=0.01",), note="KL 0.01"),
    Point(3e-4, 8, 2.0),
    Point(3e-4, 32, 2.0, (f"model.lora.keys={list(ATTENTION)}",), "attention only"),
    Point(4e-6, more=("optim.batch_size=32",), note="32 problems"),
    Point(5e-7),
    Point(1e-5),
)
"""The most important cases first."""


def part_of(_: click.Context, __: click.Parameter, text: str) -> slice:
    """The cases of `--part K/N`."""
    first, _sign, each = text.partition("/")
    if not (first.isdecimal() and each.isdecimal() and 0 < int(first) <= int(each)):
        raise click.BadParameter(f"expected K/N with 1 <= K <= N, such as 1/2, found {text}")
    return slice(int(first) - 1, None, int(each))


@single_runs("rates")
@click.option(
    "--part",
    default="1/1",
    show_default=True,
    metavar="K/N",
    callback=part_of,
    help="Only every N-th case, starting with the K-th.",
)
@click.option("--case", "names", multiple=True, help="Only cases whose name contains this text.")
@updates(40)
def main(call: Call, part: slice, names: Sequence[str], updates: int) -> Iterator[list[Figure]]:
    """Train with each learning rate of the grid, and score all test problems of GSM8K."""
    points = [point for point in GRID if not names or any(name in point.name for name in names)]
    until = time.monotonic() + 60 * call.minutes
    faults = []
    longest = 60.0  # seconds of a run so far
    for point in points[part]:
        title = f"{point.name}: seed {call.seed}"
        if title in finished(click.get_current_context().obj):
            continue
        started = time.monotonic()
        if started + longest > until:
            say(f"{title}: no time left")
            break
        folder = call.folder(f"rates-{point.name}")
        own = [*point.settings, *(QUICK if call.quick else ())]
        command = call.command(CONFIG, call.settings(folder, updates, own))
        minutes = min(MINUTES_EACH, (until - started) / 60)
        try:
            yield from watch(title, command, folder, figures_of, minutes=minutes)
        except UserError as error:  # a rate that ends a run is a result too
            say(str(error))
            faults.append(title)
        longest = max(longest, time.monotonic() - started)
    if faults:
        raise UserError(f"not finished: {'; '.join(faults)}")


def finished(out: Path) -> set[str]:
    """The titles of the complete runs in a result."""
    records = load_records(out / "rates.json").values()
    names = [figure.name for record in records for figure in record.figures]
    return {name.removesuffix(": strict after") for name in names if name.endswith(": strict after")}


if __name__ == "__main__":
    main()
