"""The decode loop: draw a token of each row, store it, drop rows that have ended, take the next step."""

from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx

from grpo_fn.decode_step import Steps
from grpo_fn.rollouts import Rollout
from grpo_fn.sampling import Sampler, drawing, mark_seen, penalize
from grpo_fn.trees import on_host

COMPACT_SHARE = 0.25  # rows are dropped once this share of them has finished

FindStop = Callable[[Sequence[int]], int | None]


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

    def rollout(self, prompts: Sequence[Sequence[int]], num_generations: int) -> Rollout:
        """The rollout, as wide as its longest completion; zeros after the end of each."""
        lengths_b = mx.array(self.lengths, mx.int32)
        width = max(self.lengths)
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
        max_new_tokens: int,
        *,
        check_every: int,
        pipelined: bool,
        compact: bool,
    ) -> None:
        self._penalty = sampler.repetition_penalty
        self._draw = drawing(sampler)
        self._eos_ids, self._find_stop = eos_ids, find_stop
        self._max_new_tokens, self._check_every = max_new_tokens, check_every
        self._launch = mx.async_eval if pipelined else mx.eval
        self._compact = compact

    def run(
        self,
        steps: Steps,
        logits_bv: mx.array,
        keys_b2: mx.array,
        rows: list[int],
        whole: Columns,
        seen_bv: mx.array | None = None,
    ) -> None:
        """Decode until every row has ended; row i of the batch is row `rows[i]` of the whole.

        `seen_bv`: the tokens that each row has had, where repeating them is penalized.
        """
        texts: dict[int, list[int]] = {row: [] for row in rows}
        alive = rows  # rows that have not ended; a subset of `rows`, which is what the batch holds
        start = 0
        block: list[dict[str, mx.array]] = []
        # Made at once on the device: a number that the host hands over at each step is waited for.
        numbers = mx.arange(self._max_new_tokens, dtype=mx.uint32)
        for n in range(self._max_new_tokens):
            if seen_bv is not None:
                logits_bv = penalize(logits_bv, seen_bv, self._penalty)
            n_b = mx.broadcast_to(numbers[n], (keys_b2.shape[0],))
            drawn = self._draw(logits_bv, keys_b2, n_b)
            if seen_bv is not None:
                seen_bv = mark_seen(seen_bv, drawn["tokens"])
            self._launch(drawn)
            block.append(drawn)
            last = n + 1 == self._max_new_tokens
            if last or (n + 1) % self._check_every == 0:
                alive = self._collect(block, rows, set(alive), texts, start, whole)
                start, block = n + 1, []
                if last or not alive:
                    return
                going_on = steps.rows_for(len(alive))
                if self._compact and going_on <= (1 - COMPACT_SHARE) * len(rows):
                    kept = _chosen(rows, set(alive), going_on)
                    steps.keep(kept)
                    index = mx.array(kept)
                    keys_b2, rows = keys_b2[index], [rows[i] for i in kept]
                    seen_bv = None if seen_bv is None else seen_bv[index]
                    drawn = {"tokens": drawn["tokens"][index]}
            logits_bv = steps(drawn["tokens"])

    def _collect(
        self,
        block: list[dict[str, mx.array]],
        rows: list[int],
        alive: set[int],
        texts: dict[int, list[int]],
        start: int,
        whole: Columns,
    ) -> list[int]:
        """Store a block of steps and find the rows that go on."""
        index = mx.array(rows, mx.int32)
        stop = start + len(block)
        stacked = {name: mx.stack([step[name] for step in block], axis=1) for name in block[0]}
        for name, columns in stacked.items():
            whole.drawn[name][index, start:stop] = columns
        going_on = []
        for row, tokens in zip(rows, on_host(stacked["tokens"]), strict=True):
            if row not in alive:
                continue
            texts[row].extend(tokens)
            end = self._end_of(texts[row], start)
            if end is None:
                going_on.append(row)
            else:
                whole.lengths[row], whole.finished[row] = end, True
        return going_on

    def _end_of(self, tokens: list[int], start: int) -> int | None:
        """Tokens to keep if the completion has ended at or after `start`, else None."""
        ends = [n + 1 for n in range(start, len(tokens)) if tokens[n] in self._eos_ids][:1]
        if self._find_stop is not None:
            found = self._find_stop(tokens[: ends[0]] if ends else tokens)
            if found is not None:
                ends.append(found)
        return min(ends, default=None)


def _chosen(rows: list[int], alive: set[int], count: int) -> list[int]:
    """Places of `count` rows: all that are alive, and of the others the first."""
    spare = count - len(alive)
    ended = [i for i, row in enumerate(rows) if row not in alive][:spare]
    return sorted([*ended, *(i for i, row in enumerate(rows) if row in alive)])
