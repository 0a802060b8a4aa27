"""Waiting for other threads and processes."""

import subprocess
import time
from collections.abc import Callable

HANGS = 600.0  # seconds: for what hangs, not for what a busy machine takes longer for


def wait_until(holds: Callable[[], object], process: subprocess.Popen | None = None) -> None:
    """Waits until the condition holds; AssertionError if `process` ends before."""
    latest = time.monotonic() + HANGS
    while not holds():
        ended = process is not None and process.poll() is not None
        assert holds() or not ended, "the process has ended"
        assert time.monotonic() < latest, f"not after {HANGS:.0f} s"
        time.sleep(0.002)
