"""Gradients and log-probs of micro-batches, repeated in smaller ones if memory runs out.

On Metal and CUDA MLX raises an exception. On a CPU the system ends the process: nothing can be caught.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.learner import halve_batch, pieces_of_rank
from grpo_fn.trees import Tree
from runners.engines.engine import Advance
from runners.errors import UserError, is_out_of_memory
from runners.ranks.ranks import Ranks

_Result = TypeVar("_Result")
Pieces = Sequence[g.Batch]


@attrs.frozen(eq=False)
class MicroBatches:
    """Computes micro-batches; each rank its part of them. All ranks shrink the budget together."""

    grad_step: Callable[..., tuple[g.TrainState, g.LossStats]]  # a `GradStep`
    logprob_step: Callable[[Tree, g.Batch], mx.array]
    asked: int  # tokens: system.micro_batch_tokens
    ranks: Ranks
    note: Callable[[str], None]  # takes a line when the budget shrinks
    longest: float = 0.0  # seconds of one micro-batch, above which the budget shrinks; 0: any
    advance: Advance = lambda what, done, total: None

    def gradients(
        self, start: g.TrainState, steps: Sequence[Pieces], budget: int
    ) -> tuple[g.TrainState, list[g.LossStats], int]:
        """`start` with the gradients of these batch steps added, their statistics, and the new budget."""

        def act(steps: Sequence[Pieces]) -> tuple[g.TrainState, list[g.LossStats]]:
            state, found = start, []
            own = [pieces_of_rank(pieces, self.ranks.number, self.ranks.count) for pieces in steps]
            submitted = self._reported(sum(map(len, own)))
            for pieces in own:
                # The state is rebound before anything is computed, so that nothing keeps the old sums.
                state, stats = self.grad_step(state, pieces, submitted=submitted)
                g.materialize(state.accum_grads, state.accum_weight, stats)
                found.append(stats)
            return state, found

        started, traces = time.perf_counter(), getattr(self.grad_step, "traces", 0)
        (state, found), used, budget = self._in_halves(act, steps, budget)
        if self.longest:
            compiled = traces != getattr(self.grad_step, "traces", 0)  # its time says nothing
            budget = self._paced(0.0 if compiled else time.perf_counter() - started, used, budget)
        return state, found if self.ranks.is_alone else self._merged(found), budget

    def with_old_logp(self, params: Tree, pieces: Pieces, budget: int) -> tuple[list[g.Batch], int]:
        """The micro-batches with the log-probs that these parameters give their tokens; the new budget."""
        rank, count = self.ranks.number, self.ranks.count

        def act(steps: Sequence[Pieces]) -> dict[int, mx.array]:
            found = {}
            for number, piece in enumerate(steps[0]):
                if number % count == rank and piece.mask_bt.shape[0]:
                    found[number] = self.logprob_step(params, piece)
                    mx.eval(found[number])
            return found

        found, (pieces,), budget = self._in_halves(act, [pieces], budget)
        if count > 1:  # every rank keeps all of them, so that a checkpoint fits any number of ranks
            for message in self.ranks.all_gather_object("the old log-probs", found):
                found |= {int(number): mx.array(array) for number, array in message.value.items()}
        pieces = [
            attrs.evolve(piece, old_logp_bt=found[number]) if number in found else piece
            for number, piece in enumerate(pieces)
        ]
        return pieces, budget

    def _reported(self, total: int) -> Callable[[mx.array], None]:
        """Reports how many micro-batches are computed; the device stays one ahead of the reports."""
        waiting: list[mx.array] = []
        self.advance("micro-batches", 0, total)

        def submitted(computed: mx.array) -> None:
            if waiting:
                mx.eval(waiting[-1])
                self.advance("micro-batches", len(waiting), total)
            waiting.append(computed)

        return submitted

    def _merged(self, found: Sequence[g.LossStats]) -> list[g.LossStats]:
        """Each step's statistics over all ranks' parts, the same on every rank."""
        rows = np.array([[value.item() for value in stats] for stats in found], np.float32)
        messages = self.ranks.all_gather_object("the statistics", rows)
        merged = []
        for number in range(len(found)):
            parts = [g.LossStats(*map(mx.array, m.value[number].tolist())) for m in messages]
            merged.append(g.merge_stats(parts))
        g.materialize(merged)
        return merged

    def _in_halves(
        self, act: Callable[[Sequence[Pieces]], _Result], steps: Sequence[Pieces], budget: int
    ) -> tuple[_Result, Sequence[Pieces], int]:
        """`act` of the steps' micro-batches, cut in halves as often as memory asks for, down to one row each.

        Also returns the micro-batches that were used, and the budget in tokens that later ones keep.
        """
        while True:
            steps = [self._fitting(pieces, budget) for pieces in steps]
            reason, result = None, None
            try:
                result = act(steps)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error)
            messages = self.ranks.all_gather_object("the gradients", reason)
            reason = next((message.value for message in messages if message.value is not None), None)
            if reason is None:
                return cast(_Result, result), steps, budget
            del result
            # Outside the handler the failed step's arrays are free: only its traceback held them.
            mx.clear_cache()
            budget = self._smaller(steps, budget, reason)

    def _paced(self, seconds: float, steps: Sequence[Pieces], budget: int) -> int:
        """A budget whose micro-batches take at most `longest` at this pace; all ranks have the same."""
        pieces = [_tokens(piece) for pieces in steps for piece in pieces]
        paces = self.ranks.all_gather_object("the pace", seconds * self.ranks.count / max(sum(pieces), 1))
        fits = max(int(self.longest / max(1e-9, *(message.value for message in paces))), 1)
        if fits >= min(max(pieces), budget):
            return budget
        self.note(
            f"a micro-batch takes over {self.longest:g} s, which a GPU that draws the screen may not; "
            f"system.micro_batch_tokens is {fits:,} from now on"
        )
        return fits

    def _smaller(self, steps: Sequence[Pieces], budget: int, reason: str) -> int:
        """A budget that cuts the largest micro-batches. Raises UserError if each has a single row."""
        large = max((_tokens(p) for pieces in steps for p in pieces if p.targets_bt.shape[0] > 1), default=0)
        if not large:
            raise UserError(
                f"out of memory with one completion at a time ({reason}); lower rollout.max_new_tokens, set "
                'system.grad_checkpoint = true, or train adapters: model.tune = "lora"'
            )
        large = min(budget, large)  # the budget may have been far larger
        self.note(
            f"out of memory ({reason}) with {large:,} tokens at a time: the step is repeated in halves; "
            f"system.micro_batch_tokens is {max(large // 2, 1):,} from now on"
        )
        return max(large // 2, 1)

    def _fitting(self, pieces: Pieces, budget: int) -> Pieces:
        """The pieces cut to a budget that has shrunk: they were made when it was larger."""
        while budget < self.asked:
            if not (large := {id(p) for p in pieces if _tokens(p) > budget and p.targets_bt.shape[0] > 1}):
                break
            pieces = [half for p in pieces for half in (halve_batch(p) if id(p) in large else [p])]
        return pieces


def _tokens(piece: g.Batch) -> int:
    """Tokens that the learner computes for a micro-batch."""
    return piece.tokens_bl.size + (0 if piece.prompt_index_b is None else piece.targets_bt.size)
