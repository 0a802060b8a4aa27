"""The decode loop: draw a token of each row, store it, drop rows that have ended, take the next step."""

from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx

from grpo_fn.backends import enabled
from grpo_fn.completions import Rollout
from grpo_fn.rollout.lanes import Lane
from grpo_fn.rollout.sampler import Sampler, drawing, mark_seen, penalize
from grpo_fn.rollout.turns import Transcript, Turns
from grpo_fn.trees import on_host

COMPACT_SHARE = 0.25  # rows are dropped once this share of them has finished

# From a completion's tokens so far, and how many of them earlier calls have seen without finding an end, to
# how many of them to keep if it has ended, else None.
FindStop = Callable[[Sequence[int], int], int | None]


@attrs.frozen
class Decoding:
    """How completions are decoded. It changes speed and memory; the numbers are the same, to rounding.

    Attributes:
        max_batch: rows decoded together at most; 0: all. Whole groups, at least one.
        check_every: steps between looks at which rows have ended; a look waits for the device.
        pipelined: hand each step to the device without waiting for the last (hides launch time on a GPU;
            costs a copy of the cache).
        lanes: parts of the rows that are decoded side by side, each on a core of its own, where that can be
            (on a CPU, over shared prefixes, at most 256 MB of plain float32 weights).
        share_prefix: keep a prompt's keys and values once for all its completions, where the model can; None:
            on CPU and CUDA.
        compact: drop rows that have ended from the batch once a quarter of it has.
        turns_together: in conversations, begin a turn when no row decodes any more and all replies are there:
            the same numbers bit for bit each time. False: as soon as a reply is there, so that a slow one
            holds up nobody; the numbers then depend on its timing, to rounding.
    """

    max_batch: int = 0
    check_every: int = 8
    pipelined: bool = False
    lanes: int = 1
    share_prefix: bool | None = None
    compact: bool = True
    turns_together: bool = True


@attrs.define(eq=False)
class Columns:
    """What has been sampled so far of all rows, in full size."""

    drawn: dict[str, mx.array]  # "tokens" int32, "logp" and, where asked for, "entropy": [B,T]
    lengths: list[int]  # tokens of each row that count
    finished: list[bool]  # as `Rollout.finished_b`

    @classmethod
    def empty(cls, rows: int, width: int, with_entropy: bool) -> "Columns":
        """Nothing sampled: each row of `width` zeros, unfinished."""
        drawn = {"tokens": mx.zeros((rows, width), mx.int32), "logp": mx.zeros((rows, width))}
        if with_entropy:
            drawn["entropy"] = mx.zeros((rows, width))
        return cls(drawn, [width] * rows, [False] * rows)

    def store(self, lane: Lane, stacked: dict[str, mx.array], start: int) -> None:
        """The lane's tokens from `start` on."""
        index = mx.array(lane.rows, mx.int32)
        for name, columns in stacked.items():
            self.drawn[name][index, start : lane.count] = columns

    def end(self, row: int, length: int, finished: bool) -> None:
        """The row has ended after so many tokens."""
        self.lengths[row], self.finished[row] = length, finished

    def rollout(self, prompts: Sequence[Sequence[int]], num_generations: int) -> Rollout:
        """The rollout, as wide as its longest completion, at least 1; zeros after the end of each."""
        lengths_b = mx.array(self.lengths, mx.int32)
        width = max(1, *self.lengths)
        within_bt = mx.arange(width)[None] < lengths_b[:, None]
        cut = {
            name: mx.where(within_bt, array[:, :width], mx.array(0, array.dtype))
            for name, array in self.drawn.items()
        }
        mx.eval(cut)
        return Rollout(
            prompts=tuple(tuple(prompt) for prompt in prompts),
            num_generations=num_generations,
            tokens_bt=cut["tokens"],
            lengths_b=lengths_b,
            logp_bt=cut["logp"],
            finished_b=mx.array(self.finished),
            entropy_bt=cut.get("entropy"),
        )


class Decoder:
    """The decode loop of one part, with its settings."""

    def __init__(
        self,
        sampler: Sampler,
        eos_ids: frozenset[int],
        find_stop: FindStop | None,
        decoding: Decoding,
    ) -> None:
        self._penalty = sampler.repetition_penalty
        self._draw = drawing(sampler)
        self._eos_ids, self._find_stop = eos_ids, find_stop
        self._check_every = max(decoding.check_every, 1)
        self._launch = mx.async_eval if decoding.pipelined else mx.eval
        self._compact = decoding.compact and enabled("row_compaction")

    def run(self, lanes: list[Lane], whole: Columns | Transcript, turns: Turns | None = None) -> None:
        """Decode until every row has ended; with `turns`, until every conversation has."""
        texts: dict[int, list[int]] = {row: [] for lane in lanes for row in lane.rows}  # of the present turn
        steps = 0
        while lanes:
            for lane in lanes:
                with mx.stream(lane.stream):
                    lane.drawn.append(self._drawn(lane, lane.count))
                lane.count += 1
            self._launch([lane.drawn[-1] for lane in lanes])
            steps += 1
            tokens = [lane.drawn[-1]["tokens"] for lane in lanes]
            look = steps % self._check_every == 0 or any(lane.is_full for lane in lanes)
            if look or (turns is not None and turns.sees_each_step):
                for lane in lanes:
                    self._collect(lane, texts, whole, turns)
            for lane, token_b in zip(lanes, tokens, strict=True):
                if lane.alive and not lane.is_full:
                    with mx.stream(lane.stream):
                        places = self._places_to_keep(lane) if look else None
                        if places is not None:
                            lane.keep_rows(places)
                            token_b = token_b[mx.array(places)]
                        lane.logits_bv = lane.steps(token_b)
            lanes = [lane for lane in lanes if lane.alive and not lane.is_full]
            if turns is not None and (look or not lanes):
                joined = turns.resumed(decoding=bool(lanes))
                while not lanes and not joined and turns.waits:
                    joined = turns.resumed(decoding=False)
                texts |= {row: [] for lane in joined for row in lane.rows}
                lanes += joined

    def _drawn(self, lane: Lane, n: int) -> dict[str, mx.array]:
        """The n-th token of each row."""
        if lane.seen_bv is not None:
            lane.logits_bv = penalize(lane.logits_bv, lane.seen_bv, self._penalty)
        drawn = self._draw(lane.logits_bv, lane.words_nbw[n])
        if lane.seen_bv is not None:
            lane.seen_bv = mark_seen(lane.seen_bv, drawn["tokens"])
        return drawn

    def _places_to_keep(self, lane: Lane) -> list[int] | None:
        """Places of the rows to go on with, where enough have ended; None: all."""
        if not self._compact:
            return None
        places = lane.steps.rows_to_keep([row in lane.alive for row in lane.rows])
        return places if len(places) <= (1 - COMPACT_SHARE) * len(lane.rows) else None

    def _collect(
        self, lane: Lane, texts: dict[int, list[int]], whole: Columns | Transcript, turns: Turns | None
    ) -> None:
        """Store the lane's tokens since the last look and find the rows that go on."""
        start = lane.count - len(lane.drawn)
        stacked = {name: mx.stack([step[name] for step in lane.drawn], axis=1) for name in lane.drawn[0]}
        lane.drawn = []
        whole.store(lane, stacked, start)
        ends = []
        for place, (row, tokens) in enumerate(zip(lane.rows, on_host(stacked["tokens"]), strict=True)):
            if row not in lane.alive:
                continue
            texts[row].extend(tokens)
            room = None if turns is None else turns.room(row)
            end = self._end_of(texts[row][:room], start)
            if end is not None:
                lane.alive.remove(row)
                whole.end(row, end, True)
                ends.append((place, row, end))
            elif room is not None and len(texts[row]) >= room:
                lane.alive.remove(row)
                whole.end(row, room, False)
        if turns is not None and ends:
            turns.ended(lane, ends)

    def _end_of(self, tokens: list[int], start: int) -> int | None:
        """Tokens to keep if the completion has ended at or after `start`, else None."""
        ends = [n + 1 for n in range(start, len(tokens)) if tokens[n] in self._eos_ids][:1]
        if self._find_stop is not None:
            seen = tokens[: ends[0]] if ends else tokens
            found = self._find_stop(seen, start)
            if found is not None:
                if not 0 <= found <= len(seen):
                    raise ValueError(
                        f"find_stop gave {found} for a completion of {len(seen)} tokens: wanted None, or how "
                        f"many of them to keep, 0 to {len(seen)}"
                    )
                ends.append(found)
        return min(ends, default=None)
