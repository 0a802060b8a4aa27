"""Shares one engine among several clients: any thread may submit turns, and the thread that owns
the engine decodes them.
"""

import itertools
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import attrs

import grpo_fn as g
from runners.engines.engine import Engine, Row, Seed, Ticket, Weights
from runners.serve.chat import ServedModel
from runners.serve.sessions import Refused, Session, Turn

WAIT = 0.05  # seconds between two checks of `until` while no turn decodes


@attrs.frozen(kw_only=True)
class Limits:
    """Limits on what clients may use."""

    turns: int = 256  # completions that are waiting or being decoded
    connections: int = 1024
    body: int = 8_000_000  # maximum size of a request in bytes
    seconds: float = 3600.0  # maximum duration of a call
    idle: float = 30.0  # seconds for which a client may send and read nothing
    rows: int = 64  # rows that a session keeps for later calls, if it does not record all rows


News = list[Callable[[], None]]


class Service:
    """Decodes the turns of all clients with one engine."""

    def __init__(self, engine: Engine, model: ServedModel, limits: Limits | None = None) -> None:
        """Starts without sessions. The thread that calls `run` must own the engine."""
        self.engine = engine
        self.model = model
        self.limits = limits or Limits()
        self.draining = False  # whether new turns are refused
        # Delivers updates to the turns' listeners, directly or through another thread.
        self.deliver: Callable[[News], object] = hand_out
        self._sessions: dict[str, Session] = {}
        self._numbers: Iterator[int] = itertools.count()
        self._room = threading.BoundedSemaphore(self.limits.turns)
        self._inbox: queue.SimpleQueue[Turn | None] = queue.SimpleQueue()
        self._waiting: list[Turn] = []
        self._turns: dict[Ticket, Turn] = {}  # turns that the engine is decoding or has queued
        self._news: News = []  # updates that are not delivered yet

    # The next methods may be called from any thread.

    def session(self, key: str) -> Session | None:
        """Returns the open session with this key, or None."""
        return self._sessions.get(key)

    @property
    def idle(self) -> bool:
        """Whether no turn is waiting or being decoded."""
        return not (self._turns or self._waiting) and self._inbox.empty()

    def submit(self, turns: Sequence[Turn]) -> None:
        """Queues all turns, or none: raises Refused if the queue is full or the service is shutting
        down.
        """
        taken = 0
        while taken < len(turns) and not self.draining and self._room.acquire(blocking=False):
            taken += 1
        if taken == len(turns):
            for turn in turns:
                self._inbox.put(turn)
            return
        for turn in turns:
            turn.session.ended(turn, Refused(""))
        if taken:
            self._room.release(taken)
        if self.draining:
            raise Refused("the server is shutting down", "draining", 503)
        raise Refused("too many completions are in progress", "full", 429)

    def cancel(self, turn: Turn) -> None:
        """Cancels a turn: its listener receives Refused, unless the turn has just ended."""
        turn.cancelled = True
        self._inbox.put(turn)

    def wake(self) -> None:
        """Makes `run` check `until` immediately."""
        self._inbox.put(None)

    # The next methods belong to the thread that owns the engine.

    def open(
        self,
        key: str = "",
        *,
        sampling: g.Sampling | None = None,
        seed: Seed | None = None,
        most_calls: int = 0,
        most_tokens: int = 0,
        records: bool = True,
    ) -> Session:
        """Opens a session for calls with this key (see `Session`). An empty key is replaced by a
        random one.

        If `records` is True, the session keeps all rows, for training. Otherwise it keeps only the
        most recent rows, for calls that continue them.
        """
        session = Session(
            key=key or secrets.token_urlsafe(24),
            number=next(self._numbers),
            sampling=sampling,
            seed=seed,
            most_calls=most_calls,
            most_tokens=most_tokens,
            most_rows=0 if records else self.limits.rows,
        )
        self._sessions[session.key] = session
        return session

    def close(self, session: Session) -> None:
        """Closes a session: later calls are refused, and calls in progress are cancelled and
        discarded, so `session.rows` no longer changes.
        """
        self._sessions.pop(session.key, None)
        session.close()
        self._accept(None)
        for turn in [*self._turns.values(), *self._waiting]:
            if turn.session is session:
                self.cancel(turn)
        for row in session.rows:
            if row.kept is not None:
                self.engine.cancel(row.kept)

    def run(self, until: Callable[[], bool], *, together: Callable[[], int] | None = None) -> None:
        """Decodes the clients' turns until `until` returns True. Unfinished turns wait for the next
        call of `run`.

        If `together` is None, turns start immediately. Otherwise, turns start only when no row is
        decoding and at least `together()` turns are waiting. They then start in the order of their
        sessions, so results are bit-identical across runs.

        If decoding fails, the turns in progress end with the error.
        """
        while not until():
            self._accept(None if self._turns else WAIT)
            self._begin(together)
            if self._turns:
                self._collect()
            elif self._news:
                self._tell()

    def load(self, weights: Weights | None, *, interrupt: bool = False) -> None:
        """Switches to these weights for sampling.

        Turns in progress finish with their old weights. If `interrupt` is True, they continue with
        the new weights instead, and their rows record which weights sampled each token. Turns with
        stop strings always finish with the old weights, because a stop string may start before the
        switch and end after it.
        """
        self._accept(None)
        for ticket, turn in list(self._turns.items()) if interrupt else ():
            if not turn.sampling.stop:
                self.engine.cancel(ticket)
        while self._turns:
            self._collect()
        self.engine.load(weights)

    def _accept(self, wait: float | None) -> None:
        """Receives the clients' turns, and waits up to `wait` seconds for the first one. None means
        it does not wait.
        """
        with suppress(queue.Empty):
            turn = self._inbox.get(block=wait is not None, timeout=wait)
            while True:
                if turn is not None:
                    self._take(turn)
                turn = self._inbox.get_nowait()

    def _take(self, turn: Turn) -> None:
        """Queues a new turn, or ends a cancelled one."""
        ends = turn.cancelled or turn.session.closed
        if turn.ticket is not None and ends:
            self.engine.cancel(turn.ticket)
        elif ends and not turn.over:
            self._waiting = [each for each in self._waiting if each is not turn]
            self._end(turn, Refused("the call was cancelled"))
        elif not ends:
            self._waiting.append(turn)

    def _begin(self, together: Callable[[], int] | None) -> None:
        """Submits waiting turns to the engine."""
        if together is not None:
            if self._turns or len(self._waiting) < together():
                return
            self._waiting.sort(key=lambda turn: turn.session.number)
        for turn in self._waiting:
            try:
                turn.ticket = self.engine.submit(turn.request, turn.sampling)
                self._turns[turn.ticket] = turn
            except ValueError as error:
                self._end(turn, error)
        self._waiting = []

    def _collect(self) -> None:
        """Decodes for a moment, and informs the clients."""
        fault: Exception | None = None
        try:
            for ticket, (row,) in self.engine.collect(0).items():
                self._ended(self._turns.pop(ticket), row)
        except Exception as error:  # `peek` raises the error again for each failed turn
            fault = error
        left = list(self._turns.items())
        for ticket, turn in left:
            if fault is not None or turn.hear is not None:
                self._look(ticket, turn)
        if fault is not None and len(left) == len(self._turns):
            raise fault
        self._tell()

    def _look(self, ticket: Ticket, turn: Turn) -> None:
        """Reads a turn's new tokens, or ends the turn with the engine's error."""
        try:
            tokens = self.engine.peek(ticket, turn.sent)
        except Exception as error:
            self.engine.cancel(ticket)
            self._end(self._turns.pop(ticket), error)
        else:
            self._hear(turn, [token.id for token in tokens], [token.logp for token in tokens])

    def _ended(self, turn: Turn, row: Row) -> None:
        """Handles a turn that has ended, or that `load` interrupted."""
        self._hear(turn, row.tokens[turn.sent :], row.logp[turn.sent :])
        whole = row if turn.begun is None else joined(turn.begun, row)
        if row.finish != "cancelled":
            self._end(turn, whole)
        elif turn.cancelled or turn.session.closed:
            self._end(turn, Refused("the call was cancelled"))
        else:  # `load` interrupted the turn
            turn.begun = whole
            turn.sent = 0
            turn.ticket = None
            turn.request = attrs.evolve(
                turn.request,
                prompt=(*turn.request.prompt, *row.tokens),
                drawn=turn.request.drawn + len(row.tokens),
                continues=None,
            )
            room = turn.sampling.max_new_tokens - len(row.tokens)
            turn.sampling = attrs.evolve(turn.sampling, max_new_tokens=room)
            self._waiting.append(turn)

    def _hear(self, turn: Turn, tokens: Sequence[int], logp: Sequence[float]) -> None:
        if tokens and turn.hear is not None:
            turn.sent += len(tokens)
            self._news.append(partial(turn.hear, tokens, logp))

    def _end(self, turn: Turn, outcome: Row | Exception) -> None:
        turn.over = True
        for ticket in turn.session.ended(turn, outcome):
            self.engine.cancel(ticket)
        turn.ticket = None
        self._room.release()
        self._news.append(partial(turn.end, outcome))

    def _tell(self) -> None:
        """Delivers the updates."""
        news = self._news
        self._news = []
        self.deliver(news)


def joined(before: Row, after: Row) -> Row:
    """Joins the two parts of a completion, sampled before and after the weights changed."""
    return Row(
        before.tokens + after.tokens,
        before.logp + after.logp,
        after.finish,
        before.versions + after.versions,
        None if before.entropy is None else before.entropy + (after.entropy or ()),
    )


def hand_out(news: News) -> None:
    """Calls all listeners."""
    for tell in news:
        tell()
