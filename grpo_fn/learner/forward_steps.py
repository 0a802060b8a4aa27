"""The learner's forward passes, which compute log-probs, the routers' choice of experts, and the
experts' load.
"""

from collections.abc import Callable
from typing import NamedTuple

import attrs
import mlx.core as mx

from grpo_fn.algorithm import expert_shares, load_balancing_loss
from grpo_fn.backends import compiled_step
from grpo_fn.learner.batch import Batch, check_fits
from grpo_fn.learner.logprobs.completion_states import (
    completion_hidden,
    completion_hidden_and_routing,
)
from grpo_fn.learner.logprobs.token_logprobs import token_logprobs
from grpo_fn.policy import experts_per_token
from grpo_fn.policy.policy import Policy
from grpo_fn.trees import Tree


@attrs.frozen(eq=False)
class Teacher:
    """A model whose distribution the student is trained to match at the tokens that the student
    sampled.
    """

    policy: Policy
    params: Tree  # {} for a policy from `Policy.for_inference`
    kl_coef: float = 0.0  # coefficient of the exact `reverse_kl` in the loss; 0: not computed


def make_logprob_step(
    policy: Policy, *, temperature: float = 1.0, compile: bool = True
) -> Callable[[Tree, Batch], mx.array]:
    """Creates `logprob_step(params, batch) -> logp_bt`, which computes the learner's own log-probs,
    without a gradient.

    The step computes π_old if a rollout is used for several updates, and π_ref if there is a
    reference model. The step is pure and is compiled once per shape.
    """
    step = compiled_step(
        lambda params, frozen, batch: batch_logprobs(policy, params, frozen, batch, temperature),
        enabled=compile,
    )

    def logprob_step(params: Tree, batch: Batch) -> mx.array:
        check_fits(batch, policy)
        return step(params, policy.frozen, attrs.evolve(batch, vocabulary=None))

    return logprob_step


def batch_logprobs(
    policy: Policy, params: Tree, frozen: Tree, batch: Batch, temperature: float
) -> mx.array:
    """Computes log π for the batch's tokens, [B,T], float32, without a gradient."""
    hidden_btd = completion_hidden(policy, params, frozen, batch)
    return mx.stop_gradient(
        token_logprobs(
            hidden_btd, policy.head(params, frozen), batch.targets_bt, temperature=temperature
        )
    )


class RoutingStats(NamedTuple):
    """The experts' load over a batch's unmasked tokens, 0-d float32 each."""

    # largest share of tokens per expert, divided by the mean share; maximum over layers
    max_load: mx.array
    unused: mx.array  # share of experts without a token, mean over layers
    balance: mx.array  # `load_balancing_loss`, mean over layers; 1 if the load is even


def routing_stats(policy: Policy, params: Tree, batch: Batch) -> RoutingStats:
    """Computes the load of a model's experts over the batch's unmasked tokens. The computation is
    eager, because shapes change between calls.

    Raises:
        ValueError: the batch shares prompts; and the errors of `Policy.hidden_and_routing`.
    """
    check_fits(batch, policy)
    chosen = experts_per_token(policy.module)
    _, routing = completion_hidden_and_routing(policy, params, policy.frozen, batch)
    mask_n = batch.mask_bt.reshape(-1)
    shares = mx.stack([expert_shares(logits_ne, mask_n, chosen) for logits_ne in routing])
    balance = mx.stack([load_balancing_loss(logits_ne, mask_n, chosen) for logits_ne in routing])
    return RoutingStats(
        max_load=(shares.max(axis=-1) * shares.shape[-1]).max(),
        unused=(shares == 0).astype(mx.float32).mean(),
        balance=balance.mean(),
    )


def chosen_experts(policy: Policy, params: Tree, batch: Batch) -> mx.array:
    """Returns the experts that this policy's routers choose, for `Batch.experts_blnk`: uint16
    [B,L,N,k]. The computation is eager, like that of `routing_stats`.

    With a sampler's policy and parameters, the result contains the experts that were used for
    sampling, so that the learner can use the same experts (R3, arXiv 2510.11370).

    Raises:
        ValueError: see `routing_stats`.
    """
    if batch.prompt_index_b is not None:
        raise ValueError(
            "routers are recorded over whole rows: expected micro-batches without shared prompts"
        )
    check_fits(batch, policy)
    chosen = experts_per_token(policy.module)
    _, routing = policy.hidden_and_routing(params, batch.tokens_bl)
    best = [
        mx.argpartition(-logits_ble, kth=chosen - 1, axis=-1)[..., :chosen]
        for logits_ble in routing
    ]
    return mx.stack(best, axis=2).astype(mx.uint16)
