"""`grpo plan CONFIG`: the memory that a run will take, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

import click

from runners.commands.base import HELP, ends_with_a_line
from runners.commands.options import SET
from runners.machine.terminal import echo

_EPILOG = """\
\b
Exit codes: 0 the run fits, 2 it does not, or something in the config, the data or the model has to change.
"""


@click.command("plan", context_settings=HELP, epilog=_EPILOG)
@click.argument("config")
@SET
@click.option("--json", "as_json", is_flag=True, help="The same facts as JSON, in bytes.")
@click.option(
    "--ranks",
    type=click.IntRange(1),
    default=1,
    help="The memory of each of so many processes of mlx.launch.",
)
@ends_with_a_line
def plan_command(config: str, overrides: Sequence[str], as_json: bool, ranks: int) -> None:
    """Predict the memory that a run will take.

    Shows, for every phase of a step, the bytes of weights, moments, activations, caches and logits, the peak
    against this machine's memory, and the largest batch that fits. Of the model only config.json and the
    headers of its weights are read; of the data the longest prompt, where both are on this machine.
    """
    from runners.config.loading import load_config
    from runners.errors import UserError
    from runners.machine import startup

    loaded = load_config(config, overrides)
    for notice in loaded.notices:
        echo(notice, err=True)
    found = startup.prepare()

    from runners.memory.plan import make_plan

    plan = make_plan(loaded.check(), found, as_json=as_json, ranks=ranks)
    echo(plan.text)
    if plan.problem:
        raise UserError(plan.problem)
