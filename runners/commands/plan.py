"""What a run needs: `grpo plan CONFIG` predicts its memory, `grpo bench CONFIG` measures
its time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import click

from runners.commands.base import command, flag, option
from runners.commands.options import SET, echo_all, open_config
from runners.errors import UserError
from runners.machine.terminal import echo_text


@command(
    "plan",
    click.argument("config"),
    SET,
    flag("--json as as_json", "The same facts as JSON, in bytes."),
    option(
        "--ranks", "Number of mlx.launch processes; shows the memory of each.", click.IntRange(1), 1
    ),
    notes="""\
\b
Exit codes: 0 the run fits; 2 it does not fit, or something in the config, the data or the model has to
change.
""",
)
def plan_command(config: str, overrides: Sequence[str], as_json: bool, ranks: int) -> None:
    """Predict the memory that a run will take.

    Shows, for every phase of a step, the bytes of weights, optimizer, activations and caches, the peak
    against this machine's memory, and the largest batch that fits. It reads only config.json and the headers
    of the weights, and finds the longest prompt of the data if data and tokenizer are on this machine.
    """
    loaded, machine = open_config(config, overrides)
    from runners.memory.plan import make_plan

    text, problem = make_plan(loaded, machine, as_json=as_json, ranks=ranks)
    echo_text(text)
    if problem:
        raise UserError(problem)


@command(
    "bench",
    click.argument("config"),
    SET,
    option("--steps", "Number of measured steps.", click.IntRange(1), 3, show_default=True),
    flag("--json as as_json", "The same facts as JSON."),
    notes="""\
\b
Examples:
  grpo bench train.toml
  grpo bench train.toml --set optim.batch_size=32 --steps 5
  grpo bench quickstart --json

\b
The first step includes compilation and is shown by itself. A step is the rollouts of an update and all
updates that use them. Evaluations, checkpoints and logs are left out.
""",
)
def bench_command(config: str, overrides: Sequence[str], steps: int, as_json: bool) -> None:
    """Time the parts of a run's steps."""
    checked, machine = open_config(config, overrides)
    echo_all(machine.notices)
    from runners.profiling import bench_steps, bench_table
    from runners.telemetry.report import PlainReport

    found = bench_steps(checked, steps=steps, report=PlainReport(sys.stderr))
    echo_text(json.dumps(found, indent=1) if as_json else bench_table(found))
