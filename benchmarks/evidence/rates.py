"""Compares learning rates on GSM8K: all weights, and adapters of several ranks and scales, for a
few updates each.

Each case is a run of 40 updates of 16 problems × 8 completions with a constant learning rate after a short
warm-up; then all test problems are scored. The cases run one after another, in the order of the
table; with `--part K/N`, only every N-th case, so that N commands on N GPUs share them. Cases that
a result already contains are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import click

from benchmarks.evidence.gsm8k import QUICK, Case, figures_of, run_command
from benchmarks.evidence.watched import WatchedRun, watch
from benchmarks.harness.command import say
from benchmarks.harness.record import load_records
from runners.commands.base import HELP, ends_with_a_line
from runners.errors import UserError

NAME = "rates"
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
        return [*case.settings, *lora, *self.more]


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


@click.command(context_settings=HELP)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for the result."
)
@click.option(
    "--work", type=click.Path(path_type=Path), help="Folder for the runs and their models [OUT/runs]."
)
@click.option("--model", required=True, help="The model's folder.")
@click.option("--data", required=True, help="Folder with train.jsonl and test.jsonl.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--part",
    default="1/1",
    show_default=True,
    metavar="K/N",
    help="Only every N-th case, starting with the K-th.",
)
@click.option("--case", "names", multiple=True, help="Only cases whose name contains this text.")
@click.option("--updates", default=40, show_default=True)
@click.option("--minutes", default=8.5, show_default=True, help="Do not start a run that would end later.")
@click.option("--quick", is_flag=True, help="Two updates with a few tokens, to show that the command works.")
@ends_with_a_line
def main(
    out: Path,
    work: Path | None,
    model: str,
    data: str,
    seed: int,
    part: str,
    names: Sequence[str],
    updates: int,
    minutes: float,
    quick: bool,
) -> None:
    """Train with each learning rate of the grid, and score all test problems of GSM8K."""
    first, _, each = part.partition("/")
    if not (first.isdecimal() and each.isdecimal() and 0 < int(first) <= int(each)):
        raise UserError(f"--part: expected K/N with 1 <= K <= N, such as 1/2, found {part}")
    points = [point for point in GRID if not names or any(name in point.name for name in names)]
    place = (work or out / "runs").resolve()
    until = time.monotonic() + 60 * minutes
    faults = []
    longest = 60.0  # seconds of a run so far
    for point in points[int(first) - 1 :: int(each)]:
        title = f"{point.name}: seed {seed}"
        if title in finished(out):
            continue
        started = time.monotonic()
        if started + longest > until:
            say(f"{title}: no time left")
            break
        folder = place / f"{NAME}-{point.name.replace(', ', '-').replace(' ', '-')}-{seed}"
        settings = [
            *point.settings,
            "optim.schedule=constant",
            "eval.at_start=false",
            "optim.batch_size=16",
            *point.more,
            *(QUICK if quick else ()),
        ]
        command = run_command(folder, model, data, seed, 2 if quick else updates, settings)
        run = WatchedRun(benchmark=NAME, title=title, command=command, folder=folder, read=figures_of)
        try:
            watch(run, out, minutes=min(MINUTES_EACH, (until - started) / 60), quick=quick)
        except UserError as error:  # a rate that ends a run is a result too
            say(str(error))
            faults.append(title)
        longest = max(longest, time.monotonic() - started)
    if faults:
        raise UserError(f"not finished: {'; '.join(faults)}")


def finished(out: Path) -> set[str]:
    """The titles of the complete runs in a result."""
    figures = [f.name for record in load_records(out / f"{NAME}.json").values() for f in record.figures]
    return {name.removesuffix(": strict after") for name in figures if name.endswith(": strict after")}


if __name__ == "__main__":
    main()
