"""Products with few rows over weights in blocks: equal to plain products, and used only where they help."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from grpo_fn.backends import disabled
from grpo_fn.backends.cpu import few_rows
from grpo_fn.backends.cpu.few_rows import decode_blocks, has_small_products
from grpo_fn.trees import named_leaves
from tests.support.generating import EOS, assert_same, roll
from tests.support.tiny_policies import tiny_policy, worst_difference

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="for CPUs")
WIDE = (512, 576)  # out, in: 64 columns of it are a block


class Layers(nn.Module):
    """A linear layer with a bias, one without, and an embedding that is also a head."""

    def __init__(self, shape=WIDE, dtype=mx.float32):
        super().__init__()
        out, inner = shape
        self.one, self.other = nn.Linear(inner, out), nn.Linear(inner, out, bias=False)
        self.table = nn.Embedding(out, inner)
        self.set_dtype(dtype)

    def __call__(self, x):
        return self.one(x), self.other(x), self.table.as_linear(x), self.table(mx.array([3, 1]))


def blocked(module):
    """The number of layers that have made their blocks."""
    return sum("_blocks" in layer for layer in module.modules())


@pytest.mark.parametrize("shape", [(1,), (8,), (4, 2), (27,), (28,), (200,)], ids=str)
def test_the_same_numbers(shape):
    """With any arrangement of rows; too many rows use the whole weight. Afterwards the module is restored."""
    module, x = Layers(), mx.random.normal((*shape, WIDE[1]))
    before, layers = module(x), module.leaf_modules()
    with decode_blocks(module, 8):
        after = module(x)
        mx.eval(after)
        assert blocked(module) == (3 if x.size // WIDE[1] <= 27 else 0)
        assert not any("_blocks" in name for name in named_leaves(module.parameters()))
    for one, other in zip(before, after, strict=True):
        assert one.shape == other.shape and worst_difference(one, other) < 1e-5
    assert not blocked(module) and module.leaf_modules() == layers
    assert {type(layer) for layer in layers.values()} == {nn.Linear, nn.Embedding}


@pytest.mark.parametrize(
    ("rows", "options", "used"),
    [
        (1, {}, 3),
        (16, {}, 3),
        (17, {}, 0),  # a copy takes a small share of the time
        (8, {"dtype": mx.bfloat16}, 0),  # not for the BLAS
        (8, {"shape": (128, 576)}, 0),  # small as it is
        (8, {"shape": (520, 576)}, 0),  # no block's width divides it
        (8, {"shape": (512, 8192)}, 0),  # the narrowest block is not small
        (8, {"shape": (512, 4864)}, 3),
        (8, {"most": 3 * 512 * 576 * 4}, 3),
        (8, {"most": 3 * 512 * 576 * 4 - 1}, 0),  # too much memory
    ],
    ids=str,
)
def test_where_blocks_are_made(rows, options, used, monkeypatch):
    """Blocks are made only if they save time and fit into memory."""
    options = dict(options)
    most = options.pop("most", 2**32)
    monkeypatch.setattr(few_rows, "number", {"block_rows": 16, "block_bytes": most}.get)
    module = Layers(**options)
    with decode_blocks(module, rows):
        inner = module.one.weight.shape[1]
        mx.eval(module(mx.zeros((2, inner), module.one.weight.dtype)))
        assert blocked(module) == used


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_a_rollout_is_the_same(name, monkeypatch):
    """Equal tokens and log-probs; too many rows use the whole weight."""
    policy = tiny_policy(name)
    with disabled("decode_blocks"):
        want = roll(policy, eos_ids=EOS)
    monkeypatch.setattr(few_rows, "has_small_products", lambda: True)
    monkeypatch.setattr(few_rows, "number", {"block_rows": 16, "block_bytes": 2**31}.get)
    monkeypatch.setattr(few_rows, "_SMALL", 8 * 16 * max(policy.module.args.hidden_size, 64))
    made = []
    real = few_rows.mx.contiguous
    monkeypatch.setattr(few_rows.mx, "contiguous", lambda *args: made.append(1) or real(*args))
    assert_same(roll(policy, eos_ids=EOS), want)
    assert made


def test_only_with_a_blas_that_makes_no_copy(monkeypatch):
    """Only OpenBLAS with AVX-512 has such products."""
    for library, flags, expected in (
        ("libopenblas.so.0", {"avx512f"}, True),
        ("libopenblas.so.0", {"avx2"}, False),
        ("libmkl_rt.so.2", {"avx512f"}, False),
        (None, {"avx512f"}, False),
    ):
        found = few_rows.load_blas().__class__(library)
        monkeypatch.setattr(few_rows, "load_blas", lambda found=found: found)
        monkeypatch.setattr(few_rows, "processor_flags", lambda flags=flags: flags)
        assert has_small_products() is expected
