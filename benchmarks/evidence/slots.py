"""`python -m benchmarks.evidence.slots FILE --gpus N`: runs commands in parallel, each on its own
GPU.

Each line of FILE contains a command without `python -m`, or several commands separated by ` ; `,
which run one after another; `#` starts a comment. The lines run in parallel, line k on GPU k modulo
N, with an equal share of the cores. If there are more lines than GPUs, they share GPUs, which only
distorts times.
"""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TextIO

import click

from benchmarks.evidence.watched import TO_SAVE
from benchmarks.harness.command import say
from benchmarks.harness.runs import Job, side_by_side
from runners.commands.base import HELP, ends_with_a_line
from runners.errors import UserError


def jobs_of(text: str, gpus: int, out: Path, until: float) -> list[Job]:
    """The jobs of the lines of a file."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    python = f"{shlex.quote(sys.executable)} -m "
    return [
        Job(
            name=line,
            command=["sh", "-c", " ; ".join(python + command for command in line.split(" ; "))],
            printed=out / f"slot-{number}.txt",
            environment={"CUDA_VISIBLE_DEVICES": str(number % gpus)},
            cwd=out,
            until=until,
            grace=2 * TO_SAVE,  # the commands end their own runs, which may save
        )
        for number, line in enumerate(filter(None, lines))
    ]


@click.command(context_settings=HELP)
@click.argument("file", type=click.File())
@click.option("--gpus", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--minutes",
    type=click.FloatRange(0),
    default=9.5,
    show_default=True,
    help="Time after which running commands are ended.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder for the commands' output."
)
@ends_with_a_line
def main(file: TextIO, gpus: int, minutes: float, out: Path) -> None:
    """Run the commands of FILE in parallel, each on its own GPU."""
    jobs = jobs_of(file.read(), gpus, out.resolve(), time.monotonic() + 60 * minutes)
    out.mkdir(parents=True, exist_ok=True)
    faults = 0
    for job, outcome in side_by_side(jobs, len(jobs)):
        failed = isinstance(outcome, UserError)
        faults += failed
        say(str(outcome) if failed else f"{job.name}: {outcome.seconds:.0f} s")
    if faults:
        raise UserError(f"{faults} of {len(jobs)} commands failed")


if __name__ == "__main__":
    main()
