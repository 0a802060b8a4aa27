"""Conversations in the decoding loop: rows that wait for replies, rows that continue, and all tokens so far.

    sample a turn ─its end→ park the row ─reply→ extend it by the given tokens ─→ sample the next turn

Replies come from outside, through `Replies`. A row depends only on its key, its prompt and its replies, to
the rounding of batched products.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs
import mlx.core as mx

from grpo_fn.checks import check_token_ids
from grpo_fn.completions import Rollout
from grpo_fn.rollout.decode_step import Extender, Prefill, RowBatch
from grpo_fn.rollout.sampling import seen_tokens
from grpo_fn.trees import on_host


class Replies(Protocol):
    """The decoding loop's interface to the answers of turns. Rows are those of the `Rollout`."""

    def begin(self, row: int, tokens: Sequence[int]) -> bool:
        """A turn has ended, by an end token or a stop; `tokens` are the turn's, its end included.

        Returns whether there may be a reply; False ends the conversation. It must not wait.
        """
        ...

    def collect(self, least: int) -> Mapping[int, Sequence[int] | None]:
        """The replies since the last call; waits for those of at least `least` rows.

        A reply is the token ids that follow the turn's last token, exactly; None ends the conversation.
        """
        ...


class Respond:
    """`Replies` from a plain function, which is called row by row when its reply is collected."""

    def __init__(self, function: Callable[[int, Sequence[int]], Sequence[int] | None]) -> None:
        """`function(row, tokens)` returns the tokens that follow, or None at the conversation's end."""
        self._function = function
        self._begun: dict[int, Sequence[int]] = {}

    def begin(self, row: int, tokens: Sequence[int]) -> bool:
        self._begun[row] = tokens
        return True

    def collect(self, least: int) -> Mapping[int, Sequence[int] | None]:
        begun, self._begun = self._begun, {}
        return {row: self._function(row, tokens) for row, tokens in begun.items()}


@attrs.define(eq=False)
class _Conversation:
    """One conversation so far, without its prompt."""

    tokens: list[int] = attrs.field(factory=list)
    sampled: list[bool] = attrs.field(factory=list)
    drawn: dict[str, list[float]] = attrs.field(factory=dict)  # "logp" and, if asked for, "entropy"
    turn: int = 0  # where its last turn begins
    finished: bool = False

    @property
    def last_turn(self) -> list[int]:
        """The tokens of the present turn, or of the one that has just ended."""
        return self.tokens[self.turn :]

    def give(self, tokens: Sequence[int]) -> None:
        """Append tokens that were not sampled; the next turn begins after them."""
        self.tokens += tokens
        self.sampled += [False] * len(tokens)
        for values in self.drawn.values():
            values += [0.0] * len(tokens)
        self.turn = len(self.tokens)


class Transcript:
    """All rows' tokens so far, on the host."""

    def __init__(self, rows: int, with_entropy: bool) -> None:
        """No tokens yet."""
        names = ("logp", "entropy") if with_entropy else ("logp",)
        self.rows = [_Conversation(drawn={name: [] for name in names}) for _ in range(rows)]

    def store(self, batch: RowBatch) -> None:
        """Moves here what the batch has drawn since the last check, of rows that have not ended."""
        columns = {name: on_host(mx.stack([n[name] for n in batch.drawn], axis=1)) for name in batch.drawn[0]}
        batch.drawn = []
        for place, row in enumerate(batch.rows):
            if row in batch.alive:
                talk = self.rows[row]
                talk.tokens += columns["tokens"][place]
                talk.sampled += [True] * len(columns["tokens"][place])
                for name, values in talk.drawn.items():
                    values += columns[name][place]

    def end(self, row: int, length: int, finished: bool) -> None:
        """The row's turn has ended after so many tokens: what comes after them is forgotten."""
        talk = self.rows[row]
        for values in (talk.tokens, talk.sampled, *talk.drawn.values()):
            del values[talk.turn + length :]
        talk.finished = finished

    def rollout(self, prompts: Sequence[Sequence[int]], num_generations: int) -> Rollout:
        """The rollout, as wide as its longest row, at least 1; zeros after the end of each."""
        lengths = [len(talk.tokens) for talk in self.rows]
        width = max(1, *lengths)

        def array(columns: Sequence[Sequence[float]], dtype: mx.Dtype) -> mx.array:
            return mx.array([[*row, *[0] * (width - len(row))] for row in columns], dtype)

        names = self.rows[0].drawn
        drawn = {name: array([talk.drawn[name] for talk in self.rows], mx.float32) for name in names}
        return Rollout(
            prompts=tuple(tuple(prompt) for prompt in prompts),
            num_generations=num_generations,
            tokens_bt=array([talk.tokens for talk in self.rows], mx.int32),
            lengths_b=mx.array(lengths, mx.int32),
            logp_bt=drawn["logp"],
            finished_b=mx.array([talk.finished for talk in self.rows]),
            entropy_bt=drawn.get("entropy"),
            sampled_bt=array([talk.sampled for talk in self.rows], mx.bool_),
        )


@attrs.define(eq=False)
class Turns:
    """The turns of one part of the rows, for the decoding loop."""

    replies: Replies
    extender: Extender
    transcript: Transcript
    prompts: Mapping[int, Sequence[int]]  # of each row of the part, by its number, in the order of the bits
    bits_nbw: mx.array  # random bits of all draws
    limit: int  # the most tokens of a conversation, including given ones
    together: bool  # turns begin when no row decodes any more; else as soon as replies are there
    vocabulary: int | None  # given token ids are below it; None: any
    penalizes: bool  # whether the sampler needs the tokens that a row has had
    waiting: set[int] = attrs.field(init=False, factory=set)  # rows whose reply is still to come

    def room(self, row: int) -> int:
        """Tokens that the row's current turn may have."""
        return self.limit - self.transcript.rows[row].turn

    def ended(self, batch: RowBatch, ends: Sequence[tuple[int, int, int]]) -> None:
        """Turns of a batch have ended: (place, row, tokens of the turn) each. Those that go on are parked."""
        going = []
        for place, row, length in ends:
            talk = self.transcript.rows[row]
            if length and len(talk.tokens) < self.limit and self.replies.begin(row, talk.last_turn):
                going.append((place, row, length))
        if going:
            places, rows, lengths = (list(column) for column in zip(*going, strict=True))
            # A turn's last token was drawn, but not fed.
            fed = [length - 1 for length in lengths]
            self.extender.park(batch.steps, places, rows, fed, batch.count - 1)
            self.waiting.update(rows)

    def resumed(self, decoding: bool) -> Prefill[list[RowBatch]]:
        """The rows with new replies, as batches that are ready for the next draw.

        Raises ValueError if replies are of other rows than asked for, or token ids are out of range.
        """
        if not self.waiting or (self.together and decoding):
            return []
        least = len(self.waiting) if self.together else 0 if decoding else 1
        found = self.replies.collect(least)
        if not found.keys() <= self.waiting or len(found) < least:
            raise ValueError(
                f"replies came of rows {sorted(found)}: expected at least {least} of the rows "
                f"{sorted(self.waiting)}"
            )
        self.waiting -= found.keys()
        given: dict[int, list[int]] = {}
        for row in sorted(found):
            tokens = found[row]
            talk = self.transcript.rows[row]
            if tokens is None:
                self.extender.drop(row)
                continue
            talk.finished = False
            if len(talk.tokens) + len(tokens) >= self.limit:  # no room for an answer to it
                self.extender.drop(row)
                continue
            check_token_ids([tokens], self.vocabulary)
            given[row] = [talk.tokens[-1], *tokens]
            talk.give(tokens)
        if not given:
            return []
        batches = []
        for steps, rows, logits_bv in (yield from self.extender.resume(given)):
            batches.append(RowBatch(steps, logits_bv, self._bits(rows), rows, self._seen(rows, logits_bv)))
        return batches

    def _bits(self, rows: Sequence[int]) -> mx.array:
        """The random bits [N,B,W] of the next draws: a row's n-th sampled token uses the n-th bits."""
        used = [sum(self.transcript.rows[row].sampled) for row in rows]
        most = max(map(self.room, rows))
        number_nb = mx.arange(most)[:, None] + mx.array(used, mx.int32)
        places = {row: place for place, row in enumerate(self.prompts)}
        place_b = mx.array([places[row] for row in rows], mx.int32)
        return self.bits_nbw[mx.minimum(number_nb, self.limit - 1), place_b]

    def _seen(self, rows: Sequence[int], logits_bv: mx.array) -> mx.array | None:
        if not self.penalizes:
            return None
        texts = [[*self.prompts[row], *self.transcript.rows[row].tokens] for row in rows]
        return seen_tokens(texts, logits_bv.shape[-1])
