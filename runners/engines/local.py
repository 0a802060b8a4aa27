"""The engine that decodes in this process, with one queue of rows."""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.rollout import Column, Columns, Entry, FindStop, RowQueue, check_entry, decode_queue
from grpo_fn.trees import flat
from runners.engines.engine import (
    Advance,
    Finish,
    Request,
    Row,
    ShouldStop,
    Ticket,
    Token,
    Weights,
    never,
)
from runners.errors import is_out_of_memory, shortage
from runners.tokenization.text import TextDecoder

PAUSE = 0.2  # seconds between two progress reports


@attrs.define(eq=False)
class _Job:
    """A request, and its results so far."""

    ticket: Ticket
    request: Request
    entry: Entry
    queued: bool = False  # whether the request is in the queue
    ended: dict[int, Row] = attrs.field(factory=dict)  # by the row numbers in `entry`
    computed: int = 0  # number of prompt tokens that were computed
    collects: bool = True  # whether `collect` returns its rows or raises its error
    error: BaseException | None = None  # the error that ended the request

    @property
    def is_done(self) -> bool:
        return len(self.ended) == len(self.entry.rows)

    @property
    def computation(self) -> Any:
        """A key that is equal for requests that can share their prompt's computation."""
        request = self.request
        if request.images is not None or request.continues is not None:
            return self.ticket
        return request.prompt, request.drawn, request.keep, self.entry.sampling


@attrs.define(eq=False)
class LocalEngine:
    """An engine that decodes in this process. It starts without weights: call `load` first."""

    decoder: TextDecoder | None = None  # finds stop strings; None means requests must not have any
    decoding: g.Decoding = attrs.field(factory=g.Decoding)
    advance: Advance | None = (
        None  # called several times a second with the number of sampled tokens
    )
    note: Callable[[str], None] = lambda line: None  # called with a message when memory runs out

    version: int = attrs.field(default=0, init=False)  # see `Engine`
    _weights: Weights | None = attrs.field(default=None, init=False)
    _queue: RowQueue | None = attrs.field(default=None, init=False)  # None without weights
    _columns: Columns[None] | None = attrs.field(default=None, init=False)  # of the decoding rows
    _jobs: dict[Ticket, _Job] = attrs.field(factory=dict, init=False)
    # submitted requests that are not in the queue yet
    _waiting: list[_Job] = attrs.field(factory=list, init=False)
    # maps the queue's rows to their requests
    _owners: dict[int, _Job] = attrs.field(factory=dict, init=False)
    # rows that a later request may continue
    _kept: dict[Ticket, int] = attrs.field(factory=dict, init=False)
    _decoding: set[int] = attrs.field(factory=set, init=False)  # rows in the last decoding step
    _cached_stop: Callable[[TextDecoder, tuple[str, ...]], FindStop | None] = attrs.field(
        factory=lambda: functools.lru_cache(64)(TextDecoder.find_stop), init=False
    )
    _tickets: Iterator[int] = attrs.field(factory=itertools.count, init=False)
    _numbers: Iterator[int] = attrs.field(factory=itertools.count, init=False)
    _drawn: int = attrs.field(default=0, init=False)  # tokens sampled since the engine was idle
    _most: int = attrs.field(default=0, init=False)  # maximum number of tokens for these rows
    _reported: float = attrs.field(default=0.0, init=False)
    # the number of rows with which a single request ran out of memory once
    _tried: int = attrs.field(default=0, init=False)

    @property
    def rows(self) -> int:
        """See `Engine`."""
        return self.decoding.max_batch

    def load(self, weights: Weights | None) -> None:
        """See `Engine`."""
        while self._queue is not None and self._step():
            pass
        self._kept.clear()
        self._weights = weights
        self._queue = None
        if weights is not None:
            self._queue = RowQueue(weights.policy)
            self.version = weights.version
            self.decoding = attrs.evolve(self.decoding, max_batch=weights.rows)

    def submit(self, request: Request, sampling: g.Sampling) -> Ticket:
        """See `Engine`."""
        if self._weights is None:
            raise RuntimeError("the engine has no weights: call load first")
        entry = Entry(
            rows=tuple(next(self._numbers) for _ in request.seeds),
            prompt=request.prompt,
            keys=request.seeds,
            sampling=sampling,
            find_stop=self._find_stop(sampling.stop),
            images=request.images,
            drawn=request.drawn,
            keep=request.keep,
            borrows=request.borrows,
        )
        check_entry(self._weights.policy, entry)
        ticket = Ticket(next(self._tickets))
        self._jobs[ticket] = _Job(ticket, request, entry)
        self._waiting.append(self._jobs[ticket])
        return ticket

    def collect(
        self, least: int = 1, *, should_stop: ShouldStop = never
    ) -> dict[Ticket, tuple[Row, ...]]:
        """See `Engine`."""
        done = self._done()
        while len(done) < max(least, 1) and not should_stop() and self._step():
            done |= self._done()
            if not least:
                break
        return done

    def tokens(self, ticket: Ticket, *, should_stop: ShouldStop = never) -> Iterator[Token]:
        """See `Engine`."""
        job = self._jobs[ticket]
        job.collects = False
        sent = 0
        try:
            while True:
                ended = job.entry.rows[0] in job.ended
                drawn = self.peek(ticket, sent)
                sent += len(drawn)
                yield from drawn
                if ended:
                    break
                if should_stop():
                    self._end(job)
                    break
                if not self._step():
                    break
        finally:
            if not job.is_done:
                self.cancel(ticket)
            self._jobs.pop(ticket, None)

    def peek(self, ticket: Ticket, start: int = 0) -> list[Token]:
        """See `Engine`."""
        job = self._jobs[ticket]
        if job.error is not None:
            raise job.error
        number = job.entry.rows[0]
        row = job.ended.get(number)
        tokens, logp = (row.tokens, row.logp) if row else self._so_far(job, number)
        known = self._queue.rows.get(number) if self._queue and job.queued else None
        computed = job.computed if known is None else known.done.prompt_computed
        return [Token(tokens[n], logp[n], computed) for n in range(start, len(tokens))]

    def cancel(self, ticket: Ticket) -> None:
        """See `Engine`."""
        kept = self._kept.pop(ticket, None)
        if kept is not None and self._queue is not None:
            self._queue.cancel([kept])
        job = self._jobs.get(ticket)
        if job is None or job.is_done:
            return
        if job.error is not None:
            del self._jobs[ticket]
            return
        if job in self._waiting:
            self._waiting.remove(job)
            if job.request.continues is not None:
                self.cancel(job.request.continues)
        for number in job.entry.rows:
            if number in job.ended:
                continue
            tokens, logp = self._so_far(job, number)
            job.ended[number] = self._row(job, tokens, logp, None, "cancelled")
            if self._queue is not None and job.queued:
                self._queue.cancel([number])
                del self._owners[number]

    def _end(self, job: _Job) -> None:
        """Ends a decoding request at its current token. The caches are kept if the request may be
        continued.
        """
        rows = job.entry.rows
        draws = self._decoding.issuperset(rows) or bool(self._so_far(job, rows[0])[0])
        if self._queue is None or not (job.request.keep and draws):
            return
        self._queue.end(rows)
        while job.queued and not job.is_done and self._step():
            pass

    def _so_far(self, job: _Job, row: int) -> tuple[list[int], list[float]]:
        if self._queue is None or not job.queued:
            return [], []
        return self._queue.so_far(row)

    def _done(self) -> dict[Ticket, tuple[Row, ...]]:
        """Returns each completed request once. Raises the error of failed requests."""
        errors = []
        for job in self._jobs.values():
            if job.collects and job.error is not None:
                job.collects = False
                errors.append(job.error)
        if errors:
            raise errors[0]
        done = {ticket: job for ticket, job in self._jobs.items() if job.is_done and job.collects}
        for ticket in done:
            del self._jobs[ticket]
        return {
            ticket: tuple(job.ended[number] for number in job.entry.rows)
            for ticket, job in done.items()
        }

    def _step(self) -> bool:
        """Decodes for a moment. Returns whether there was a row to decode."""
        weights, queue = self._weights, self._queue
        if weights is None or queue is None:
            raise RuntimeError("the engine has no weights: call load first")
        self._enqueue(queue)
        if not queue.busy:
            self._close()
            return False
        reason = None
        try:
            if self._columns is None:
                self._columns = decode_queue(weights.policy, weights.params, queue, self.decoding)
            column = next(self._columns, None)
            self._decoding = set() if column is None else set(column.rows)
            self._report(column)
        except BaseException as error:  # includes signals: the decoding rows are lost
            self._columns = None
            if not is_out_of_memory(error):
                self._take(queue)
                self._fail(weights, queue, error)
                if not isinstance(error, Exception):
                    raise
                return True
            reason = str(error)
        self._take(queue)
        if reason is not None:
            mx.clear_cache()  # outside the handler, the failed rows' arrays have been freed
            self._again(weights, queue, reason)
        elif not queue.busy:
            self._close()
        return True

    def _close(self) -> None:
        """Stops decoding, and restores the policy module's own parameters."""
        if self._columns is not None:
            self._columns.close()
        self._columns = None
        self._drawn = 0
        self._most = 0
        self._reported = 0.0

    def _take(self, queue: RowQueue) -> None:
        """Assigns finished rows to their requests."""
        for number, ended in queue.take().items():
            job = self._owners.pop(number)
            job.computed = ended.prompt_computed
            job.ended[number] = self._row(
                job, ended.tokens, ended.logp, ended.entropy, "stop" if ended.finished else "length"
            )
            if job.request.keep:
                self._kept[job.ticket] = number

    def _row(
        self,
        job: _Job,
        tokens: list[int],
        logp: list[float],
        entropy: list[float] | None,
        finish: Finish,
    ) -> Row:
        zeros = (0.0,) * len(tokens) if job.entry.sampling.with_entropy else None
        drawn = zeros if entropy is None else tuple(entropy)
        return Row(tuple(tokens), tuple(logp), finish, ((self.version, len(tokens)),), drawn)

    def _enqueue(self, queue: RowQueue) -> None:
        """Adds submitted requests to the queue. Requests with the same prompt share its
        computation.
        """
        for _, alike in itertools.groupby(self._waiting, lambda job: job.computation):
            jobs = list(alike)
            for job in jobs:
                job.queued = True
                self._owners |= dict.fromkeys(job.entry.rows, job)
            first = jobs[0]
            rows = flat(job.entry.rows for job in jobs)
            self._most += len(rows) * first.entry.sampling.max_new_tokens
            continues = first.request.continues
            queue.add(
                attrs.evolve(
                    first.entry,
                    rows=tuple(rows),
                    keys=tuple(flat(job.entry.keys for job in jobs)),
                    continues=None if continues is None else self._kept.pop(continues, None),
                )
            )
        self._waiting = []

    def _find_stop(self, stop: tuple[str, ...]) -> FindStop | None:
        if not stop:
            return None
        if self.decoder is None:
            raise ValueError(
                f"stop = {stop}: this engine has no tokenizer, which is required to find stop "
                f"strings"
            )
        return self._cached_stop(self.decoder, stop)

    def _again(self, weights: Weights, queue: RowQueue, reason: str) -> None:
        """Restarts the rows in progress after memory ran out, with half as many rows at a time.

        At least one request's rows are decoded together. This minimum is tried twice, because
        cached memory may be fragmented.
        """
        left = self._under_way()
        largest = max(len(job.entry.rows) for job in left)
        rows = sum(len(job.entry.rows) for job in left)
        before = min(self.decoding.max_batch or rows, rows)
        if before <= largest and self._tried == before:
            self._fail(weights, queue, MemoryError(reason))
            return
        self._tried = before if before <= largest else 0
        together = largest * max(before // largest // 2, 1)
        self._restart(weights, left)
        self.decoding = attrs.evolve(self.decoding, max_batch=together)
        self.note(f"{shortage(reason)}; sampling again, {together:,} rows at a time")

    def _under_way(self) -> list[_Job]:
        return [job for job in self._jobs.values() if job.queued and not job.is_done]

    def _fail(self, weights: Weights, queue: RowQueue, error: BaseException) -> None:
        """Ends the started requests with this error. The other requests in the queue are
        submitted again.
        """
        left = self._under_way()
        begun = {self._owners[number] for number, row in queue.rows.items() if row.has_begun}
        failed = [job for job in left if job in begun] or left
        for job in failed:
            job.error = error
        self._restart(weights, [job for job in left if job not in failed])

    def _restart(self, weights: Weights, jobs: list[_Job]) -> None:
        """Submits these requests again, without their previous results."""
        self._queue = RowQueue(weights.policy)
        self._kept.clear()
        self._owners.clear()
        for job in self._jobs.values():
            job.queued = False
        for job in jobs:
            job.ended.clear()
        self._waiting = jobs + self._waiting

    def _report(self, column: Column | None) -> None:
        """Reports the number of sampled tokens and their maximum, several times a second."""
        self._drawn += 0 if column is None else len(column.rows)
        if self.advance is None or time.perf_counter() < self._reported + PAUSE:
            return
        self.advance("tokens", min(self._drawn, self._most), self._most)
        self._reported = time.perf_counter()
