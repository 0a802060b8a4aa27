"""Attention over whole sequences on a CPU, compared with NumPy in float64 and with MLX."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import scaled_dot_product_attention

from grpo_fn.backends import disabled, find
from grpo_fn.backends.cpu import attention as cpu_attention
from grpo_fn.backends.cpu.attention import attention, takes_sequences
from grpo_fn.policy.layers import patched_layers
from tests.support.tiny_policies import worst_difference

ROWS, HEADS, SHARED, LENGTH, SEEN, WIDTH, VALUE_WIDTH = 3, 6, 2, 5, 9, 8, 12


def drawn(*shapes):
    return [mx.random.normal(shape, key=mx.random.key(n)) for n, shape in enumerate(shapes)]


def inputs():
    """Queries, keys, values, and a cotangent."""
    return drawn(
        (ROWS, HEADS, LENGTH, WIDTH),
        (ROWS, SHARED, SEEN, WIDTH),
        (ROWS, SHARED, SEEN, VALUE_WIDTH),
        (ROWS, HEADS, LENGTH, VALUE_WIDTH),
    )


def masks():
    """None, causal, and a random mask for each row and query; every query sees its first key."""
    seen = mx.random.uniform(shape=(ROWS, 1, LENGTH, SEEN), key=mx.random.key(9)) > 0.4
    return {"all": None, "causal": "causal", "by row": seen | (mx.arange(SEEN) == 0)}


@pytest.mark.parametrize("name", masks())
def test_it_is_the_formula(name):
    """Also with fewer keys than heads, more keys than queries, and wider values."""
    queries, keys, values, _ = inputs()
    mask = masks()[name]
    q, k, v = (np.array(x, np.float64) for x in (queries, keys, values))
    k, v = (np.repeat(x, HEADS // SHARED, axis=1) for x in (k, v))
    scores = 0.3 * q @ k.swapaxes(-1, -2)
    if mask is not None:
        causal = np.arange(SEEN)[None] - (SEEN - LENGTH) <= np.arange(LENGTH)[:, None]
        scores = np.where(causal if name == "causal" else np.array(mask), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    want = weights / weights.sum(axis=-1, keepdims=True) @ v
    assert np.abs(np.array(attention(queries, keys, values, 0.3, mask)) - want).max() < 2e-6


@pytest.mark.parametrize("name", masks())
def test_the_gradient_is_mlx_s(name):
    """The gradient in queries, keys and values."""
    *arrays, cotangent = inputs()
    mask = masks()[name]

    def plain(queries, keys, values):
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask)

    found = mx.vjp(lambda *x: attention(*x, 0.3, mask), arrays, [cotangent])[1]
    want = mx.vjp(plain, arrays, [cotangent])[1]
    assert worst_difference({"x": list(found)}, {"x": list(want)}) < 1e-5


def test_what_it_takes(monkeypatch):
    """It accepts float32, several tokens, a boolean or named mask, and a limited number of scores."""
    queries, keys, *_ = inputs()
    for mask in masks().values():
        assert takes_sequences(queries, keys, mask)
    assert not takes_sequences(queries[:, :, :1], keys, None)
    assert not takes_sequences(queries.astype(mx.bfloat16), keys, None)
    assert not takes_sequences(queries, keys.astype(mx.bfloat16), None)
    assert not takes_sequences(queries, (keys, keys, keys), None), "a packed cache"
    assert not takes_sequences(queries, keys, mx.zeros((LENGTH, SEEN))), "a mask that is added"
    monkeypatch.setattr(cpu_attention, "_MOST_SCORES", ROWS * HEADS * LENGTH * SEEN - 1)
    assert not takes_sequences(queries, keys, None)


@pytest.mark.skipif(find("attention", *inputs()[:2], None) is None, reason="needs a CPU")
def test_layers_use_it():
    """Layers use it unless they have sinks; without it, mlx-lm's function computes."""
    queries, keys, values, _ = inputs()
    rest = {"cache": None, "scale": 0.3, "mask": "causal"}
    own = patched_layers.attention(queries, keys, values, **rest)
    assert mx.array_equal(own, attention(queries, keys, values, 0.3, "causal"))
    want = scaled_dot_product_attention(queries, keys, values, **rest)
    with disabled("attention"):
        assert mx.array_equal(patched_layers.attention(queries, keys, values, **rest), want)
    sinks = mx.zeros((HEADS,))
    found = patched_layers.attention(queries, keys, values, **rest, sinks=sinks)
    assert not mx.allclose(found, own, atol=1e-3), "a sink takes a part of the weights"
