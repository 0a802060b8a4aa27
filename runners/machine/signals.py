"""Handles signals in two steps: the first signal stops a run, which then saves; the second signal
ends the process immediately.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, Self
from weakref import WeakSet

from runners.errors import printable

ASKED = "Stopping at the last finished step. Press Ctrl-C again to quit now."
_SAME = 0.5  # another signal within these seconds counts as the same one
# The cursor is at the end of the display's last line.
_LEAVE_DISPLAY = b"\r\n\x1b[?25h"


def to_stderr(text: str) -> None:
    """Writes a line to standard error immediately. The text starts on a new line, because the
    terminal has shown "^C".
    """
    with suppress(OSError):  # standard error is closed or has no reader
        os.write(2, f"\n{printable(text)}\n".encode())


def _exit(number: int) -> NoReturn:
    """Ends the process immediately."""
    with suppress(OSError):  # the terminal may be gone
        if os.isatty(1):
            os.write(1, _LEAVE_DISPLAY)
    os._exit(128 + number)


class Stopped(KeyboardInterrupt):
    """Raised when a signal has stopped a run."""

    def __init__(self, number: int) -> None:
        """Stores the exit code for the signal `number`."""
        super().__init__(number)
        self.exit_code = 128 + number  # as in shells
        self.begun = False  # whether the folder belongs to this run, so that --resume continues it
        self.advice = ""  # a message about how to continue


# Their handlers are removed in a forked child, such as a worker of a pool in data.transform.
_all: WeakSet[Interrupts] = WeakSet()
os.register_at_fork(after_in_child=lambda: [each.__exit__() for each in [*_all]])


class Interrupts:
    """Handles SIGINT within the `with` block: the first one sets `received`, and a second one
    raises KeyboardInterrupt.

    Outside the main thread, the block has no effect, because only the main thread receives signals.
    """

    signals: tuple[int, ...] = (signal.SIGINT,)

    def __init__(self) -> None:
        """Creates a handler that has not received a signal."""
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def stopped(self) -> bool:
        """Whether a signal has arrived."""
        return self.received is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in self.signals}
            _all.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.received = number


class StopSignals(Interrupts):
    """Handles a run's signals. The first SIGINT, SIGTERM or SIGHUP raises Stopped in the main
    thread; see `deferred`.

    If SIGHUP is ignored at the start, as with nohup, it stays ignored. A second SIGINT or SIGTERM
    ends the process immediately, with exit code 128 + its number. A second signal also works while
    MLX computes and no Python handler runs, because a thread reads the signals' numbers from a pipe
    to which the interpreter writes them. Files on the disk are consistent at any moment.
    """

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, say: Callable[[str], None] = to_stderr) -> None:
        """Creates handlers that show the response to a signal with `say`. `say` must show the line
        immediately; it is called in another thread.
        """
        super().__init__()
        self._say = say
        self._deferrals = 0
        self._raised = False
        self._asked = False
        self.stopping = False  # the run saves and ends; no signal raises an exception from now on
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            self.signals = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self) -> Self:
        super().__enter__()
        if self._before:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
            self._watcher.start()
        return self

    def ignore_launcher(self) -> None:
        """Ignores SIGTERM after the `with` block, because mlx.launch sends SIGTERM when one rank
        has ended, while the others still have to print their last lines.
        """
        if self._before:
            self._before[signal.SIGTERM] = signal.SIG_IGN

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Prevents signals from raising Stopped within the block. If a signal has arrived, Stopped
        is raised at the end of the block.
        """
        self._deferrals += 1
        try:
            yield
        finally:
            self._deferrals -= 1
        self._raise()

    def check(self) -> None:
        """Raises Stopped if a signal has arrived, even if an earlier Stopped was lost, for example
        in an object's __del__.
        """
        self._raised = self.stopping
        self._raise()

    @contextmanager
    def ending_at_once(self) -> Iterator[None]:
        """Lets a signal end the process without a message within the block, because MLX waits there
        for up to half a minute and no Python thread runs meanwhile.
        """
        before = {
            number: signal.signal(number, signal.SIG_DFL) for number in self.signals if self._before
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def shown_by(self, say: Callable[[str], None]) -> Iterator[None]:
        """Uses `say` within the block to show the response to a signal."""
        before = self._say
        self._say = say
        try:
            yield
        finally:
            self._say = before

    def ask(self, number: int) -> None:
        """Acts as if this signal had arrived. May be called from another thread."""
        if self.received:
            return
        if self._before:
            self._asked = True
            os.kill(os.getpid(), number)
        else:  # the handlers are not installed, as in a thread other than the main one
            self.received = number

    def __exit__(self, *_: object) -> None:
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._writer)  # ends the thread
            # the response to a signal is shown before the final lines of the run
            self._watcher.join(1)
        super().__exit__()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        self._raise()

    def _raise(self) -> None:
        if self.received and not (self._deferrals or self._raised or self.stopping):
            self._raised = True
            raise Stopped(self.received)

    def _watch(self) -> None:
        first = None  # time of the first signal from outside
        # Blocked output, as after Ctrl-S, must not prevent the second signal from being read.
        saying = threading.Thread(target=lambda: self._say(ASKED), name="answer", daemon=True)
        for number in iter(lambda: os.read(self._reader, 1), b""):
            if number[0] not in self.signals:
                continue
            self.received = self.received or number[0]  # no handler runs while a collective waits
            if saying.ident is None:
                saying.start()
            if self._asked:
                self._asked = False
            elif first is None:
                first = time.monotonic()
            elif number[0] != signal.SIGHUP and time.monotonic() - first >= _SAME:
                # an earlier one was sent again by a shell or a launcher, and is not a second request
                _exit(number[0])
        os.close(self._reader)
        if saying.ident is not None:
            saying.join()
