"""Log-probs of one completion by the plainest forward pass, with which every faster path is compared."""

from collections.abc import Sequence

import mlx.core as mx

from grpo_fn.policy.policy import Policy
from grpo_fn.trees import Tree


def completion_logprobs(
    policy: Policy, params: Tree, prompt: Sequence[int], completion: Sequence[int]
) -> mx.array:
    """log π [T] float32 of a completion's tokens, at temperature 1: prompt and completion alone, unpadded.

    Args:
        policy, params: the model, called as by the learner.
        prompt, completion: token ids, at least one each.

    Raises:
        ValueError: one of them is empty, or they need more positions than the model has learned.
    """
    if not prompt or not completion:
        raise ValueError(f"wanted at least one token each, found {len(prompt)} and {len(completion)}")
    logits = policy.logits(params, mx.array([[*prompt, *completion[:-1]]], mx.int32))
    z_tv = logits[0, len(prompt) - 1 :].astype(mx.float32)
    logp_tv = z_tv - mx.logsumexp(z_tv, axis=-1, keepdims=True)
    return mx.take_along_axis(logp_tv, mx.array(list(completion), mx.int32)[:, None], axis=-1)[:, 0]
