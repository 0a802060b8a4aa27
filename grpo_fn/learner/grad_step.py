"""The grad step, which adds the gradient of a batch's loss to the state. The step is pure and is
compiled once per shape.
"""

from collections.abc import Callable, Iterable, Sequence

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
    load_balancing_loss,
    loss_sum,
    merge_stats,
)
from grpo_fn.backends import compiled_step
from grpo_fn.compile import Compiled, compiled
from grpo_fn.learner.batch import Batch, as_teacher_reads, check_fits
from grpo_fn.learner.forward_steps import Teacher, batch_logprobs
from grpo_fn.learner.logprobs.completion_states import (
    completion_hidden,
    completion_hidden_and_routing,
)
from grpo_fn.learner.logprobs.token_logprobs import reverse_kl, token_logprobs_and_entropy
from grpo_fn.learner.state import TrainState
from grpo_fn.policy import experts_per_token
from grpo_fn.policy.policy import Policy
from grpo_fn.trees import Tree, arrays_of, map_arrays

SFT = LossSpec(surrogate="likelihood", aggregation="token_mean")
"""Supervised fine-tuning: with advantages of 1, the mean cross-entropy of the completions' tokens,
nats."""


@attrs.frozen(eq=False)
class GradStep:
    """`grad_step(state, batch) -> (state, stats)`; created by `make_grad_step` or
    `make_sft_step`.
    """

    micro_step: Compiled
    stats_step: Compiled
    policy: Policy
    ref_policy: Policy
    spec: LossSpec
    max_completion_length: int | None
    teacher: tuple[Tree, Tree] | None = None  # its parameters and frozen leaves

    @property
    def traces(self) -> int:
        """Number of times the step was traced: once per shape of a (micro-)batch."""
        return self.micro_step.traces

    def __call__(
        self,
        state: TrainState,
        batch: Batch | Sequence[Batch],
        *,
        submitted: Callable[[mx.array], None] | None = None,
        logprobs: list[mx.array] | None = None,
    ) -> tuple[TrainState, LossStats]:
        """Runs one batch step, which adds a batch's gradient and denominator to the state's.

        If a loss is NaN or infinite, the denominator becomes NaN, so the update is skipped.

        Args:
            state: the gradient is computed at its params; its ref_params are used if the spec has a
                KL term.
            batch: one batch, or its micro-batches.
            submitted: called after each micro-batch except the last. Its argument is a 0-d array
                that depends on the micro-batch. Evaluate the array of the previous call to stay at
                most one micro-batch ahead of the device.
            logprobs: a list to which the log π_θ [B,T] of each micro-batch's tokens is appended, as
                in the loss.

        Raises:
            ValueError: there is no batch, a token id is outside the model's embedding, or beta > 0
                and neither state nor batch has a reference.
        """
        parts = list(batch) if isinstance(batch, Iterable) else [batch]
        if not parts:
            raise ValueError("expected a batch, or at least one micro-batch, found an empty list")
        accum = state.accum_grads, state.accum_weight
        stats: list[LossStats] = []
        for number, part in enumerate(parts, 1):
            check_fits(part, self.policy)
            if self.spec.beta > 0 and part.ref_logp_bt is None and state.ref_params is None:
                raise ValueError(
                    f"beta = {self.spec.beta} requires a reference: init_state(..., "
                    f"ref_params=params)"
                )
            if part.mask_bt.shape[0] == 0:  # all rows were omitted: only the denominators count
                denominator = AGGREGATIONS[self.spec.aggregation].denominator(
                    part.num_sequences, part.num_tokens, self.max_completion_length
                )
                stats.append(empty_stats(denominator))
                accum = accum[0], accum[1] + denominator
                if logprobs is not None:
                    logprobs.append(mx.zeros(part.mask_bt.shape))
                continue
            ref = state.ref_params if self.spec.beta > 0 and part.ref_logp_bt is None else None
            # One micro-batch's activations at a time: nothing else orders the forwards.
            tokens_bl = mx.depends(part.tokens_bl, [*arrays_of(accum)])
            # A number in a batch is part of the program's key; `vocabulary` is not needed there.
            part = attrs.evolve(part, tokens_bl=tokens_bl, vocabulary=None)
            grads, arrays, loss = self.micro_step(
                state.params,
                ref,
                (self.policy.frozen, self.ref_policy.frozen),
                accum[0],
                part,
                self.teacher,
            )
            part_stats, weight = self.stats_step(arrays, loss, accum[1])
            accum = grads, weight
            stats.append(part_stats)
            if logprobs is not None:
                logprobs.append(arrays.logp_bt)
            if number < len(parts):
                # The device computes this while the next graph is built. The caller evaluates the
                # last micro-batch.
                mx.async_eval(list(arrays_of((accum, part_stats))))
                if submitted is not None:
                    submitted(weight)
        state = attrs.evolve(
            state, accum_grads=accum[0], accum_weight=accum[1], step=state.step + 1
        )
        return state, merge_stats(stats)


def make_grad_step(
    policy: Policy,
    spec: LossSpec,
    *,
    temperature: float = 1.0,
    max_completion_length: int | None = None,
    ref_policy: Policy | None = None,
    router_aux_coef: float = 0.0,
    teacher: Teacher | None = None,
    compile: bool = True,
) -> GradStep:
    """Creates the learner's first step, which adds the gradient of `spec`'s loss to the accumulated
    gradient.

    Args:
        policy: the model as a function of its parameters.
        spec: the algorithm.
        temperature: the sampler's temperature; it also divides the learner's logits.
        max_completion_length: L_max, required by the aggregation `constant`.
        ref_policy: the policy to which `ref_params` belong, such as a `quantized_role`'s; None
            means `policy`.
        router_aux_coef: for a model with experts, the coefficient of `load_balancing_loss` over the
            unmasked tokens, averaged over the model's routers. Each micro-batch balances its own
            tokens, weighted by its share of the loss. A coefficient of 0 disables this loss.
        teacher: if its `kl_coef` > 0, the exact KL to the teacher is part of each token's loss.
        compile: False runs the same Python eagerly.

    Raises:
        ValueError: max_completion_length is missing, or router_aux_coef > 0 and the model's routers
            are unknown (`Policy.hidden_and_routing`).
    """
    reference = policy if ref_policy is None else ref_policy
    check_max_length(spec.aggregation, max_completion_length)
    chosen = experts_per_token(policy.module) if router_aux_coef > 0 else 0
    teacher_coef = 0.0 if teacher is None else teacher.kl_coef

    def teacher_kl(
        hidden_btd: mx.array,
        params: Tree,
        frozen: Tree,
        batch: Batch,
        trees: tuple[Tree, Tree] | None,
    ) -> mx.array | None:
        """Returns the KL to the teacher. The KL is exact and differentiable if it is in the loss;
        otherwise, it is estimated from the sampled tokens, or is None.
        """
        if teacher is None or trees is None or not teacher_coef:
            logp_bt = batch.teacher_logp_bt
            return None if logp_bt is None else mx.stop_gradient(batch.rollout_logp_bt - logp_bt)
        teacher_bte = completion_hidden(
            teacher.policy,
            trees[0],
            trees[1],
            as_teacher_reads(batch, teacher.policy.vocabulary),
        )
        heads = policy.head(params, frozen), teacher.policy.head(trees[0], trees[1])
        return reverse_kl(hidden_btd, heads[0], teacher_bte, heads[1], temperature=temperature)

    def micro_step(
        params: Tree,
        ref_params: Tree | None,
        frozen: tuple[Tree, Tree],
        accum_grads: Tree,
        batch: Batch,
        teacher_trees: tuple[Tree, Tree] | None,
    ) -> tuple[Tree, LossArrays, mx.array]:
        frozen, ref_frozen = frozen
        ref_logp_bt = batch.ref_logp_bt
        if ref_params is not None:
            own_routing = attrs.evolve(batch, experts_blnk=None)
            ref_logp_bt = batch_logprobs(
                reference, ref_params, ref_frozen, own_routing, temperature
            )

        def summed_loss(params: Tree) -> tuple[mx.array, LossArrays]:
            routing: list[mx.array] = []
            if chosen:
                hidden_btd, routing = completion_hidden_and_routing(policy, params, frozen, batch)
            else:
                hidden_btd = completion_hidden(policy, params, frozen, batch)
            logp_bt, entropy_bt = token_logprobs_and_entropy(
                hidden_btd,
                policy.head(params, frozen),
                batch.targets_bt,
                temperature=temperature,
                entropy_gradient=spec.entropy_coef > 0,
            )
            arrays = LossArrays(
                logp_bt,
                batch.advantages_b,
                batch.mask_bt,
                old_logp_bt=batch.old_logp_bt,
                rollout_logp_bt=batch.rollout_logp_bt,
                ref_logp_bt=ref_logp_bt,
                entropy_bt=entropy_bt,
                keep_bt=batch.keep_bt,
                teacher_kl_bt=teacher_kl(hidden_btd, params, frozen, batch, teacher_trees),
                num_sequences=batch.num_sequences,
                num_tokens=batch.num_tokens,
            )
            total, stats = loss_sum(arrays, spec, max_completion_length, teacher_coef)
            if routing:
                mask_n = batch.mask_bt.reshape(-1)
                balance = mx.stack([load_balancing_loss(x, mask_n, chosen) for x in routing]).mean()
                # The update divides by the denominators, so this becomes the coefficient of the
                # balancing loss.
                total = total + router_aux_coef * balance * stats.denominator
            return total, arrays

        # MLX puts tracers into the containers, and another thread may read the state's containers.
        (loss, arrays), grads = mx.value_and_grad(summed_loss)(map_arrays(lambda a: a, params))
        accum_grads = tree_map(
            lambda total, grad: total + grad.astype(total.dtype), accum_grads, grads
        )
        return accum_grads, arrays, loss

    def stats_step(
        arrays: LossArrays, loss: mx.array, accum_weight: mx.array
    ) -> tuple[LossStats, mx.array]:
        stats = loss_sum(arrays, spec, max_completion_length, teacher_coef)[1]
        return stats, accum_weight + mx.where(mx.isfinite(loss), stats.denominator, mx.nan)

    return GradStep(
        compiled_step(micro_step, enabled=compile),
        # Arrays are small: separate kernels would take seconds to compile and save nothing.
        compiled(stats_step, enabled=compile, fuse=False),
        policy,
        reference,
        spec,
        max_completion_length,
        None if teacher is None else (teacher.params, teacher.policy.frozen),
    )


def make_sft_step(
    policy: Policy, *, router_aux_coef: float = 0.0, compile: bool = True
) -> GradStep:
    """Creates the grad step for supervised fine-tuning, whose loss is the cross-entropy of given
    completions.

        loss = −Σ A·log π_θ(token) / number of tokens

    over the tokens of all completions, at temperature 1.

    Create batches with `given_rollout` and `make_batch`; the advantages are 1, or the weights of
    the completions. The step is `make_grad_step`'s with a loss that has no ratios, and accepts the
    same arguments.
    """
    return make_grad_step(policy, SFT, router_aux_coef=router_aux_coef, compile=compile)
