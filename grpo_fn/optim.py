"""A functional face on mlx.optimizers: `init(params) -> state`, `apply(...) -> (params, state)`."""

from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx
import mlx.optimizers as optimizers

from grpo_fn.guards import check_choice
from grpo_fn.trees import Tree, map_arrays

Schedule = Callable[[mx.array], mx.array]
SCHEDULES = ("cosine", "linear", "constant")


@attrs.frozen(eq=False)
class Optimizer:
    """Two pure functions over trees.

    init(params) -> opt_state
    apply(grads, opt_state, params, update_step) -> (params, opt_state); `update_step` is 0-d int32, counted
        from 0, and drives the schedule.
    """

    init: Callable[[Tree], Tree]
    apply: Callable[[Tree, Tree, Tree, mx.array], tuple[Tree, Tree]]
    schedule: Schedule


def adamw(
    learning_rate: float | Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Optimizer:
    """AdamW (arXiv 1711.05101) with bias correction, through mlx.optimizers.

    Decay is decoupled and applies to every leaf, as in mlx; with weight_decay = 0 this is Adam.

    Raises:
        ValueError: a value is out of range.
    """
    if not (0 <= betas[0] < 1 and 0 <= betas[1] < 1):
        raise ValueError(f"betas = {betas}: wanted each in [0, 1)")
    if not (weight_decay >= 0 and eps > 0):
        raise ValueError(f"weight_decay = {weight_decay}, eps = {eps}: wanted weight_decay >= 0 and eps > 0")
    schedule = learning_rate if callable(learning_rate) else constant(learning_rate)

    def init(params: Tree) -> Tree:
        optimizer = _fresh()
        optimizer.init(params)
        return {**_without_rate(optimizer.state), "step": mx.array(0, mx.int32)}

    def apply(grads: Tree, opt_state: Tree, params: Tree, update_step: mx.array) -> tuple[Tree, Tree]:
        optimizer = _fresh()
        # apply_gradients writes into the nested state in place: it gets containers of its own.
        moments = map_arrays(lambda a: a, opt_state)
        # "step" counts what the moments have seen, for bias correction: a skipped update is none of it.
        optimizer.state = {**moments, "learning_rate": schedule(update_step)}
        new_params = optimizer.apply_gradients(grads, params)
        return new_params, _without_rate(optimizer.state)

    def _fresh() -> optimizers.AdamW:
        return optimizers.AdamW(
            learning_rate=0.0, betas=list(betas), eps=eps, weight_decay=weight_decay, bias_correction=True
        )

    return Optimizer(init, apply, schedule)


def _without_rate(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != "learning_rate"}


def constant(learning_rate: float) -> Schedule:
    """The same learning rate at every update.

    Raises:
        ValueError: it is negative.
    """
    if not learning_rate >= 0:
        raise ValueError(f"learning_rate = {learning_rate}: wanted >= 0")
    return lambda update_step: mx.array(learning_rate, mx.float32)


def warmup_schedule(
    kind: str, learning_rate: float, total_updates: int, warmup_ratio: float = 0.0
) -> Schedule:
    """Linear warm-up, then `cosine` or `linear` decay to 0 at `total_updates`, or `constant`.

    Update u (from 0) of w warm-up updates has learning_rate·(u+1)/(w+1), so that the first one already moves
    (Hugging Face's schedule gives it 0).

    Raises:
        ValueError: the kind is unknown or a number is out of range.
    """
    check_choice("schedule", kind, SCHEDULES)
    if total_updates < 1 or not 0 <= warmup_ratio <= 1:
        raise ValueError(
            f"total_updates = {total_updates}, warmup_ratio = {warmup_ratio}: wanted total_updates >= 1 and "
            "0 <= warmup_ratio <= 1"
        )
    base = constant(learning_rate)
    warmup = round(total_updates * warmup_ratio)
    decay_steps = max(total_updates - warmup, 1)
    decay = {
        "cosine": lambda: optimizers.cosine_decay(learning_rate, decay_steps),
        "linear": lambda: optimizers.linear_schedule(learning_rate, 0.0, decay_steps),
        "constant": lambda: base,
    }[kind]()
    if warmup == 0:
        return decay
    rise = optimizers.linear_schedule(learning_rate / (warmup + 1), learning_rate, warmup)
    return optimizers.join_schedules([rise, decay], [warmup])
