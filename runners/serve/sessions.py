"""Records a client's calls as rows of token ids.

A call that continues an earlier call is appended to that call's row: the row already contains the
exact ids of the earlier prompt and reply, so only the new part is added. Every other call
(compaction, a branch, a sub-agent) starts a new row. A branch copies the exact ids of the call that
it branches from, so nothing is tokenized twice.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

import grpo_fn as g
from runners.data.messages import Message
from runners.engines.engine import Request, Row, Seed, Ticket
from runners.engines.rollouts import Talk


class Refused(Exception):
    """Raised if a session has ended or reached a limit, or if the queue is full."""

    def __init__(self, message: str, code: str = "session_limit", status: int = 403) -> None:
        """Stores the `code` and `status` for the HTTP response."""
        super().__init__(message)
        self.code = code
        self.status = status


@attrs.define(eq=False)
class SessionRow:
    """One token row in a session."""

    talk: Talk  # the prompt, and all tokens until the end of the last finished turn
    kept: Ticket | None = None  # ticket for the last turn, whose caches the engine may have kept
    turn: Turn | None = None  # the turn in progress

    @property
    def ids(self) -> tuple[int, ...]:
        """The row's ids: the prompt and all tokens after it."""
        return (*self.talk.prompt, *self.talk.tokens)


@attrs.frozen(eq=False)
class Point:
    """The end of a call, where a later call may continue the row or branch off."""

    row: SessionRow
    length: int  # number of the row's ids up to this point

    @property
    def ids(self) -> tuple[int, ...]:
        """The row's ids up to this point."""
        return self.row.ids[: self.length]


@attrs.define(eq=False, kw_only=True)
class Turn:
    """One completion for a call: the engine request and its progress."""

    session: Session
    row: SessionRow
    given: tuple[int, ...]  # tokens after the row's previous turn that were not sampled
    request: Request
    sampling: g.Sampling
    # Receives new tokens and their log-probs; None means the client waits for the full completion.
    hear: Callable[[Sequence[int], Sequence[float]], None] | None = None
    # Receives the full completion or an error. A turn that fails does not change its row.
    end: Callable[[Row | Exception], None] = lambda outcome: None
    sent: int = 0  # number of tokens from the engine's request that `hear` has received
    begun: Row | None = None  # the part that was sampled with earlier weights
    ticket: Ticket | None = None  # None means the turn is not submitted to the engine
    cancelled: bool = False
    over: bool = False
    point: Point | None = None  # where the turn ends in the row


@attrs.define(eq=False, kw_only=True)
class Session:
    """All calls made with one API key. Methods may be called from any thread."""

    key: str
    number: int = 0  # sessions are numbered in the order in which they were opened
    sampling: g.Sampling | None = (
        None  # overrides the sampling distribution of every call; None keeps each call's own
    )
    seed: Seed | None = (
        None  # seed of the first row, from which the others derive; None means random
    )
    most_calls: int = 0  # 0 means no limit
    most_tokens: int = 0  # limit on sampled tokens; 0 means no limit
    most_rows: int = 0  # older rows are dropped; 0 keeps all rows, for training
    rows: list[SessionRow] = attrs.field(factory=list, init=False)
    calls: int = attrs.field(default=0, init=False)
    tokens: int = attrs.field(default=0, init=False)
    closed: bool = attrs.field(default=False, init=False)
    # the messages of the last chat, including its reply
    messages: tuple[Message, ...] = attrs.field(default=(), init=False)
    # keyed by the digest of a conversation
    _points: dict[bytes, Point] = attrs.field(factory=dict, init=False)
    _row_numbers: Iterator[int] = attrs.field(factory=itertools.count, init=False)
    _lock: threading.RLock = attrs.field(factory=threading.RLock, init=False)

    def count(self) -> None:
        """Registers a call. Raises Refused if the session has ended or reached a limit."""
        with self._lock:
            self._check()
            if self.most_calls and self.calls >= self.most_calls:
                raise Refused(f"the session has reached its limit of {self.most_calls} calls")
            if self.most_tokens and self.tokens >= self.most_tokens:
                raise Refused(
                    f"the session has reached its limit of {self.most_tokens} sampled tokens"
                )
            self.calls += 1

    def close(self) -> None:
        """Refuses all calls from now on."""
        with self._lock:
            self.closed = True

    def point(self, keys: Sequence[str]) -> tuple[Point | None, int]:
        """Finds the longest recorded conversation that is a prefix of a chat.

        Returns the point where that conversation ends and its number of keys, or None and 0 if no
        recorded conversation matches.
        """
        digests = _digests(keys)
        with self._lock:
            for count in range(len(keys) - 1, 1, -1):
                if digests[count] in self._points:
                    return self._points[digests[count]], count
        return None, 0

    def point_in(self, prompt: tuple[int, ...]) -> Point | None:
        """Returns the end of the longest row that is a proper prefix of a prompt, or None."""
        with self._lock:
            points = [Point(row, len(row.ids)) for row in self.rows if row.talk.tokens]
            shorter = [each for each in points if each.length < len(prompt)]
            found = [each for each in shorter if prompt[: each.length] == each.ids]
            return max(found, key=lambda point: point.length, default=None)

    def begin(
        self,
        prompt: tuple[int, ...],
        point: Point | None,
        sampling: g.Sampling,
        seed: Seed | None,
        *,
        keep: bool = True,
    ) -> Turn:
        """Starts a turn after a prompt. If there is a `point`, the prompt starts with its ids.

        The turn continues the point's row, unless another turn has already continued that row or is
        in progress on it. `seed` is the call's seed. If `seed` is None, or if the session has its
        own distribution, the row's seed is used instead. Raises Refused if the session has ended,
        or if there is no room after the prompt.
        """
        with self._lock:
            self._check()
            row = None if point is None else point.row
            if row is None or point is None or row.turn or point.length < len(row.ids):
                row = SessionRow(Talk(prompt, self._next_seed()))
                self.rows.append(row)
            given = prompt[len(row.ids) :]
            drawn = 0
            if seed is None or self.sampling is not None:
                seed = row.talk.seed
                drawn = sum(row.talk.sampled)
            request = Request(
                prompt=prompt,
                seeds=(seed,),
                drawn=drawn,
                keep=keep,
                borrows=keep and self.sampling is None,
                continues=row.kept,
            )
            sampling = self._sampling(sampling, len(prompt) - len(row.talk.prompt))
            row.turn = Turn(session=self, row=row, given=given, request=request, sampling=sampling)
            row.kept = None
            return row.turn

    def ended(self, turn: Turn, outcome: Row | Exception) -> list[Ticket]:
        """Appends the turn's completion to its row. If the turn failed or the session has ended,
        the completion is discarded. Returns the kept caches of dropped rows.
        """
        row = turn.row
        with self._lock:
            row.turn = None
            if isinstance(outcome, Exception) or self.closed:
                if not row.talk.tokens and row in self.rows:
                    self.rows.remove(row)
                return []
            row.talk.give(turn.given)
            row.talk.sample(outcome)
            row.kept = turn.ticket if turn.request.keep else None
            turn.point = Point(row, len(row.ids))
            self.tokens += len(outcome.tokens)
            return self._forget(row) if self.most_rows else []

    def record(self, turn: Turn, keys: Iterable[Sequence[str]]) -> None:
        """Records a turn's chat, including its reply, in each form that a client may send back to
        continue it.
        """
        with self._lock:
            if turn.point is not None:
                self._points |= dict.fromkeys([_digests(each)[-1] for each in keys], turn.point)

    def _check(self) -> None:
        if self.closed:
            raise Refused("the session has ended")

    def _next_seed(self) -> Seed:
        if self.seed is None:
            return secrets.randbits(32), secrets.randbits(32)
        return derived_seed(self.seed, next(self._row_numbers))

    def _sampling(self, asked: g.Sampling, used: int) -> g.Sampling:
        """Returns the sampling settings for a call. If the session has its own distribution, that
        distribution is used, with the call's stop conditions and limits.

        `used` is the number of tokens after the row's prompt. Raises Refused if the row has reached
        its limit.
        """
        if self.sampling is None:
            return asked
        most = self.sampling.max_new_tokens
        room = most - used
        if room < 1:
            raise Refused(
                f"the row has reached its limit of {most} tokens", "context_length_exceeded", 400
            )
        return attrs.evolve(
            self.sampling,
            max_new_tokens=min(asked.max_new_tokens, room),
            eos_ids=self.sampling.eos_ids | asked.eos_ids,
            stop=(*self.sampling.stop, *asked.stop),
        )

    def _forget(self, last: SessionRow) -> list[Ticket]:
        """Drops the oldest rows, after moving the row `last` to the newest position. Returns the
        kept caches of the dropped rows.
        """
        self.rows.remove(last)
        self.rows.append(last)
        gone = [row for row in self.rows[: -self.most_rows] if row.turn is None]
        if gone:
            self.rows = [row for row in self.rows if row not in gone]
            self._points = {
                key: point for key, point in self._points.items() if point.row not in gone
            }
        return [row.kept for row in gone if row.kept is not None]


def derived_seed(seed: Seed, number: int) -> Seed:
    """Derives an independent seed for each number; number 0 gives the seed itself."""
    if number == 0:
        return seed
    words = struct.pack("<3Q", *seed, number)
    first, second = struct.unpack("<2I", hashlib.blake2b(words, digest_size=8).digest())
    return first, second


def _digests(keys: Sequence[str]) -> list[bytes]:
    """Returns one digest for each prefix of the list: the first 0, 1, 2, … texts."""
    return list(itertools.accumulate(keys, _digest, initial=b""))


def _digest(before: bytes, key: str) -> bytes:
    return hashlib.blake2b(key.encode(), key=before).digest()
