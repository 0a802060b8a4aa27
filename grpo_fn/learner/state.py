"""TrainState, a training run as one immutable value, and functions that sync its policies."""

from collections.abc import Callable

import attrs
import mlx.core as mx
from mlx.utils import tree_map

from grpo_fn.learner.optimizer import Optimizer
from grpo_fn.prng import REFERENCE_ROUNDING, fold_in
from grpo_fn.rounding import storing
from grpo_fn.trees import Tree, map_arrays


@attrs.frozen(eq=False)
class TrainState:
    """A run's state between two steps, as a tree of arrays. Functions return a new state.

    Rebind the name before anything is evaluated (`state, stats = grad_step(state, batch)`), so that
    MLX can reuse the old state's buffers. Use `materialize` to evaluate a state, because `mx.eval`
    silently ignores a state.
    """

    params: Tree  # π_θ: trainable leaves, master precision
    old_params: Tree  # π_old, which samples; the same arrays as params right after a sync
    ref_params: Tree  # π_ref; None if there is no KL term
    opt_state: Tree
    accum_grads: Tree  # Σ of gradients of summed losses since the last update, float32
    accum_weight: mx.array  # Σ of their denominators, float32 0-d
    step: mx.array  # calls of grad_step: batches, counted once per pass over a rollout, int32 0-d
    update_step: mx.array  # number of optimizer updates, int32 0-d
    key: mx.array  # PRNG key, from which all of the run's random numbers are derived


def init_state(
    params: Tree, optimizer: Optimizer, *, key: mx.array, ref_params: Tree | None = None
) -> TrainState:
    """Creates the state before the first step.

    Args:
        params: trainable leaves in master precision: float32, or 16 bits to save memory (see
            `rounding`).
        optimizer: see `adamw`.
        key: PRNG key, `mx.random.key(seed)`.
        ref_params: the reference of the KL term, usually `params` itself (shared until the first
            update). If `ref_params` is omitted, there is no reference and `beta` must be 0.
    """
    return TrainState(
        params=params,
        old_params=params,
        ref_params=ref_params,
        opt_state=optimizer.init(params),
        accum_grads=zeros_like(params),
        accum_weight=mx.array(0.0),
        step=mx.array(0, mx.int32),
        update_step=mx.array(0, mx.int32),
        key=key,
    )


def sync_old(state: TrainState, transform: Callable[[Tree], Tree] | None = None) -> TrainState:
    """Sets π_old ← π_θ, through `transform` (a cast or a quantizer) if given. Without a transform,
    nothing is copied.
    """
    return attrs.evolve(
        state, old_params=state.params if transform is None else transform(state.params)
    )


def sync_ref(
    state: TrainState, mixup: float = 1.0, transform: Callable[[Tree], Tree] | None = None
) -> TrainState:
    """Sets π_ref ← α·π_θ + (1−α)·π_ref (TRL's `sync_ref_model`, TR-DPO arXiv 2404.09656, eq. 6).

    `transform` is the function that created `ref_params` (a quantizer), if any; with a transform, α
    must be 1.

    Raises:
        ValueError: there is no reference, `mixup` is outside (0, 1], or `mixup` is below 1 with a
            transform.
    """
    if state.ref_params is None:
        raise ValueError(
            "the state has no ref_params to sync, because it was created without a reference "
            "(beta = 0)"
        )
    if not 0 < mixup <= 1:
        raise ValueError(f"mixup = {mixup}: expected 0 < mixup <= 1")
    if mixup == 1:
        return attrs.evolve(
            state, ref_params=state.params if transform is None else transform(state.params)
        )
    if transform is not None:
        raise ValueError(
            f"mixup = {mixup}: a transformed reference cannot be mixed with the policy's "
            "weights; expected 1"
        )

    store = storing(state.ref_params, fold_in(state.key, REFERENCE_ROUNDING, state.update_step))

    def mixed(ref: mx.array, new: mx.array) -> mx.array:
        return store(mixup * new.astype(mx.float32) + (1 - mixup) * ref.astype(mx.float32), ref)

    return attrs.evolve(state, ref_params=tree_map(mixed, state.ref_params, state.params))


def zeros_like(params: Tree) -> Tree:
    """Returns float32 zeros in the shapes of `params`. The zeros need no memory, because each array
    is one broadcast number.
    """
    return map_arrays(lambda a: mx.broadcast_to(mx.array(0.0), a.shape), params)
