"""A decoder's block as one CUDA kernel: which blocks are taken, their composed form, and decoding with it."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import grpo_fn as g
from grpo_fn.backends import disabled
from grpo_fn.backends.cuda.decoding import block_kernel, decode_blocks
from grpo_fn.backends.cuda.decoding.block_kernel import BlockShape, Weights, takes_block
from grpo_fn.backends.cuda.decoding.decode_blocks import DecodeBlock, composed_block, known_blocks, parts_of
from grpo_fn.backends.cuda.decoding.kernel_steps import KernelCache
from grpo_fn.backends.cuda.kernels import DeviceLimits
from grpo_fn.trees import named_leaves
from tests.support.generating import roll
from tests.support.tiny_policies import tiny_module, worst_difference

ON_CUDA = mx.default_device().type == mx.DeviceType.gpu and not mx.metal.is_available()
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2}
FAMILIES: dict[str, Any] = {
    "llama": {"head_dim": 64, "num_key_value_heads": 1},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"head_dim": 128, "num_key_value_heads": 1},
    "nanochat": {"num_key_value_heads": 2},
}


def module_of(name, **changes) -> Any:
    return tiny_module(name, **SIZES | FAMILIES[name] | changes)


def known_parts(block):
    parts = parts_of(block)
    assert parts is not None
    return parts


@pytest.fixture
def taken(monkeypatch):
    """As if the kernel ran here."""
    monkeypatch.setattr(decode_blocks, "takes_block", lambda shape, weights, rows: True)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_composed_form_is_the_block(name, taken):
    """Biases, norms of heads with weights and without, gates and none; and the module is as before."""
    module = module_of(name)
    leaves = named_leaves(module.parameters())
    blocks = known_blocks(module)
    assert len(blocks) == len(module.layers)
    x = mx.random.normal((2, 7, 128), key=mx.random.key(1))
    for _, block in blocks:
        parts = known_parts(block)
        assert worst_difference(composed_block(parts, x), block(x, mask="causal", cache=None)) < 1e-4
    assert all(leaves[path] is leaf for path, leaf in named_leaves(module.parameters()).items())


def test_another_function_under_the_same_names_is_left_alone(taken, monkeypatch):
    """Numbers decide: a block that scales what it adds, and an MLP with another gate."""
    module = module_of("llama")
    kind = type(module.layers[0])
    plain = kind.__call__

    class Scaled(kind):
        def __call__(self, x, mask=None, cache=None):
            return x + 0.9 * (plain(self, x, mask, cache) - x)

    module.layers[0].__class__ = Scaled
    assert [name for name, _ in known_blocks(module)] == ["model.layers.1"]


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block.self_attn, "o_proj", nn.Linear(128, 128, bias=True)),
        lambda block: setattr(block.mlp, "up_proj", nn.QuantizedLinear(128, 192, bias=False)),
        lambda block: setattr(block, "input_layernorm", nn.LayerNorm(128)),
        lambda block: setattr(block, "pre_feedforward_layernorm", nn.RMSNorm(128)),
    ],
)
def test_blocks_with_other_parts_are_not_taken(change):
    block = module_of("llama").layers[0]
    assert parts_of(block) is not None
    change(block)
    assert parts_of(block) is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"width": 100}, "width of 100: expected a multiple of 64"),
        ({"width": 8192}, "width of 8192: expected at most 4096"),
        ({"head_width": 32}, "heads of 32: expected 64 or 128"),
        ({"heads": 18}, "18 query heads over 2: expected at most 8 to share keys"),
        ({}, None),
    ],
)
def test_shapes(change, message):
    shape = {"width": 896, "heads": 14, "shared": 2, "head_width": 64, "hidden": 4864} | change
    rest = {"gated": True, "biased": True, "head_norms": 0, "scale": 0.125, "eps": 1e-6}
    assert BlockShape(**shape, **rest).fault() == message


@pytest.mark.parametrize(
    "shape, most",
    [
        ({"width": 896, "heads": 14, "shared": 2, "head_width": 64, "hidden": 4864, "gated": True}, 512),
        ({"width": 1280, "heads": 10, "shared": 10, "head_width": 128, "hidden": 5120, "gated": False}, 384),
        ({"width": 3584, "heads": 28, "shared": 4, "head_width": 128, "hidden": 18944, "gated": True}, 0),
    ],
    ids=["Qwen2.5-0.5B", "nanochat-d20", "Qwen2.5-7B"],
)
def test_large_blocks_of_many_rows_are_left_to_cublas(shape, most, monkeypatch):
    """As many rows as the products' time allows, in whole tiles."""
    shape = BlockShape(**shape, biased=False, head_norms=0, scale=0.1, eps=1e-6)
    limits = {"has_cuda": True, "compiles": True, "device_limits": DeviceLimits(132, 232448)}
    for name, value in limits.items():
        monkeypatch.setattr(block_kernel, name, lambda *_, value=value: value)
    weights = Weights(*[mx.zeros((1,), mx.bfloat16)] * 6)
    taken = [rows for rows in range(1, 1025) if takes_block(shape, weights, rows)]
    assert max(taken, default=0) == most


def steps_of(name, monkeypatch):
    """Kernel steps on the CPU, the kernel's place being taken by the block itself: logits, and the calls."""
    calls = []

    def composed(shape, weights, x, turns, prompt, own, prompt_of_b, lengths_p, own_length_b, barrier):
        calls.append(turns)
        return x

    monkeypatch.setattr(decode_blocks, "takes_block", lambda shape, weights, rows: True)
    monkeypatch.setattr(decode_blocks, "block_step", composed)
    module = module_of(name)
    places = mx.array([0, 0, 1]), mx.array([3, 2]), mx.array([3, 3, 2]), mx.array([1, 1, 1])
    nothing, turns = (mx.zeros(()), mx.zeros(())), {}
    caches = [KernelCache(nothing, nothing, *places, turns) for _ in module.layers]
    with decode_blocks.decode_blocks(module):
        module(mx.zeros((3, 1), mx.int32), cache=caches)
        kinds = [type(layer) for layer in module.layers]
    return kinds, calls, [type(layer) for layer in module.layers]


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_of_a_step_share_their_rotation(name, monkeypatch):
    """It is that of each row's position; and the blocks come back."""
    kinds, calls, after = steps_of(name, monkeypatch)
    assert set(kinds) == {DecodeBlock} and DecodeBlock not in after
    assert len(calls) == 2 and calls[0] is calls[1]
    parts = known_parts(module_of(name).layers[0])
    wanted = decode_blocks.turns_at(parts.rope, parts.shape.head_width, 1, 6, 0)[0, mx.array([4, 4, 3])]
    assert worst_difference(calls[0], wanted) < 1e-5


def test_more_rows_than_it_takes_go_through_the_block(monkeypatch):
    policy = g.Policy.from_module(module_of("llama"))
    tokens = mx.array([[3, 4, 5]])
    wanted = policy.logits(policy.params, tokens)
    monkeypatch.setattr(decode_blocks, "takes_block", lambda shape, weights, rows: rows == 1)
    with decode_blocks.decode_blocks(policy.module):
        assert worst_difference(policy.module(mx.repeat(tokens, 2, axis=0))[:1], wanted) < 1e-5
    with decode_blocks.decode_blocks(policy.module, 2):
        assert not any(isinstance(layer, DecodeBlock) for layer in policy.module.modules())


@pytest.mark.skipif(not ON_CUDA, reason="needs CUDA")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("generations, warps", [(1, 8), (5, 1), (70, 2)])
def test_decoding_with_it(name, dtype, generations, warps, monkeypatch):
    """As near to float32 as without it; the same each time; and no row depends on the others."""
    monkeypatch.setattr(block_kernel, "warps_of_row", lambda items, room: warps)
    prompts = [[5, 9, 11, 3], [7, 2], [4] * 30]
    exact = g.Policy.from_module(module_of(name, dtype=dtype), compute_dtype=mx.float32)

    def draw(prompts):
        policy = g.Policy.from_module(module_of(name, dtype=dtype))
        return roll(policy, prompts, seed=3, generations=generations, limit=40, pipelined=True)

    def error(rollout):
        batch = g.make_batch(rollout, mx.ones((len(prompts), generations)))
        return float(mx.abs(g.make_logprob_step(exact)(exact.params, batch) - rollout.logp_bt).mean())

    policy = g.Policy.from_module(module_of(name, dtype=dtype))
    with policy.sampling(policy.params) as module:
        assert sum(isinstance(layer, DecodeBlock) for layer in module.modules()) == 2
    drawn, again, part = draw(prompts), draw(prompts), draw(prompts[:2])
    assert mx.array_equal(drawn.tokens_bt, again.tokens_bt) and mx.array_equal(drawn.logp_bt, again.logp_bt)
    assert mx.array_equal(drawn.tokens_bt[: 2 * generations], part.tokens_bt)
    with disabled("decode_blocks"):
        plain = draw(prompts)
    assert error(drawn) < 1.5 * error(plain) + 1e-4
