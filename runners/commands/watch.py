"""`grpo watch`: the page of a run, live, on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from runners.commands.base import HELP, ends_with_a_line
from runners.commands.options import flag, option, options
from runners.errors import UserError
from runners.machine.terminal import echo

_EXAMPLES = """\
\b
Examples:
  grpo watch outputs/my-first           one run, while it trains or later
  grpo watch outputs                    all runs of a folder, as a list
  ssh -L 8517:127.0.0.1:8517 HOST       from another machine: a tunnel, then open http://127.0.0.1:8517/
"""


@click.command("watch", context_settings=HELP, epilog=_EXAMPLES)
@click.argument("place", metavar="RUN")
@options(
    option("--host=ADDRESS", "The address to listen on.", default="127.0.0.1", show_default=True),
    option("--port", "The port, or the next free one [8517].", click.IntRange(0, 65535), 8517),
    option("--allow-host as hosts=NAME", "Also answer under this name.", multiple=True),
    flag("--open as show", "Open the page in a browser."),
)
@ends_with_a_line
def watch_command(place: str, host: str, port: int, hosts: Sequence[str], show: bool) -> None:
    """Serve a run's page and keep it current.

    RUN is a run's folder, or a folder with runs. The page is read-only and has no password. It can be reached
    only from this machine, unless --host says otherwise. Ctrl-C ends the page; the run goes on.
    """
    from runners.report.server import address, listening, serve
    from runners.report.site import runs_in

    folder = Path(place).expanduser()
    if not folder.is_dir() or not runs_in(folder):
        from runners.report.run_record import find_run

        find_run(folder)
        raise UserError(f"{folder}: it contains no run")
    with listening(host, port) as found:
        url = address(found)
        echo(f"{url}  (Ctrl-C ends the page, not the run)")
        if host not in ("127.0.0.1", "::1", "localhost"):
            echo("anyone who can reach this address can read the run", err=True)
        if show:
            import webbrowser

            webbrowser.open(url)
        os.nice(10)  # a run on this machine comes first
        serve(folder, found, hosts)
