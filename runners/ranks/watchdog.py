"""Ends a rank if its peers have disappeared or hang, because a collective that waits for them
cannot be interrupted.

The ranks on a host share a file, the scoreboard, which shows which ranks are waiting, which have
ended and why, and which have disappeared. Each rank has a slot in the file and holds a lock on that
slot. The system releases the lock when the process ends for any reason. Therefore, a rank has
disappeared if another rank can take its lock.
"""

import errno
import fcntl
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import attrs
import numpy as np

from runners.errors import one_line
from runners.machine.signals import StopSignals

WORKING = 0
WAITING = 1
ENDED = 2
_SLOT = np.dtype(
    [
        ("asked", "i8"),  # the signal that the rank has received; 0: none
        ("begun", "i8"),  # number of collectives that have started
        ("line", "S480"),  # why the rank has ended
        ("state", "i8"),
    ]
)


class Scoreboard:
    """A file with a slot for each of `size` ranks. This rank writes the slot `mine` and reads the
    others.
    """

    def __init__(self, path: str, size: int, mine: int) -> None:
        """Opens the file that `create` has created, and takes this rank's lock."""
        self._slots = np.memmap(path, _SLOT, "r+", shape=(size,))
        self._own = self._slots[mine : mine + 1]
        # opened last, because closing any of the file's descriptors releases the lock
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, mine)

    @staticmethod
    def create(size: int) -> str:
        """Creates a file for `size` ranks and returns its path. The file should be removed after
        all ranks have opened it.
        """
        number, path = tempfile.mkstemp(prefix="grpo-ranks-")
        os.ftruncate(number, size * _SLOT.itemsize)
        os.close(number)
        return path

    def share(self, asked: int) -> list[int]:
        """Publishes the signal that this rank has received; 0 means none. Returns the signals that
        any rank has received.
        """
        self._own["asked"] = asked
        return [int(number) for number in self._slots["asked"] if number]

    def write(self, state: int, line: str = "") -> None:
        """Writes this rank's slot. The state `WAITING` means that one more collective has
        started.
        """
        self._own["line"] = line.encode("utf-8", "replace")
        self._own["begun"] += state == WAITING
        self._own["state"] = state

    def read(self, rank: int) -> tuple[int, int, str]:
        """Returns a rank's state, the number of collectives that it has started, and its last
        message.
        """
        slot = self._slots[rank]
        return (
            int(slot["state"]),
            int(slot["begun"]),
            bytes(slot["line"]).decode("utf-8", "replace"),
        )

    def is_gone(self, rank: int) -> bool:
        """Returns whether the process of another rank has ended."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True


def host_key() -> str:
    """Returns the host's name and an identifier, which distinguishes hosts with the same name and
    containers on the same host.
    """
    boot = ""
    place = os.stat(tempfile.gettempdir())
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{os.uname().nodename}/{boot}/{place.st_dev}/{place.st_ino}"


EXIT_CODE = 4  # exit code of a run that ended because a rank failed
_INTERVAL = 0.25  # seconds between two checks
_GRACE = 3.0  # seconds that the ranks have to end by themselves


@attrs.define(eq=False, slots=False)
class Watchdog:
    """A thread that checks the other ranks, and how long this rank has been waiting."""

    rank: int
    timeout: float  # seconds that a collective may take
    # a signal to one rank is passed on to all ranks on this host
    _signals: StopSignals
    names: Sequence[str] = ()  # names of all ranks; empty until they have connected
    here: Sequence[int] = ()  # the other ranks on this host, which share the `board`
    board: Scoreboard | None = None
    on_fault: Callable[[str], None] = lambda line: None  # receives the reason why the process ends
    # the main thread's current collective; "": none
    _what: str = attrs.field(default="", init=False)
    _number: int = attrs.field(default=0, init=False)  # number of collectives that have started
    _parent: int = attrs.field(factory=os.getppid, init=False)  # the launcher
    _off: threading.Event = attrs.field(factory=threading.Event, init=False)

    @property
    def name(self) -> str:
        """This rank's name in messages."""
        return f"rank {self.rank} ({os.uname().nodename})"

    @property
    def elsewhere(self) -> str:
        """The names of the ranks on other hosts."""
        return ", ".join(
            name for rank, name in enumerate(self.names) if rank not in (*self.here, self.rank)
        )

    def start(self) -> None:
        """Starts checking."""
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def stop(self) -> None:
        """Stops the thread because the ranks end. A signal that arrives from now on, such as the
        launcher's, no longer raises Stopped.
        """
        self._signals.stopping = True
        self._off.set()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Marks a block in which the main thread is in a collective."""
        self._number += 1
        self._what = what
        self.write(WAITING)
        try:
            yield
        finally:
            self._what = ""
            self.write(WORKING)

    def write(self, state: int, line: str = "") -> None:
        """Updates the state that this rank shows to the other ranks on this host."""
        if self.board:
            self.board.write(state, line)

    def gone(self) -> str | None:
        """Returns a message about a failed rank on this host, or None if no rank has failed.

        Ranks with their own message are reported first, because the other ranks may have ended for
        that reason.
        """
        if self.board is None:
            return None
        lost = [(rank, *self.board.read(rank)) for rank in self.here if self.board.is_gone(rank)]
        lines = [f"{self.names[rank]}: {line}" for rank, _, _, line in lost if line]
        lines += [
            f"{self.names[rank]} has disappeared: it was killed or crashed"
            for rank, state, _, _ in lost
            if state != ENDED
        ]
        return lines[0] if lines else None

    def is_reporter(self, late: Sequence[int] = ()) -> bool:
        """Returns whether this rank must report the failure, because it is the lowest remaining
        rank on this host that is not `late`.
        """
        below = [rank for rank in self.here if rank < self.rank and rank not in late]
        return self.board is None or all(map(self.board.is_gone, below))

    def _watch(self) -> None:
        last = time.monotonic()
        number = 0
        waited = 0.0
        gone_at = 0.0
        while not self._off.wait(_INTERVAL):
            now = time.monotonic()
            # Time during which the whole run was suspended (Ctrl-Z) does not count.
            passed = min(now - last, 2 * _INTERVAL)
            last = now
            self._share_signals()
            line = self.gone()
            if line:
                gone_at = gone_at or now
                if now - gone_at > _GRACE:
                    self._end(line)
            what = self._what
            waited = waited + passed if what and number == self._number else 0.0
            number = self._number
            if waited > self.timeout:
                late = self._late()
                missing = " and ".join(self.names[rank] for rank in late) or self.elsewhere
                why = (
                    f"waited for {missing or 'the network'}"
                    if self.names
                    else "not all ranks have joined"
                )
                self._end(
                    f"{what} did not finish within {waited:.0f} s (system.collective_timeout): "
                    f"{why}",
                    late,
                )

    def _share_signals(self) -> None:
        """Shows this rank's signal to the other ranks on this host, and adopts the signals of those
        ranks.

        If the launcher has ended, this rank acts as if it had received SIGTERM, because nothing
        else would read the ranks' output or end them.
        """
        if os.getppid() != self._parent:
            self._signals.ask(signal.SIGTERM)
        if self.board:
            for asked in self.board.share(self._signals.received or 0):
                self._signals.ask(asked)

    def _late(self) -> list[int]:
        """Returns the ranks on this host that have not reached this rank's collective."""
        if self.board is None:
            return []
        _, mine, _ = self.board.read(self.rank)
        states = {rank: self.board.read(rank) for rank in self.here}
        return [
            rank for rank, (state, begun, _) in states.items() if begun < mine or state != WAITING
        ]

    def _end(self, line: str, late: Sequence[int] = ()) -> None:
        """Ends this process. Ranks that are `late` then detect that this rank has disappeared."""
        if self._off.is_set():
            return
        if self.is_reporter(late):
            with suppress(OSError):
                os.write(2, f"{one_line(f'{self.name} ends: {line}', os.environ)}\n".encode())
        with suppress(Exception):
            self.on_fault(line)
        os._exit(EXIT_CODE)
