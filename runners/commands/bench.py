"""`grpo bench CONFIG`: where the time of a config's own steps goes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from runners.commands.base import HELP, ends_with_a_line
from runners.commands.options import SET
from runners.machine.terminal import echo

if TYPE_CHECKING:
    from runners.training.step_bench import StepBench

_NOTES = """\
\b
Examples:
  grpo bench train.toml
  grpo bench train.toml --set optim.batch_size=32 --steps 5
  grpo bench quickstart --json

\b
The first step, in which what has to be compiled is compiled, is shown by itself. A step is the rollouts of an
update, and all updates that they serve. A floor is what the
machine's own rates allow, measured beforehand: the time to read the weights once a decoding step, and that
of the products. Evaluations, checkpoints and logs are left out.
"""


@click.command("bench", context_settings=HELP, epilog=_NOTES)
@click.argument("config")
@SET
@click.option(
    "--steps", type=click.IntRange(1), default=3, show_default=True, help="Steps that are measured."
)
@click.option("--json", "as_json", is_flag=True, help="The same facts as JSON.")
@ends_with_a_line
def bench_command(config: str, overrides: Sequence[str], steps: int, as_json: bool) -> None:
    """Take some steps of a run and show where their time goes."""
    from runners.config.loading import load_config

    loaded = load_config(config, overrides)
    for notice in loaded.notices:
        echo(notice, err=True)
    from runners.machine import startup

    checked = loaded.check()
    for notice in startup.prepare(checked.system.memory_limit_gb).notices:
        echo(notice, err=True)
    from runners.training.step_bench import bench_steps

    found = bench_steps(checked, steps=steps, say=lambda text: echo(text, err=True))
    echo(json.dumps(found.facts(), indent=1) if as_json else table(found))


def table(found: StepBench) -> str:
    """The parts with their shares and floors, and what follows from them."""
    import io

    from rich.console import Console
    from rich.table import Table

    from runners.errors import gigabytes

    grid = Table("part", box=None, pad_edge=False)
    for name in ("seconds", "share", "floor", "of the floor"):
        grid.add_column(name, justify="right")
    for part, seconds in found.seconds.items():
        floor = found.floors.get(part)
        grid.add_row(
            part,
            f"{seconds:.3f}",
            f"{100 * seconds / max(found.step, 1e-9):.0f} %",
            "" if floor is None else f"{floor:.3f}",
            "" if not floor else f"{seconds / floor:.1f} x",
        )
    grid.add_row("a step", f"{found.step:.3f}", "100 %")
    stream = io.StringIO()
    Console(file=stream, width=100, color_system=None).print(grid)
    rollout = found.tokens / max(found.seconds["rollout"], 1e-9)
    expected = f", {gigabytes(found.expected_peak)} foretold" if found.expected_peak else ""
    lines = {
        "measured": f"the median of {found.steps} steps; the first one took {found.first:.1f} s",
        "sampled": f"{found.tokens:,.0f} tokens a step: {rollout:,.0f} a second of the rollout, "
        f"{found.tokens / max(found.step, 1e-9):,.0f} of the whole step",
        "learned": f"{found.learned:,.0f} tokens a step, prompts included",
        "peak": f"{gigabytes(found.peak)} of MLX's arrays{expected}",
        "machine": f"{found.rates.matmul / 1e12:.3g} TFLOP/s in products, "
        f"reads {found.rates.read / 1e9:.3g} GB/s",
        "most time": f"{found.limit}; shorter with {found.advice}",
    }
    text = "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
    return text + "\n\n" + "\n".join(f"{name:<12}{value}" for name, value in lines.items())
