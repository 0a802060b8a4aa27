"""The live page beside a run: a separate process, which the run neither waits for nor depends on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runners.report.server import HOST, PORT, address, check_server_installed, listening


@contextmanager
def watched(folder: Path) -> Iterator[str]:
    """Serves the run in `folder`, which need not exist yet, within the block; the block gets the URL.

    Raises UserError if a package is missing or no port is free. Later faults of the server do not affect the
    run.
    """
    check_server_installed()
    with listening(HOST, PORT) as found:
        number = found.fileno()
        command = [sys.executable, "-m", "runners.report.child", str(folder), str(number)]
        # A separate session, because Ctrl-C is for the run. It ends when its standard input ends, with the
        # run.
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[number],
            start_new_session=True,
        )
        url = address(found)
    assert server.stdin is not None
    try:
        yield url
    finally:
        server.stdin.close()
        try:
            server.wait(3)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
