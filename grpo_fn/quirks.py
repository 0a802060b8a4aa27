"""Faults of single mlx-lm models that are put right in one instance, by name: no property tells them."""

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def put_right(module: nn.Module) -> None:
    """Mend a model that is one of those; a second call changes nothing."""
    if type(module).__module__ == "mlx_lm.models.phi3small":
        _put_phi3small_right(module)


def _put_phi3small_right(module: nn.Module) -> None:
    """It writes −inf at ids that a smaller vocabulary does not have, past the end of the logits; and its
    block-sparse layers add their causal mask of booleans to the scores, so that they see later tokens."""
    vocabulary = module.args.vocab_size
    unused = [n for n in module._dummy_tokenizer_ids.tolist() if n < vocabulary]
    module._dummy_tokenizer_ids = mx.array(unused, mx.int32)
    kind: Any = sys.modules[type(module).__module__]

    class Attention(kind.Attention):
        def _block_sparse_attention(
            self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
        ) -> mx.array:
            if mask is not None and mask.dtype == mx.bool_:
                mask = mx.where(mask, 0.0, -mx.inf).astype(queries.dtype)
            return super()._block_sparse_attention(queries, keys, values, scale, mask)

    for layer in module.modules():
        if type(layer) is kind.Attention and layer.block_sparse:
            layer.__class__ = Attention
