"""A queue of rows to decode, which contains waiting entries, decoding rows, their tokens, and kept
caches.

    add ─→ entries that wait ─due→ rows that decode ─ended→ take
                  ↑  continues              │ keep
                  └────── kept caches ←─────┘

The queue is kept on the host and computes nothing. The queue tells `decode_queue` which rows start,
and `decode_queue` reports finished rows to it.
"""

import bisect
import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import attrs
import mlx.core as mx

from grpo_fn.checks import check_positions, check_token_ids
from grpo_fn.completions import Ended
from grpo_fn.images import PromptImages
from grpo_fn.policy.caches.kv_caches import Caches
from grpo_fn.policy.image_forward import takes_images
from grpo_fn.policy.policy import Policy
from grpo_fn.rollout.decode_step import RowBatch, caches_of_row, shortened
from grpo_fn.rollout.sampling import FindStop, Sampling
from grpo_fn.trees import arrays_of

LEAST = 32  # fewest shared tokens for which kept caches are copied


@attrs.frozen(eq=False, kw_only=True)
class Entry:
    """Rows that start after one prompt.

    Attributes:
        rows: the rows' numbers, unique in the queue's lifetime.
        prompt: token ids.
        keys: the PRNG key of each row, as returned by `completion_keys`, as plain numbers.
        sampling: the distribution, and how a row ends; its `num_generations` and
            `first_generation` are not used.
        find_stop: finds `sampling.stop` in tokens; None means that there is nothing to find.
        images: the images of the prompt, or None.
        drawn: number of tokens already sampled with these keys: the n-th token uses the (`drawn` +
            n)-th bits.
        keep: keep the rows' caches when they end, for an entry that continues one of them.
        borrows: if a kept row starts with the same tokens as the prompt, copy its caches for these
            tokens.
        continues: a kept row that starts with the same tokens as the prompt; its caches are used
            for these tokens. The first entry that continues a row consumes its caches.
    """

    rows: tuple[int, ...]
    prompt: Sequence[int]
    keys: tuple[tuple[int, int], ...]
    sampling: Sampling
    find_stop: FindStop | None = None
    images: PromptImages | None = None
    drawn: int = 0
    keep: bool = False
    borrows: bool = False
    continues: int | None = None

    @property
    def keyed_rows(self) -> Iterable[tuple[int, tuple[int, int]]]:
        """Pairs of a row's number and its key."""
        return zip(self.rows, self.keys, strict=True)


@attrs.define(eq=False)
class Row:
    """A waiting or decoding row."""

    entry: Entry
    key: tuple[int, int]
    done: Ended  # the row's state so far

    @property
    def has_begun(self) -> bool:
        """Whether the row is decoding or its prompt is being computed."""
        return self.done.prompt_computed > 0


@attrs.frozen(eq=False)
class Start:
    """An entry whose rows start now."""

    entry: Entry
    rows: list[int]  # without cancelled rows
    caches: Caches | None  # plain caches of one row; None: nothing was kept
    held: int  # prompt tokens in the caches


class RowQueue:
    """Entries in the order in which they were added, and their rows until `take` returns them."""

    def __init__(self, policy: Policy) -> None:
        """Creates an empty queue; `policy` defines the valid token ids, positions and images."""
        self._policy = policy
        self.rows: dict[int, Row] = {}  # waiting or decoding rows
        self._entries: list[Entry] = []  # not yet in a round
        self._rounds: deque[list[Entry]] = deque()  # a round begins when no row is decoding
        self._ended: dict[int, Ended] = {}
        self._kept: dict[int, tuple[list[int], Caches]] = {}  # the tokens in the caches

    @property
    def busy(self) -> bool:
        """Whether rows wait or decode."""
        return bool(self.rows)

    @property
    def waiting(self) -> bool:
        """Whether any waiting entry could start."""
        return bool(self._entries or self._rounds)

    def add(self, entry: Entry) -> None:
        """Adds an entry at the end of the queue.

        Raises:
            ValueError: the prompt is empty or has a token id outside the model's embedding, the
                number of keys differs from the number of rows, a row's number is in use, nothing
                finds `sampling.stop`, or images do not fit the prompt, the policy's module
                (`use_multimodal_rope`) or `keep`.
            TooLong: prompt and `max_new_tokens` need more positions than the model has learned.
        """
        check_entry(self._policy, entry)
        used = (self.rows.keys() | self._ended.keys() | self._kept.keys()) & set(entry.rows)
        if used or len(set(entry.rows)) != len(entry.rows):
            raise ValueError(
                f"rows {entry.rows}: expected new numbers, found {sorted(used)} in use"
            )
        self._entries.append(entry)
        for row, key in entry.keyed_rows:
            self.rows[row] = Row(entry, key, nothing_yet(entry.sampling))

    def cancel(self, rows: Iterable[int]) -> None:
        """Removes waiting rows and, at the next check, decoding rows.

        Also frees the kept caches of these rows, and of the rows that they would have continued.
        """
        for row in rows:
            continued = self.rows[row].entry.continues if row in self.rows else None
            if continued is not None:
                self._kept.pop(continued, None)
            for known in (self.rows, self._ended, self._kept):
                known.pop(row, None)

    def end(self, rows: Iterable[int]) -> None:
        """Ends decoding rows at the next check, after at most one more token, as if they had
        reached their length limit.
        """
        for number in rows:
            row = self.rows[number]
            limit = min(row.entry.sampling.max_new_tokens, len(row.done.tokens) + 1)
            sampling = attrs.evolve(row.entry.sampling, max_new_tokens=limit)
            row.entry = attrs.evolve(row.entry, sampling=sampling)

    def take(self) -> dict[int, Ended]:
        """Removes and returns the rows that finished since the last call."""
        ended = self._ended
        self._ended = {}
        return ended

    def so_far(self, row: int) -> tuple[list[int], list[float]]:
        """Returns a row's tokens and log-probs at the last check, if the row was not taken."""
        done = self._ended.get(row) or self.rows[row].done
        return [*done.tokens], [*done.logp]

    def widest(self, most: int) -> int:
        """Returns the maximum number of rows in a round, given the waiting entries; for `most`, see
        `due`.
        """
        rounds = [*self._rounds, *_rounds(self._entries, most)]
        return max((sum(len(entry.rows) for entry in each) for each in rounds), default=1)

    def due(self, decoding: int, most: int) -> list[Start]:
        """Returns the entries that start now, given the number of decoding rows.

        If nothing is decoding, all waiting entries are split into rounds. Later entries join the
        decoding rows once every round has started. Entries that continue kept rows start first,
        because their caches use memory.

        Args:
            decoding: number of decoding rows.
            most: the maximum number of rows decoded together; 0 means no limit.
        """
        self._entries = [entry for entry in self._entries if self._alive(entry)]
        if not decoding and not self._rounds:
            self._rounds.extend(_rounds(self._entries, most))
            self._entries = []
        begun = self._fitting(decoding, most)
        if not (decoding or begun):
            return self._starts(self._rounds.popleft()) if self._rounds else []
        self._entries = [entry for entry in self._entries if entry not in begun]
        return self._starts(begun)

    def rows_due(self, decoding: int, most: int) -> int:
        """Returns the number of waiting rows that could start now; see `due`."""
        return sum(len(entry.rows) for entry in self._fitting(decoding, most))

    def _fitting(self, decoding: int, most: int) -> list[Entry]:
        entries = self._entries
        if self._rounds:
            entries = [entry for entry in entries if entry.continues in self._kept]
        return _first(entries, (most or math.inf) - decoding)

    def ended(self, batch: RowBatch, place: int, length: int, finished: bool) -> None:
        """Records that a row of a batch has ended after this many tokens.

        Every token that the row has sampled, except the last one, has been fed to the batch's
        steps.
        """
        number = batch.rows[place]
        row = self.rows.pop(number)
        fed = len(row.done.tokens) - 1
        row.done = attrs.evolve(row.done, finished=finished)
        for values in (row.done.tokens, row.done.logp, row.done.entropy or []):
            del values[length:]
        if self._finish(number, row):
            held = max(length - 1, 0)
            steps: Any = batch.steps  # `CacheSteps`, because its rows are kept
            caches = caches_of_row(steps.caches, place, fed - held)
            if caches is not None:
                # Evaluated now, because lazy caches would keep the batch's buffers.
                mx.eval(list(arrays_of([cache.state for cache in caches])))
                self._kept[number] = [*row.entry.prompt, *row.done.tokens[:held]], caches

    def completions(self, rows: int) -> list[Ended]:
        """Returns the rows 0, 1, … in their current state; finished rows are taken."""
        ended = self.take()
        return [ended.get(row) or self.rows[row].done for row in range(rows)]

    def _finish(self, number: int, row: Row) -> bool:
        """Stores a row that has ended; returns whether its caches are kept."""
        self._ended[number] = row.done
        return row.entry.keep

    def _alive(self, entry: Entry) -> list[int]:
        return [row for row in entry.rows if row in self.rows]

    def _starts(self, entries: Iterable[Entry]) -> list[Start]:
        starts = []
        for entry in entries:
            if rows := self._alive(entry):
                caches, held = self._resumed(entry)
                starts.append(Start(entry, rows, caches, held))
                for row in rows:
                    self.rows[row].done = attrs.evolve(
                        self.rows[row].done, prompt_computed=len(entry.prompt) - held
                    )
        return starts

    def _resumed(self, entry: Entry) -> tuple[Caches | None, int]:
        """Returns the kept caches that the entry continues, truncated to the tokens that they share
        with its prompt, and the number of these tokens.

        The prompt's last token is not included.
        """
        number = entry.continues
        borrows = number is None or number not in self._kept
        if borrows:
            number = self._alike(entry) if entry.borrows else None
        if number is None:
            return None, 0
        tokens, caches = self._kept[number] if borrows else self._kept.pop(number)
        shared = shared_length(tokens, entry.prompt[:-1])
        if not shared:
            return None, 0
        surplus = len(tokens) - shared
        cut = caches_of_row(caches, 0, surplus) if borrows else shortened(caches, surplus)
        return cut, 0 if cut is None else shared

    def _alike(self, entry: Entry) -> int | None:
        """Returns the kept row that shares the most tokens with the entry's prompt, if a copy pays
        off.
        """
        head = list(entry.prompt[:LEAST])
        alike = {
            number: shared_length(tokens, entry.prompt[:-1])
            for number, (tokens, _) in self._kept.items()
            if tokens[:LEAST] == head
        }
        return max(alike, key=lambda number: alike[number], default=None)


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the length of the longest common prefix."""
    first = list(one)
    second = list(other)
    places = range(min(len(first), len(second)))
    return bisect.bisect_left(places, True, key=lambda n: first[: n + 1] != second[: n + 1])


def nothing_yet(sampling: Sampling) -> Ended:
    """Returns a row without tokens."""
    return Ended(tokens=[], logp=[], entropy=[] if sampling.with_entropy else None)


def check_entry(policy: Policy, entry: Entry) -> None:
    """Raises ValueError unless the model can complete the entry's prompt; see `RowQueue.add`."""
    check_prompts(policy, [entry.prompt], entry.sampling.max_new_tokens)
    check_images(policy, entry)
    if entry.sampling.stop and entry.find_stop is None:
        raise ValueError(f"find_stop is None: expected a function that finds {entry.sampling.stop}")
    if not entry.rows or len(entry.keys) != len(entry.rows):
        raise ValueError(
            f"expected a key for each row, found {len(entry.keys)} for rows {entry.rows}"
        )


def check_prompts(policy: Policy, prompts: Sequence[Sequence[int]], most: int) -> None:
    """Raises ValueError if the model cannot continue one of the prompts by `most` tokens."""
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError(
            "expected at least one prompt, and no empty one, found lengths "
            f"{[len(prompt) for prompt in prompts]}"
        )
    check_token_ids(prompts, policy.vocabulary)
    longest = max(map(len, prompts))
    check_positions(
        f"a prompt of {longest} tokens and max_new_tokens = {most}",
        longest + most - 1,
        policy.positions,
    )


def check_images(policy: Policy, entry: Entry) -> None:
    """Raises ValueError if the model does not accept the entry's images."""
    if entry.images is None:
        return
    if entry.keep:
        raise ValueError("images cannot be combined with replies or kept rows")
    if not (policy.shares_prefix and takes_images(policy.module)):
        raise ValueError(
            "this policy does not accept images: expected a module with `use_multimodal_rope`, "
            "whose completions can be decoded with one copy of their prompt"
        )


def _rounds(entries: Sequence[Entry], most: int) -> list[list[Entry]]:
    """Splits entries into rounds of one entry or more and at most `most` rows; 0 means no limit."""
    room = most or math.inf
    left = list(entries)
    if sum(len(entry.rows) for entry in left) > room:
        left.sort(key=lambda entry: len(entry.prompt))  # similar lengths together, for less padding
    rounds = []
    while left:
        rounds.append(_first(left, room) or left[:1])
        left = left[len(rounds[-1]) :]
    return rounds


def _first(entries: Sequence[Entry], room: float) -> list[Entry]:
    """Returns the first entries, as many as fit."""
    totals = accumulate(len(entry.rows) for entry in entries)
    return [entry for entry, total in zip(entries, totals, strict=True) if total <= room]
