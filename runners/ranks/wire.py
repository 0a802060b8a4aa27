"""The connection between the ranks: messages and arrays over MLX's collectives, guarded by a watchdog.

A message is bytes: plain values as JSON, and arrays behind them. It contains no code.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from runners.errors import UserError
from runners.machine.signals import StopSignals
from runners.ranks.rank_place import RankPlace
from runners.ranks.watchdog import EXIT_CODE, WORKING, Scoreboard, Watchdog

if TYPE_CHECKING:
    from grpo_fn.learner import Collectives


@attrs.frozen(eq=False)
class RankMessage:
    """One rank's message in an exchange."""

    where: str  # the exchange, such as "rollout"; all ranks have to be at the same one
    value: Any = None  # a plain JSON value
    arrays: Mapping[str, np.ndarray] = attrs.field(factory=dict)
    error: str | None = None  # why the rank ends; None: it does not
    code: int = 0  # its exit code
    asked: int = 0  # the signal that has come to the rank; 0: none


def encode_message(message: RankMessage) -> bytes:
    """The inverse of `decode_message`. TypeError for a value that JSON cannot hold."""
    arrays = {name: np.ascontiguousarray(array) for name, array in message.arrays.items()}
    head = {
        "where": message.where,
        "value": message.value,
        "error": message.error,
        "code": message.code,
        "asked": message.asked,
        "arrays": [[name, str(array.dtype), array.shape] for name, array in arrays.items()],
    }
    text = json.dumps(head).encode("ascii")
    return b"".join([len(text).to_bytes(8, "little"), text, *(array.tobytes() for array in arrays.values())])


def decode_message(data: bytes) -> RankMessage:
    """The message from the bytes of `encode_message`."""
    end = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:end])
    arrays = {}
    for name, dtype, shape in head.pop("arrays"):
        size = np.dtype(dtype).itemsize * int(np.prod(shape))
        arrays[name] = np.frombuffer(data[end : end + size], dtype).reshape(shape)
        end += size
    return RankMessage(arrays=arrays, **head)


_BLOCK = 4096  # bytes of each message in the first collective
_LOST = ("connection to a peer was lost", "ncclRemoteError", "NCCL")  # in MLX's exceptions


class RankError(UserError):
    """Another rank's fault: it ends this one too. `reported`: rank 0 reports it for all."""

    exit_code = EXIT_CODE
    reported = False
    seen = False  # each rank has noticed it by itself, without an exchange


class Wire:
    """One rank's end of the connection to the others. All ranks use theirs in the same order."""

    def __init__(self, collectives: Collectives, watchdog: Watchdog) -> None:
        """`watchdog`, already started, checks the others and the time of each collective."""
        self.collectives, self.watchdog = collectives, watchdog
        self.closed = False  # whether the ranks have agreed to end
        self._seconds = {"waiting": 0.0, "reducing": 0.0}

    def close(self) -> None:
        """Stops waiting: all ranks know that they end."""
        self.closed = True
        self.watchdog.stop()

    def all_gather_object(self, own: RankMessage) -> list[RankMessage]:
        """Every rank's message, in order.

        Raises RankError if one of them reports a fault, or if the ranks are not at the same point and no
        signal has come to one of them.
        """
        messages = self.exchange(own)
        if any(message.error is not None for message in messages):
            self.close()
            raise self.error_of(messages)
        if len({message.where for message in messages}) > 1 and not any(each.asked for each in messages):
            self.close()
            spelled = ", ".join(f"{self.name(r)} at {m.where}" for r, m in enumerate(messages))
            raise RankError(f"the ranks are not at the same point: {spelled}; this is a bug")
        return messages

    def gather_values(self, where: str, value: Any) -> list[Any]:
        """Every rank's value, a plain JSON one; raises as `all_gather_object`."""
        return [message.value for message in self.all_gather_object(RankMessage(where, value))]

    def exchange(self, own: RankMessage) -> list[RankMessage]:
        """Every rank's message, without checks."""
        data = encode_message(own)
        whole = len(data).to_bytes(8, "little") + data
        firsts = self._gather(own.where, whole[:_BLOCK], _BLOCK)
        sizes = [8 + int.from_bytes(first[:8], "little") for first in firsts]
        rest = max(sizes) - _BLOCK
        if rest > 0:
            more = self._gather(own.where, whole[_BLOCK:], rest)
            firsts = [first + after for first, after in zip(firsts, more, strict=True)]
        return [decode_message(found[8:size]) for found, size in zip(firsts, sizes, strict=True)]

    def error_of(self, messages: Sequence[RankMessage]) -> RankError:
        """The first fault among the messages."""
        rank = next(r for r, message in enumerate(messages) if message.error is not None)
        error = RankError(f"{self.name(rank)}: {messages[rank].error}")
        error.exit_code = messages[rank].code or EXIT_CODE
        return error

    def reduce(self, what: str, act: Callable[[Any], Any], x: Any) -> Any:
        """`act(x)`, one of the collectives, over arrays."""
        return self._timed(what, "reducing", act, x)

    def seconds(self) -> dict[str, float]:
        """Since this was last asked: "waiting" in exchanges, for the slowest rank, and "reducing"."""
        found, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return found

    def name(self, rank: int) -> str:
        """A rank's name in messages, with its host if that is known."""
        names = self.watchdog.names
        return names[rank] if names else f"rank {rank}"

    def _gather(self, where: str, data: bytes, size: int) -> list[bytes]:
        import mlx.core as mx

        block = np.zeros(size, np.uint8)
        block[: len(data)] = np.frombuffer(data, np.uint8)
        gather = self.collectives.all_gather
        gathered = self._timed(f"the exchange of {where}", "waiting", gather, mx.array(block))
        return [row.tobytes() for row in np.array(gathered).reshape(-1, size)]

    def _timed(self, what: str, kind: str, act: Callable[[Any], Any], x: Any) -> Any:
        """A collective under the watchdog. Raises RankError if a peer is gone."""
        started = time.monotonic()
        self.watchdog.begins(what)
        try:
            return act(x)
        except RuntimeError as error:
            if not any(sign in str(error) for sign in _LOST):
                raise
            lost = RankError(self._who_is_gone(str(error)))
            lost.seen = True
            self.close()
            self.watchdog.on_fault(str(lost))
            raise lost from error
        finally:
            self.watchdog.ends()
            self._seconds[kind] += time.monotonic() - started

    def _who_is_gone(self, why: str) -> str:
        """The lost rank, if it becomes known within a moment."""
        latest = time.monotonic() + 2.0
        while time.monotonic() < latest:
            if line := self.watchdog.gone():
                return line
            time.sleep(0.05)
        others = self.watchdog.elsewhere or "all of them are on this host, and are still there"
        return f"the connection to another rank is lost ({why}); ranks elsewhere: {others}"


def connect(place: RankPlace, timeout: float, signals: StopSignals) -> tuple[Wire, list[str]]:
    """The connection to the others of `place`, and every rank's host; waits for all of them.

    `timeout`: seconds that this, or a collective, may take. A signal ends the process while it waits. The
    ranks of one host see each other on a scoreboard.

    Raises UserError if the ranks cannot connect.
    """
    import mlx.core as mx

    from grpo_fn.learner import MlxCollectives

    watchdog = Watchdog(place.rank, timeout, signals)
    watchdog.start()
    watchdog.begins("the start")
    try:
        with signals.ending_at_once():
            group = mx.distributed.init(strict=True, backend=place.backend)
    except RuntimeError as error:
        watchdog.stop()
        raise UserError(f"{watchdog.name} cannot join the others: {error}") from error
    watchdog.ends()
    on_cuda = place.backend == "nccl"
    collectives = MlxCollectives(group, None if on_cuda else mx.Device(mx.cpu))
    wire = Wire(collectives, watchdog)
    return wire, _introduce(wire, place)


def _introduce(wire: Wire, place: RankPlace) -> list[str]:
    keys = wire.gather_values("the hosts' names", _host_key())
    mine = [rank for rank, key in enumerate(keys) if key == keys[place.rank]]
    own = Scoreboard.create(place.size) if mine[0] == place.rank else None
    board = None
    try:
        paths = wire.gather_values("the scoreboards", own)
        with suppress(OSError):  # two containers on one host treat each other as different hosts
            board = Scoreboard(paths[mine[0]], place.size, place.rank)
            board.write(WORKING)
        opened = wire.gather_values("open scoreboards", board is not None)
    finally:
        if own:
            Scoreboard.remove(own)
    here = [rank for rank in mine if board and opened[rank] and rank != place.rank]
    hosts = [key.rsplit("/", 1)[0] for key in keys]
    wire.watchdog.see([f"rank {rank} ({host})" for rank, host in enumerate(hosts)], here, board)
    return hosts


def _host_key() -> str:
    """The host's name, with what distinguishes two hosts or containers of the same name."""
    boot = ""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{os.uname().nodename}/{boot}"
