"""The ranks of a run: they meet, exchange messages, and end together."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from runners.errors import UserError, error_line, text_of
from runners.machine.signals import Stopped, restored_in_forks
from runners.ranks.connection import connect, introduce
from runners.ranks.messages import RankMessage
from runners.ranks.rank_place import RankPlace
from runners.ranks.scoreboard import ENDED, WORKING
from runners.ranks.wire import RankError, Wire

if TYPE_CHECKING:
    import mlx.core as mx

_MOMENT = 1.0  # seconds until the end of another rank is visible


class Ranks:
    """This process among those of its run. A single process has the same methods.

    It implements `grpo_fn.learner.Collectives`. All ranks call the same methods in the same order.
    """

    def __init__(self, place: RankPlace | None = None, *, timeout: float = 600.0) -> None:
        """Joins the others of `place` (None: no others); `timeout`: seconds that a collective may take.

        From now on SIGTERM and SIGINT raise Stopped, but not before `ending_together` and not within an
        exchange. The end of `ending_together` restores the handlers.

        Raises UserError if the ranks cannot meet.
        """
        self.number, self.count = (place.rank, place.size) if place else (0, 1)
        self.hosts: list[str] = [os.uname().nodename]
        self.asked = 0  # the signal that asked a rank to stop, as of the last meeting; 0: none
        self.lost: str | None = None  # why rank 0's output has no reader, as of the last meeting
        self.wishes: Callable[[], tuple[int, str | None]] = lambda: (0, None)  # this rank's own two values
        self._moving = False
        self._waits = False  # whether a signal has to wait: within an exchange, and before `ending_together`
        self._signal = 0  # a signal that came when no other handler was set; 0: none
        self._handlers: dict[int, Any] = {}  # the signals' previous handlers
        self._wire: Wire | None = None
        if place:
            self._wire = connect(place, timeout)
            self._wire.watchdog.asked = lambda: max(self.wishes()[0], self._signal) > 0
            self._waits = True
            # Not earlier: no handler runs while this waits for the other ranks.
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGTERM, signal.SIGINT):
                    self._handlers[number] = signal.signal(number, self._receive)
                restored_in_forks.append(self._restore)
            self.hosts = introduce(self._wire, self.number, self.count)

    @property
    def first(self) -> bool:
        """Whether this rank writes the run's folder and reports."""
        return self.number == 0

    @property
    def alone(self) -> bool:
        """Whether there is only one rank."""
        return self.count == 1

    def name(self, rank: int) -> str:
        """A rank's name in messages."""
        return f"rank {rank} ({self.hosts[rank]})"

    def wait_for(self, seconds: float) -> None:
        """From now on a collective may take so long."""
        if self._wire:
            self._wire.watchdog.timeout = seconds

    # for reductions

    def rank(self) -> int:
        """See `Collectives`."""
        return self.number

    def size(self) -> int:
        """See `Collectives`."""
        return self.count

    def all_sum(self, x: mx.array) -> mx.array:
        """See `Collectives`."""
        return self._reduced("the sum of gradients", "all_sum", x)

    def all_gather(self, x: mx.array) -> mx.array:
        """See `Collectives`."""
        return self._reduced("the gathering of weights", "all_gather", x)

    def sum_scatter(self, x: mx.array) -> mx.array:
        """See `Collectives`."""
        return self._reduced("the sum of gradients", "sum_scatter", x)

    def _reduced(self, what: str, name: str, x: mx.array) -> mx.array:
        wire = self._wire
        return x if wire is None else wire.reduce(what, getattr(wire.collectives, name), x)

    # meetings

    def meet(
        self, where: str, value: Any = None, arrays: Mapping[str, np.ndarray] | None = None
    ) -> list[RankMessage]:
        """Every rank's message at this meeting, in order.

        Raises RankError if a rank has reported that it ends, or if one is gone.
        """
        asked, lost = self.wishes()
        own = RankMessage(where, value, arrays or {}, asked=asked, lost=lost)
        if self._wire is None:
            self.asked, self.lost = asked, lost
            return [own]
        with self._whole():
            messages = self._wire.meet(own)
        self.asked = max(message.asked for message in messages)
        self.lost = messages[0].lost
        return messages

    def agree(self, where: str, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return flag if self.alone else any(message.value for message in self.meet(where, flag))

    def seconds(self) -> dict[str, float]:
        """Seconds since the last call: "waiting" in meetings, for the slowest rank, and "reducing"."""
        return self._wire.seconds() if self._wire else {"waiting": 0.0, "reducing": 0.0}

    # the end

    def agreed_to_end(self) -> None:
        """All ranks know that they end: from now on none waits for another."""
        if self._wire:
            self._wire.close()

    @contextmanager
    def moving_arrays(self) -> Iterator[None]:
        """Within the block the ranks exchange arrays, not messages: each rank notices faults by itself."""
        self._moving = True
        with self._whole():
            yield
        self._moving = False

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Within the block signals wait: an interrupted exchange would leave the others at another point."""
        before, self._waits = self._waits, True
        yield
        self._waits = before
        self._raise_signal()

    def _raise_signal(self) -> None:
        """Raises Stopped if a signal has come and need not wait."""
        if self._signal and not self._waits and not self._over:
            raise Stopped(self._signal)

    @property
    def _over(self) -> bool:
        """Whether the ranks have agreed to end."""
        return self._wire is not None and self._wire.closed

    def alert(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """`say` for the answer to a signal, but silent if the signal is only the launcher's after another
        rank's end."""

        def alert(text: str) -> None:
            if not self.alone:
                time.sleep(_MOMENT)  # this is a separate thread
            if self._wire is None or not (self._over or self._wire.watchdog.gone()):
                say(text)

        return alert

    def on_fault(self, act: Callable[[str], None]) -> None:
        """If the process ends at once, another thread calls `act` with the line about the rank's fault."""
        if self._wire:
            self._wire.watchdog.on_fault = act

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        """An exception inside the block ends all ranks. At the end they disconnect in good order."""
        if self.alone:
            yield
            return
        try:
            self._waits = False
            self._raise_signal()  # a signal that came while the ranks joined
            yield
            self.meet("the end")
            self._part()
            self._restore()
        except BaseException as error:
            if not self._over:
                error = self._tell(error)
            self._part(error)
            if isinstance(error, UserError | KeyboardInterrupt):
                error.reported = not self._speaks(error)  # pyright: ignore[reportAttributeAccessIssue]
            raise error

    def _speaks(self, error: BaseException) -> bool:
        """Whether this rank reports why the run ends: rank 0, or the lowest one left on a host."""
        if isinstance(error, RankError) and error.seen and self._wire:
            return self._wire.watchdog.speaks()
        return self.first

    def _tell(self, error: BaseException) -> BaseException:
        """Reports a fault of this rank to the others, and returns the exception to raise."""
        wire, line = self._wire, _line(error)
        assert wire is not None
        self._waits = True  # until the end: signals no longer matter
        if not isinstance(error, Stopped):  # it may come from the launcher: not a cause to report
            wire.write(WORKING, line)
        if self._moving:
            return error
        try:
            messages = wire.exchange(RankMessage("an error", error=line, code=getattr(error, "exit_code", 1)))
        except UserError as lost:
            # If another rank has ended before, SIGTERM comes from the launcher, and that rank is the cause.
            return lost if isinstance(error, Stopped) else error
        self.agreed_to_end()
        if not isinstance(error, UserError) or all(each.error == line for each in messages):
            return error
        return wire.error_of(messages)

    def _part(self, error: BaseException | None = None) -> None:
        """Disconnects this rank: it sends no more messages."""
        self.agreed_to_end()
        if self._wire:
            reported = error and not isinstance(error, RankError | KeyboardInterrupt)
            self._wire.write(ENDED, error_line(error) if error and reported else "")

    def _restore(self) -> None:
        if self._restore in restored_in_forks:
            restored_in_forks.remove(self._restore)
        for number, before in self._handlers.items():
            signal.signal(number, before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal that comes before the run's own handlers, or the launcher's SIGTERM to all ranks
        after one has ended, which is ignored if all end anyway."""
        if not self._over:
            self._signal = number
            self._raise_signal()


def _line(error: BaseException) -> str:
    """The line about a rank's fault, for the others."""
    if isinstance(error, Stopped):
        return f"stopped by {signal.Signals(error.exit_code - 128).name}"
    return text_of(error) if isinstance(error, UserError) else error_line(error)
