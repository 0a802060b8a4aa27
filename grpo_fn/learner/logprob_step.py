"""The log-prob step: the learner's own log-probs of a batch. Pure, compiled once per shape."""

from collections.abc import Callable

import attrs
import mlx.core as mx

from grpo_fn.learner.batch import Batch, check_fits
from grpo_fn.learner.compiled_step import compiled_step
from grpo_fn.learner.logprobs.completion_states import completion_hidden
from grpo_fn.learner.logprobs.token_logprobs import token_logprobs
from grpo_fn.policy.policy import Policy
from grpo_fn.trees import Tree


@attrs.frozen(eq=False)
class Teacher:
    """A model whose distribution the student approaches, at the tokens that the student sampled."""

    policy: Policy
    params: Tree  # {} for a policy made for inference
    kl_coef: float = 0.0  # of the exact `reverse_kl` in the loss; 0: not computed


def make_logprob_step(
    policy: Policy, *, temperature: float = 1.0, compile: bool = True
) -> Callable[[Tree, Batch], mx.array]:
    """`logprob_step(params, batch) -> logp_bt`: the learner's own log-probs of a batch, without gradient.

    For π_old if a rollout serves several updates, and for π_ref if it should be kept.
    """
    step = compiled_step(
        lambda params, frozen, batch: batch_logprobs(policy, params, frozen, batch, temperature),
        enabled=compile,
    )

    def logprob_step(params: Tree, batch: Batch) -> mx.array:
        check_fits(batch, policy)
        return step(params, policy.frozen, attrs.evolve(batch, vocabulary=None))

    return logprob_step


def batch_logprobs(policy: Policy, params: Tree, frozen: Tree, batch: Batch, temperature: float) -> mx.array:
    """log π of the batch's tokens, [B,T], float32, without gradient."""
    hidden_btd = completion_hidden(policy, params, frozen, batch)
    head = policy.head(params, frozen)
    return mx.stop_gradient(token_logprobs(hidden_btd, head, batch.targets_bt, temperature=temperature))
