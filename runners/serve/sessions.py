"""A client's calls as rows of tokens.

A call that continues an earlier one continues its row: the exact ids of the earlier prompt and
reply, then only what is new. Every other call (compaction, a branch, a sub-agent) begins a new row.
A branch of an earlier call begins with that call's exact ids, so nothing is tokenized twice.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable, Sequence

import attrs

import grpo_fn as g
from runners.engines.engine import Request, Row, Seed, Ticket
from runners.engines.rollouts import Talk


class Refused(Exception):
    """A session is over, or has used up what it may."""


@attrs.define(eq=False)
class SessionRow:
    """A row of a session."""

    talk: Talk  # its prompt and its tokens, sampled and given ones, up to the last turn that ended
    kept: Ticket | None = None  # its last turn: the engine may have kept the caches
    turn: Turn | None = None  # the one under way

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt, and all tokens behind it."""
        return (*self.talk.prompt, *self.talk.tokens)


@attrs.frozen
class Point:
    """A place in a row where a later call may continue, or branch off."""

    row: SessionRow
    length: int  # of the row's ids

    @property
    def ids(self) -> tuple[int, ...]:
        """Up to here."""
        return self.row.ids[: self.length]


@attrs.define(eq=False, kw_only=True)
class Turn:
    """One completion of a call: what the engine is asked for, and how far it has come."""

    session: Session
    row: SessionRow
    given: tuple[int, ...]  # tokens behind the row's last turn that were not sampled
    request: Request
    sampling: g.Sampling
    # Hears new tokens with their log-probs if `streams`; at the end the whole completion, or a
    # fault. A turn that ends with a fault leaves no trace in its row.
    hear: Callable[[Sequence[int], Sequence[float]], None] | None = None
    end: Callable[[Row | Exception], None]
    sent: int = 0  # tokens that `hear` was given
    begun: Row | None = None  # what earlier weights have drawn of it
    ticket: Ticket | None = None  # None: the engine does not have it
    cancelled: bool = False


@attrs.define(eq=False, kw_only=True)
class Session:
    """The calls that come with one API key."""

    key: str
    sampling: g.Sampling | None = None  # draws its rows, whatever a call asks for; None: the call's
    seed: Seed | None = None  # its first row's; later ones derive from it. None: random
    most_calls: int = 0  # 0: any number
    most_tokens: int = 0  # sampled in all calls; 0: any number
    most_rows: int = 0  # the oldest ones are forgotten; 0: all are recorded, as for training
    rows: list[SessionRow] = attrs.field(factory=list, init=False)
    calls: int = attrs.field(default=0, init=False)
    tokens: int = attrs.field(default=0, init=False)
    closed: bool = attrs.field(default=False, init=False)
    _points: dict[bytes, Point] = attrs.field(factory=dict, init=False)  # by their conversation
    _begun: int = attrs.field(default=0, init=False)  # rows
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
