"""The chunked gated delta rule is mlx-lm's loop over tokens: outputs, last state, and all gradients."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import gated_delta as theirs
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.architectures.small_models import small_model
from benchmarks.architectures.small_settings import VOCABULARY
from grpo_fn.policy.layers import gated_delta as ours
from grpo_fn.policy.layers.patched_layers import patch_layers
from tests.support.tiny_policies import worst_difference

NAMES = ("q", "k", "v", "g", "beta", "state")


def inputs(rows=2, length=13, key_heads=1, heads=2, key_width=8, value_width=6, *, channels=False, seed=0):
    """Keys of length 1, decays from almost 0 to 1, and a state that matters."""
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(rows, length, key_heads, key_width)) for _ in range(2))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True)) for x in (q, k))
    decays = (rows, length, heads, *([key_width] if channels else []))
    arrays = (
        q,
        k,
        rng.normal(size=(rows, length, heads, value_width)),
        np.exp(-np.exp(rng.normal(-2, 2, size=decays))).clip(1e-20),
        rng.uniform(0, 1, size=(rows, length, heads)),
        rng.normal(size=(rows, heads, value_width, key_width)),
    )
    return [mx.array(x, mx.float32) for x in arrays]


def loop(q, k, v, g, beta, state, mask=None) -> Any:
    """mlx-lm's loop; outputs at masked positions, where its loop and kernel differ, are 0."""
    y, last = theirs.gated_delta_ops(q, k, v, g, beta, state, mask)
    return (y if mask is None else mx.where(mask[..., None, None], y, 0)), last


def chunks(q, k, v, g, beta, state, mask=None, chunk=None) -> Any:
    return ours.chunked_gated_delta(q, k, v, mx.log(g), beta, state, mask, chunk=chunk)


def weighed(function, seed=9):
    """A number that depends on every output and on the last state."""

    def loss(*arrays):
        rng = np.random.default_rng(seed)
        results = function(*arrays)
        return sum((mx.array(rng.normal(size=x.shape), mx.float32) * x).sum() for x in results)

    return loss


def largest(found, wanted):
    """The largest difference, relative to the largest entry if that is above 1."""
    return float(mx.abs(found - wanted).max() / mx.maximum(mx.abs(wanted).max(), 1))


def assert_close(got, want, bound):
    for found, wanted in zip(got, want, strict=True):
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        assert largest(found.astype(mx.float32), wanted.astype(mx.float32)) < bound


def assert_same(arrays, mask=None, chunk=None):
    assert_close(chunks(*arrays, mask=mask, chunk=chunk), loop(*arrays, mask=mask), 1e-5)
    argnums = list(range(6))
    got = mx.grad(weighed(lambda *a: chunks(*a, mask=mask, chunk=chunk)), argnums)(*arrays)
    want = mx.grad(weighed(lambda *a: loop(*a, mask=mask)), argnums)(*arrays)
    for found, wanted, x, name in zip(got, want, arrays, NAMES, strict=True):
        # The gradient of ln g: that of g itself grows without bound where g vanishes.
        factor = x if name == "g" else 1
        assert largest(found * factor, wanted * factor) < 1e-4, name


@given(
    length=st.integers(1, 21),
    chunk=st.sampled_from([1, 2, 8, 16, None]),
    key_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    channels=st.booleans(),
    padding=st.integers(0, 5),
    seed=st.integers(0, 2**16),
)
def test_same_as_the_loop(length, chunk, key_heads, group, channels, padding, seed):
    """For any length, chunk, sharing of keys, kind of decay, and padding on either side."""
    arrays = inputs(2, length, key_heads, key_heads * group, channels=channels, seed=seed)
    missing = min(padding, length - 1)
    mask: Any = mx.arange(length)[None] >= mx.array([[0], [missing]]) if missing else None
    if missing and seed % 2:
        mask = mask[:, ::-1]
    assert_same(arrays, mask, chunk)


def test_keys_that_repeat():
    """One key many times without decay: powers of A reach 10⁸ in a chunk of 32, its inverse 1."""
    q, k, v, g, beta, state = inputs(1, 64)
    k = mx.broadcast_to(k[:, :1], k.shape)
    assert_same([q, k, v, mx.ones_like(g), mx.ones_like(beta), state])


def test_a_decay_that_forgets_everything():
    """A chunk's Σ ln g of −10⁶ costs later tokens no accuracy."""
    q, k, v, g, beta, state = inputs(1, 32, 1, 1)
    log_g = mx.where(mx.arange(32)[:, None] == 3, -1e6, mx.log(g))
    found = ours.chunked_gated_delta(q, k, v, log_g, beta, state)
    assert_close(found, loop(q, k, v, mx.exp(log_g), beta, state), 1e-5)
    total = weighed(lambda log_g: ours.chunked_gated_delta(q, k, v, log_g, beta, state))
    assert mx.isfinite(mx.grad(total)(log_g)).all().item()


def test_masked_is_deleted():
    """Garbage at masked positions, including NaN, changes neither results nor gradients."""
    arrays = inputs(1, 9)
    mask = mx.arange(9)[None] >= 4
    spoiled = [mx.where(mask.reshape(1, 9, *[1] * (x.ndim - 2)), x, mx.nan) for x in arrays[:5]]
    short = [x[:, 4:] for x in arrays[:5]]

    def run(parts: Any, mask):
        q, k, v, g, beta = parts
        return chunks(q, k, v, g, beta, arrays[5], mask)

    y, last = run(spoiled, mask)
    want_y, want_last = run(short, None)
    assert largest(y[:, 4:], want_y) < 1e-6 and largest(last, want_last) < 1e-6
    assert mx.abs(y[:, :4]).max().item() == 0
    got = mx.grad(lambda v: run([*spoiled[:2], v, *spoiled[3:]], mask)[0].sum())(spoiled[2])
    want = mx.grad(lambda v: run([*short[:2], v, *short[3:]], None)[0].sum())(short[2])
    assert largest(got[:, 4:], want) < 1e-6 and float(mx.abs(got[:, :4]).max()) == 0


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("more", [{}, {"lower_bound": -5.0}, {"allow_neg_eigval": True}])
def test_the_layers_function(more, channels):
    """With a layer's inputs, also in 16 bits; a single token is mlx-lm's result to the bit."""
    q, k, v, g, beta, state = inputs(2, 11, 2, 2, channels=channels)
    a = mx.log(g).astype(mx.bfloat16)
    A_log, dt_bias = mx.array([0.2, -0.5]), mx.array([0.1, 0.3])
    if channels:
        A_log, dt_bias = A_log[:, None], mx.broadcast_to(dt_bias[:, None], (2, 8))
    half = [x.astype(mx.bfloat16) for x in (q, k, v)]
    one = [x[:, :1] for x in (q, k, v, a, beta)]
    for parts, first, bound in (
        ((q, k, v, a, beta), state, 1e-5),
        ((*half, a, beta), None, 1e-2),
        (one, state, 1e-30),
    ):
        given = (*parts, A_log, dt_bias, first)
        got, want = (each.gated_delta_update(*given, **more) for each in (ours, theirs))
        assert_close(got, want, bound)


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_whole_models(name):
    """A policy's layers call it: logits and gradients are those of mlx-lm's model, with caches too."""
    plain, patched = small_model(name), small_model(name)
    assert patch_layers(patched) > 0
    layers = [x for x in patched.modules() if "gated_delta_update" in getattr(x, "patched", ())]
    assert len(layers) == 2
    tokens = mx.random.randint(0, VOCABULARY, (2, 9), key=mx.random.key(0))

    def gradient(model):
        return nn.value_and_grad(model, lambda: mx.logsumexp(model(tokens), axis=-1).mean())()[1]

    assert largest(patched(tokens), plain(tokens)) < 1e-4
    assert worst_difference(gradient(patched), gradient(plain)) < 1e-3
    caches = [make_prompt_cache(model) for model in (plain, patched)]
    for part in (tokens[:, :6], tokens[:, 6:7], tokens[:, 7:]):
        want, got = (model(part, cache=cache) for model, cache in zip((plain, patched), caches, strict=True))
        assert largest(got, want) < 1e-4
