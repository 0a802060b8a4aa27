"""What several ranks gain, computed: bytes on the wire, waiting for long completions, and the fixed part.

    python -m benchmarks.harness.rank_scaling --parameters 494e6 --step 4.06 --fixed 0.7 --rows 512

A step of N ranks takes  fixed + (step − fixed)/N + wait + sum.  *fixed* is the part that fewer rows do not
shorten, such as the launches of decoding steps: from two measured steps it is 2·T(half the rows) − T(all
rows). *sum* moves 2·(N−1)/N times the gradients' bytes in each direction. *wait* is simulated: a rank decodes
until its longest completion ends. Nothing here is measured; `benchmarks.ranks` measures.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import click

LINKS = {  # bytes a second in each direction
    "1 Gb/s Ethernet": 0.12e9,
    "10 Gb/s Ethernet": 1.2e9,
    "Thunderbolt": 4e9,
    "NVLink": 250e9,
}
GRADIENT = 4  # bytes of a number
_TRIALS = 300


@attrs.frozen
class Step:
    """A step on one rank, and what of it N ranks share."""

    seconds: float
    fixed: float  # seconds that fewer rows do not shorten
    decoding: float  # share of the step that decodes
    rows: int
    longest: int  # tokens at most
    mean: float  # tokens of a completion
    parameters: float  # trained

    def sum_seconds(self, ranks: int, rate: float) -> float:
        """Of an update's gradients over a link of so many bytes a second."""
        return 2 * (ranks - 1) / ranks * GRADIENT * self.parameters / rate

    def strong(self, ranks: int, rate: float, skew: float) -> float:
        """Efficiency with the same batch for any number of ranks."""
        spent = self.fixed + (self.seconds - self.fixed) / ranks
        return self.seconds / (ranks * (spent + self._wait(skew) + self.sum_seconds(ranks, rate)))

    def weak(self, ranks: int, rate: float, skew: float) -> float:
        """Efficiency with the same rows on each rank for any number of ranks."""
        return self.seconds / (self.seconds + self._wait(skew) + self.sum_seconds(ranks, rate))

    def break_even(self, ranks: int, rate: float) -> float:
        """Seconds that a step on one rank takes at least where N ranks are faster."""
        return self.fixed + self.sum_seconds(ranks, rate) * ranks / (ranks - 1)

    def _wait(self, skew: float) -> float:
        return skew * self.decoding * self.seconds


def rollout_skew(ranks: int, rows: int, longest: int, mean: float, seed: int = 0) -> float:
    """Share of the decoding steps in which the average rank waits for the one with the longest completion.

    Lengths are exponential with this mean, cut at `longest`: from draws, the same for each seed.
    """
    chance, waited, total = random.Random(seed), 0.0, 0.0
    each = max(rows // ranks, 1)
    for _ in range(_TRIALS):
        ends = [
            max(min(longest, 1 + int(chance.expovariate(1 / mean))) for _ in range(each))
            for _ in range(ranks)
        ]
        waited += max(ends) - sum(ends) / ranks
        total += max(ends)
    return waited / total


def rows_of(step: Step, counts: Sequence[int]) -> list[list[str]]:
    """The table: a row for each number of ranks and link."""
    found = []
    for ranks in counts:
        skew = rollout_skew(ranks, step.rows, step.longest, step.mean)
        for name, rate in LINKS.items():
            found.append(
                [
                    str(ranks),
                    name,
                    f"{100 * skew:.1f} %",
                    f"{step.sum_seconds(ranks, rate):.3g} s",
                    f"{step.break_even(ranks, rate):.3g} s",
                    f"{step.strong(ranks, rate, skew):.2f}",
                    f"{step.weak(ranks, rate, skew):.2f}",
                ]
            )
    return found


COLUMNS = (
    "ranks",
    "link",
    "waiting of decoding",
    "sum",
    "pays from a step of",
    "same batch",
    "same rows a rank",
)


@click.command()
@click.option("--parameters", default=494e6, show_default=True, help="Numbers that are trained.")
@click.option("--step", "seconds", default=4.06, show_default=True, help="Seconds of a step on one rank.")
@click.option("--fixed", default=0.7, show_default=True, help="Seconds of it that fewer rows do not shorten.")
@click.option("--decoding", default=0.6, show_default=True, help="Share of it that decodes.")
@click.option("--rows", default=512, show_default=True, help="Completions of a step.")
@click.option("--longest", default=256, show_default=True, help="Tokens of a completion at most.")
@click.option("--mean", default=120.0, show_default=True, help="Tokens of a completion.")
@click.option("--ranks", "counts", multiple=True, type=click.IntRange(2), help="[2, 4, 8]")
def main(
    parameters: float,
    seconds: float,
    fixed: float,
    decoding: float,
    rows: int,
    longest: int,
    mean: float,
    counts: tuple[int, ...],
) -> None:
    """Efficiency and break-even of several ranks over four kinds of links, computed."""
    if not 0 <= fixed < seconds:
        raise click.BadParameter(f"found {fixed}, want 0 to the step's {seconds}", param_hint="--fixed")
    step = Step(seconds, fixed, decoding, rows, longest, mean, parameters)
    click.echo(f"gradients of an update: {GRADIENT * parameters / 1e6:,.0f} MB")
    lines = [COLUMNS, *rows_of(step, counts or (2, 4, 8))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
