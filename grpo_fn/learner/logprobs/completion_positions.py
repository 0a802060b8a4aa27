"""The completion positions of a batch whose log-probs are computed: [B,T] as one row of N, and back.

`batch.positions_n` lists them: places in [B,T], counted row by row; None means all B·T. The place B·T means
no token and fills up to a fixed N. Heads and log-probs then cost N rows, not B·T.
"""

from typing import cast

import mlx.core as mx

from grpo_fn.learner.batch import Batch
from grpo_fn.learner.logprobs.shared_prompts import hidden_after_shared_prompts
from grpo_fn.policy.policy import Policy
from grpo_fn.trees import Tree


def hidden_at_positions(policy: Policy, params: Tree, frozen: Tree, batch: Batch) -> mx.array:
    """Hidden states [1,N,D] from which the tokens at `positions_n` are predicted.

    Raises:
        ValueError: the batch shares prompts and has `experts_blnk`, which are for whole rows.
    """
    if batch.prompt_index_b is not None:
        if batch.experts_blnk is not None:
            raise ValueError(
                "experts_blnk are those of whole rows: make micro-batches without shared prompts"
            )
        hidden_btd = hidden_after_shared_prompts(policy, params, frozen, batch)
        return _picked(hidden_btd.reshape(batch.targets_bt.size, -1), _positions(batch))[None]
    hidden_bld = policy.hidden(params, batch.tokens_bl, frozen, batch.images, batch.experts_blnk)
    return _predicting(batch, hidden_bld)[None]


def hidden_and_routing_at_positions(
    policy: Policy, params: Tree, frozen: Tree, batch: Batch
) -> tuple[mx.array, list[mx.array]]:
    """`hidden_at_positions`, and the routers' logits [N,E] of each layer with experts, at the same tokens.

    Raises:
        ValueError: the batch shares prompts or has images, or as `Policy.hidden_and_routing`.
    """
    if batch.prompt_index_b is not None:
        raise ValueError("routers are recorded over whole rows: make micro-batches without shared prompts")
    if batch.images is not None:
        raise ValueError("routers are recorded over text: wanted a batch without images")
    hidden_bld, logits = policy.hidden_and_routing(params, batch.tokens_bl, frozen, batch.experts_blnk)
    return _predicting(batch, hidden_bld)[None], [_predicting(batch, x) for x in logits]


def mask_at_positions(batch: Batch) -> mx.array:
    """[N], True if the token at `positions_n` counts."""
    mask, position_n = batch.mask_bt.reshape(-1), _positions(batch)
    return mask[_within(position_n, mask.size)].astype(mx.bool_) & (position_n < mask.size)


def _predicting(batch: Batch, states_bld: mx.array) -> mx.array:
    """[N,D] of the positions from which the tokens at `positions_n` are predicted."""
    rows, width = batch.targets_bt.shape
    position_n = _positions(batch)
    length = states_bld.shape[1]
    row_n = mx.minimum(position_n // width, rows - 1)
    # The first token is predicted at the prompt's last position.
    column_n = batch.prompt_lengths_b[row_n] - 1 + position_n % width
    there_n = (position_n < rows * width) & (column_n < length)
    index_n = mx.where(there_n, row_n * length + column_n, rows * length)
    return _picked(states_bld.reshape(rows * length, -1), index_n)


def targets_at_positions(batch: Batch) -> mx.array:
    """The tokens [1,N] at `positions_n`."""
    targets = batch.targets_bt.reshape(-1)
    return targets[_within(_positions(batch), targets.size)][None]


def scatter_to_batch(batch: Batch, values_1n: mx.array) -> mx.array:
    """Values [1,N] of the tokens at `positions_n` as [B,T], 0 elsewhere."""
    size = batch.targets_bt.size
    whole = mx.zeros((size + 1,)).at[_positions(batch)].add(values_1n[0])
    return whole[:size].reshape(batch.targets_bt.shape)


def _picked(hidden_nd: mx.array, index_n: mx.array) -> mx.array:
    """Rows of `hidden_nd`, each at most once; the index one past the last row means no row.

    Its gradient also picks rows. The gradient of an indexed read would add up row by row, atomically on a
    GPU.
    """
    rows = hidden_nd.shape[0]

    @mx.custom_function
    def pick(hidden_nd: mx.array) -> mx.array:
        return hidden_nd[_within(index_n, rows)]

    @pick.vjp
    def pick_vjp(hidden_nd: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        picks = index_n.shape[0]
        source = mx.full((rows + 1,), picks, mx.int32)
        source[index_n] = mx.arange(picks, dtype=mx.int32)
        padded = mx.concatenate([cotangent, mx.zeros((1, cotangent.shape[1]), cotangent.dtype)])
        return padded[source[:rows]]

    return cast(mx.array, pick(hidden_nd))


def _within(index_n: mx.array, size: int) -> mx.array:
    """The last index where there is none: `size` is made an array, because a fused kernel contains each
    number of its operations, and another one would be compiled for each shape."""
    return mx.minimum(index_n, mx.arange(size - 1, size, dtype=mx.int32))


def _positions(batch: Batch) -> mx.array:
    if batch.positions_n is not None:
        return batch.positions_n
    return mx.arange(batch.targets_bt.size, dtype=mx.int32)
