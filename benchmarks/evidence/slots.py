"""`python -m benchmarks.evidence.slots FILE --gpus N`: commands side by side, each on one GPU of its own.

FILE has in each line a command without `python -m`, or several with ` ; ` between them, which run one after
the other; `#` begins a comment. The lines run side by side, line k on GPU k modulo N, with an equal share of
the cores. More lines than GPUs share them, which distorts times and nothing else.
"""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TextIO

import click

from benchmarks.evidence.pool import Job, side_by_side
from runners.commands.base import HELP, ends_with_a_line
from runners.errors import UserError
from runners.machine.terminal import echo


def jobs_of(text: str, gpus: int, out: Path) -> list[Job]:
    """The jobs of the lines of a file."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    python = f"{shlex.quote(sys.executable)} -m "
    return [
        Job(
            name=line,
            command=["sh", "-c", " ; ".join(python + command for command in line.split(" ; "))],
            printed=out / f"slot-{number}.txt",
            environment={"CUDA_VISIBLE_DEVICES": str(number % gpus)},
        )
        for number, line in enumerate(filter(None, lines))
    ]


@click.command(context_settings=HELP)
@click.argument("file", type=click.File())
@click.option("--gpus", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--minutes", type=click.FloatRange(0), default=9.5, show_default=True, help="End what still runs."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="For what the commands print.")
@ends_with_a_line
def main(file: TextIO, gpus: int, minutes: float, out: Path) -> None:
    """Run the commands of FILE side by side, each on a GPU of its own."""
    jobs = jobs_of(file.read(), gpus, out.resolve())
    faults = []
    for job, outcome in side_by_side(jobs, len(jobs), until=time.monotonic() + 60 * minutes):
        if isinstance(outcome, UserError):
            faults.append(str(outcome))
            echo(faults[-1])
        else:
            echo(f"{job.name}: {outcome.seconds:.0f} s")
    if faults:
        raise UserError(f"{len(faults)} of {len(jobs)} commands failed")


if __name__ == "__main__":
    main()
