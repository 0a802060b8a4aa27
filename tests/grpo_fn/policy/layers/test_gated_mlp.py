"""The gated half of an MLP: the same value and gradient as the plain expression, with less kept for it."""

import gc

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama, qwen2
from mlx_lm.models.activations import swiglu
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear

from grpo_fn.policy.layers import patched_layers as substitutes
from grpo_fn.policy.layers.gated_mlp import down_of_gated
from grpo_fn.policy.layers.patched_layers import patch_layers
from tests.support.tiny_policies import worst_difference

LLAMA = llama.ModelArgs("llama", 32, 1, 64, 2, 1e-5, 16)


def linear_of(width, out, *, bias=False):
    layer = nn.Linear(width, out, bias=bias)
    layer.weight = mx.random.normal((out, width), key=mx.random.key(1)) * 0.2
    return layer


def linear(*, bias=False):
    return linear_of(64, 32, bias=bias)


def adapted(kind, base, **more):
    layer = kind.from_base(base, r=4, **more)
    layer.lora_b = mx.random.normal(layer.lora_b.shape, key=mx.random.key(2))
    base = layer.linear
    base.freeze()
    return layer


LAYERS = {
    "linear": lambda: linear(),
    "bias": lambda: linear(bias=True),
    "lora": lambda: adapted(LoRALinear, linear()),
    "dora": lambda: adapted(DoRALinear, linear()),
    "lora on 4 bits": lambda: adapted(LoRALinear, linear().to_quantized(32, 4)),
    "frozen": lambda: linear().freeze(),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_value_and_gradient_are_those_of_the_plain_expression(name, compiled):
    down = LAYERS[name]()
    keys = mx.random.split(mx.random.key(0), 3)
    gate, x = (mx.random.normal((2, 5, 64), key=key) for key in keys[:2])
    weights = mx.random.normal((2, 5, 32), key=keys[2])

    def plain(gate, x):
        return down(gate * mx.sigmoid(gate) * x)

    def gradients(function):
        def loss(leaves, gate, x):
            held = down.parameters()
            try:
                down.update(leaves)
                return (function(gate, x) * weights).sum()
            finally:
                down.update(held)

        take = mx.value_and_grad(loss, argnums=(0, 1, 2))
        return (mx.compile(take) if compiled else take)(down.trainable_parameters(), gate, x)

    found, wanted = gradients(lambda gate, x: down_of_gated(down, gate, x)), gradients(plain)
    assert worst_difference(found, wanted) < 1e-3


@pytest.mark.parametrize("make", [qwen2.MLP, lambda *sizes: llama.MLP(LLAMA)])
def test_it_is_what_gated_mlps_run(make):
    layer = make(32, 64)
    x = mx.random.normal((2, 3, 32), key=mx.random.key(5))
    before = layer(x)
    patch_layers(layer)
    assert type(layer).__call__ is substitutes._gated_mlp
    assert worst_difference(layer(x), before) < 1e-6


class Residual(qwen2.MLP):
    """Calls what a gated MLP calls, in the same order, for something else."""

    def __call__(self, x):
        return x + self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Swapped(qwen2.MLP):
    """The same instructions with other names."""

    def __call__(self, x):
        return self.down_proj(swiglu(self.up_proj(x), self.gate_proj(x)))


@pytest.mark.parametrize("kind", [Residual, Swapped])
def test_a_layer_that_only_looks_like_one_computes_what_it_says(kind):
    layer = kind(32, 64)
    x = mx.random.normal((2, 3, 32), key=mx.random.key(5))
    before = layer(x)
    patch_layers(layer)
    assert worst_difference(layer(x), before) < 1e-6


def test_a_second_draw_of_dropout_is_not_taken_for_the_first():
    layer = adapted(LoRALinear, linear(), dropout=0.5)
    gate = mx.random.normal((1, 4, 64), key=mx.random.key(3))

    def loss(a, gate):
        held = layer.parameters()
        try:
            layer.update({"lora_a": a})
            return down_of_gated(layer, gate, gate).sum()
        finally:
            layer.update(held)

    mx.random.seed(7)
    value, gradient = mx.value_and_grad(loss)(layer.lora_a, gate)
    # The output is linear in lora_a: with one mask throughout, its gradient along lora_a is its own part.
    mx.random.seed(7)
    without = loss(mx.zeros_like(layer.lora_a), gate)
    assert worst_difference((gradient * layer.lora_a).sum(), value - without) < 1e-3


def test_the_gated_product_is_not_kept(monkeypatch):
    """Compiled, 60 MLPs in a row peak lower by most of their gated products."""
    blocks, hidden, wide, tokens = 60, 32, 256, 64
    x = mx.random.normal((1, tokens, hidden), key=mx.random.key(6))

    def peak():
        layers = [qwen2.MLP(hidden, wide) for _ in range(blocks)]
        for layer in layers:
            patch_layers(layer)

        def loss(leaves, x):
            for layer, mine in zip(layers, leaves, strict=True):
                held = layer.parameters()
                layer.update(mine)
                x = x + layer(x)
                layer.update(held)
            return mx.square(x).sum()

        take = mx.compile(mx.grad(loss))
        leaves = [layer.parameters() for layer in layers]
        mx.eval(leaves, x)
        peaks = []
        for _ in range(4):
            gc.collect()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            mx.eval(take(leaves, x))
            peaks.append(mx.get_peak_memory() - before)
        return max(peaks[1:])  # the first one is traced

    without = peak()
    substitutes._patched.cache_clear()
    monkeypatch.setattr(substitutes, "_is_gated_mlp", lambda call: False)
    try:
        kept = peak()
    finally:
        substitutes._patched.cache_clear()
    assert kept - without > 0.6 * blocks * tokens * wide * 4
