"""An engine on other ranks, which sample for rank 0 (`ranks.samplers`).

The ranks exchange messages repeatedly: rank 0 sends its orders, and the other ranks return the
completions that have ended since the previous exchange. Between two exchanges, the ranks decode
only for a moment, so rank 0 can stop them at any time.
"""

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.rollout import Interrupted
from grpo_fn.trees import Tree, map_arrays
from runners.engines.engine import (
    Engine,
    Request,
    Row,
    ShouldStop,
    Ticket,
    Token,
    Weights,
    never,
)
from runners.ranks.messages import RankError
from runners.ranks.ranks import Ranks

_MOMENT = 0.1  # seconds of decoding between two exchanges
_MEETING = "the samples"  # name of the exchange in error messages


class RankEngine:
    """Rank 0's side of the engine. Every other rank runs `serve`."""

    def __init__(self, ranks: Ranks) -> None:
        """Starts without weights on the other ranks."""
        self.version = -1
        self.rows = 0
        self._ranks = ranks
        self._lock = threading.Lock()
        self._end: BaseException | None = None  # the reason why exchanges have ended
        self._orders: list[Any] = []  # orders for the next exchange
        # which rank decodes each request, since the last `load`
        self._owners: dict[Ticket | None, int] = {}
        self._open: set[Ticket] = set()
        self._tickets = itertools.count()

    def load(self, weights: Weights | None) -> None:
        """See `Engine`. Only trained weights are sent, in the sampler's compute dtype, and only if
        their version is new. If `weights` is None, nothing is sent.
        """
        if weights is None:
            return
        changed = weights.version != self.version
        self._owners.clear()
        self._orders.append(["load", weights.version, weights.rows, changed])
        self._meet(weights.policy.cast(weights.params) if changed else None)
        self.version = weights.version

    def submit(self, request: Request, sampling: g.Sampling) -> Ticket:
        """See `Engine`. Requests are distributed round-robin; a request that continues another goes
        to the same rank.
        """
        ticket = Ticket(next(self._tickets))
        owner = self._owners.get(request.continues, 1 + ticket % (self._ranks.count - 1))
        self._orders.append(
            [
                "submit",
                owner,
                ticket,
                attrs.asdict(request),
                attrs.asdict(sampling) | {"eos_ids": sorted(sampling.eos_ids)},
            ]
        )
        self._owners[ticket] = owner
        self._open.add(ticket)
        return ticket

    def collect(
        self, least: int = 1, *, should_stop: ShouldStop = never
    ) -> dict[Ticket, tuple[Row, ...]]:
        """See `Engine`."""
        found = self._meet()
        while len(found) < least and self._open and not should_stop():
            found |= self._meet()
        return found

    def tokens(self, ticket: Ticket, *, should_stop: ShouldStop = never) -> Iterator[Token]:
        """Raises NotImplementedError, because ranks return only complete completions."""
        raise NotImplementedError

    def peek(self, ticket: Ticket, start: int = 0) -> list[Token]:
        """Raises NotImplementedError, because ranks return only complete completions."""
        raise NotImplementedError

    def cancel(self, ticket: Ticket) -> None:
        """See `Engine`."""
        self._orders.append(["cancel", self._owners[ticket], ticket])

    def close(self) -> None:
        """Ends `serve` on the other ranks. A thread that is still waiting for completions raises
        Interrupted.
        """
        with self._ranks.moving_arrays(), self._lock:  # no signal interrupts the exchange
            if self._end is None:
                self._end = Interrupted()
                self._ranks.meet(_MEETING, [["end"]])
            elif isinstance(self._end, RankError):
                raise self._end  # the launcher's signal has the same cause

    def _meet(self, params: Tree | None = None) -> dict[Ticket, tuple[Row, ...]]:
        """Exchanges messages with the other ranks: sends the orders, then new weights, and returns
        the requests that have ended.
        """
        with self._lock:
            if self._end is not None:
                raise self._end
            orders = self._orders
            self._orders = []
            try:
                answers = self._ranks.meet(_MEETING, orders)
                if params is not None:
                    self._ranks.shared(params)
            except BaseException as error:
                self._end = error
                raise
        found: dict[Ticket, tuple[Row, ...]] = {}
        for rows, ended in answers[1:]:
            self.rows = rows
            found |= {Ticket(ticket): tuple(map(_row, group)) for ticket, *group in ended}
        self._open -= found.keys()
        return found


def blank_weights(policy: g.Policy, params: Tree) -> Tree:
    """Returns zeros with the shapes and dtypes of the weights that rank 0 sends. The zeros use no
    memory.
    """
    return map_arrays(lambda leaf: mx.zeros(leaf.shape, leaf.dtype), policy.cast(params))


def serve(ranks: Ranks, engine: Engine, policy: g.Policy, blank: Tree) -> None:
    """Executes rank 0's orders until rank 0 ends the exchange. For `blank`, see `blank_weights`."""
    params = blank
    own: dict[int, Ticket] = {}  # maps rank 0's tickets to this engine's, since the last "load"
    ended: dict[Ticket, tuple[Row, ...]] = {}
    while True:
        numbers = {ticket: number for number, ticket in own.items()}
        answer = [[numbers[ticket], *map(attrs.astuple, rows)] for ticket, rows in ended.items()]
        for order in ranks.meet(_MEETING, [engine.rows, answer])[0]:
            match order:
                case ["end"]:
                    return
                case ["load", version, rows, changed]:
                    engine.load(None)
                    own.clear()
                    if changed:
                        params = None  # frees the old weights before the new ones arrive
                        params = ranks.shared(blank)
                    engine.load(Weights(policy, params, version, rows))
                case ["submit", rank, number, request, sampling] if rank == ranks.number:
                    own[number] = engine.submit(
                        _request(request, own), attrs.evolve(g.Sampling(), **sampling)
                    )
                case ["cancel", rank, number] if rank == ranks.number:
                    engine.cancel(own[number])
        ended = engine.collect(len(own), should_stop=_moment()) if own else {}


def _moment() -> ShouldStop:
    end = time.monotonic() + _MOMENT
    return lambda: time.monotonic() > end


def _request(plain: dict[str, Any], own: dict[int, Ticket]) -> Request:
    """Converts a request from JSON."""
    return Request(
        prompt=tuple(plain["prompt"]),
        seeds=tuple(map(tuple, plain["seeds"])),
        drawn=plain["drawn"],
        keep=plain["keep"],
        borrows=plain["borrows"],
        continues=own.get(plain["continues"]),
    )


def _row(plain: list[Any]) -> Row:
    """Converts a row from JSON."""
    tokens, logp, finish, versions, entropy = plain
    return Row(
        tuple(tokens),
        tuple(logp),
        finish,
        tuple(map(tuple, versions)),
        None if entropy is None else tuple(entropy),
    )
