"""Defines `grpo report`, which writes an HTML page for one run or for several runs in the same
plots; `grpo watch`, which serves the page live; and `grpo runs`, which lists the runs in a folder
and how to resume each.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from runners.commands.base import command, flag, option
from runners.errors import gigabytes
from runners.machine.terminal import aligned, echo, echo_output


@command(
    "report",
    click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN ...]"),
    option(
        "--out=FILE",
        "File for the page [RUN/report.html; for several runs: report.html].",
        default="",
    ),
    flag("--all as everything", "Include all completions, even if the page becomes large."),
    notes="""\
\b
Examples:
  grpo report outputs/my-first                           writes outputs/my-first/report.html
  grpo report outputs/a outputs/b --out compared.html    two runs in one page
""",
)
def report_command(runs: Sequence[str], out: str, everything: bool) -> None:
    """Write an HTML report of one or more runs.

    The report contains curves, events, completions and the config. RUN is the folder of a run that is
    finished, interrupted or still training. The report is a single HTML file that works offline and
    can be sent by mail. If completions.jsonl is larger than 96 MB, it includes completions from
    evenly spaced updates.
    """
    from runners.report.page import MOST_PAGE_BYTES, REPORT, write_report

    folders = [Path(run).expanduser() for run in runs]
    target = folders[0] / REPORT if len(folders) == 1 else Path(REPORT)
    if out:
        target = Path(out).expanduser()
    written = write_report(folders, target, most_bytes=1 << 62 if everything else MOST_PAGE_BYTES)
    more = ""
    if written.left_out:
        more = f"; completions of {written.left_out:,} updates are left out (--all)"
    echo(f"{written.path}: {gigabytes(written.size)}, {written.completions:,} completions{more}")


@command(
    "watch",
    click.argument("run"),
    option(
        "--port",
        "Port; if it is in use, a free one is chosen [8517].",
        click.IntRange(0, 65535),
        8517,
    ),
    flag("--open as show", "Open the page in a browser."),
    notes="""\
\b
Examples:
  grpo watch outputs/my-first           during training or later
  ssh -L 8517:127.0.0.1:8517 HOST       tunnel from another machine; then open http://127.0.0.1:8517/
""",
)
def watch_command(run: str, port: int, show: bool) -> None:
    """Serve a live report of a run.

    RUN is a run's folder. The page is read-only, and only this machine can reach it. Ctrl-C stops the server;
    the run continues.
    """
    from runners.report.server import Server

    with Server(Path(run).expanduser(), port) as server:
        echo(f"{server.url}  (Ctrl-C stops this server, not the run)")
        if show:
            import webbrowser

            webbrowser.open(server.url)
        os.nice(10)  # a run on this machine has priority
        with suppress(KeyboardInterrupt):  # the usual way to stop the server
            server.serve_forever()


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
