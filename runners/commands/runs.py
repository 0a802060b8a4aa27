"""`grpo runs [FOLDER]`: lists the runs in a folder, and how to resume each."""

from __future__ import annotations

import time
from pathlib import Path

import click

from runners.commands.base import command, flag
from runners.machine.terminal import aligned, echo, echo_output


@command(
    "runs",
    click.argument("folder", default="outputs"),
    flag("--json as as_json", "Print one JSON object per line."),
    notes="""\
\b
States: running; finished (there is a final model); interrupted (there is a checkpoint to resume
from); stopped (before the first checkpoint).
""",
)
def runs_command(folder: str, as_json: bool) -> None:
    """List the runs in a folder [outputs].

    For each run, shows its state, number of updates, exact match at its last evaluation (or the reward,
    if the data has no reference answers), last reward, and the command that resumes it. The most recent
    run is listed first. Nothing is changed.
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
        echo(f"{folder} contains no runs")
        return
    from runners.telemetry.report import number_text, percent_text

    rows = [("run", "state", "updates", "evaluation", "reward", "last change")]
    for run in runs:
        measured = number_text(run.eval_reward) if run.em is None else percent_text(run.em)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed))
        rows.append(
            (run.folder, run.state, str(run.update), measured, number_text(run.reward), when)
        )
    heading, *lines = aligned(rows)
    echo(heading)
    for line, run in zip(lines, runs, strict=True):
        echo(line)
        for more in filter(None, (run.worse, run.go_on)):
            echo(f"  {more}")
