"""The ranks of a run, which exchange messages and end together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from runners.errors import UserError, error_line, text_of
from runners.machine.signals import Stopped, StopSignals
from runners.ranks.messages import RankError, RankMessage, decode_message, encode_message
from runners.ranks.rank_place import RankPlace
from runners.ranks.watchdog import ENDED, EXIT_CODE, WORKING, Scoreboard, Watchdog, host_key

if TYPE_CHECKING:
    import mlx.core as mx

    from grpo_fn.learner import Collectives
    from grpo_fn.trees import Tree

_MOMENT = 1.0  # seconds after which another rank's end is visible
_LOST = ("connection to a peer was lost", "ncclRemoteError", "NCCL")  # in MLX's exceptions


class Ranks:
    """This process as one rank of its run. The class is also used for a run in a single process.

    The class implements `grpo_fn.learner.Collectives`. All ranks call the same methods in the same
    order.
    """

    def __init__(
        self,
        place: RankPlace | None = None,
        *,
        timeout: float = 600.0,
        signals: StopSignals | None = None,
    ) -> None:
        """Connects to the other ranks of `place`; None means that this process is the only rank.
        `timeout` is a collective's time limit in seconds.

        `signals` raise Stopped in this process, but not before `ending_together` and not within an
        exchange.

        Raises UserError if the ranks cannot connect.
        """
        self.number, self.count = (place.rank, place.size) if place else (0, 1)
        self.hosts: list[str] = [os.uname().nodename]
        self._signals = signals or StopSignals()
        self._moving = self._committing = False
        self._stopping = False  # whether all ranks know that they stop
        self.watchdog = Watchdog(self.number, timeout, self._signals)
        self._collectives: Collectives | None = None  # MLX's; None: there is only one rank
        self._over = False  # whether the ranks have agreed to end
        self._seconds = {"waiting": 0.0, "reducing": 0.0}
        self._joining = ExitStack()
        if place:
            self._joining.enter_context(self._signals.deferred())
            self._join(place)

    def _join(self, place: RankPlace) -> None:
        """Waits for all ranks, then creates a scoreboard for the ranks on each host."""
        import mlx.core as mx

        from grpo_fn.learner import MlxCollectives

        self.watchdog.start()
        try:
            with self.watchdog.waiting("the start"), self._signals.ending_at_once():
                group = mx.distributed.init(strict=True, backend=place.backend)
        except RuntimeError as error:
            self.watchdog.stop()
            raise UserError(
                f"{self.watchdog.name} cannot connect to the other ranks: {error}"
            ) from error
        self._collectives = MlxCollectives(
            group, None if place.backend == "nccl" else mx.Device(mx.cpu)
        )
        # Signals are ignored here, so the messages do not contain them.
        keys = self._gather(RankMessage("the hosts' names", host_key()))
        here = [rank for rank, key in enumerate(keys) if key == keys[self.number]]
        own = Scoreboard.create(self.count) if here[0] == self.number else None
        try:
            paths = self._gather(RankMessage("the scoreboards", own))
            board = Scoreboard(paths[here[0]], self.count, self.number)
            self._gather(RankMessage("open scoreboards"))
        finally:
            if own:
                os.unlink(own)
        self.hosts = [key.partition("/")[0] for key in keys]
        self.watchdog.names = [self.name(rank) for rank in range(self.count)]
        self.watchdog.here = [rank for rank in here if rank != self.number]
        self.watchdog.board = board

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank writes the run's folder and reports."""
        return self.number == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is only one rank."""
        return self.count == 1

    def name(self, rank: int) -> str:
        """Returns a rank's name in messages."""
        return (
            f"rank {rank} ({self.hosts[rank]})" if len(self.hosts) == self.count else f"rank {rank}"
        )

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
        if self._collectives is None:
            return x
        return self._timed(what, "reducing", getattr(self._collectives, name), x)

    # exchanges

    def all_gather_object(self, where: str, value: Any = None) -> list[Any]:
        """Returns every rank's value in this exchange, in order.

        Raises Stopped on all ranks if one has received a signal. Raises RankError if a rank has
        reported that it ends, or if a rank has disappeared.
        """
        return self._gather(RankMessage(where, value, asked=self._signals.received or 0))

    def _gather(self, own: RankMessage) -> list[Any]:
        if self._collectives is None:
            return [own.value]
        # After an interrupted exchange, the ranks would be at different points of the program.
        with self._signals.deferred():
            messages = self._checked(self._exchange(own))
            asked = max(message.asked for message in messages)
            if asked and not self._stopping and not self._committing:
                self._stopping = self._signals.stopping = True
                raise Stopped(asked)
        return [message.value for message in messages]

    def _checked(self, messages: list[RankMessage]) -> list[RankMessage]:
        """Returns the messages of an exchange. Raises RankError if a rank ends, or if a rank is at
        another point of the program.
        """
        if any(message.error is not None for message in messages):
            self.agreed_to_end()
            raise self._error_of(messages)
        asked = any(message.asked for message in messages)
        if len({message.where for message in messages}) > 1 and not asked:
            self.agreed_to_end()
            spelled = ", ".join(f"{self.name(r)} at {m.where}" for r, m in enumerate(messages))
            raise RankError(
                f"the ranks are not at the same point of the program: {spelled}; this is a bug"
            )
        return messages

    # ranks that sample for rank 0

    def apart(self) -> Ranks:
        """Returns this rank alone, for steps that it does not share with the other ranks."""
        alone = Ranks(signals=self._signals)
        alone.number = self.number
        alone.watchdog = self.watchdog
        return alone

    def meet(self, where: str, value: Any) -> list[Any]:
        """Returns every rank's value.

        Unlike `all_gather_object`, this method may be called in any thread: if a rank has received
        a signal, the signal is passed on to every process, and the exchange completes.
        """
        own = RankMessage(where, value, asked=self._signals.received or 0)
        messages = self._checked(self._exchange(own))
        for asked in {message.asked for message in messages} - {0}:
            self._signals.ask(asked)
        return [message.value for message in messages]

    def shared(self, tree: Tree) -> Tree:
        """Returns rank 0's tree on all ranks. The other ranks pass a tree with the same shapes.
        This method may be called in any thread.
        """
        from grpo_fn.learner import share

        self._moving = True  # each rank detects a failure by itself
        found = share(tree, self)
        self._moving = False
        return found

    def _exchange(self, own: RankMessage) -> list[RankMessage]:
        """Exchanges messages, and returns every rank's message without checks."""
        data = encode_message(own)
        sizes = self._gathered(own.where, np.array([len(data)], np.int32))[:, 0].tolist()
        padded = np.frombuffer(data.ljust(max(sizes), b"\0"), np.uint8)
        rows = self._gathered(own.where, padded)
        return [decode_message(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def _gathered(self, where: str, own: np.ndarray) -> np.ndarray:
        """Gathers all ranks' arrays, one row per rank."""
        import mlx.core as mx

        assert self._collectives is not None
        found = self._timed(
            f"the exchange of {where}", "waiting", self._collectives.all_gather, mx.array(own)
        )
        return np.array(found).reshape(-1, own.size)

    def _timed(self, what: str, kind: str, act: Callable[[Any], Any], x: Any) -> Any:
        """Runs a collective under the watchdog, and measures its time. Raises RankError if a peer
        has disappeared.
        """
        started = time.monotonic()
        try:
            with self.watchdog.waiting(what):
                return act(x)
        except RuntimeError as error:
            if not any(sign in str(error) for sign in _LOST):
                raise
            lost = RankError(self._who_is_gone(str(error)))
            lost.seen = True
            self.agreed_to_end()
            self.watchdog.on_fault(str(lost))
            raise lost from error
        finally:
            self._seconds[kind] += time.monotonic() - started

    def _who_is_gone(self, why: str) -> str:
        """Returns a message that names the lost rank if this rank can be identified within two
        seconds. Otherwise, returns a general message.
        """
        latest = time.monotonic() + 2.0
        while time.monotonic() < latest:
            line = self.watchdog.gone()
            if line:
                return line
            time.sleep(0.05)
        others = self.watchdog.elsewhere or "all ranks are on this host and still running"
        return f"the connection to another rank is lost ({why}); ranks elsewhere: {others}"

    def _error_of(self, messages: Sequence[RankMessage]) -> RankError:
        """Returns the first failure among the messages as a RankError."""
        rank = next(r for r, message in enumerate(messages) if message.error is not None)
        error = RankError(f"{self.name(rank)}: {messages[rank].error}")
        error.exit_code = messages[rank].code or EXIT_CODE
        return error

    @contextmanager
    def committing(self, where: str, value: Any = None) -> Iterator[list[Any]]:
        """Runs a block that changes the run's state, on all ranks or on none. No signal interrupts
        the block.

        The block receives every rank's value from a preceding exchange, which raises Stopped if a
        rank has received a signal.
        """
        self._signals.check()
        with self._signals.deferred():
            values = self.all_gather_object(where, value)
            before = self._committing
            self._committing = True
            try:
                yield values
            finally:
                self._committing = before

    def stop_together(self, error: Stopped) -> None:
        """Waits, after `error`, until all ranks know that they stop. Raises RankError if a rank has
        disappeared.
        """
        self._signals.stopping = True
        if not self._stopping:
            with suppress(Stopped):
                self._gather(RankMessage("the stop", asked=error.exit_code - 128))

    def any_rank(self, where: str, flag: bool) -> bool:
        """Returns whether the flag is set on any rank."""
        return any(self.all_gather_object(where, flag))

    def seconds(self) -> dict[str, float]:
        """Returns the seconds spent since the last call, as "waiting" (for the slowest rank, in
        exchanges) and "reducing" (summing and gathering arrays).
        """
        found = self._seconds
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return found

    # the end

    def agreed_to_end(self) -> None:
        """Records that all ranks know about the end. From now on, no rank waits for another."""
        if self._collectives:
            self._over = True
            self.watchdog.stop()

    @contextmanager
    def moving_arrays(self) -> Iterator[None]:
        """Marks a block in which the ranks exchange arrays instead of messages, so that each rank
        detects failures by itself.
        """
        self._moving = True
        with self._signals.deferred():
            yield
        self._moving = False

    def alert(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """Wraps `say`, which shows the response to a signal, so that nothing is shown if the signal
        only follows another rank's end.
        """

        def alert(text: str) -> None:
            if not self.is_alone:
                time.sleep(_MOMENT)  # this is a separate thread
            if not (self._over or self.watchdog.gone()):
                say(text)

        return alert

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        """Ends all ranks if the block raises an exception. After the block, the ranks disconnect
        normally.
        """
        if self.is_alone:
            yield
            return
        try:
            self._joining.close()  # raises Stopped if a signal has arrived meanwhile
            yield
            with suppress(Stopped):  # the run has finished
                self.all_gather_object("the end")
            self._part()
        except BaseException as error:
            if not self._over:
                error = self._report(error)
            self._part(error)
            if isinstance(error, UserError | KeyboardInterrupt):
                # The reason is reported by rank 0, or by the lowest remaining rank on each host.
                seen = isinstance(error, RankError) and error.seen
                reports = self.watchdog.is_reporter() if seen else self.is_rank_zero
                error.reported = not reports  # pyright: ignore[reportAttributeAccessIssue]
            raise error

    def _report(self, error: BaseException) -> BaseException:
        """Reports this rank's failure to the others, and returns the exception to raise."""
        line = text_of(error) if isinstance(error, UserError) else error_line(error)
        self._signals.stopping = True  # from now on, signals do not raise Stopped
        if isinstance(error, Stopped):
            try:
                self.stop_together(error)
            except UserError as lost:
                # If another rank has ended earlier, the launcher has sent the SIGTERM; that rank is
                # the cause.
                return lost
            return error
        self.watchdog.write(WORKING, line)
        if self._moving:
            return error
        try:
            own = RankMessage("an error", error=line, code=getattr(error, "exit_code", 1))
            messages = self._exchange(own)
        except UserError:
            return error
        self.agreed_to_end()
        if not isinstance(error, UserError) or all(each.error == line for each in messages):
            return error
        return self._error_of(messages)

    def _part(self, error: BaseException | None = None) -> None:
        """Disconnects this rank, after which it sends no messages."""
        self.agreed_to_end()
        reported = error and not isinstance(error, RankError | KeyboardInterrupt)
        self.watchdog.write(ENDED, error_line(error) if error and reported else "")
