"""AdamW as pure functions of trees, and learning-rate schedules."""

from collections.abc import Callable
from typing import NamedTuple

import attrs
import mlx.core as mx
import mlx.optimizers as optimizers
from mlx.utils import tree_map

from grpo_fn.backends import enabled
from grpo_fn.checks import check_choice
from grpo_fn.trees import Tree, map_arrays

Schedule = Callable[[mx.array], mx.array]
Keep = Callable[[mx.array, mx.array], mx.array]
SCHEDULES = ("cosine", "linear", "constant")


class OptimizerNumbers(NamedTuple):
    """The values shared by all leaves' updates: 0-d, float32 except for the step."""

    rate: mx.array  # the learning rate, η
    decay: mx.array  # 1 − η λ
    step: mx.array  # t, int32: number of updates in the moments, including this one
    size: mx.array  # η / (1 − β1^t): step size that corrects the first moment
    root: mx.array  # 1 / √(1 − β2^t): corrects the root of the second moment
    # [5]: β1, 1 − β1, β2, 1 − β2, ε; None means the optimizer's own
    constants: mx.array | None = None


class Rates(NamedTuple):
    """Numbers or 0-d arrays that replace the optimizer's settings for one update."""

    learning_rate: float | mx.array
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | mx.array | None = None  # bound on the global L2 norm; None: not clipped


@attrs.frozen(eq=False)
class Optimizer:
    """An optimizer, as three pure functions.

    init(params) -> opt_state
    numbers(opt_state, update_step, rates=None) -> OptimizerNumbers; `update_step` is 0-d int32,
        counted from 0, and drives the schedule; `Rates` replace schedule and constants.
    apply(grads, opt_state, params, numbers, keep, factor) -> (params, opt_state). `keep(new, old)`
        converts a new value (float32 if it is a floating-point number) to the value that is stored;
        every leaf passes through it once. `factor`, 0-d float32, is an optional factor for all
        gradients.
    """

    init: Callable[[Tree], Tree]
    numbers: Callable[..., OptimizerNumbers]
    apply: Callable[..., tuple[Tree, Tree]]


def adamw(
    learning_rate: float | Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    moment_dtype: mx.Dtype = mx.float32,
) -> Optimizer:
    """Creates AdamW (arXiv 1711.05101, algorithm 2).

    Decay is decoupled and applies to every leaf, as in mlx.optimizers. With weight_decay = 0, the
    algorithm is Adam. The arithmetic is in float32 for all dtypes of parameters and moments, one
    leaf at a time.

    Args:
        learning_rate: a number, or a schedule (a function of the update number).
        betas: the paper's β1 and β2.
        eps: the paper's ε, added to the square root of the second moment.
        weight_decay: the paper's λ; it is multiplied by the learning rate.
        moment_dtype: the dtype in which the two moments are stored, float32 or bfloat16.

    Raises:
        ValueError: a value is out of range.
    """
    if not (0 <= betas[0] < 1 and 0 <= betas[1] < 1):
        raise ValueError(f"betas = {betas}: expected each in [0, 1)")
    if not (weight_decay >= 0 and eps > 0):
        raise ValueError(
            f"weight_decay = {weight_decay}, eps = {eps}: expected weight_decay >= 0 and eps > 0"
        )
    if moment_dtype not in (mx.float32, mx.bfloat16):
        raise ValueError(f"moment_dtype = {moment_dtype}: expected float32 or bfloat16")
    schedule = learning_rate if callable(learning_rate) else constant(learning_rate)

    def init(params: Tree) -> Tree:
        def zeros(param: mx.array) -> dict[str, mx.array]:
            return {name: mx.zeros(param.shape, moment_dtype) for name in ("m", "v")}

        return {"step": mx.array(0, mx.int32), **map_arrays(zeros, params)}

    def numbers(
        opt_state: Tree, update_step: mx.array, rates: Rates | None = None
    ) -> OptimizerNumbers:
        # "step" counts the updates in the moments, for bias correction; skipped updates do not
        # count.
        step = opt_state["step"] + 1
        own = Rates(schedule(update_step), betas, eps, weight_decay) if rates is None else rates
        rate = mx.array(own.learning_rate)
        b1, b2 = own.betas
        size = rate / (1 - b1**step)
        root = mx.rsqrt(1 - b2**step)
        rate, decay, size, root = (
            each.astype(mx.float32) for each in (rate, 1 - rate * own.weight_decay, size, root)
        )
        # Because they are arguments of the compiled update, new values need no new trace.
        constants = None if rates is None else mx.array([b1, 1 - b1, b2, 1 - b2, own.eps])
        return OptimizerNumbers(rate, decay, step, size, root, constants)

    def apply(
        grads: Tree,
        opt_state: Tree,
        params: Tree,
        numbers: OptimizerNumbers,
        keep: Keep,
        factor: mx.array | None = None,
    ) -> tuple[Tree, Tree]:
        whole = mx.array(1.0) if factor is None else factor
        fixed = (betas[0], 1 - betas[0], betas[1], 1 - betas[1], eps)
        b1, one_less_b1, b2, one_less_b2, small = (
            fixed if numbers.constants is None else numbers.constants
        )
        new_moments: list[dict[str, mx.array]] = []
        last: list[mx.array] = []

        def apply_leaf(grad: mx.array, param: mx.array, moments: dict[str, mx.array]) -> mx.array:
            # Leaf by leaf, because MLX would otherwise keep the old and new values of the whole
            # tree at once.
            grad = mx.depends(grad, last) if last and enabled("leafwise_update") else grad
            old = (param, moments["m"], moments["v"])
            param, grad, m, v = (x.astype(mx.float32) for x in (param, grad, *old[1:]))
            # Two products, not a shared one, because each is fused into its moment's pass.
            m = b1 * m + one_less_b1 * (grad * whole)
            v = b2 * v + one_less_b2 * mx.square(whole * grad)
            step = numbers.size * m / (mx.sqrt(v) * numbers.root + small)
            new = param * numbers.decay - step, m, v
            last[:] = [
                keep(new_part, old_part) for new_part, old_part in zip(new, old, strict=True)
            ]
            new_moments.append({"m": last[1], "v": last[2]})
            return last[0]

        new_params = tree_map(apply_leaf, grads, params, opt_state)
        moments = iter(new_moments)
        return new_params, {
            "step": keep(numbers.step, opt_state["step"]),
            **map_arrays(lambda _: next(moments), new_params),
        }

    return Optimizer(init, numbers, apply)


def constant(learning_rate: float) -> Schedule:
    """Creates a schedule with a constant learning rate.

    Raises:
        ValueError: the rate is negative.
    """
    if not learning_rate >= 0:
        raise ValueError(f"learning_rate = {learning_rate}: expected >= 0")
    return lambda update_step: mx.array(learning_rate, mx.float32)


def warmup_schedule(
    kind: str, learning_rate: float, total_updates: int, warmup_ratio: float = 0.0
) -> Schedule:
    """Creates a schedule: linear warm-up, then `cosine` or `linear` decay to 0 at `total_updates`,
    or `constant`.

    Update u (from 0) of w warm-up updates has the rate learning_rate·(u+1)/(w+1), so the first
    update already has an effect (its rate is 0 in Hugging Face's schedule).

    Raises:
        ValueError: the kind is unknown, or a number is out of range.
    """
    check_choice("schedule", kind, SCHEDULES)
    if total_updates < 1 or not 0 <= warmup_ratio <= 1:
        raise ValueError(
            f"total_updates = {total_updates}, warmup_ratio = {warmup_ratio}: expected "
            "total_updates >= 1 and 0 <= warmup_ratio <= 1"
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
