"""`python -m benchmarks.architectures`: tests each module of mlx-lm in a separate process, and
writes docs/models.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import attrs
import click

from benchmarks.architectures.page import BACKENDS, write_page
from benchmarks.architectures.small_models import modules
from benchmarks.architectures.trial import STEPS, Outcome
from benchmarks.harness.machine import backend
from benchmarks.harness.record import RESULTS
from runners.machine.bounded_process import python_command

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


@click.command()
@click.argument("names", nargs=-1)
@click.option(
    "--seconds", default=300.0, show_default=True, help="Limit on the computing time of each architecture."
)
@click.option("--memory-gb", default=3.0, show_default=True, help="Limit on the memory of each architecture.")
@click.option(
    "--jobs", default=1, show_default=True, help="Number of architectures that are tested in parallel."
)
@click.option("--page", type=click.Path(path_type=Path, dir_okay=False), default=PAGE, show_default=True)
@click.option(
    "--results",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the result of each step; benchmarks/results/architectures.json without NAMES.",
)
@click.option(
    "--only-page",
    type=click.Choice(BACKENDS),
    help="Test nothing; write the page's table for this backend from the results.",
)
@click.option("--check", is_flag=True, help="Exit with 1 if an architecture computes something wrong.")
def main(
    names: Sequence[str],
    seconds: float,
    memory_gb: float,
    jobs: int,
    page: Path,
    results: Path | None,
    only_page: str | None,
    check: bool,
) -> None:
    """Test every architecture of mlx-lm on a small random model, and write docs/models.md.

    NAMES are modules of mlx_lm.models; if some are given, the page does not change.
    """
    known = modules()
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name!r}: expected one of {', '.join(known)}")

    results = results or (None if names else RESULTS / "architectures.json")
    if only_page and results:
        recorded = json.loads(results.read_text(encoding="utf-8"))[only_page]
        outcomes_of = {name: [Outcome(**each) for each in outcomes] for name, outcomes in recorded.items()}
        write_page(page, outcomes_of, only_page)
        return
    writing = Lock()

    def one(name: str) -> list[Outcome]:
        began = time.monotonic()
        outcomes = tried(name, seconds, int(memory_gb * 1e9))
        faults = [f"{each.step}: {each.fault}" for each in outcomes if each.fault]
        click.echo(f"{name:24} {time.monotonic() - began:5.1f} s  {'; '.join(faults) or 'right'}")
        if results:
            with writing:
                record(results, name, outcomes, backend())
        return outcomes

    wanted = names or known
    with ThreadPoolExecutor(jobs) as pool:
        found = dict(zip(wanted, pool.map(one, wanted), strict=True))
    if not names:
        write_page(page, found, backend())
        click.echo(f"written to {page}")
    if check and any(each.is_wrong for outcomes in found.values() for each in outcomes):
        raise SystemExit(1)


def record(results: Path, name: str, outcomes: Sequence[Outcome], backend: str) -> None:
    """Replaces the outcomes of this architecture on this backend in a file."""
    known = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    here = known.get(backend, {}) | {name: [attrs.asdict(outcome) for outcome in outcomes]}
    known[backend] = dict(sorted(here.items()))
    results.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def tried(name: str, seconds: float, memory: int) -> list[Outcome]:
    """The outcomes of one architecture, tested in a separate process."""
    command = python_command(
        "from runners.machine.startup import prepare; prepare(); "
        "from benchmarks.architectures.trial import main; main(*sys.argv[1:])",
        name,
        str(seconds),
        str(memory),
    )
    environment = os.environ | {"MLX_ENABLE_TF32": "0"}  # on CUDA: products in float32, as on a CPU
    ending = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    outcomes = [Outcome(**json.loads(line)) for line in ending.stdout.splitlines() if line.startswith("{")]
    whole = len(outcomes) >= len(STEPS) or any(each.fault for each in outcomes[:2])
    if not whole:
        limits = {
            -signal.SIGPROF: f"more than {seconds:g} s",
            -signal.SIGABRT: f"more than {memory / 1e9:g} GB",
        }
        fault = limits.get(ending.returncode, f"the process ended with {ending.returncode}")
        outcomes.append(Outcome(STEPS[len(outcomes)], fault))
    return outcomes


if __name__ == "__main__":
    main()
