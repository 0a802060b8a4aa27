"""Conversations in the decode loop: keeps track of rows that wait for replies, rows that continue,
and all tokens.

    sample a turn ─its end→ park the row ─reply→ extend it by its tokens ─→ sample the next turn

Replies come from outside, through `Replies`. A row depends only on its key, its prompt and its
replies, up to the rounding of batched products.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs

from grpo_fn.checks import check_token_ids
from grpo_fn.completions import Ended
from grpo_fn.policy.policy import Policy
from grpo_fn.rollout.row_queue import Entry, Row, RowQueue, Start, nothing_yet


class Replies(Protocol):
    """The interface through which the decode loop receives replies. Rows are numbered as in the
    `Rollout`.
    """

    def begin(self, row: int, tokens: Sequence[int]) -> bool:
        """Receives a turn that has ended with an end token or a stop string; `tokens` are the
        turn's tokens, including its end.

        Returns whether a reply may follow; False ends the conversation. An implementation must not
        wait.
        """
        ...

    def collect(self, least: int) -> Mapping[int, Sequence[int] | None]:
        """Returns the replies since the last call; waits until at least `least` rows have replies.

        A reply contains exactly the token ids that follow the turn's last token; None ends the
        conversation.
        """
        ...


class Respond:
    """`Replies` from a plain function, which is called for each row when its reply is collected."""

    def __init__(self, function: Callable[[int, Sequence[int]], Sequence[int] | None]) -> None:
        """Stores `function(row, tokens)`, which returns the tokens that follow, or None to end the
        conversation.
        """
        self._function = function
        self._begun: dict[int, Sequence[int]] = {}

    def begin(self, row: int, tokens: Sequence[int]) -> bool:
        self._begun[row] = tokens
        return True

    def collect(self, least: int) -> Mapping[int, Sequence[int] | None]:
        return {row: self._function(row, self._begun.pop(row)) for row in [*self._begun]}


@attrs.define(eq=False, kw_only=True)
class _Talk:
    """A conversation: sampled turns, and given tokens between them, without the prompt."""

    entry: Entry  # entry of the first turn
    key: tuple[int, int]
    done: Ended
    sampled: list[bool] = attrs.field(factory=list)

    def add(self, turn: Ended, *, sampled: bool = True) -> None:
        """Appends a turn, or tokens that were not sampled."""
        self.done.tokens.extend(turn.tokens)
        self.done.logp.extend(turn.logp)
        if self.done.entropy is not None:
            self.done.entropy.extend(turn.entropy or ())
        self.sampled += [sampled] * len(turn.tokens)
        self.done = attrs.evolve(self.done, finished=turn.finished)

    def give(self, tokens: Sequence[int]) -> None:
        """Appends tokens that were not sampled."""
        zeros = [0.0] * len(tokens)
        self.add(Ended(tokens=[*tokens], logp=zeros, entropy=zeros), sampled=False)


class Turns(RowQueue):
    """A queue whose rows are turns of conversations. If a reply follows a finished turn, the next
    turn is added.

    With B conversations, row b is the first turn of conversation b, and the rows b + B, b + 2B, …
    are its next turns.
    """

    def __init__(self, policy: Policy, replies: Replies, together: bool) -> None:
        """Creates an empty queue. If `together` is True, turns start when no row is decoding;
        otherwise, they start as soon as their replies arrive.
        """
        super().__init__(policy)
        self._replies, self._together = replies, together
        self.talks: list[_Talk] = []
        # rows that wait for a reply, by conversation
        self._asked: dict[int, int] = {}

    @property
    def waiting(self) -> bool:
        """Whether a turn is waiting or a reply is still expected."""
        return super().waiting or bool(self._asked)

    def add(self, entry: Entry) -> None:
        """Adds the first turns of conversations, in the order of their rows."""
        super().add(entry)
        self.talks += [
            _Talk(done=nothing_yet(entry.sampling), entry=entry, key=key) for key in entry.keys
        ]

    def due(self, decoding: int, most: int) -> list[Start]:
        """Returns the entries that start now; see `RowQueue`. First, turns after new replies are
        added to the waiting rows.

        Raises ValueError if replies belong to unexpected rows, or if token ids are out of range.
        """
        if self._asked and not (self._together and decoding):
            self._collect(len(self._asked) if self._together else int(not decoding))
        return super().due(decoding, most)

    def completions(self, rows: int) -> list[Ended]:
        """Returns the conversations 0, 1, … in their current state."""
        for number, row in self.rows.items():
            self.talks[number % rows].add(row.done)
        return [talk.done for talk in self.talks]

    def _finish(self, number: int, row: Row) -> bool:
        """Requests a reply to a turn that has ended; the turn's caches are kept if a reply may
        follow.
        """
        talk_number = number % len(self.talks)
        talk = self.talks[talk_number]
        talk.add(row.done)
        full = len(talk.done.tokens) >= talk.entry.sampling.max_new_tokens
        if full or not row.done.finished or not row.done.tokens:
            return False
        replies = self._replies.begin(talk_number, row.done.tokens)
        if replies:
            self._asked[talk_number] = number
        return replies

    def _collect(self, least: int) -> None:
        """Collects new replies, and adds the turns after them to the waiting rows."""
        found = self._replies.collect(least)
        if not found.keys() <= self._asked.keys() or len(found) < least:
            raise ValueError(
                f"replies arrived for rows {sorted(found)}: expected at least {least} of the rows "
                f"{sorted(self._asked)}"
            )
        for talk_number in sorted(found):
            row = self._asked.pop(talk_number)
            tokens = found[talk_number]
            if tokens is None or not self._continue(talk_number, row, tokens):
                self.cancel([row])

    def _continue(self, talk_number: int, row: int, tokens: Sequence[int]) -> bool:
        """Adds the turn after these tokens; returns False if the tokens leave no room for
        a turn.
        """
        talk = self.talks[talk_number]
        room = talk.entry.sampling.max_new_tokens - len(talk.done.tokens) - len(tokens)
        if room <= 0:
            talk.done = attrs.evolve(talk.done, finished=False)
            return False
        check_token_ids([tokens], self._policy.vocabulary)
        talk.give(tokens)
        super().add(
            attrs.evolve(
                talk.entry,
                rows=(row + len(self.talks),),
                prompt=[*talk.entry.prompt, *talk.done.tokens],
                keys=(talk.key,),
                sampling=attrs.evolve(talk.entry.sampling, max_new_tokens=room),
                drawn=sum(talk.sampled),
                continues=row,
            )
        )
        return True
