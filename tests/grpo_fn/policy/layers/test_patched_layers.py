"""Layers that call the library's functions compute what mlx-lm's layers do; nothing else changes."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base, qwen2

from grpo_fn.policy.layers import patched_layers as substitutes
from tests.support.tiny_policies import ARCHITECTURES, VOCAB, tiny_module, worst_difference


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_same_model(name):
    """Logits and gradients agree with those of the untouched model."""
    theirs, ours = tiny_module(name), tiny_module(name)
    ours.update(theirs.parameters())
    substitutes.patch_layers(ours)
    tokens = mx.random.randint(0, VOCAB, (3, 9), key=mx.random.key(0))
    assert mx.abs(ours(tokens) - theirs(tokens)).max() < 1e-4

    def gradient(model):
        return nn.value_and_grad(model, lambda tokens: model(tokens).square().mean())(tokens)[1]

    assert worst_difference(gradient(ours), gradient(theirs)) < 1e-4


def test_only_this_instance():
    """The class and other models keep mlx-lm's functions; patching twice changes nothing."""
    one, other = tiny_module("qwen2"), tiny_module("qwen2")
    # A block: attention, MLP, two norms.
    changed = 4 * len(one.layers) + 1
    assert substitutes.patch_layers(one) == substitutes.patch_layers(one) == changed
    assert type(other.layers[0].self_attn) is qwen2.Attention
    assert type(one.layers[0].self_attn) is not qwen2.Attention
    assert isinstance(one.layers[0].self_attn, qwen2.Attention)
    assert type(other.norm if hasattr(other, "norm") else other.model.norm) is nn.RMSNorm
    assert qwen2.scaled_dot_product_attention is base.scaled_dot_product_attention


def test_a_cache_may_attend_by_itself():
    """A cache with `attend` is called; masks and sinks, which it would not see, are refused."""

    class Cache:
        def attend(self, queries, keys, values, scale):
            return queries * scale

    q = mx.ones((1, 2, 1, 4))
    assert mx.array_equal(substitutes.attention(q, q, q, Cache(), 0.5, None), 0.5 * q)
    with pytest.raises(ValueError, match="sinks"):
        substitutes.attention(q, q, q, Cache(), 0.5, None, sinks=mx.zeros((2,)))
    with pytest.raises(ValueError, match="a mask"):
        substitutes.attention(q, q, q, Cache(), 0.5, mx.zeros((1, 1, 1, 1)))
