"""The CUDA kernels over a head's products: against NumPy in float64; and the log-probs that call them."""

import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn.backends import disabled, substituted
from grpo_fn.backends.cuda.logit_kernels import row_gradients, row_logprobs, takes_dtype
from grpo_fn.policy.head import Head
from tests.grpo_fn.learner.logprobs.test_token_logprobs import (
    assert_close,
    make_inputs,
    specified,
    wanted_gradients,
    wanted_logprobs,
)


def float64(array):
    """The array's numbers."""
    return np.array(array.astype(mx.float32), np.float64)


def naive_row_logprobs(product_cv, targets_c, scale_cap, temperature):
    """Stands in for the kernel of that name where nothing is compiled."""
    columns = wanted_logprobs(float64(product_cv), np.array(targets_c), scale_cap, temperature)[:3]
    return tuple(mx.array(column.astype(np.float32)) for column in columns)


def naive_row_gradients(product_cv, targets_c, found, up, scale_cap, temperature):
    """Stands in for the kernel of that name."""
    given = float64(product_cv), np.array(targets_c)
    _, entropy, lse, _ = wanted_logprobs(*given, scale_cap, temperature)
    assert np.allclose(float64(found[0]), lse, atol=1e-4), "not what the other kernel found"
    assert up[1] is None or np.allclose(float64(found[1]), entropy, atol=1e-4)
    by_entropy = np.zeros(len(lse)) if up[1] is None else float64(up[1])
    dz = wanted_gradients(*given, float64(up[0]), by_entropy, scale_cap, temperature)
    return mx.array(dz.astype(np.float32)).astype(product_cv.dtype)


needs_cuda = pytest.mark.skipif(not takes_dtype(mx.float32), reason="needs CUDA")
SCALES_AND_CAPS = {"plain": (1.0, None), "scaled": (0.25, None), "capped": (1.0, 15.0), "both": (0.5, 15.0)}


def make_products(rows, vocabulary, dtype, size=6.0):
    """Products [C,V] of that standard deviation, targets and two gradients [C]."""
    keys = mx.random.split(mx.random.key(vocabulary), 4)
    products = (size * mx.random.normal((rows, vocabulary), key=keys[0])).astype(dtype)
    targets = mx.random.randint(0, vocabulary, (rows,), mx.int32, key=keys[1])
    return products, targets, mx.random.normal((rows,), key=keys[2]), mx.random.normal((rows,), key=keys[3])


@needs_cuda
@pytest.mark.parametrize("vocabulary", [5, 1000, 65536])
@pytest.mark.parametrize("form", SCALES_AND_CAPS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients(vocabulary, form, dtype, temperature):
    """All forms of logits in three dtypes; a capped logit is rounded to the dtype, half a unit at 15."""
    products, targets, by_logp, by_entropy = make_products(6, vocabulary, dtype)
    given, how = (float64(products), np.array(targets)), (SCALES_AND_CAPS[form], temperature)
    rounding = {mx.float32: 2e-6, mx.float16: 2**-7, mx.bfloat16: 2**-4}[dtype]
    bound = 1e-4 if SCALES_AND_CAPS[form] == (1.0, None) else 1e-4 + 2 * rounding / temperature

    logp, entropy, lse = row_logprobs(products, targets, *how)
    wanted_logp, wanted_entropy, *_ = wanted_logprobs(*given, *how)
    assert np.abs(float64(logp) - wanted_logp).max() < bound
    assert np.abs(float64(entropy) - wanted_entropy).max() < bound * max(1, np.abs(wanted_logp).max())

    for up in (None, by_entropy):
        found = row_gradients(products, targets, (lse, entropy), (by_logp, up), *how)
        assert found.dtype == dtype
        second = np.zeros(6) if up is None else float64(up)
        wanted = wanted_gradients(*given, float64(by_logp), second, *how)
        largest = np.abs(wanted).max(axis=-1, keepdims=True)
        unit = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}[dtype]
        assert (np.abs(float64(found) - wanted) <= (unit + 4 * bound) * largest).all()


@needs_cuda
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("start", [1, 2, 3])
def test_products_may_be_a_part_of_a_row(start, dtype):
    """Where they begin at no multiple of 16 bytes, numbers are read one by one."""
    whole = make_products(1, 64 + start, dtype)[0]
    products, targets, by_logp = whole[:, start:], mx.array([7], mx.int32), mx.ones((1,))
    mx.eval(whole)
    logp, entropy, lse = row_logprobs(products, targets, (1.0, None), 1.0)
    wanted = wanted_logprobs(float64(products), np.array(targets), (1.0, None), 1.0)
    for found, want in zip((logp, entropy, lse), wanted[:3], strict=True):
        assert np.allclose(float64(found), want, atol=1e-4)
    found = row_gradients(products, targets, (lse, entropy), (by_logp, None), (1.0, None), 1.0)
    want = wanted_gradients(float64(products), np.array(targets), np.ones(1), np.zeros(1), (1.0, None), 1.0)
    assert np.allclose(float64(found), want, atol=1e-2 if dtype == mx.bfloat16 else 1e-5)


@needs_cuda
def test_impossible_tokens_and_numbers_that_are_none():
    """−∞ counts nothing, also as a target; a NaN makes its row's results NaN, and no other's."""
    products, targets, by_logp, by_entropy = make_products(4, 64, mx.float32)
    numbers = np.array(products)
    numbers[:2, :32] = -np.inf
    numbers[3, 5] = np.nan
    targets = mx.array([40, 3, 3, 7], mx.int32)
    numbers[1, 40:] = -np.inf
    logp, entropy, lse = row_logprobs(mx.array(numbers), targets, (1.0, None), 1.0)
    given = numbers[:3], np.array(targets)[:3]
    wanted_logp, wanted_entropy, *_ = wanted_logprobs(*given, (1.0, None), 1.0)
    assert np.allclose(np.array(logp)[:3], wanted_logp, atol=1e-4)
    assert np.allclose(np.array(entropy)[:3], wanted_entropy, atol=1e-4)
    assert np.isnan(np.array(logp)[3]) and np.isnan(np.array(entropy)[3])
    up = by_logp, by_entropy
    found = np.array(row_gradients(mx.array(numbers), targets, (lse, entropy), up, (1.0, None), 1.0))
    first = [np.array(x)[:3] for x in up]
    wanted = wanted_gradients(*given, first[0], first[1], (1.0, None), 1.0)
    assert np.allclose(found[:3], wanted, atol=1e-4) and np.isnan(found[3]).any()


@needs_cuda
@pytest.mark.parametrize("compiled", [False, True])
def test_logprobs_on_cuda_are_those_of_the_composed_passes(compiled):
    """The same values and gradients with the kernels and without, to TF32's rounding."""
    hidden, weight, targets, up = make_inputs(3, 5, seed=4)

    def loss(hidden, weight):
        logp, entropy = g.token_logprobs_and_entropy(hidden, weight, targets, temperature=0.7, chunk=4)
        return (up[0] * logp + up[1] * entropy).sum(), logp, entropy

    def gradients():
        call = mx.value_and_grad(loss, argnums=(0, 1))
        return (mx.compile(call) if compiled else call)(hidden, weight)

    (_, *with_kernels), with_grads = gradients()
    mx.eval(with_kernels, with_grads)
    with disabled("row_logprobs", "row_gradients"):
        (_, *without), without_grads = gradients()
    for found, wanted in zip([*with_kernels, *with_grads], [*without, *without_grads], strict=True):
        assert_close(found, float64(wanted), 1e-2)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("with_entropy", ["differentiable", "constant", "none"])
def test_logprobs_ask_the_kernels_for_what_they_need(chunk, cap, with_entropy):
    """With the kernels' specifications in their place, on any machine: values, and gradients of both."""
    hidden, weight, targets, up = make_inputs(2, 5, seed=5)
    dead = up[0], mx.zeros_like(up[1])
    want = specified(hidden, weight, targets, up if with_entropy == "differentiable" else dead, 0.7, cap)
    options = {"temperature": 0.7, "chunk": chunk}

    def wrong(params, hidden):
        raise AssertionError("the kernels compute the logits themselves")

    def loss(hidden, weight):
        head = Head({"w": weight}, wrong, lambda params: params["w"], 1.0, cap)
        if chunk is None:
            head = Head({"w": weight}, lambda p, h: h @ p["w"].T, lambda params: params["w"], 1.0, cap)
        if with_entropy == "none":
            logp = g.token_logprobs(hidden, head, targets, **options)
            return (up[0] * logp).sum(), logp
        differentiable = with_entropy == "differentiable"
        logp, entropy = g.token_logprobs_and_entropy(
            hidden, head, targets, entropy_gradient=differentiable, **options
        )
        return (up[0] * logp + up[1] * entropy).sum(), logp, entropy

    kernels = {"row_logprobs": naive_row_logprobs, "row_gradients": naive_row_gradients}
    with substituted(**kernels):
        (_, *columns), grads = mx.value_and_grad(loss, argnums=(0, 1))(hidden, weight)
    for found, wanted in zip([*columns, *grads], [*want[: len(columns)], *want[2:]], strict=True):
        assert_close(found, wanted)
