"""Waits for threads that have computed at the end of the process.

MLX keeps compiled programs for each thread, and frees them after the thread's last line of Python. For that
it takes the interpreter's lock again. Before Python 3.13 `Thread.join` does not wait for this. If the
interpreter shuts down meanwhile, it ends the thread inside MLX, and the process aborts.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
import time

JOIN_WAITS = sys.version_info >= (3, 13)  # for everything that a thread does
_LONGEST = 10.0  # seconds at the end of the process
_threads: list[threading.Thread] = []


def wait_for_this_thread() -> None:
    """Keeps the process alive until MLX has freed this thread's programs, unless the thread is a daemon."""
    thread = threading.current_thread()
    if JOIN_WAITS or thread is threading.main_thread() or thread in _threads:
        return
    _threads[:] = [each for each in _threads if each.is_alive() or _is_ending(each)]
    _threads.append(thread)
    _register()


@functools.cache  # once
def _register() -> None:
    atexit.register(_wait)


def _wait() -> None:
    latest = time.monotonic() + _LONGEST
    while any(map(_is_ending, _threads)) and time.monotonic() < latest:
        time.sleep(0.001)  # gives them the interpreter


def _is_ending(thread: threading.Thread) -> bool:
    """Whether the thread has ended for Python, but not yet for the system."""
    if thread.is_alive() or thread.ident is None:
        return False
    if sys.platform == "linux":
        return os.path.exists(f"/proc/self/task/{thread.native_id}")
    try:
        signal.pthread_kill(thread.ident, 0)  # macOS looks the thread up
    except ProcessLookupError:
        return False
    return True
