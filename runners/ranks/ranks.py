"""The ranks of a run: they exchange messages, and end together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from runners.errors import UserError, error_line, text_of
from runners.machine.signals import Stopped, StopSignals
from runners.ranks.rank_place import RankPlace
from runners.ranks.watchdog import ENDED, WORKING
from runners.ranks.wire import RankError, RankMessage, Wire, connect

if TYPE_CHECKING:
    import mlx.core as mx

_MOMENT = 1.0  # seconds until the end of another rank is visible


class Ranks:
    """This process among those of its run. A single process has the same methods.

    It implements `grpo_fn.learner.Collectives`. All ranks call the same methods in the same order.
    """

    def __init__(
        self, place: RankPlace | None = None, *, timeout: float = 600.0, signals: StopSignals | None = None
    ) -> None:
        """Joins the others of `place` (None: no others); `timeout`: seconds that a collective may take.

        `signals` raise Stopped in this process, but not before `ending_together` and not within an exchange.

        Raises UserError if the ranks cannot connect.
        """
        self.number, self.count = (place.rank, place.size) if place else (0, 1)
        self.hosts: list[str] = [os.uname().nodename]
        self._signals = signals or StopSignals()
        self._moving = self._committing = False
        self._stopping = False  # whether all ranks know that they stop
        self._joining = ExitStack()
        self._wire: Wire | None = None
        if place:
            self._joining.enter_context(self._signals.deferred())
            self._wire, self.hosts = connect(place, timeout, self._signals)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank writes the run's folder and reports."""
        return self.number == 0

    @property
    def is_alone(self) -> bool:
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

    def _reduced(self, what: str, name: str, x: mx.array) -> mx.array:
        wire = self._wire
        return x if wire is None else wire.reduce(what, getattr(wire.collectives, name), x)

    # exchanges

    def all_gather_object(
        self, where: str, value: Any = None, arrays: Mapping[str, np.ndarray] | None = None
    ) -> list[RankMessage]:
        """Every rank's message in this exchange, in order.

        Raises Stopped, on all ranks, if a signal has come to one; RankError if a rank has reported that it
        ends, or if one is gone.
        """
        return self._gather(RankMessage(where, value, arrays or {}, asked=self._signals.received or 0))

    def _gather(self, own: RankMessage) -> list[RankMessage]:
        if self._wire is None:
            return [own]
        with self._signals.deferred():  # an interrupted exchange would leave the others at another point
            messages = self._wire.all_gather_object(own)
            asked = max(message.asked for message in messages)
            if asked and not self._stopping and not self._committing:
                self._stopping = self._signals.stopping = True
                raise Stopped(asked)
        return messages

    @contextmanager
    def committing(self, where: str, value: Any = None) -> Iterator[list[RankMessage]]:
        """The block is a change of the run's state: all ranks make it or none, and no signal interrupts it.

        It gets the messages of the exchange before it, which raises Stopped if a signal has come to a rank.
        """
        self._signals.check()
        with self._signals.deferred():
            messages = self.all_gather_object(where, value)
            before, self._committing = self._committing, True
            try:
                yield messages
            finally:
                self._committing = before

    def stop_together(self, error: Stopped) -> None:
        """After `error`: when this returns, all ranks know that they stop. RankError if one is gone."""
        self._signals.stopping = True
        if not self._stopping:
            with suppress(Stopped):
                self._gather(RankMessage("the stop", asked=error.exit_code - 128))

    def any_rank(self, where: str, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return any(message.value for message in self.all_gather_object(where, flag))

    def seconds(self) -> dict[str, float]:
        """Seconds since the last call: "waiting" in exchanges, for the slowest rank, and "reducing"."""
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
        with self._signals.deferred():
            yield
        self._moving = False

    @property
    def _over(self) -> bool:
        """Whether the ranks have agreed to end."""
        return self._wire is not None and self._wire.closed

    def alert(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """`say` for the answer to a signal, but silent if the signal is only the launcher's after another
        rank's end."""

        def alert(text: str) -> None:
            if not self.is_alone:
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
        if self.is_alone:
            yield
            return
        try:
            self._joining.close()  # raises Stopped if a signal has come meanwhile
            yield
            with suppress(Stopped):  # all is done
                self.all_gather_object("the end")
            self._part()
        except BaseException as error:
            if not self._over:
                error = self._report(error)
            self._part(error)
            if isinstance(error, UserError | KeyboardInterrupt):
                error.reported = not self._is_reporter(error)  # pyright: ignore[reportAttributeAccessIssue]
            raise error

    def _is_reporter(self, error: BaseException) -> bool:
        """Whether this rank reports why the run ends: rank 0, or the lowest one left on a host."""
        if isinstance(error, RankError) and error.seen and self._wire:
            return self._wire.watchdog.is_reporter()
        return self.is_rank_zero

    def _report(self, error: BaseException) -> BaseException:
        """Reports a fault of this rank to the others, and returns the exception to raise."""
        wire, line = self._wire, _line(error)
        assert wire is not None
        self._signals.stopping = True  # until the end: signals no longer matter
        if isinstance(error, Stopped):
            try:
                self.stop_together(error)
            except UserError as lost:
                # If another rank has ended before, SIGTERM comes from the launcher; that rank is the cause.
                return lost
            return error
        wire.watchdog.write(WORKING, line)
        if self._moving:
            return error
        try:
            messages = wire.exchange(RankMessage("an error", error=line, code=getattr(error, "exit_code", 1)))
        except UserError:
            return error
        self.agreed_to_end()
        if not isinstance(error, UserError) or all(each.error == line for each in messages):
            return error
        return wire.error_of(messages)

    def _part(self, error: BaseException | None = None) -> None:
        """Disconnects this rank: it sends no more messages."""
        self.agreed_to_end()
        if self._wire:
            reported = error and not isinstance(error, RankError | KeyboardInterrupt)
            self._wire.watchdog.write(ENDED, error_line(error) if error and reported else "")


def _line(error: BaseException) -> str:
    """The line about a rank's fault, for the others."""
    return text_of(error) if isinstance(error, UserError) else error_line(error)
