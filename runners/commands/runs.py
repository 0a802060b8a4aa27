"""`grpo runs [FOLDER]`: the runs of a folder, and how to continue each."""

from __future__ import annotations

import time
from pathlib import Path

import click

from runners.commands.base import command, flag
from runners.machine.terminal import aligned, echo, echo_output


@command(
    "runs",
    click.argument("folder", default="outputs"),
    flag("--json as as_json", "One JSON object a line."),
    notes="""\
\b
States: running; finished (has a final model); interrupted (has a checkpoint to resume from); stopped (before
its first checkpoint).
""",
)
def runs_command(folder: str, as_json: bool) -> None:
    """List the runs of a folder [outputs].

    Shows each run's state, updates, exact match at its last evaluation (the reward there, if its data has no
    gold answers), last reward, and the command that continues it. The run that changed last comes first.
    Nothing is changed.
    """
    import attrs

    from runners.machine import startup

    startup.load_blas()  # before MLX is imported
    from runners.checkpoints.run_list import find_runs
    from runners.files.json_files import to_json

    runs = find_runs(Path(folder).expanduser())
    if as_json:
        for run in runs:
            echo_output(to_json(attrs.asdict(run)), nl=True)
        return
    if not runs:
        echo(f"{folder} holds no runs")
        return
    from runners.telemetry.report import number_text, percent_text

    rows = [("run", "state", "updates", "evaluation", "reward", "last change")]
    for run in runs:
        measured = number_text(run.eval_reward) if run.em is None else percent_text(run.em)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed))
        rows.append(
            (run.folder, run.state, str(run.update), measured, number_text(run.reward), when)
        )
    for line, go_on in zip(aligned(rows), ["", *(run.go_on for run in runs)], strict=True):
        echo(line)
        if go_on:
            echo(f"  {go_on}")
