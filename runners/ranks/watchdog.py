"""Ends a rank whose peers are gone or hang: a collective that waits for them cannot be interrupted.

The ranks of one host share a file, the scoreboard: who waits, who is stopped, who has ended and why, and who
is gone. Each rank has a slot in the file and holds a lock on it. The system releases the lock when the
process ends, however it ends. If another rank can take the lock, the rank is gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from runners.errors import one_line
from runners.machine.signals import StopSignals

WORKING, WAITING, ENDED = 0, 1, 2
_SLOT = np.dtype(
    [
        ("beat", "f8"),  # the time of the last one
        ("asked", "i8"),  # the signal that has come
        ("process", "i8"),  # its number
        ("begun", "i8"),  # collectives
        ("line", "S464"),  # why it has ended
        ("state", "i8"),
    ]
)


class Scoreboard:
    """The slots of `size` ranks; `mine` is written, the others are read."""

    def __init__(self, path: str, size: int, mine: int) -> None:
        """Opens the file, which `create` made, and takes this rank's lock."""
        self._slots = np.memmap(path, _SLOT, "r+", shape=(size,))
        self._own = self._slots[mine : mine + 1]
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # last: a lock ends if any descriptor is closed
        self.beat(0)
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, mine)

    @staticmethod
    def create(size: int) -> str:
        """The path of a new file for `size` ranks. `remove` it when all have opened it."""
        number, path = tempfile.mkstemp(prefix="grpo-ranks-")
        os.ftruncate(number, size * _SLOT.itemsize)
        os.close(number)
        return path

    @staticmethod
    def remove(path: str) -> None:
        """Removes the file's name; processes that have it open keep it."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def beat(self, asked: int) -> None:
        """Shows that this process runs, and the signal that has come to it; 0: none."""
        self._own["beat"], self._own["asked"], self._own["process"] = time.monotonic(), asked, os.getpid()

    def pulse(self, rank: int) -> tuple[float, int, int]:
        """Seconds since a rank's last beat, the signal that has come to it, and its process's number.

        The number is 0 before it has opened the file.
        """
        slot = self._slots[rank]
        return time.monotonic() - float(slot["beat"]), int(slot["asked"]), int(slot["process"])

    def write(self, state: int, line: str = "") -> None:
        """Writes this rank's slot; `WAITING` means that one more collective has begun."""
        self._own["line"] = line.encode("utf-8", "replace")
        self._own["begun"] += state == WAITING
        self._own["state"] = state

    def read(self, rank: int) -> tuple[int, int, str]:
        """A rank's state, how many collectives it has begun, and its last line."""
        slot = self._slots[rank]
        return int(slot["state"]), int(slot["begun"]), bytes(slot["line"]).decode("utf-8", "replace")

    def is_gone(self, rank: int) -> bool:
        """Whether the process of another rank has ended."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True


EXIT_CODE = 4  # of a run that ended because of a rank's fault
_INTERVAL = 0.25  # seconds between two checks
_GRACE = 3.0  # seconds in which the ranks may end by themselves
# Seconds after a signal, in a collective with ranks that cannot end: of other hosts, or stopped.
_ASKED = 25.0
_STILL = 5.0  # seconds without a beat after which a process counts as stopped, as by SIGSTOP


class Watchdog:
    """A thread that checks the other ranks, and how long this one has waited."""

    def __init__(self, rank: int, timeout: float, signals: StopSignals) -> None:
        """`timeout` is in seconds a collective.

        A signal that comes to one rank of this host comes to the `signals` of all of them.
        """
        self.rank, self.timeout, self._signals = rank, timeout, signals
        self.name = f"rank {rank} ({os.uname().nodename})"
        self.names: Sequence[str] = ()  # of all ranks; with the next three see `see`
        self.elsewhere = ""
        self._here: Sequence[int] = ()
        self._board: Scoreboard | None = None
        self.on_fault: Callable[[str], None] = lambda line: None  # gets the reason why the process ends
        self._what = ""  # the main thread's current collective; "": none
        self._number = 0  # of collectives
        self._parent = os.getppid()  # the launcher
        self._off = threading.Event()

    def start(self) -> None:
        """Begins to look."""
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def see(self, names: Sequence[str], here: Sequence[int], board: Scoreboard | None) -> None:
        """From now on it knows the names of all ranks, and looks at the other ones of this host.

        `here` are their numbers, and `board` shows them; None: there are none.
        """
        others = [name for rank, name in enumerate(names) if rank not in (*here, self.rank)]
        self.names, self.elsewhere, self._here, self._board = names, ", ".join(others), here, board

    def stop(self) -> None:
        """Ends the thread: the ranks end. A signal that comes now, as the launcher's, is not the reason."""
        self._signals.stopping = True
        self._off.set()

    def begins(self, what: str) -> None:
        """The main thread enters a collective."""
        self._number += 1
        self._what = what
        self.write(WAITING)

    def ends(self) -> None:
        """The main thread has left it."""
        self._what = ""
        self.write(WORKING)

    def write(self, state: int, line: str = "") -> None:
        """Updates this rank's state for the other ranks of this host."""
        if self._board:
            self._board.write(state, line)

    def gone(self) -> str | None:
        """A line about ranks of this host that have not ended in good order; None: there are none.

        Those with their own line are reported first, because the others may have ended for that reason.
        """
        lost = [(rank, *board.read(rank)) for board, rank in self._others() if board.is_gone(rank)]
        lines = [f"{self.names[rank]}: {line}" for rank, _, _, line in lost if line]
        dead = [self.names[rank] for rank, state, _, _ in lost if state != ENDED]
        lines += [f"{name} is gone: it was killed, or has crashed" for name in dead]
        return lines[0] if lines else None

    def is_reporter(self, hanging: Sequence[int] = ()) -> bool:
        """Whether this rank is the lowest remaining one of this host that is not `hanging`, and so has to
        report what happened."""
        return all(
            rank > self.rank or rank in hanging or board.is_gone(rank) for board, rank in self._others()
        )

    def _others(self) -> list[tuple[Scoreboard, int]]:
        """The other ranks of this host, each with the board that shows it."""
        return [(self._board, rank) for rank in self._here] if self._board else []

    def _watch(self) -> None:
        last, number, waited, asked, gone_at = time.monotonic(), 0, 0.0, 0.0, 0.0
        while not self._off.wait(_INTERVAL):
            now = time.monotonic()
            # Time for which the whole run was suspended (Ctrl-Z) does not count.
            passed, last = min(now - last, 2 * _INTERVAL), now
            self._share_signals()
            if line := self.gone():
                gone_at = gone_at or now
                if now - gone_at > _GRACE:
                    self._end(line)
            what = self._what
            if not what or number != self._number:
                number, waited, asked = self._number, 0.0, 0.0
                continue
            waited += passed
            stopped, late = self._stopped(), self._late()
            if self._signals.received and (self.elsewhere or stopped) and late == stopped:
                asked += passed
            if waited > self.timeout:
                why = f"no end of {what} after {waited:.0f} s (system.collective_timeout): "
                self._end(why + self._missing(), late)
            if asked > _ASKED:
                self._end(f"asked to stop, and {self._missing()}", late)

    def _share_signals(self) -> None:
        """Shows this rank's signal to the others of this host, and takes over theirs.

        A launcher that has ended is a SIGTERM: nobody reads the ranks' output, or ends them.
        """
        if os.getppid() != self._parent:
            self._signals.ask(signal.SIGTERM)
        if self._board:
            self._board.beat(self._signals.received or 0)
        for board, rank in self._others():
            if asked := board.pulse(rank)[1]:
                self._signals.ask(asked)

    def _missing(self) -> str:
        """The ranks that this one waits for, in words."""
        if late := self._late():
            stopped = self._stopped()
            named = [f"{self.names[rank]}{', which is stopped' * (rank in stopped)}" for rank in late]
            return f"waited for {' and '.join(named)}"
        if not self.names:
            return "not all ranks have joined"
        return f"waited for {self.elsewhere or 'the network between the ranks'}"

    def _stopped(self) -> list[int]:
        """The ranks of this host whose processes are there, but do not run."""
        others = self._others()
        return [rank for board, rank in others if board.pulse(rank)[0] > _STILL and not board.is_gone(rank)]

    def _late(self) -> list[int]:
        """The ranks of this host that have not reached this rank's collective, or are stopped in it."""
        late, stopped = [], self._stopped()
        for board, rank in self._others():
            state, begun, _ = board.read(rank)
            if begun < board.read(self.rank)[1] or state != WAITING or rank in stopped:
                late.append(rank)
        return late

    def _end(self, line: str, hanging: Sequence[int] = ()) -> None:
        """Ends this process, and processes of this host that may be unable to end themselves."""
        if self._off.is_set():
            return
        if self.is_reporter(hanging):
            with suppress(OSError):
                os.write(2, f"{one_line(f'{self.name} ends: {line}', os.environ)}\n".encode())
        with suppress(Exception):
            self.on_fault(line)
        for board, rank in self._others():
            process = board.pulse(rank)[2]
            if rank in hanging and process and not board.is_gone(rank):
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)
        os._exit(EXIT_CODE)
