"""Ends a rank whose peers are gone or hang: a collective that waits for them cannot be interrupted."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from runners.errors import one_line
from runners.ranks.scoreboard import ENDED, WAITING, Scoreboard

EXIT_CODE = 4  # of a run that ended because of a rank's fault
_INTERVAL = 0.5  # seconds between two checks
_GRACE = 3.0  # seconds in which the ranks may end by themselves
_ASKED = 25.0  # seconds after a signal, in a collective with ranks of other hosts: they have ended by then


class Watchdog:
    """A thread that checks the other ranks, and how long this one has waited."""

    def __init__(self, name: str, timeout: float) -> None:
        """`name` is this rank's in messages; `timeout` is in seconds a collective."""
        self._name, self.timeout = name, timeout
        self.board: Scoreboard | None = None
        self.here: Sequence[int] = ()  # the other ranks of this host, in order
        self.elsewhere = ""  # the ranks on other hosts, for messages; "": none
        self.names: Sequence[str] = ()  # of all ranks
        self.rank = 0
        self.asked: Callable[[], bool] = lambda: False  # whether a signal has come
        self.on_fault: Callable[[str], None] = lambda line: None  # gets the reason why the process ends
        self._what = ""
        self._since: float | None = None  # start of the main thread's current collective
        self._asked_at: float | None = None
        self._gone_at: float | None = None
        self._off = threading.Event()

    def start(self) -> None:
        """Begins to look."""
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread, when the ranks disconnect in good order."""
        self._off.set()

    def begins(self, what: str) -> None:
        """The main thread enters a collective."""
        self._what, self._since = what, time.monotonic()

    def ends(self) -> None:
        """The main thread has left it."""
        self._since = None

    def gone(self) -> str | None:
        """A line about ranks of this host that have not ended in good order; None: there are none.

        Those with their own line are reported first, because the others may have ended for that reason.
        """
        if self.board is None:
            return None
        lost = [rank for rank in self.here if self.board.is_gone(rank)]
        found = [(rank, self.board.read(rank)) for rank in lost]
        for rank, (_, _, _, line) in found:
            if line:
                return f"{self.names[rank]}: {line}"
        for rank, (state, _, _, _) in found:
            if state != ENDED:
                return f"{self.names[rank]} is gone: it was killed, or has crashed"
        return None

    def speaks(self, hanging: Sequence[int] = ()) -> bool:
        """Whether this rank is the lowest remaining one of this host that is not `hanging`, and so has to
        report what happened."""
        board = self.board
        return board is None or all(
            rank > self.rank or rank in hanging or board.is_gone(rank) for rank in self.here
        )

    def _watch(self) -> None:
        while not self._off.wait(_INTERVAL):
            now = time.monotonic()
            line = self.gone()
            if line:
                self._gone_at = self._gone_at or now
                if now - self._gone_at > _GRACE:
                    self._end(line)
            since = self._since
            if since is None:
                continue
            if now - since > self.timeout:
                self._end(
                    f"no end of {self._what} after {now - since:.0f} s (system.collective_timeout): "
                    f"{self._missing()}",
                    self._late(),
                )
            if self.asked() and self.elsewhere and not self._late():
                self._asked_at = self._asked_at or now
                if now - max(since, self._asked_at) > _ASKED:
                    self._end(f"asked to stop, and {self._missing()}")

    def _missing(self) -> str:
        """The ranks that this one waits for, in words."""
        if late := self._late():
            return f"waited for {', '.join(self.names[rank] for rank in late)}"
        if not self.names:
            return "not all ranks have joined"
        return f"waited for {self.elsewhere or 'the network between the ranks'}"

    def _late(self) -> list[int]:
        """The ranks of this host that have not reached this rank's collective."""
        late: list[int] = []
        if self.board is not None:
            number = self.board.read(self.rank)[1]
            for rank in self.here:
                state, begun, _, _ = self.board.read(rank)
                if begun < number or state != WAITING:
                    late.append(rank)
        return late

    def _end(self, line: str, hanging: Sequence[int] = ()) -> None:
        """Ends this process, and processes of this host that may be unable to end themselves."""
        if self._off.is_set():
            return
        if self.speaks(hanging):
            text = one_line(f"{self._name} ends: {line}", os.environ)
            with suppress(OSError):
                os.write(2, f"{text}\n".encode())
        with suppress(Exception):
            self.on_fault(line)
        for rank in hanging:
            if self.board and not self.board.is_gone(rank) and (process := self.board.process(rank)):
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)
        os._exit(EXIT_CODE)
