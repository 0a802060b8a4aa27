"""Computes gradients and log-probs of micro-batches. If memory runs out, the computation is
repeated with smaller micro-batches.

On Metal and CUDA, running out of memory raises an exception in MLX. On a CPU, the system kills the
process, which cannot be caught.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Generic, TypeVar, cast

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.learner import halve_batch, pieces_of_rank
from grpo_fn.trees import Tree
from runners.engines.engine import Advance
from runners.errors import UserError, is_out_of_memory, shortage
from runners.ranks.ranks import Ranks

_Result = TypeVar("_Result")
Pieces = Sequence[g.Batch]  # micro-batches
LogprobStep = Callable[[Tree, g.Batch], mx.array]


@attrs.frozen(eq=False)
class Computed(Generic[_Result]):
    """A result computed from micro-batches, together with the micro-batches and the token budget
    that were used.
    """

    value: _Result
    steps: Sequence[Pieces]  # the micro-batches that were used, per batch step
    micro_batch_tokens: int  # the token budget from now on


# the state with accumulated gradients, and statistics per batch step
Gradients = tuple[g.TrainState, tuple[g.LossStats, ...]]


@attrs.frozen(eq=False)
class MicroBatches:
    """Computes gradients and log-probs of micro-batches, which are divided among the ranks. All
    ranks reduce the token budget together.
    """

    grad_step: Callable[..., tuple[g.TrainState, g.LossStats]]  # a `GradStep`
    asked: int  # tokens: system.micro_batch_tokens
    ranks: Ranks
    note: Callable[[str], None]  # receives a message when the budget shrinks
    longest: float = 0.0  # seconds per micro-batch above which the budget shrinks; 0: no limit
    advance: Advance = lambda what, done, total: None

    def gradients(
        self, start: g.TrainState, steps: Sequence[Pieces], budget: int
    ) -> Computed[Gradients]:
        """Adds the gradients of these batch steps to those in `start`."""

        def act(steps: Sequence[Pieces]) -> Gradients:
            state = start
            found = []
            own = [pieces_of_rank(pieces, self.ranks.number, self.ranks.count) for pieces in steps]
            submitted = self._reported(sum(map(len, own)))
            for pieces in own:
                # The state is rebound before anything is computed, so that nothing keeps the old
                # sums.
                state, stats = self.grad_step(state, pieces, submitted=submitted)
                g.materialize(state.accum_grads, state.accum_weight, stats)
                found.append(stats)
            return state, tuple(found)

        started = time.perf_counter()
        traces = getattr(self.grad_step, "traces", 0)
        computed = self._in_halves(act, steps, budget)
        if self.longest:
            compiled = traces != getattr(self.grad_step, "traces", 0)  # compile time must not count
            computed = self._paced(0.0 if compiled else time.perf_counter() - started, computed)
        if self.ranks.is_alone:
            return computed
        train, stats = computed.value
        return attrs.evolve(computed, value=(train, self._merged(stats)))

    def logprobs(
        self, step: LogprobStep, params: Tree, pieces: Pieces, budget: int
    ) -> Computed[dict[int, mx.array]]:
        """Computes the log-probs of micro-batches' tokens under these parameters.

        The result maps micro-batch numbers to log-probs; micro-batches without rows are omitted.
        With several ranks, each rank computes its share, and all ranks return the complete result.
        """
        rank, count = self.ranks.number, self.ranks.count

        def act(steps: Sequence[Pieces]) -> dict[int, mx.array]:
            found = {}
            for number, piece in enumerate(steps[0]):
                if number % count == rank and piece.mask_bt.shape[0]:
                    found[number] = step(params, piece)
                    mx.eval(found[number])
            return found

        computed = self._in_halves(act, [pieces], budget)
        # Every rank keeps all log-probs, so that a checkpoint fits any number of ranks.
        if count > 1:
            for found in self.ranks.all_gather_object("the log-probs", computed.value):
                computed.value.update({int(n): mx.array(array) for n, array in found.items()})
        return computed

    def _reported(self, total: int) -> Callable[[mx.array], None]:
        """Returns a callback that reports the number of computed micro-batches. The device stays
        one micro-batch ahead of the reports.
        """
        waiting: list[mx.array] = []
        self.advance("micro-batches", 0, total)

        def submitted(computed: mx.array) -> None:
            if waiting:
                mx.eval(waiting[-1])
                self.advance("micro-batches", len(waiting), total)
            waiting.append(computed)

        return submitted

    def _merged(self, found: Sequence[g.LossStats]) -> tuple[g.LossStats, ...]:
        """Merges each step's statistics over all ranks; the result is the same on every rank."""
        rows = np.array([[value.item() for value in stats] for stats in found], np.float32)
        merged = []
        for parts in zip(*self.ranks.all_gather_object("the statistics", rows), strict=True):
            stats = [g.LossStats._make(map(mx.array, part.tolist())) for part in parts]
            merged.append(g.merge_stats(stats))
        g.materialize(merged)
        return tuple(merged)

    def _in_halves(
        self, act: Callable[[Sequence[Pieces]], _Result], steps: Sequence[Pieces], budget: int
    ) -> Computed[_Result]:
        """Applies `act` to the steps' micro-batches. Whenever memory runs out, the largest
        micro-batches are halved, down to one row each.
        """
        while True:
            if budget < self.asked:  # the micro-batches were made for a larger budget
                steps = [list(_fitting(pieces, budget)) for pieces in steps]
            fault = result = None
            try:
                result = act(steps)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                fault = str(error)
            faults = self.ranks.all_gather_object("the gradients", fault)
            reason = next((each for each in faults if each is not None), None)
            if reason is None:
                return Computed(cast(_Result, result), steps, budget)
            del result
            # Outside the handler, the failed step's arrays are free: only the traceback referred to them.
            mx.clear_cache()
            budget = self._smaller(steps, budget, reason)

    def _paced(self, seconds: float, computed: Computed[_Result]) -> Computed[_Result]:
        """Lowers the budget so that a micro-batch takes at most `longest` seconds at the measured
        pace. The budget is the same on all ranks.
        """
        tokens = list(map(_tokens, chain.from_iterable(computed.steps)))
        pace = seconds * self.ranks.count / max(sum(tokens), 1)
        slowest = max(self.ranks.all_gather_object("the pace", pace))
        fits = max(int(self.longest / max(1e-9, slowest)), 1)
        if fits >= min(max(tokens), computed.micro_batch_tokens):
            return computed
        self.note(
            f"a micro-batch took over {self.longest:g} s; macOS may kill GPU work that long while "
            f"the display is on; system.micro_batch_tokens is {fits:,} from now on"
        )
        return attrs.evolve(computed, micro_batch_tokens=fits)

    def _smaller(self, steps: Sequence[Pieces], budget: int, reason: str) -> int:
        """Returns a budget that splits the largest micro-batches. Raises UserError if every
        micro-batch has a single row.
        """
        cuttable = [
            _tokens(piece) for piece in chain.from_iterable(steps) if piece.targets_bt.shape[0] > 1
        ]
        if not cuttable:
            raise UserError(
                f"{shortage(reason)}, with one completion at a time; lower "
                "rollout.max_new_tokens, set "
                'system.grad_checkpoint = true, or train adapters: model.tune = "lora"'
            )
        large = min(budget, max(cuttable))  # the budget may have been far larger
        half = max(large // 2, 1)
        self.note(
            f"{shortage(reason)}, with {large:,} tokens at a time: the step is repeated "
            f"with half as many; system.micro_batch_tokens is {half:,} from now on"
        )
        return half


def _fitting(pieces: Pieces, budget: int) -> Iterator[g.Batch]:
    """Splits micro-batches to fit a budget, down to single rows."""
    for piece in pieces:
        if _tokens(piece) <= budget or piece.targets_bt.shape[0] <= 1:
            yield piece
        else:
            yield from _fitting(halve_batch(piece), budget)


def _tokens(piece: g.Batch) -> int:
    """Returns the number of tokens that the learner computes for a micro-batch."""
    return piece.tokens_bl.size + (0 if piece.prompt_index_b is None else piece.targets_bt.size)
