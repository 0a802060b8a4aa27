"""`grpo watch`: the page of a run, live, on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import click

from runners.commands.base import HELP, ends_with_a_line
from runners.commands.options import flag, option, options
from runners.machine.terminal import echo

_EXAMPLES = """\
\b
Examples:
  grpo watch outputs/my-first           a run, while it trains or later
  ssh -L 8517:127.0.0.1:8517 HOST       from another machine: a tunnel, then open http://127.0.0.1:8517/
"""


@click.command("watch", context_settings=HELP, epilog=_EXAMPLES)
@click.argument("run")
@options(
    option("--port", "The port, or the next free one [8517].", click.IntRange(0, 65535), 8517),
    flag("--open as show", "Open the page in a browser."),
)
@ends_with_a_line
def watch_command(run: str, port: int, show: bool) -> None:
    """Serve a run's page and keep it current.

    RUN is a run's folder. The page is read-only, and only this machine can reach it. Ctrl-C ends the page;
    the run goes on.
    """
    from runners.report.server import Server

    with Server(Path(run).expanduser(), port) as server:
        echo(f"{server.url}  (Ctrl-C ends the page, not the run)")
        if show:
            import webbrowser

            webbrowser.open(server.url)
        os.nice(10)  # a run on this machine comes first
        try:
            server.serve_forever()
        except KeyboardInterrupt:  # how a person ends it
            return
