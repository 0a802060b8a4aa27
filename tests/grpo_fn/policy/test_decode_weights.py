"""A policy's module while it samples: the same function, with merged adapters."""

from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear

import grpo_fn as g
from grpo_fn.backends import substituted
from grpo_fn.policy import decode_weights
from grpo_fn.policy.decode_weights import decode_weights_bytes, merged_adapters
from grpo_fn.trees import named_leaves
from tests.support.generating import roll
from tests.support.tiny_policies import VOCAB, tiny_module, with_adapters, worst_difference

TOKENS = mx.random.randint(0, VOCAB, (3, 7), key=mx.random.key(0))


def adapted(name="llama", *, dora=False):
    """A tiny model whose adapters change its output."""
    return with_adapters(tiny_module(name), dora=dora)


def fits(path, layer):
    return path.endswith("linear") and layer.weight.shape[-1] % 32 == 0


def kinds(module):
    return {type(layer).__name__ for layer in module.modules()}


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "nanochat"])
def test_merged_adapters_compute_the_same_and_come_back(name, dora):
    module = adapted(name, dora=dora)
    before, leaves = module(TOKENS), named_leaves(module.parameters())
    held = decode_weights_bytes(module)
    adapters = [path for path, layer in module.named_modules() if "lora_a" in layer]
    with merged_adapters(module):
        assert not {"LoRALinear", "DoRALinear"} & kinds(module)
        made = dict(module.named_modules())
        assert held == sum(made[path].weight.nbytes for path in adapters) > 0
        assert worst_difference(module(TOKENS), before) < 1e-5
    after = named_leaves(module.parameters())
    assert after.keys() == leaves.keys() and all(after[path] is leaf for path, leaf in leaves.items())
    assert worst_difference(module(TOKENS), before) == 0


def test_adapters_over_few_bits_are_left_alone(monkeypatch):
    """16-bit weights unless a backend asks for it, and packed weights, are not merged."""
    monkeypatch.setattr(decode_weights, "number", {"merged_16_bits": 0, "unpack_rows": 4}.get)
    for change in (
        lambda module: module.set_dtype(mx.bfloat16),
        lambda module: nn.quantize(module, 32, 8, class_predicate=fits),
    ):
        module = adapted()
        change(module)
        with merged_adapters(module):
            assert "LoRALinear" in kinds(module)
    assert decode_weights_bytes(adapted(), mx.bfloat16) == 0


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("dora", [False, True])
def test_weights_of_16_bits_keep_a_young_adapter_on_average(dora, dtype, monkeypatch):
    """An adapter below the dtype's steps moves the weights' mean; a zero adapter moves none."""
    monkeypatch.setattr(decode_weights, "number", lambda name: {"merged_16_bits": 1e9}[name])
    kind = DoRALinear if dora else LoRALinear
    linear = nn.Linear(256, 256, bias=True)
    linear.weight = (1.5 + 0.25 * mx.random.uniform(shape=(256, 256), key=mx.random.key(3))).astype(dtype)
    module = nn.Sequential(kind.from_base(linear, r=4, scale=1.0))
    [layer] = module.layers
    with merged_adapters(module):
        unmoved = module.layers[0].weight
        assert unmoved.dtype == dtype and "bias" in module.layers[0]
    if not dora:  # its row lengths are rounded
        assert mx.array_equal(unmoved, linear.weight)
    layer.lora_a, layer.lora_b = mx.ones((256, 4)), mx.full((4, 256), 1e-4 / 4)
    with merged_adapters(module):
        moved = module.layers[0].weight.astype(mx.float32)
    step = mx.abs(moved - linear.weight.astype(mx.float32)).max()
    assert float(step) <= 2**-7  # a neighbour
    if not dora:
        # The mean of 65,536 draws, each 1/64 or so of a step of 2^-7 apart from its expectation.
        assert abs((moved - linear.weight.astype(mx.float32)).mean().item() - 1e-4) < 2e-5


@pytest.mark.parametrize("max_batch, rows", [(0, 6), (5, 4), (1, 2), (64, 6)])
def test_a_form_is_told_how_many_rows_are_decoded(max_batch, rows):
    """Rows of whole groups: three prompts with two completions each."""
    told = []

    @contextmanager
    def form(module, rows):
        told.append(rows)
        yield

    policy = g.Policy.from_module(tiny_module("llama"))
    with substituted(decode_blocks=form):
        roll(policy, [[1, 2], [3], [4, 5]], generations=2, limit=2, max_batch=max_batch)
    assert told == [rows]
