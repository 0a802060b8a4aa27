"""`grpo plan CONFIG` predicts a run's memory; `grpo bench CONFIG` measures its time."""

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
    flag("--json as as_json", "Print the figures as JSON, in bytes."),
    option(
        "--ranks",
        "Number of mlx.launch processes; memory is shown per process.",
        click.IntRange(1),
        1,
    ),
    notes="""\
\b
Exit codes: 0 the run fits; 2 it does not fit, or the config, the data or the model must be changed.
""",
)
def plan_command(config: str, overrides: Sequence[str], as_json: bool, ranks: int) -> None:
    """Predict how much memory a run needs.

    For each phase of a step, shows the memory for weights, optimizer, activations and caches. Compares
    the peak with this machine's memory, and shows the largest batch that fits. Reads only config.json and
    the headers of the weights, and the data's longest prompt if data and tokenizer are on this machine.
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
    option("--steps", "Number of steps to measure.", click.IntRange(1), 3, show_default=True),
    flag("--json as as_json", "Print the figures as JSON."),
    notes="""\
\b
Examples:
  grpo bench train.toml
  grpo bench train.toml --set optim.batch_size=32 --steps 5
  grpo bench quickstart --json

\b
The first step includes compilation and is shown separately. A step consists of the rollouts for an
update and all updates that use them. Evaluations, checkpoints and logs are not measured.
""",
)
def bench_command(config: str, overrides: Sequence[str], steps: int, as_json: bool) -> None:
    """Measure the time of each part of a step."""
    checked, machine = open_config(config, overrides)
    echo_all(machine.notices)
    from runners.profiling import bench_steps, bench_table
    from runners.telemetry.report import PlainReport

    found = bench_steps(checked, steps=steps, report=PlainReport(sys.stderr))
    echo_text(json.dumps(found, indent=1) if as_json else bench_table(found))
