"""The update step, which divides and clips the accumulated gradient and applies the optimizer. The
step is pure and is compiled once.
"""

from collections.abc import Callable
from typing import NamedTuple

import attrs
import mlx.core as mx

from grpo_fn.algorithm import divisor
from grpo_fn.backends import compiled_step
from grpo_fn.learner.optimizer import Optimizer, OptimizerNumbers, Rates
from grpo_fn.learner.state import TrainState, zeros_like
from grpo_fn.prng import UPDATE_ROUNDING, fold_in
from grpo_fn.rounding import storing
from grpo_fn.trees import Tree, arrays_of


class UpdateStats(NamedTuple):
    """Statistics for one optimizer update, as 0-d arrays."""

    grad_norm: mx.array  # global L2 norm before clipping, float32
    learning_rate: mx.array  # rate of this update, float32
    skipped: mx.array  # True if loss, gradient, rate or new values were not finite: discarded


def make_update_step(
    optimizer: Optimizer, *, max_grad_norm: float | None = None, compile: bool = True
) -> Callable[..., tuple[TrainState, UpdateStats]]:
    """Creates the learner's second step, `update_step(state, rates=None) -> (state, stats)`.

    The step divides the accumulated gradient by its weight, clips it and applies the optimizer.
    `Rates` replace the optimizer's learning rate and constants, and the norm bound, for this
    update; new values do not cause a new trace.

    If a loss, a gradient or the learning rate is not finite, parameters and moments do not change.
    Only the counters and the accumulated sums change, and the stats report the skipped update. A
    leaf also keeps its values if its new values are not finite. The decision is made per leaf,
    because waiting for all leaves would need memory for all of them. Leaves of 16 bits are rounded
    stochastically, with a key from the state's key and the update's number.

    Args:
        optimizer: see `adamw`.
        max_grad_norm: bound on the global L2 norm; None disables clipping.
        compile: False runs the same Python eagerly.
    """
    if max_grad_norm is not None and max_grad_norm <= 0:
        raise ValueError(f"max_grad_norm = {max_grad_norm}: expected > 0, or None for no clipping")

    def sum_of_squares(accum_grads: Tree) -> mx.array:
        return mx.stack(
            [sum_of(mx.square(leaf.astype(mx.float32))) for leaf in arrays_of(accum_grads)]
        ).sum()

    def apply(
        held: tuple[Tree, Tree],
        accum_grads: Tree,
        numbers: OptimizerNumbers,
        factor: mx.array,
        finite: mx.array,
        key: mx.array,
    ) -> tuple[tuple[Tree, Tree], mx.array]:
        params, opt_state = held
        store = storing(held, key)
        sound = [finite]

        def keep(new: mx.array, old: mx.array) -> mx.array:
            stored = store(new, old)
            # A sum that contains an infinity or a NaN is not finite, and a sum is faster than
            # testing each number. Only in float32: in 16 bits a sum of finite numbers can overflow.
            exact = stored.dtype == mx.float32
            sound.append(
                finite & (mx.isfinite(sum_of(stored)) if exact else mx.isfinite(stored).all())
            )
            return mx.where(sound[-1], stored, old)

        updated = optimizer.apply(accum_grads, opt_state, params, numbers, keep, factor)
        return updated, mx.logical_not(mx.stack(sound).all())

    squares_step = compiled_step(sum_of_squares, enabled=compile)
    step = compiled_step(apply, enabled=compile)

    def update_step(
        state: TrainState, rates: Rates | None = None
    ) -> tuple[TrainState, UpdateStats]:
        # Not compiled: a program for a single number would save nothing. One factor divides and
        # clips, so that there is no second copy of the gradients.
        weight = divisor(state.accum_weight)
        norm = mx.sqrt(squares_step(state.accum_grads)) / weight
        factor = 1 / weight
        bound = max_grad_norm if rates is None else rates.max_grad_norm
        if bound is not None:
            factor = factor * mx.minimum(bound / (norm + 1e-6), 1.0)
        numbers = optimizer.numbers(state.opt_state, state.update_step, rates)
        finite = mx.isfinite(norm) & mx.isfinite(numbers.rate)
        key = fold_in(state.key, UPDATE_ROUNDING, state.update_step)
        (params, opt_state), skipped = step(
            (state.params, state.opt_state), state.accum_grads, numbers, factor, finite, key
        )
        state = attrs.evolve(
            state,
            params=params,
            opt_state=opt_state,
            accum_grads=zeros_like(state.params),
            accum_weight=mx.array(0.0),
            update_step=state.update_step + 1,
        )
        return state, UpdateStats(norm, numbers.rate, skipped)

    return update_step


def sum_of(x: mx.array) -> mx.array:
    """Returns the sum of all numbers, computed by column because a CPU adds several columns at a
    time.
    """
    return x.sum(axis=0).sum() if x.ndim > 1 else x.sum()
