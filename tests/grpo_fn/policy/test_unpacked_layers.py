"""A packed base with adapters (QLoRA) on a CPU or CUDA: many rows are multiplied by unpacked weights."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import grpo_fn as g
from grpo_fn.backends.mechanisms import has_cuda
from grpo_fn.policy import decode_weights as unpacking
from grpo_fn.policy.decode_weights import decode_weights, decode_weights_bytes, unpackable, unpacked_weights
from grpo_fn.policy.layers import patched_layers as substitutes
from grpo_fn.policy.layers import quantized_layers
from grpo_fn.policy.layers.quantized_layers import QuantMode, dequantize, unpack_rows
from tests.support.generating import EOS, RAGGED, assert_teacher_forced, roll
from tests.support.tiny_policies import (
    memory_in_use,
    tiny_module,
    token_rows,
    with_adapters,
    worst_difference,
)

pytestmark = pytest.mark.skipif(
    not unpack_rows(), reason="products with packed weights take many rows well here"
)

MODES = [("affine", 32, 4), ("affine", 64, 8), ("mxfp4", 32, 4), ("nvfp4", 16, 4)]


def packed_module(name="qwen2", *, adapters=True, mode="affine", group_size=32, bits=4):
    """A tiny model with packed weights, embedding included, and adapters other than zero."""
    module = tiny_module(name, hidden_size=64, intermediate_size=128, vocab_size=96)
    nn.quantize(module, group_size, bits, mode=mode)
    return with_adapters(module, None) if adapters else module


def kinds(module):
    return {type(layer).__name__ for layer in module.modules()}


@pytest.fixture
def no_packed_products(monkeypatch):
    """mlx's product of packed weights with many rows raises."""
    few = mx.quantized_matmul

    def refuse(x, *args, **kwargs):
        if x.size // x.shape[-1] >= unpack_rows():
            raise AssertionError("a product with packed weights")
        return few(x, *args, **kwargs)

    monkeypatch.setattr(mx, "quantized_matmul", refuse)


@pytest.mark.parametrize("part_bytes", [64e6, 64 * 4 * 10], ids=["whole", "in parts"])
@pytest.mark.parametrize(("mode", "group_size", "bits"), MODES)
def test_the_product_and_its_gradient_are_those_of_the_unpacked_weight(
    mode, group_size, bits, part_bytes, monkeypatch
):
    """Of a layer with a bias, and of an embedding as the head, in float64; part by part as well."""
    monkeypatch.setattr(quantized_layers, "PART_BYTES", part_bytes)
    x = mx.random.normal((2, 8, 64), key=mx.random.key(0))
    mx.random.seed(0)  # for the layers' weights
    shares = np.arange(96) / 96
    for plain in (nn.Linear(64, 96), nn.Embedding(96, 64)):
        layer = plain.to_quantized(group_size, bits, mode)
        kind = type(layer)
        substitutes.patch_layers(layer)
        assert type(layer) is not kind and isinstance(layer, kind)

        def weighted(x, layer=layer):
            product = layer.as_linear(x) if isinstance(layer, nn.QuantizedEmbedding) else layer(x)
            return (mx.array(shares, mx.float32) * product).sum()

        value, gradient = mx.value_and_grad(weighted)(x)
        packed = {name: layer[name] for name in ("weight", "scales", "biases") if layer.get(name) is not None}
        weight = np.array(dequantize(packed, QuantMode(mode, bits, group_size), mx.float32), np.float64)
        product = np.array(x, np.float64) @ weight.T + np.array(layer.get("bias", 0.0))
        assert value.item() == pytest.approx((product * shares).sum(), rel=1e-5, abs=1e-3)
        assert np.allclose(np.array(gradient), shares @ weight, atol=1e-4)


@pytest.mark.parametrize("compile", [False, True])
def test_the_learner_takes_no_packed_product(compile, no_packed_products):
    """Compiled or not, the gradient is that of the same weights unpacked."""
    policy, plain_module = g.Policy.from_module(packed_module()), packed_module()
    tokens, targets = token_rows(2, 6), token_rows(2, 6, seed=1)

    def loss(policy, params, frozen):
        hidden = policy.hidden(params, tokens, frozen)
        return g.token_logprobs(hidden, policy.head(params, frozen), targets).sum()

    def gradient(policy):
        step = g.compiled(
            lambda params, frozen: mx.grad(lambda params: loss(policy, params, frozen))(params),
            enabled=compile,
        )
        return step(policy.params, policy.frozen)

    got = gradient(policy)
    with unpacked_weights(plain_module):
        want = gradient(g.Policy.from_module(plain_module))
    assert worst_difference(got, want) < 1e-4


@pytest.mark.parametrize("compile", [False, True])
def test_the_backward_pass_keeps_no_unpacked_weights(compile):
    """The peak stays below half of the weights; CUDA also keeps ten buffers, so it gets more weights."""
    width, count = (4096, 96) if has_cuda() else (1024, 16)
    layers = [nn.Linear(width, width, bias=False).to_quantized(64, 4) for _ in range(count)]
    for layer in layers:
        substitutes.patch_layers(layer)
        mx.eval(layer.parameters())

    def deep(x):
        for layer in layers:
            x = layer(x)
        return x.sum()

    x = mx.random.normal((8, width), key=mx.random.key(0))
    mx.eval(x)
    before = memory_in_use()
    mx.reset_peak_memory()
    mx.eval(g.compiled(mx.grad(deep), enabled=compile)(x))
    assert mx.get_peak_memory() - before < count / 2 * 4 * width**2


@pytest.mark.parametrize(
    ("name", "options"), [("qwen2", {}), ("llama", {"share_prefix": False})], ids=["shared", "copied"]
)
def test_a_rollout_takes_no_packed_product(name, options, no_packed_products):
    """Weights are unpacked once with merged adapters, and samples are the learner's."""
    policy = g.Policy.from_module(packed_module(name))
    with policy.sampling(policy.params) as module:
        assert not {"_QuantizedLinear", "_QuantizedEmbedding", "LoRALinear"} & kinds(module)
    drawn = roll(policy, RAGGED, generations=4, eos_ids=EOS, check_every=2, **options)
    assert {"_QuantizedLinear", "LoRALinear"} <= kinds(policy.module)
    assert_teacher_forced(policy, drawn)


@pytest.mark.parametrize(("mode", "group_size", "bits"), MODES)
def test_unpacked_weights_compute_the_same_and_go_away(mode, group_size, bits):
    """The plain layers give the same result; afterwards the same packed arrays are back."""
    module = packed_module(adapters=False, mode=mode, group_size=group_size, bits=bits)
    substitutes.patch_layers(module)
    before, held = module(token_rows(2, 5)), {p: id(a) for p, a in tree_flatten(module.parameters())}
    mx.random.seed(5)
    with unpacked_weights(module) as found:
        layers: Any = found
        assert len(layers) == 2 * 7 + 1 and not any(hasattr(layer, "bits") for layer in module.modules())
        assert float(mx.abs(module(token_rows(2, 5)) - before).max()) < 1e-4
        assert all(layer.weight.dtype == mx.float32 for layer in layers)
    assert {p: id(a) for p, a in tree_flatten(module.parameters())} == held
    got = mx.random.uniform(shape=(3,))
    mx.random.seed(5)
    assert mx.array_equal(mx.random.uniform(shape=(3,)), got), "no random number was drawn"


def test_what_sampling_holds_is_counted():
    """The bytes of the unpacked weights, with or without adapters, are those allocated."""
    module = packed_module()
    substitutes.patch_layers(module)
    with unpacked_weights(module) as found:
        layers: Any = found
        unpacked = sum(layer.weight.nbytes for layer in layers)
    assert decode_weights_bytes(module) == unpacked
    mx.eval(module.parameters())
    before = memory_in_use()
    with decode_weights(module):
        held = memory_in_use() - before
    pages = 1024 * len(layers) if mx.cuda.is_available() else 2000
    assert 0 <= held - unpacked < pages, "MLX rounds sizes up"
    assert decode_weights_bytes(module, mx.bfloat16) == unpacked / 2
    assert kinds(module) >= {"_QuantizedLinear"}


def test_nothing_is_unpacked_where_packed_products_are_fast(monkeypatch):
    """As on Metal, except weights of one group per row, which are wrong on CUDA."""
    monkeypatch.setattr(quantized_layers, "unpack_rows", lambda: 0)
    monkeypatch.setattr(unpacking, "number", lambda name: 0)
    assert unpackable(packed_module()) == []
    taken, packed = [], mx.quantized_matmul
    monkeypatch.setattr(
        mx, "quantized_matmul", lambda x, *a, **k: taken.append(x.shape) or packed(x, *a, **k)
    )
    for width, rows in ((64, 1), (64, 2), (128, 100)):
        for layer in (nn.Linear(width, 32).to_quantized(64, 4), nn.Embedding(32, width).to_quantized(64, 4)):
            x = mx.random.normal((rows, width), key=mx.random.key(0))
            weight = mx.dequantize(layer.weight, layer.scales, layer.biases, 64, 4)
            wanted = x @ weight.T + layer.get("bias", 0.0)
            substitutes.patch_layers(layer)
            found = layer.as_linear(x) if isinstance(layer, nn.QuantizedEmbedding) else layer(x)
            assert mx.allclose(found, wanted, atol=1e-4)
    assert taken == [(1, 64)] * 2 + [(100, 128)] * 2
