"""Single keys typed on the terminal while something else goes on there."""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from runners.machine.terminal import read_keys_singly, restore_terminals

_LOOK = 0.2  # seconds between checks for the end of the block


class KeyPresses:
    """Within the `with` block, another thread passes each key typed on standard input to `act`.

    Keys act without Enter and are not shown; Ctrl-C, Ctrl-Z and the like work as usual. Nothing is read or
    changed if standard input is not a terminal, if the process is in the background, or if keys are read
    already.
    """

    def __init__(self, act: Callable[[str], None]) -> None:
        """`act` gets the key's letter."""
        self._act = act
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def reading(self) -> bool:
        """Whether keys are read now."""
        return self._thread is not None and not self._over.is_set()

    def __enter__(self) -> KeyPresses:
        try:
            number = sys.stdin.fileno()
            if not os.isatty(number) or not _in_front(number) or not read_keys_singly(number):
                return self
        except (OSError, ValueError, AttributeError, termios.error):
            return self  # standard input is closed or missing: there are no keys
        self._thread = threading.Thread(target=self._read, args=(number,), name="keys", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(5 * _LOOK)
            restore_terminals()

    def _read(self, number: int) -> None:
        with suppress(OSError, ValueError):  # the terminal has gone
            while not self._over.is_set():
                ready, _, _ = select.select([number], [], [], _LOOK)
                # A process in the background that reads its terminal is stopped by the system.
                if ready and _in_front(number) and not self._over.is_set():
                    key = os.read(number, 1)
                    if not key:
                        return
                    self._act(key.decode("ascii", "replace"))
                elif ready:
                    self._over.wait(_LOOK)


def _in_front(number: int) -> bool:
    return os.tcgetpgrp(number) == os.getpgrp()
