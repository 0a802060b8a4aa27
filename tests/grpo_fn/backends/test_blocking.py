"""Products in blocks: the same model for decoding steps, and for everything else."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from grpo_fn.backends.cpu import blocked_weights as blocking
from grpo_fn.backends.cpu.blocked_weights import (
    BlockedPart,
    Blocks,
    blockable,
    blocked_products,
    takes_blocks,
)
from grpo_fn.policy.decoding.decode_weights import decode_weights_bytes
from grpo_fn.trees import named_leaves
from tests.support.tiny_policies import VOCAB, tiny_module, worst_difference


def linear(width, out, *, bias=False, seed=1):
    layer = nn.Linear(width, out, bias=bias)
    layer.weight = mx.random.normal((out, width), key=mx.random.key(seed))
    return layer


def kinds(module):
    return {type(layer) for layer in module.modules()}


@pytest.mark.parametrize("rows", [1, 5, 16, 24, 32, 37])
@pytest.mark.parametrize(("width", "out"), [(256, 64), (1024, 256), (96, 48), (1000, 160)])
def test_a_product_is_that_of_its_layer(width, out, rows):
    """Of one cut of the input or several, of few rows or many, a number without divisors too."""
    layer = linear(width, out)
    x = mx.random.normal((rows, 1, width), key=mx.random.key(0))
    found, wanted = Blocks([layer]).take(0, x), layer(x)
    assert found.shape == wanted.shape
    assert worst_difference(found, wanted) < 1e-3


def test_no_block_is_more_than_a_blas_gives_one_core():
    for width, out in ((256, 64), (1024, 256), (64, 4096), (1000, 160)):
        *_, part, columns = Blocks([linear(width, out)]).blocks.shape
        assert blocking.ROWS * part * columns <= blocking.PRODUCT and width % part == 0 and out % columns == 0


def test_layers_of_one_input_are_one_product():
    """Whatever is asked for first, once or twice; another input begins anew."""
    layers = [linear(32, 64, seed=1), linear(32, 32, seed=2), linear(32, 32, seed=3)]
    blocks = Blocks(layers)
    a, b = (mx.random.normal((3, 1, 32), key=mx.random.key(seed)) for seed in (4, 5))
    for number, x in ((2, a), (0, a), (0, a), (1, b), (2, b), (1, a)):
        assert worst_difference(blocks.take(number, x), layers[number](x)) < 1e-4


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="wants a CPU")
@pytest.mark.parametrize("name", ["llama", "qwen2", "nanochat", "cohere"])
def test_a_model_computes_the_same_and_comes_back(name):
    """One token a row through the blocks, a sequence through the layers as they were; head and biases too."""
    module = tiny_module(name)
    token, tokens = (mx.random.randint(0, VOCAB, (3, n), key=mx.random.key(n)) for n in (1, 7))
    one, many, leaves = module(token), module(tokens), named_leaves(module.parameters())
    with blocked_products(module):
        inside = named_leaves(module.parameters())
        assert {Blocks, BlockedPart} <= kinds(module)
        assert worst_difference(module(token), one) < 1e-5
        assert worst_difference(module(tokens), many) < 1e-6
        made = [leaf for name, leaf in inside.items() if name.endswith("blocks")]
        assert decode_weights_bytes(module) == 0, "counted from the layers as they are outside"
        assert all(not part._results and part._input is None for part in _blocks(module))
    assert decode_weights_bytes(module, lanes=True) == sum(leaf.nbytes for leaf in made) > 0
    after = named_leaves(module.parameters())
    assert after.keys() == leaves.keys() and all(after[path] is leaf for path, leaf in leaves.items())


def _blocks(module):
    return [layer for layer in module.modules() if type(layer) is Blocks]


def test_an_error_inside_puts_the_layers_back():
    module = tiny_module("llama")
    with pytest.raises(RuntimeError, match="stop"), blocked_products(module):
        raise RuntimeError("stop")
    assert BlockedPart not in kinds(module)


def test_large_weights_stay_as_they_are(monkeypatch):
    module = tiny_module("llama")
    held = sum(layer.weight.nbytes for group in blockable(module) for _, layer in group)
    monkeypatch.setattr(blocking, "MOST_BYTES", held - 1)
    assert not takes_blocks(module) and blockable(module) == []


@pytest.mark.parametrize(
    ("width", "out", "fits"),
    [(853, 320, False), (1706, 640, False), (320, 853, False), (320, 848, True), (40, 64, True)],
)
def test_sizes_that_hardly_divide_stay_as_they_are(width, out, fits):
    """853 is a prime: as columns of one, or as 853 cuts of the input, it would take many times as long."""
    holder = nn.Module()
    holder.layer = linear(width, out)
    assert bool(blockable(holder)) == fits


def test_siblings_of_different_inputs_are_apart():
    holder = nn.Module()
    holder.gate_proj, holder.up_proj = linear(32, 48), linear(48, 48)
    assert sorted([name for name, _ in group] for group in blockable(holder)) == [["gate_proj"], ["up_proj"]]
    x, y = (mx.random.normal((3, 1, width), key=mx.random.key(width)) for width in (32, 48))
    wanted = holder.gate_proj(x), holder.up_proj(y)
    with blocked_products(holder):
        assert worst_difference(holder.gate_proj(x), wanted[0]) < 1e-4
        assert worst_difference(holder.up_proj(y), wanted[1]) < 1e-4


def test_an_embedding_is_in_blocks_where_it_is_the_head():
    for name, tied in (("llama", True), ("llama-untied", False)):
        paths = {path for group in blockable(tiny_module(name, vocab_size=64)) for path, _ in group}
        assert ("model.embed_tokens" in paths) == tied and ("lm_head" in paths) != tied


def test_packed_and_short_numbers_stay_as_they_are():
    module = tiny_module("llama")
    module.set_dtype(mx.bfloat16)
    assert takes_blocks(module) and blockable(module) == []
    assert blockable(module, mx.float32), "if they were cast"
