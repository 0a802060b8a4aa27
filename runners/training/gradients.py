"""The accumulated gradient of an update; repeated in smaller micro-batches if memory runs out.

On Metal and CUDA MLX raises an exception. On a CPU the system ends the process: nothing can be caught.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.learner import halve_batch, pieces_of_rank
from grpo_fn.trees import Tree
from runners.errors import UserError, count_in, is_out_of_memory
from runners.ranks.ranks import Ranks

_Result = TypeVar("_Result")
_Pieces = Sequence[g.Batch]


class HoldsState(Protocol):
    """An object that keeps a run's state."""

    state: g.TrainState


class Gradients:
    """Adds micro-batches to a state, and limits their tokens.

    A step that runs out of memory is repeated with its micro-batches cut in halves, if necessary down to one
    row each. Later steps keep that size. Gradients accumulated before it are computed again: the old sums are
    not kept, so that MLX can write the new ones in their place.
    """

    def __init__(
        self,
        grad_step: Callable[[g.TrainState, _Pieces], tuple[g.TrainState, g.LossStats]],
        logprob_step: Callable[[Tree, g.Batch], mx.array],
        max_tokens: int,
        note: Callable[[str], None],
        ranks: Ranks | None = None,
    ) -> None:
        """The learner's steps, the budget (system.micro_batch_tokens), `note` for a line when it shrinks, and
        the ranks. Each rank takes its part of the micro-batches; all shrink the budget together."""
        self._ranks = ranks or Ranks()
        self.max_tokens = self._asked = max_tokens
        self._grad_step, self._logprob_step, self._note = grad_step, logprob_step, note
        self._taken: list[_Pieces] = []  # since the last update
        self._start: dict[str, Any] = {}  # the sums before them: zeros, or a checkpoint's

    def add(self, holder: HoldsState, pieces: _Pieces) -> g.LossStats:
        """One batch step: adds the micro-batches' gradient and weight to the holder's state and computes it.

        The state is rebound in the holder before anything is computed, so that nothing keeps the old sums.
        """

        def act(pieces: _Pieces) -> g.LossStats:
            holder.state, stats = self._grad_step(holder.state, self._own(pieces))
            g.materialize(holder.state.accum_grads, holder.state.accum_weight, stats)
            return stats

        def again(pieces: _Pieces) -> g.LossStats:
            holder.state = attrs.evolve(holder.state, **start)
            for earlier in self._taken:
                act(earlier)
            return act(pieces)

        pieces = self._fitting(pieces)
        if not self._taken:
            self._start = {
                name: getattr(holder.state, name) for name in ("accum_grads", "accum_weight", "step")
            }
        start = self._start
        stats, taken = self._or_in_halves(pieces, act, again)
        self._taken.append(taken)
        return stats if self._ranks.is_alone else self._merged(stats)

    def with_old_logp(self, params: Tree, pieces: _Pieces) -> list[g.Batch]:
        """The micro-batches with the log-probs that these parameters give their tokens."""

        rank, count = self._ranks.number, self._ranks.count

        def act(pieces: _Pieces) -> dict[int, mx.array]:
            return {
                number: self._logp(params, piece)
                for number, piece in enumerate(pieces)
                if number % count == rank and piece.mask_bt.shape[0]
            }

        found, pieces = self._or_in_halves(pieces, act, act)
        if count > 1:  # every rank keeps all of them, so that a checkpoint fits any number of ranks
            arrays = {str(number): np.array(old_logp_bt) for number, old_logp_bt in found.items()}
            for message in self._ranks.all_gather_object("the old log-probs", None, arrays):
                found |= {int(number): mx.array(array) for number, array in message.arrays.items()}
        return [
            attrs.evolve(piece, old_logp_bt=found[number]) if number in found else piece
            for number, piece in enumerate(pieces)
        ]

    def applied(self) -> None:
        """The update has been done: the accumulated gradient is cleared."""
        self._taken, self._start = [], {}

    def facts(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"micro_batch_tokens": self.max_tokens}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continues with the budget in a checkpoint's facts. Raises UserError if it is not a count."""
        saved = count_in(facts, "micro_batch_tokens", self.max_tokens)
        self.max_tokens = max(min(self.max_tokens, saved), 1)

    def _fitting(self, pieces: _Pieces) -> _Pieces:
        """The pieces cut to the current budget: they may have been made when it was larger."""
        while self.max_tokens < self._asked:
            large = {id(p) for p in pieces if _tokens(p) > self.max_tokens and p.targets_bt.shape[0] > 1}
            if not large:
                break
            pieces = [half for p in pieces for half in (halve_batch(p) if id(p) in large else [p])]
        return pieces

    def _own(self, pieces: _Pieces) -> _Pieces:
        return pieces_of_rank(pieces, self._ranks.number, self._ranks.count)

    def _merged(self, stats: g.LossStats) -> g.LossStats:
        """The statistics of all ranks' parts, the same on every rank."""
        row = np.array([value.item() for value in stats], np.float32)
        messages = self._ranks.all_gather_object("the statistics", None, {"stats": row})
        parts = [g.LossStats(*map(mx.array, message.arrays["stats"].tolist())) for message in messages]
        merged = g.merge_stats(parts)
        g.materialize(merged)
        return merged

    def _logp(self, params: Tree, piece: g.Batch) -> mx.array:
        old_logp_bt = self._logprob_step(params, piece)
        mx.eval(old_logp_bt)
        return old_logp_bt

    def _or_in_halves(
        self, pieces: _Pieces, act: Callable[[_Pieces], _Result], again: Callable[[_Pieces], _Result]
    ) -> tuple[_Result, _Pieces]:
        """The result of `act`, or of `again` with the pieces cut in halves as often as necessary, down to one
        row each; and the pieces that were used."""
        take = act
        while True:
            reason, result = None, None
            try:
                result = take(pieces)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error)
            if not self._ranks.is_alone:
                messages = self._ranks.all_gather_object("the gradients", reason)
                reason = next((message.value for message in messages if message.value is not None), None)
            if reason is None:
                return cast(_Result, result), pieces
            del result
            # Outside the handler the failed step's arrays are free: only its traceback held them.
            mx.clear_cache()
            pieces = self._in_halves(pieces, reason)
            if take is again:  # the earlier micro-batches may be too large as well
                self._taken = [self._fitting(earlier) for earlier in self._taken]
            take = again

    def _in_halves(self, pieces: _Pieces, reason: str) -> _Pieces:
        """The pieces cut in halves, with a matching budget. Raises UserError if each is a single row."""
        halves = [half for piece in pieces for half in halve_batch(piece)]
        if len(halves) == len(pieces):
            raise UserError(
                f"out of memory with one completion at a time ({reason}); lower rollout.max_new_tokens, set "
                'system.grad_checkpoint = true, or train adapters: model.tune = "lora"'
            )
        # Half of what did not fit: the budget may have been far larger.
        large = min(self.max_tokens, max(map(_tokens, pieces)))
        self.max_tokens = max(large // 2, 1)
        self._note(
            f"out of memory ({reason}) with {large:,} tokens at a time: the step is repeated in halves; "
            f"system.micro_batch_tokens is {self.max_tokens:,} from now on"
        )
        return halves


def _tokens(piece: g.Batch) -> int:
    """Tokens that the learner computes for a micro-batch."""
    return piece.tokens_bl.size + (0 if piece.prompt_index_b is None else piece.targets_bt.size)
