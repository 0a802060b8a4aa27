"""The gradients that gather for one update, taken again in smaller micro-batches where memory runs out.

MLX says so by an exception on Metal and CUDA. On a CPU the system ends the process: nothing can be caught.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.learner import halved
from grpo_fn.trees import Tree
from runners.errors import UserError, count_in, is_out_of_memory

_Result = TypeVar("_Result")
_Pieces = Sequence[g.Batch]


class HoldsState(Protocol):
    """Whoever keeps a run's state."""

    state: g.TrainState


class Gradients:
    """Adds micro-batches to a state, and knows how many tokens they may have.

    A step that runs out of memory is taken again once, with the micro-batches cut in halves, and so are all
    that follow. Whatever had gathered before it is computed anew: of the old sums nothing is kept, which is
    what lets MLX write the new ones in their place.
    """

    def __init__(
        self,
        grad_step: Callable[[g.TrainState, _Pieces], tuple[g.TrainState, g.LossStats]],
        logprob_step: Callable[[Tree, g.Batch], mx.array],
        max_tokens: int,
        note: Callable[[str], None],
    ) -> None:
        """The learner's steps, the budget (system.micro_batch_tokens), and who is told that it shrank."""
        self.max_tokens = self._asked = max_tokens
        self._grad_step, self._logprob_step, self._note = grad_step, logprob_step, note
        self._taken: list[_Pieces] = []  # since the update before
        self._start: dict[str, Any] = {}  # what had gathered before them: zeros, or a checkpoint's sums

    def add(self, holder: HoldsState, pieces: _Pieces) -> g.LossStats:
        """One batch step: the micro-batches' gradient and weight are added to the holder's state, computed.

        The state is rebound in the holder before anything is computed, so that nothing keeps the old sums.
        """

        def act(pieces: _Pieces) -> g.LossStats:
            holder.state, stats = self._grad_step(holder.state, pieces)
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
        return stats

    def with_old_logp(self, params: Tree, pieces: _Pieces) -> list[g.Batch]:
        """The micro-batches with the log-probs that these parameters give their tokens."""

        def act(pieces: _Pieces) -> list[g.Batch]:
            return [self._logged(params, piece) for piece in pieces]

        return self._or_in_halves(pieces, act, act)[0]

    def applied(self) -> None:
        """The update has been taken: what had gathered is gone."""
        self._taken, self._start = [], {}

    def facts(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"micro_batch_tokens": self.max_tokens}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Goes on with the budget that a checkpoint's facts hold; UserError where that is none."""
        saved = count_in(facts, "micro_batch_tokens", self.max_tokens)
        self.max_tokens = max(min(self.max_tokens, saved), 1)

    def _fitting(self, pieces: _Pieces) -> _Pieces:
        """The pieces as small as the budget now is: they may have been cut when it was larger."""
        while self.max_tokens < self._asked:
            large = {id(p) for p in pieces if _tokens(p) > self.max_tokens and p.targets_bt.shape[0] > 1}
            if not large:
                break
            pieces = [half for p in pieces for half in (halved(p) if id(p) in large else [p])]
        return pieces

    def _logged(self, params: Tree, piece: g.Batch) -> g.Batch:
        if piece.mask_bt.shape[0] == 0:
            return piece
        old_logp_bt = self._logprob_step(params, piece)
        mx.eval(old_logp_bt)
        return attrs.evolve(piece, old_logp_bt=old_logp_bt)

    def _or_in_halves(
        self, pieces: _Pieces, act: Callable[[_Pieces], _Result], again: Callable[[_Pieces], _Result]
    ) -> tuple[_Result, _Pieces]:
        """What `act` gives, or `again` with the pieces cut in halves, and the pieces that were taken."""
        try:
            return act(pieces), pieces
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        # Outside of the handler the failed step's arrays, which its traceback holds, are gone.
        mx.clear_cache()
        halves = [half for piece in pieces for half in halved(piece)]
        if len(halves) == len(pieces):
            raise UserError(
                f"out of memory with one completion at a time ({reason}); lower rollout.max_new_tokens, set "
                'system.grad_checkpoint = true, or train adapters: model.tune = "lora"'
            )
        # Half of what did not fit: the budget itself may be far above it.
        large = min(self.max_tokens, max(map(_tokens, pieces)))
        self.max_tokens = max(large // 2, 1)
        self._note(
            f"out of memory ({reason}) with {large:,} tokens at a time: the step is taken again in halves; "
            f"system.micro_batch_tokens is {self.max_tokens:,} from here on"
        )
        try:
            return again(halves), halves
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"out of memory again with half as many tokens at a time ({error}); set "
                f"system.micro_batch_tokens to {max(self.max_tokens // 2, 1)} or less, or see what takes the "
                "memory with `grpo plan CONFIG`"
            ) from error


def _tokens(piece: g.Batch) -> int:
    """Tokens that the learner computes for a micro-batch."""
    return piece.tokens_bl.size + (0 if piece.prompt_index_b is None else piece.targets_bt.size)
