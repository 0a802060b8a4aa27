"""Computes the hidden states (and router logits) from which a batch's completion tokens are
predicted.

With shared prompts, a group's prompt is computed once, and its completions attend to it:

    prompts [P,L] ─backbone→ keys, values of each layer
    completions [B,T−1] ─backbone over them→ hidden

The layers below replace caches and provide mlx-lm's attention layers with an offset, a mask, and
keys and values to attend to. These layers contain traced arrays, so gradients flow from completions
into prompts.
"""

from typing import cast

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.learner.batch import Batch
from grpo_fn.policy.caches.kv_caches import plain_caches, shares_keys, takes_ragged
from grpo_fn.policy.image_forward import Positions, forward_with_images
from grpo_fn.policy.policy import Policy
from grpo_fn.trees import Tree


def completion_hidden(policy: Policy, params: Tree, frozen: Tree, batch: Batch) -> mx.array:
    """Computes the hidden states [B,T,D] from which the completions' tokens are predicted.

    Raises:
        ValueError: the batch shares prompts and has `experts_blnk`, which requires whole rows.
    """
    if batch.prompt_index_b is None:
        hidden_bld = policy.hidden(
            params, batch.tokens_bl, frozen, batch.images, batch.experts_blnk
        )
        return _predicting(batch, hidden_bld)
    if batch.experts_blnk is not None:
        raise ValueError(
            "experts_blnk applies to whole rows: expected micro-batches without shared prompts"
        )
    lengths_p, index_b = batch.prompt_lengths_b, batch.prompt_index_b
    images = batch.images
    at = 0 if images is None else Positions(images.positions_r3l)
    shift_p = None if images is None else images.shift_r
    prompts = [_PromptLayer(at) for _ in plain_caches(policy.module)]
    with policy.learning(params, frozen) as module:
        backbone = policy.split.backbone(module)
        if images is None:
            hidden_pld = backbone(batch.tokens_bl, cache=prompts)
        else:
            hidden_pld = forward_with_images(backbone, batch.tokens_bl, images, prompts)
        last_pd = hidden_pld[mx.arange(lengths_p.shape[0]), lengths_p - 1]
        first_b1d = last_pd[index_b][:, None]  # predicts each completion's first token
        if batch.targets_bt.shape[1] == 1:
            return first_b1d
        completions = [_CompletionLayer(layer, lengths_p, index_b, shift_p) for layer in prompts]
        rest_btd = backbone(batch.targets_bt[:, :-1], cache=completions)
    return mx.concatenate([first_b1d, rest_btd], axis=1)


def completion_hidden_and_routing(
    policy: Policy, params: Tree, frozen: Tree, batch: Batch
) -> tuple[mx.array, list[mx.array]]:
    """Like `completion_hidden`, but also returns the routers' logits [B·T,E] of each layer with
    experts, at the same tokens.

    Raises:
        ValueError: the batch shares prompts or has images; and the errors of
            `Policy.hidden_and_routing`.
    """
    if batch.prompt_index_b is not None:
        raise ValueError(
            "routers are recorded over whole rows: expected micro-batches without shared prompts"
        )
    if batch.images is not None:
        raise ValueError("routers are only recorded for text: expected a batch without images")
    hidden_bld, logits = policy.hidden_and_routing(
        params, batch.tokens_bl, frozen, batch.experts_blnk
    )
    return _predicting(batch, hidden_bld), [
        _predicting(batch, x).reshape(-1, x.shape[-1]) for x in logits
    ]


def _predicting(batch: Batch, states_bld: mx.array) -> mx.array:
    """Selects the states [B,T,D] that predict the completion; the prompt's last position predicts
    the first token. States past a row's end are arbitrary.

    The gradient also picks rows. The gradient of an indexed read would be summed row by row,
    atomically on a GPU.
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
    """Returns each row's values at these columns, [B,M,D]."""
    rows, columns, width = values_bnd.shape
    index_bm = mx.arange(0, rows * columns, columns)[:, None] + column_bm
    return values_bnd.reshape(-1, width)[index_bm.reshape(-1)].reshape(rows, -1, width)


def _last(size: int) -> mx.array:
    """Returns the last index as an array, because a fused kernel contains its numbers and would be
    compiled for each number.
    """
    return mx.arange(size - 1, size)


def can_share(module: nn.Module) -> bool:
    """Returns whether every layer has its own plain key-value cache and accepts a mask for each
    row.

    Prompts cannot be shared with sliding windows, recurrent states, or layers that use other
    layers' caches.
    """
    from mlx_lm.models.cache import KVCache

    plain = all(type(cache) is KVCache for cache in plain_caches(module))
    return plain and not shares_keys(module) and takes_ragged(module)


class _PromptLayer:
    """Stores a layer's keys and values for the prompts."""

    def __init__(self, offset: int | Positions = 0) -> None:
        self.offset = offset
        self.keys = self.values = mx.zeros((0,))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values
        return keys, values

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        if return_array or window_size:
            return _causal(mx.arange(length)[:, None] - mx.arange(length)[None], window_size)
        return "causal" if length > 1 else None


class _CompletionLayer:
    """Prepends the row's prompt to a layer's keys and values for the completions."""

    def __init__(
        self,
        prompt: _PromptLayer,
        lengths_p: mx.array,
        index_b: mx.array,
        shift_p: mx.array | None = None,
    ) -> None:
        self._prompt, self._index_b = prompt, index_b
        self._length_b = lengths_p[index_b]
        # position of each completion's first token
        self.offset = self._length_b if shift_p is None else self._length_b + shift_p[index_b]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        prompt_keys, prompt_values = (
            self._prompt.keys[self._index_b],
            self._prompt.values[self._index_b],
        )
        return mx.concatenate([prompt_keys, keys], axis=2), mx.concatenate(
            [prompt_values, values], axis=2
        )

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Returns the mask [B,1,T,L+T], which allows the prompt without its padding, and the
        completion up to the current token.
        """
        padded = self._prompt.keys.shape[2]
        position = mx.arange(padded)[None, None, None]
        offset = self._length_b[:, None, None, None]
        back = offset + mx.arange(length)[:, None] - position  # the distance to each prompt token
        in_prompt = (position < offset) & _causal(back, window_size)
        causal = _causal(mx.arange(length)[:, None] - mx.arange(length)[None], window_size)
        shape = (self._length_b.shape[0], 1, length)
        in_prompt = mx.broadcast_to(in_prompt, (*shape, padded))
        return mx.concatenate(
            [in_prompt, mx.broadcast_to(causal[None, None], (*shape, length))], axis=-1
        )


def _causal(back: mx.array, window_size: int | None) -> mx.array:
    """Returns whether a token may attend to the token `back` positions before it."""
    seen = back >= 0
    return seen & (back < window_size) if window_size else seen
