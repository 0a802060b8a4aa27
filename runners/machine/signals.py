"""Signals in two steps: the first asks to stop, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType

from runners.machine.terminal import restore_terminals

ASKED = "Saving after this step. Press Ctrl-C again to quit now."
# The cursor is at the end of the display's last line.
_LEAVE_DISPLAY = b"\r\n\x1b[?25h"


def to_stderr(text: str) -> None:
    """Writes a line to standard error at once, on a new line, because a terminal has shown "^C"."""
    with suppress(OSError):  # closed: it has no reader
        os.write(2, f"\n{text}\n".encode())


def _write(number: int, text: bytes) -> None:
    with suppress(OSError):  # the terminal may be gone
        os.write(number, text)


class Stopped(KeyboardInterrupt):
    """A run was ended by a signal after it was saved."""

    def __init__(self, number: int) -> None:
        """`number`: the signal's."""
        super().__init__(number)
        self.exit_code = 128 + number  # as shells count
        self.advice = ""  # a line on how to continue


# A forked child, such as a reward's pool of workers, calls these, latest first, so that its signals act as
# before the run.
restored_in_forks: list[Callable[[], None]] = []


def _restore_all() -> None:
    while restored_in_forks:
        restored_in_forks.pop()()


os.register_at_fork(after_in_child=_restore_all)


class Interrupts:
    """Within the `with` block the first SIGINT sets `stopped`, and a second one raises KeyboardInterrupt.

    In a thread other than the main one, where signals do not arrive, it does nothing.
    """

    signals: tuple[int, ...] = (signal.SIGINT,)

    def __init__(self) -> None:
        """Nothing has been asked yet."""
        self.received: int | None = None
        self._before: dict[int, object] = {}

    @property
    def stopped(self) -> bool:
        """Whether a signal has come."""
        return self.received is not None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in self.signals}
            restored_in_forks.append(self._restore)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._restore in restored_in_forks:
            restored_in_forks.remove(self._restore)
            self._restore()

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # pyright: ignore[reportArgumentType]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.received = number


class StopSignals(Interrupts):
    """For a run: SIGINT, SIGTERM and SIGHUP. A second signal ends the process at once, with 128 + its number.
    A SIGHUP that is ignored from the start, as with nohup, stays ignored.

    This also works while MLX computes, when no Python handler runs: a thread reads the signals' numbers from
    a pipe to which the interpreter writes them as they come. Files on the disk are complete at any moment.
    """

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, say: Callable[[str], None] = to_stderr) -> None:
        """`say` shows a line at once; it is called in another thread."""
        super().__init__()
        self._say = say
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            self.signals = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self) -> StopSignals:
        super().__enter__()
        if self._before:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def _restore(self) -> None:
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._writer)  # ends the thread
        super()._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number

    def _watch(self) -> None:
        asked = False
        while number := os.read(self._reader, 1):
            if number[0] not in self.signals:
                continue
            if asked:
                restore_terminals()
                if os.isatty(1):
                    _write(1, _LEAVE_DISPLAY)
                os._exit(128 + number[0])
            asked = True
            self.received = self.received or number[0]  # no handler runs while a collective waits
            # A blocked display, as after Ctrl-S, must not keep the second signal from being read.
            threading.Thread(target=self._say, args=(ASKED,), name="signal line", daemon=True).start()
        os.close(self._reader)
