"""The states from which a batch's completion tokens are predicted: hidden ones, and those of routers."""

from typing import cast

import mlx.core as mx

from grpo_fn.learner.batch import Batch
from grpo_fn.learner.logprobs.shared_prompts import hidden_after_shared_prompts
from grpo_fn.policy.policy import Policy
from grpo_fn.trees import Tree


def completion_hidden(policy: Policy, params: Tree, frozen: Tree, batch: Batch) -> mx.array:
    """Hidden states [B,T,D] from which the completions' tokens are predicted.

    Raises:
        ValueError: the batch shares prompts and has `experts_blnk`, which are for whole rows.
    """
    if batch.prompt_index_b is None:
        hidden_bld = policy.hidden(params, batch.tokens_bl, frozen, batch.images, batch.experts_blnk)
        return _predicting(batch, hidden_bld)
    if batch.experts_blnk is not None:
        raise ValueError("experts_blnk are those of whole rows: make micro-batches without shared prompts")
    return hidden_after_shared_prompts(policy, params, frozen, batch)


def completion_hidden_and_routing(
    policy: Policy, params: Tree, frozen: Tree, batch: Batch
) -> tuple[mx.array, list[mx.array]]:
    """`completion_hidden`, and the routers' logits [B·T,E] of each layer with experts, at the same tokens.

    Raises:
        ValueError: the batch shares prompts or has images, or as `Policy.hidden_and_routing`.
    """
    if batch.prompt_index_b is not None:
        raise ValueError("routers are recorded over whole rows: make micro-batches without shared prompts")
    if batch.images is not None:
        raise ValueError("routers are recorded over text: expected a batch without images")
    hidden_bld, logits = policy.hidden_and_routing(params, batch.tokens_bl, frozen, batch.experts_blnk)
    return _predicting(batch, hidden_bld), [_predicting(batch, x).reshape(-1, x.shape[-1]) for x in logits]


def _predicting(batch: Batch, states_bld: mx.array) -> mx.array:
    """[B,T,D]: the first token is predicted at the prompt's last position. Past a row's end: any states.

    The gradient also picks rows. That of an indexed read would add up row by row, atomically on a GPU.
    """
    rows, width = batch.targets_bt.shape
    length = states_bld.shape[1]
    first_b1 = batch.prompt_lengths_b[:, None] - 1

    @mx.custom_function
    def pick(states_bld: mx.array) -> mx.array:
        return _taken(states_bld, mx.minimum(first_b1 + mx.arange(width), _last(length)))

    @pick.vjp
    def pick_vjp(states_bld: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        token_bl = mx.arange(length) - first_b1
        picked = (token_bl >= 0) & (token_bl <= _last(width))
        taken = _taken(cotangent, mx.clip(token_bl, mx.array(0), _last(width)))
        return mx.where(picked[..., None], taken, 0)

    return cast(mx.array, pick(states_bld.reshape(rows, length, -1)))


def _taken(values_bnd: mx.array, column_bm: mx.array) -> mx.array:
    """[B,M,D]: of each row the values at these columns."""
    rows, columns, width = values_bnd.shape
    index_bm = mx.arange(0, rows * columns, columns)[:, None] + column_bm
    return values_bnd.reshape(-1, width)[index_bm.reshape(-1)].reshape(rows, -1, width)


def _last(size: int) -> mx.array:
    """The last index as an array: a fused kernel contains each number, and would be compiled for each."""
    return mx.arange(size - 1, size)
