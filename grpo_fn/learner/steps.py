"""The two steps of the learner: gradient of a batch, and optimizer update. Pure, compiled once per shape."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import attrs
import mlx.core as mx
from mlx.utils import tree_map

from grpo_fn.algorithm import (
    AGGREGATIONS,
    LossArrays,
    LossSpec,
    LossStats,
    check_max_length,
    empty_stats,
    loss_sum,
    merge_stats,
)
from grpo_fn.compile import Compiled, compiled
from grpo_fn.learner.batch import Batch, check_vocabulary
from grpo_fn.learner.completion_positions import kept_hidden, kept_targets, spread
from grpo_fn.learner.optimizer import Optimizer
from grpo_fn.learner.rounding import storing
from grpo_fn.learner.state import TrainState, zeros_like
from grpo_fn.learner.token_logprobs import token_logprobs, token_logprobs_and_entropy
from grpo_fn.policy.policy import Policy
from grpo_fn.prng import UPDATE_ROUNDING, stream_key
from grpo_fn.trees import Tree, arrays_of


class UpdateStats(NamedTuple):
    """What one optimizer update did: 0-d arrays."""

    grad_norm: mx.array  # global L2 norm before clipping, float32
    learning_rate: mx.array  # of this update, float32
    skipped: mx.array  # True where loss, gradient, rate or new values were not finite, and not taken


class GradStep:
    """`grad_step(state, batch) -> (state, stats)`; made by `make_grad_step`."""

    def __init__(
        self,
        micro_step: Compiled,
        policy: Policy,
        ref_policy: Policy,
        spec: LossSpec,
        max_completion_length: int | None,
    ) -> None:
        self._micro_step, self._policy, self._ref_policy = micro_step, policy, ref_policy
        self._spec = spec
        self._max_completion_length = max_completion_length

    @property
    def traces(self) -> int:
        """How often the step has been traced: once per shape of a (micro-)batch."""
        return self._micro_step.traces

    def __call__(self, state: TrainState, batch: Batch | Sequence[Batch]) -> tuple[TrainState, LossStats]:
        """Add a batch's gradient and denominator to the state's; one batch step.

        A loss that is not finite, whatever its gradient, makes the denominator NaN: the update that it is
        for will be skipped.

        Args:
            state: its params are differentiated; its ref_params used where the spec has a KL term.
            batch: one batch, or the micro-batches that it was split into.

        Raises:
            ValueError: there is no batch, a token id is outside of the model's embedding, or beta > 0 and
                neither state nor batch has a reference.
        """
        parts = list(batch) if isinstance(batch, Iterable) else [batch]
        if not parts:
            raise ValueError("wanted a batch, or at least one micro-batch; found an empty list")
        accum = state.accum_grads, state.accum_weight
        stats: list[LossStats] = []
        for number, part in enumerate(parts, 1):
            check_vocabulary(part, self._policy.vocabulary)
            if self._spec.beta > 0 and part.ref_logp_bt is None and state.ref_params is None:
                raise ValueError(
                    f"beta = {self._spec.beta} needs a reference: init_state(..., ref_params=params)"
                )
            if part.mask_bt.shape[0] == 0:  # every row was left out: only the denominators count
                part_stats = empty_stats(
                    AGGREGATIONS[self._spec.aggregation].denominator(
                        part.num_sequences, part.num_tokens, self._max_completion_length
                    )
                )
                accum = accum[0], accum[1] + part_stats.denominator
                stats.append(part_stats)
                continue
            ref = state.ref_params if self._spec.beta > 0 and part.ref_logp_bt is None else None
            # One micro-batch's activations at a time: nothing else orders the forwards.
            tokens_bl = mx.depends(part.tokens_bl, [*arrays_of(accum)])
            # Any number in a batch is a part of what is compiled for it: this one would be for nothing.
            part = attrs.evolve(part, tokens_bl=tokens_bl, vocabulary=None)
            frozen = self._policy.frozen, self._ref_policy.frozen
            accum, part_stats = self._micro_step(state.params, ref, frozen, accum, part)
            stats.append(part_stats)
            if number < len(parts):
                # It computes while the next one is described. Nothing follows the last: who takes it decides.
                mx.async_eval(list(arrays_of((accum, part_stats))))
        accum_grads, accum_weight = accum
        state = attrs.evolve(state, accum_grads=accum_grads, accum_weight=accum_weight, step=state.step + 1)
        return state, merge_stats(stats)


def make_grad_step(
    policy: Policy,
    spec: LossSpec,
    *,
    temperature: float = 1.0,
    max_completion_length: int | None = None,
    ref_policy: Policy | None = None,
    compile: bool = True,
) -> GradStep:
    """The learner's first step: the gradient of `spec`'s loss, added to what has accumulated.

    Args:
        policy: the model as a function of its parameters.
        spec: the algorithm.
        temperature: of the sampler; divides the learner's logits too.
        max_completion_length: L_max, needed by the aggregation `constant`.
        ref_policy: whose parameters `ref_params` are, such as a `quantized_role`'s; None: `policy`.
        compile: False runs the same Python eagerly.
    """
    reference = policy if ref_policy is None else ref_policy
    check_max_length(spec.aggregation, max_completion_length)

    def micro_step(
        params: Tree,
        ref_params: Tree | None,
        frozen: tuple[Tree, Tree],
        accum: tuple[Tree, mx.array],
        batch: Batch,
    ) -> tuple[tuple[Tree, mx.array], LossStats]:
        frozen, ref_frozen = frozen
        accum_grads, accum_weight = accum
        ref_logp_bt = batch.ref_logp_bt
        if ref_params is not None:
            ref_logp_bt = _logprobs(reference, ref_params, ref_frozen, batch, temperature)

        def summed_loss(params: Tree) -> tuple[mx.array, LossStats]:
            logp_1n, entropy_1n = token_logprobs_and_entropy(
                kept_hidden(policy, params, frozen, batch),
                policy.head(params, frozen),
                kept_targets(batch),
                temperature=temperature,
                entropy_gradient=spec.entropy_coef > 0,
            )
            arrays = LossArrays(
                spread(batch, logp_1n),
                batch.advantages_b,
                batch.mask_bt,
                old_logp_bt=batch.old_logp_bt,
                rollout_logp_bt=batch.rollout_logp_bt,
                ref_logp_bt=ref_logp_bt,
                entropy_bt=spread(batch, entropy_1n),
                keep_bt=batch.keep_bt,
                num_sequences=batch.num_sequences,
                num_tokens=batch.num_tokens,
            )
            return loss_sum(arrays, spec, max_completion_length)

        (loss, stats), grads = mx.value_and_grad(summed_loss)(params)
        accum_grads = tree_map(lambda total, grad: total + grad.astype(total.dtype), accum_grads, grads)
        weight = mx.where(mx.isfinite(loss), stats.denominator, mx.nan)
        return (accum_grads, accum_weight + weight), stats

    return GradStep(compiled(micro_step, enabled=compile), policy, reference, spec, max_completion_length)


def make_update_step(
    optimizer: Optimizer, *, max_grad_norm: float | None = None, compile: bool = True
) -> Callable[[TrainState], tuple[TrainState, UpdateStats]]:
    """The learner's second step: divide what has accumulated by its weight, clip, and apply the optimizer.

    A loss, a gradient or a learning rate that is not finite changes nothing but the counters and what has
    accumulated: parameters and moments stay as they were, and the stats say so. So does a leaf whose new
    values would not be finite, which takes values at the end of float32's range: leaf by leaf, as to wait for
    all of them would take the memory of all of them. bfloat16 leaves are rounded stochastically, with a key
    that follows from the state's and from the update's number.

    Args:
        optimizer: see `adamw`.
        max_grad_norm: bound on the global L2 norm; None: no clipping.
        compile: False runs the same Python eagerly.
    """
    if max_grad_norm is not None and max_grad_norm <= 0:
        raise ValueError(f"max_grad_norm = {max_grad_norm}: wanted > 0, or None for no clipping")

    def apply(
        held: tuple[Tree, Tree],
        accum_grads: Tree,
        accum_weight: mx.array,
        update_step: mx.array,
        key: mx.array,
    ) -> tuple[tuple[Tree, Tree], UpdateStats]:
        params, opt_state = held
        # Division and clipping are one factor: no second copy of the gradients.
        weight = mx.maximum(accum_weight, 1e-30)
        squares = [_sum(mx.square(leaf.astype(mx.float32))) for leaf in arrays_of(accum_grads)]
        norm = mx.sqrt(mx.stack(squares).sum()) / weight
        factor = 1 / weight
        if max_grad_norm is not None:
            factor = factor * mx.minimum(max_grad_norm / (norm + 1e-6), 1.0)
        grads = tree_map(lambda total: total * factor, accum_grads)
        rate = optimizer.schedule(update_step)
        finite = mx.isfinite(norm) & mx.isfinite(rate)
        store = storing(held, stream_key(key, UPDATE_ROUNDING, update_step))
        sound: list[mx.array] = []

        def keep(new: mx.array, old: mx.array) -> mx.array:
            stored = store(new, old)
            sound.append(finite & _all_finite(stored))
            return mx.where(sound[-1], stored, old)

        kept = optimizer.apply(grads, opt_state, params, update_step, keep)
        return kept, UpdateStats(norm, rate, mx.logical_not(mx.stack(sound).all()))

    step = compiled(apply, enabled=compile)

    def update_step(state: TrainState) -> tuple[TrainState, UpdateStats]:
        held = state.params, state.opt_state
        (params, opt_state), stats = step(
            held, state.accum_grads, state.accum_weight, state.update_step, state.key
        )
        state = attrs.evolve(
            state,
            params=params,
            opt_state=opt_state,
            accum_grads=zeros_like(state.params),
            accum_weight=mx.array(0.0),
            update_step=state.update_step + 1,
        )
        return state, stats

    return update_step


def _sum(x: mx.array) -> mx.array:
    """Of all numbers; a CPU sums columns several at a time."""
    return x.sum(axis=0).sum() if x.ndim > 1 else x.sum()


def _all_finite(x: mx.array) -> mx.array:
    # A sum with an infinity or a NaN in it is not finite, and faster to take than a look at each number. Only
    # in float32: a sum of finite numbers in 16 bits can itself be beyond their range.
    return mx.isfinite(_sum(x)) if x.dtype == mx.float32 else mx.isfinite(x).all()


def make_logprob_step(
    policy: Policy, *, temperature: float = 1.0, compile: bool = True
) -> Callable[[Tree, Batch], mx.array]:
    """`logprob_step(params, batch) -> logp_bt`: the learner's own log-probs of a batch, without gradient.

    For π_old where a rollout serves several updates, and for π_ref where one wants it kept.
    """
    step = compiled(
        lambda params, frozen, batch: _logprobs(policy, params, frozen, batch, temperature), enabled=compile
    )

    def logprob_step(params: Tree, batch: Batch) -> mx.array:
        check_vocabulary(batch, policy.vocabulary)
        return step(params, policy.frozen, attrs.evolve(batch, vocabulary=None))

    return logprob_step


def _logprobs(policy: Policy, params: Tree, frozen: Tree, batch: Batch, temperature: float) -> mx.array:
    hidden_1nd = kept_hidden(policy, params, frozen, batch)
    head = policy.head(params, frozen)
    logp_1n = token_logprobs(hidden_1nd, head, kept_targets(batch), temperature=temperature)
    return mx.stop_gradient(spread(batch, logp_1n))
