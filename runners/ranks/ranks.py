"""The ranks of a run: they meet, tell each other what they have, and end together."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from runners.errors import UserError, error_line, text_of
from runners.machine.signals import Stopped
from runners.ranks.launched import Place
from runners.ranks.messages import Message, decode, encode
from runners.ranks.scoreboard import ENDED, WAITING, WORKING, Scoreboard
from runners.ranks.watchdog import EXIT_CODE, Watchdog

if TYPE_CHECKING:
    import mlx.core as mx

_BLOCK = 4096  # bytes of each message that go in the first collective
_MOMENT = 1.0  # seconds until the end of another rank shows
_LOST = ("connection to a peer was lost", "ncclRemoteError", "NCCL")  # in what MLX raises


class RankError(UserError):
    """Another rank's fault: it ends this one too. `told` where rank 0 says so for all."""

    exit_code = EXIT_CODE
    told = False
    seen = False  # by each rank for itself: no meeting has told it


class Ranks:
    """This process among those of its run; alone, with all methods at hand, where there is no other.

    It is `grpo_fn.learner.Collectives`. All ranks call the same methods in the same order.
    """

    def __init__(self, place: Place | None = None, *, timeout: float = 600.0) -> None:
        """Joins the others of `place`, None for none; `timeout`: seconds that a collective may take.

        Raises UserError where the ranks cannot meet.
        """
        self.number, self.count = (place.rank, place.size) if place else (0, 1)
        self.host = os.uname().nodename
        self.hosts: list[str] = [self.host]
        self.asked = 0  # the signal that asked a rank to stop, as of the last meeting; 0: none
        self.lost: str | None = None  # why nobody reads rank 0's output, as of the last meeting
        self.wishes: Callable[[], tuple[int, str | None]] = lambda: (0, None)  # both, of this rank
        self._seconds = {"waiting": 0.0, "reducing": 0.0}
        self._over = False  # whether the ranks have agreed to end
        self._moving = False
        self._exchanging = False
        self._signal = 0  # that came while nobody else handled it; 0: none
        self._board: Scoreboard | None = None
        self._watchdog: Watchdog | None = None
        self._inner: Any = None
        if place:
            self._join(place, timeout)

    @property
    def first(self) -> bool:
        """Whether this rank writes the run's folder and speaks."""
        return self.number == 0

    @property
    def alone(self) -> bool:
        """Whether there is one rank only."""
        return self.count == 1

    def name(self, rank: int) -> str:
        """A rank in messages."""
        return f"rank {rank} ({self.hosts[rank]})"

    def wait_for(self, seconds: float) -> None:
        """From here on a collective may take so long."""
        if self._watchdog:
            self._watchdog.timeout = seconds

    # what a reduction needs

    def rank(self) -> int:
        """See `Collectives`."""
        return self.number

    def size(self) -> int:
        """See `Collectives`."""
        return self.count

    def all_sum(self, x: mx.array) -> mx.array:
        """See `Collectives`."""
        return x if self.alone else self._timed("the sum of gradients", "reducing", self._inner.all_sum, x)

    def all_gather(self, x: mx.array) -> mx.array:
        """See `Collectives`."""
        if self.alone:
            return x
        return self._timed("the gathering of weights", "reducing", self._inner.all_gather, x)

    def sum_scatter(self, x: mx.array) -> mx.array:
        """See `Collectives`."""
        if self.alone:
            return x
        return self._timed("the sum of gradients", "reducing", self._inner.sum_scatter, x)

    # meetings

    def meet(
        self, where: str, value: Any = None, arrays: Mapping[str, np.ndarray] | None = None
    ) -> list[Message]:
        """What every rank says at this meeting, in their order.

        Raises RankError where a rank has said that it ends, or where one is gone.
        """
        asked, lost = self.wishes()
        own = Message(where, value, arrays or {}, asked=asked, lost=lost)
        if self.alone:
            self.asked, self.lost = asked, lost
            return [own]
        with self._whole():
            messages = self._exchange(own)
        self._judge(messages)
        self.asked = max(message.asked for message in messages)
        self.lost = messages[0].lost
        return messages

    def agree(self, where: str, flag: bool) -> bool:
        """Whether it holds on any rank."""
        return flag if self.alone else any(message.value for message in self.meet(where, flag))

    def seconds(self) -> dict[str, float]:
        """Since this was last asked: "waiting" in meetings, for the slowest rank, and "reducing"."""
        found, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return found

    # the end

    def agreed_to_end(self) -> None:
        """All ranks know that they end, and raise for it: from here on none waits for another."""
        self._over = True
        if self._watchdog:
            self._watchdog.stop()

    @contextmanager
    def moving_arrays(self) -> Iterator[None]:
        """Within it the ranks exchange arrays, not messages: a fault here is not told, but seen."""
        self._moving = True
        with self._whole():
            yield
        self._moving = False

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Within it SIGTERM waits: an exchange that breaks off leaves the others at another point."""
        self._exchanging = True
        yield
        self._exchanging = False
        if self._signal and not self._over:
            raise Stopped(self._signal)

    def alert(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """`say` for what a signal makes a run say: not where it is only the launcher's, after another rank's
        end."""

        def alert(text: str) -> None:
            if not self.alone:
                time.sleep(_MOMENT)  # this is a thread of its own
            if self.alone or not (self._over or (self._watchdog and self._watchdog.gone())):
                say(text)

        return alert

    def on_fault(self, act: Callable[[str], None]) -> None:
        """`act` is told of a rank's fault where the process ends at once; in another thread."""
        if self._watchdog:
            self._watchdog.on_fault = act

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        """What is raised inside ends all ranks. At the end they part in good order."""
        if self.alone:
            yield
            return
        try:
            yield
            self.meet("the end")
            self._part()
        except BaseException as error:
            if not self._over:
                error = self._tell(error)
            self._part(error)
            if isinstance(error, UserError | KeyboardInterrupt):
                error.told = not self._speaks(error)  # pyright: ignore[reportAttributeAccessIssue]
            raise error

    def _speaks(self, error: BaseException) -> bool:
        """Whether this rank says why the run ends: rank 0, or the lowest one left of a host."""
        if isinstance(error, RankError) and error.seen and self._watchdog:
            return self._watchdog.speaks()
        return self.first

    def _tell(self, error: BaseException) -> BaseException:
        """Tells the others of a fault of this rank, and returns what is to be raised."""
        line = text_of(error) if isinstance(error, UserError) else error_line(error)
        if self._board:
            self._board.write(WORKING, time.monotonic(), line)
        code = getattr(error, "exit_code", 1)
        self._exchanging = True  # to the end: a signal changes nothing any more
        if self._moving:
            return error
        try:
            messages = self._exchange(Message("an error", error=line, code=code))
        except UserError as lost:
            # SIGTERM is the launcher's where another rank has ended before: that rank is the cause.
            return lost if isinstance(error, Stopped) else error
        self.agreed_to_end()
        if not isinstance(error, UserError) or all(each.error == line for each in messages):
            return error
        return self._error_of(messages)

    def _part(self, error: BaseException | None = None) -> None:
        """This rank has nothing more to say."""
        self.agreed_to_end()
        if self._board:
            words = (
                "" if error is None or isinstance(error, RankError | KeyboardInterrupt) else error_line(error)
            )
            self._board.write(ENDED, time.monotonic(), words)

    def _judge(self, messages: Sequence[Message]) -> None:
        if any(message.error is not None for message in messages):
            self.agreed_to_end()
            raise self._error_of(messages)
        places = {message.where for message in messages}
        if len(places) > 1:
            self.agreed_to_end()
            spelled = ", ".join(f"{self.name(r)} at {m.where}" for r, m in enumerate(messages))
            raise RankError(f"the ranks are not at the same point: {spelled}; this is a fault of the program")

    def _error_of(self, messages: Sequence[Message]) -> RankError:
        """The first fault among the messages."""
        rank = next(r for r, message in enumerate(messages) if message.error is not None)
        error = RankError(f"{self.name(rank)}: {messages[rank].error}")
        error.exit_code = messages[rank].code or EXIT_CODE
        return error

    # on the wire

    def _exchange(self, own: Message) -> list[Message]:
        data = encode(own)
        whole = len(data).to_bytes(8, "little") + data
        firsts = self._gather(own.where, whole[:_BLOCK], _BLOCK)
        sizes = [8 + int.from_bytes(first[:8], "little") for first in firsts]
        rest = max(sizes) - _BLOCK
        if rest > 0:
            more = self._gather(own.where, whole[_BLOCK:], rest)
            firsts = [first + after for first, after in zip(firsts, more, strict=True)]
        return [decode(found[8:size]) for found, size in zip(firsts, sizes, strict=True)]

    def _gather(self, where: str, data: bytes, size: int) -> list[bytes]:
        import mlx.core as mx

        block = np.zeros(size, np.uint8)
        block[: len(data)] = np.frombuffer(data, np.uint8)
        gathered = self._timed(f"the meeting for {where}", "waiting", self._inner.all_gather, mx.array(block))
        found = np.array(gathered).reshape(self.count, size)
        return [found[rank].tobytes() for rank in range(self.count)]

    def _timed(self, what: str, kind: str, act: Callable[[Any], Any], x: Any) -> Any:
        """A collective under the watchdog's eyes; RankError where a peer is gone."""
        assert self._watchdog is not None
        started = time.monotonic()
        self._watchdog.begins(what)
        if self._board:
            self._board.write(WAITING, started)
        try:
            return act(x)
        except RuntimeError as error:
            if not any(sign in str(error) for sign in _LOST):
                raise
            lost = RankError(self._who_is_gone(str(error)))
            lost.seen = True
            self.agreed_to_end()
            self._watchdog.on_fault(str(lost))
            raise lost from error
        finally:
            self._watchdog.ends()
            now = time.monotonic()
            self._seconds[kind] += now - started
            if self._board:
                self._board.write(WORKING, now)

    def _who_is_gone(self, why: str) -> str:
        """The rank that was lost, if that is known within a moment."""
        watchdog = self._watchdog
        assert watchdog is not None
        latest = time.monotonic() + 2.0
        while time.monotonic() < latest:
            if line := watchdog.gone():
                return line
            time.sleep(0.05)
        others = watchdog.elsewhere or "all of them are on this host, and are still there"
        return f"the connection to another rank is lost ({why}); ranks elsewhere: {others}"

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM, with which the launcher ends all ranks when one has ended: no end within the end, and none
        within an exchange."""
        if self._over:
            return
        self._signal = number
        if not self._exchanging:
            raise Stopped(number)

    def _join(self, place: Place, timeout: float) -> None:
        import mlx.core as mx

        from grpo_fn.learner import MlxCollectives

        self._watchdog = watchdog = Watchdog(f"rank {place.rank} ({self.host})", timeout)
        watchdog.rank = place.rank
        watchdog.start()
        watchdog.begins("the start")
        try:
            group = mx.distributed.init(strict=True, backend=place.backend)
        except RuntimeError as error:
            watchdog.stop()
            raise UserError(f"rank {place.rank} ({self.host}) cannot join the others: {error}") from error
        watchdog.ends()
        if (group.rank(), group.size()) != (place.rank, place.size):
            watchdog.stop()
            raise UserError(
                f"the backend {place.backend} made rank {group.rank()} of {group.size()}; the launcher "
                f"wanted rank {place.rank} of {place.size}"
            )
        # Not before: what waits for the other ranks to join runs no handler.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._receive)
        on_cuda = place.backend == "nccl"
        self._inner = MlxCollectives(group, None if on_cuda else mx.Device(mx.cpu), scatters=on_cuda)
        self.hosts = [message.value for message in self.meet("the hosts' names", _host_key())]
        mine = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.number]]
        opened: list[Any] = []
        own = Scoreboard.create(self.count) if mine[0] == self.number else None
        try:
            paths = [message.value for message in self.meet("the scoreboards", own)]
            with suppress(OSError):  # two containers of one host: they see each other as other hosts
                self._board = Scoreboard(paths[mine[0]], self.count, self.number)
                self._board.write(WORKING, time.monotonic())
            opened = [message.value for message in self.meet("open scoreboards", self._board is not None)]
        finally:
            if own:
                Scoreboard.remove(own)
        mine = [rank for rank in mine if self._board and opened[rank]]
        self.hosts = [host.rsplit("/", 1)[0] for host in self.hosts]
        watchdog.names = [self.name(rank) for rank in range(self.count)]
        watchdog.here = [rank for rank in mine if rank != self.number]
        elsewhere = [rank for rank in range(self.count) if rank not in (*mine, self.number)]
        watchdog.elsewhere = ", ".join(self.name(rank) for rank in elsewhere)
        watchdog.asked = lambda: max(self.wishes()[0], self._signal) > 0
        watchdog.board = self._board


def _host_key() -> str:
    """The host's name, and what tells two hosts or containers of one name apart."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{os.uname().nodename}/{boot}"
