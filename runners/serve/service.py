"""An engine that several clients use: their turns come from any thread, and the thread that owns
the engine decodes them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs

import grpo_fn as g
from runners.engines.engine import Engine, Row, Seed, Ticket, Weights
from runners.serve.sessions import Session, Turn
from runners.tokenization.text import TextDecoder


@attrs.frozen(kw_only=True)
class Limits:
    """What clients may use up."""

    turns: int = 256  # completions that wait or decode
    connections: int = 1024
    body: int = 8_000_000  # bytes
    seconds: float = 600.0  # of a call
    idle_seconds: float = 30.0  # while a client sends its body, or reads nothing of its answer


@attrs.frozen(eq=False, kw_only=True)
class ServedModel:
    """What the wire needs to know of a model."""

    name: str
    tokenizer: Any
    decoder: TextDecoder
    eos_ids: frozenset[int]
    vocabulary: int | None  # token ids are below it; None: not known
    length: int  # the most tokens of a prompt and its completion
    sampling: g.Sampling  # of a call that does not say how to sample
    template_kwargs: dict[str, Any] = attrs.field(factory=dict)


class Full(Exception):
    """There is no room for a call now."""


class Service:
    """Turns of all clients, over one engine."""

    def __init__(self, engine: Engine, model: ServedModel, limits: Limits | None = None) -> None:
        """The thread that calls `run` owns the engine."""

    # From any thread.

    def session(self, key: str) -> Session | None:
        """The open session with this key."""

    def submit(self, turns: Sequence[Turn]) -> None:
        """Queue turns. Raises Full if there are too many, or the service ends."""

    def cancel(self, turn: Turn) -> None:
        """End a turn: it hears Refused unless it has just ended."""

    def wake(self) -> None:
        """Make `run` ask `until` at once."""

    # From the thread that owns the engine.

    def open(
        self,
        key: str = "",
        *,
        seed: Seed | None = None,
        sampling: g.Sampling | None = None,
        most_calls: int = 0,
        most_tokens: int = 0,
        most_rows: int = 0,
    ) -> Session:
        """A session, for the calls with its key (empty: a new random one); see `Session`."""
        raise NotImplementedError

    def close(self, session: Session) -> None:
        """Later calls are refused, those under way end and leave no trace. `session.rows` stay."""

    def run(self, until: Callable[[], bool], *, together: Callable[[], int] | None = None) -> None:
        """Decode what clients ask for, until `until` says so; turns under way then wait for the
        next call.

        `together`: begin turns only when no row decodes and as many turns wait as it returns, in
        the order of their sessions: the same numbers bit for bit each time. None: at once.
        """

    def load(self, weights: Weights | None, *, interrupt: bool = False) -> None:
        """Sample with these weights from now on. Turns under way end with those that they began
        with; `interrupt`: they continue with the new ones, and their rows say which drew what."""
