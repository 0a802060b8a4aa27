"""Fixes for faults of single mlx-lm models, in one instance; such a model is known by its module's name."""

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn


def fix_known_faults(module: nn.Module) -> None:
    """Fix the model if it is one of those; a second call changes nothing."""
    if type(module).__module__ == "mlx_lm.models.phi3small":
        _fix_phi3small(module)


def _fix_phi3small(module: nn.Module) -> None:
    """It writes −inf at ids that a smaller vocabulary does not have, past the end of the logits; and its
    block-sparse layers add their causal mask of booleans to the scores, so that they see later tokens."""
    from mlx_lm.models import phi3small

    model = cast(Any, module)
    unused = [n for n in model._dummy_tokenizer_ids.tolist() if n < model.args.vocab_size]
    model._dummy_tokenizer_ids = mx.array(unused, mx.int32)

    class Attention(phi3small.Attention):
        def _block_sparse_attention(
            self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
        ) -> mx.array:
            if mask is not None and mask.dtype == mx.bool_:
                mask = mx.where(mask, 0.0, -mx.inf).astype(queries.dtype)
            return super()._block_sparse_attention(queries, keys, values, scale, mask)

    for layer in module.modules():
        if type(layer) is phi3small.Attention and layer.block_sparse:
            layer.__class__ = Attention
