"""token_logprobs and its entropy: values and closed-form gradients against autodiff and NumPy float64."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import grpo_fn as g
from grpo_fn.policy.head import Head
from tests.support.tiny_policies import memory_in_use

WIDTH, VOCAB = 6, 11


def make_inputs(rows=2, length=4, *, seed=0, scale=1.0, dtype=mx.float32):
    """hidden [B,T,D], weight [V,D], targets [B,T], and cotangents of logp and entropy [B,T]."""
    rng = np.random.default_rng(seed)
    hidden = mx.array(scale * rng.normal(size=(rows, length, WIDTH)), dtype)
    weight = mx.array(rng.normal(size=(VOCAB, WIDTH)), dtype)
    targets = mx.array(rng.integers(0, VOCAB, (rows, length)), mx.int32)
    up = [mx.array(rng.normal(size=(rows, length)), mx.float32) for _ in range(2)]
    return hidden, weight, targets, up


def _logits(products, scale_cap):
    """Logits, and their gradients in the products."""
    scale, cap = scale_cap
    if cap is None:
        return scale * products, np.full(products.shape, scale)
    tanh = np.tanh(scale * products / cap)
    return cap * tanh, scale * (1 - tanh**2)


def wanted_logprobs(products, targets, scale_cap, temperature):
    """logp, entropy (0 · log 0 = 0) and log Σ e^z of each row, and all log-probs."""
    z = _logits(products, scale_cap)[0] / temperature
    lse = np.logaddexp.reduce(z, axis=-1)
    every = z - lse[:, None]
    probs = np.exp(every)
    entropy = -np.where(probs > 0, probs * np.where(probs > 0, every, 0), 0).sum(axis=-1)
    return every[np.arange(len(targets)), targets], entropy, lse, every


def wanted_gradients(products, targets, by_logp, by_entropy, scale_cap, temperature):
    """The gradient in the products of Σ by_logp · logp + by_entropy · H."""
    _, entropy, _, every = wanted_logprobs(products, targets, scale_cap, temperature)
    probs = np.exp(every)
    hit = np.eye(products.shape[1])[targets]
    above = np.where(probs > 0, every, 0) + entropy[:, None]  # 0 · −∞ would be NaN
    dz = by_logp[:, None] * (hit - probs) - by_entropy[:, None] * probs * above
    return dz / temperature * _logits(products, scale_cap)[1]


def specified(hidden, weight, targets, up, temperature=1.0, cap=None):
    """logp, entropy, and the gradients of Σ up·(logp, entropy) in hidden and weight, in NumPy float64."""
    h, w, a, b = (np.array(x.astype(mx.float32), np.float64) for x in (hidden, weight, *up))
    rows, shape, how = h.reshape(-1, WIDTH), a.shape, ((1.0, cap), temperature)
    given = rows @ w.T, np.array(targets).reshape(-1)
    logp, entropy, *_ = wanted_logprobs(*given, *how)
    dz = wanted_gradients(*given, a.reshape(-1), b.reshape(-1), *how)
    return logp.reshape(shape), entropy.reshape(shape), (dz @ w).reshape(h.shape), dz.T @ rows


def naive(hidden, head, targets, temperature=1.0):
    """The same from all logits at once."""
    if isinstance(head, Head):
        flat = head.function(head.params, hidden.reshape(-1, WIDTH))
        z = flat.reshape(*hidden.shape[:2], -1)
    else:
        z = hidden @ head.T
    z = z.astype(mx.float32) / temperature
    logp = z - mx.logsumexp(z, axis=-1, keepdims=True)
    return mx.take_along_axis(logp, targets[..., None], axis=-1)[..., 0], -(mx.exp(logp) * logp).sum(axis=-1)


def soft_capped(weight, cap=3.0):
    """A head that is no plain product."""
    return Head({"w": weight}, lambda params, h: cap * mx.tanh(h @ params["w"].T / cap))


def assert_close(got, want, relative=1e-5):
    """Equal to `relative` of the largest number wanted."""
    got, want = np.array(got.astype(mx.float32)), np.asarray(want)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= relative * max(np.abs(want).max(), 1.0)


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 3),
    length=st.integers(1, 5),
    chunk=st.sampled_from([None, 1, 2, 3, 7, 100]),
    temperature=st.sampled_from([1.0, 0.5, 2.5]),
    scale=st.sampled_from([0.1, 1.0, 4.0]),
    capped=st.booleans(),
    constant=st.booleans(),
)
def test_values_and_gradients_match_the_specification(
    seed, rows, length, chunk, temperature, scale, capped, constant
):
    """For plain and soft-capped heads; a constant entropy has a value but no gradient."""
    hidden, weight, targets, up = make_inputs(rows, length, seed=seed, scale=scale)
    held = [up[0], up[1] * (not constant)]
    want = specified(hidden, weight, targets, held, temperature, 3.0 if capped else None)
    options = {"temperature": temperature, "chunk": chunk}

    def loss(hidden, weight):
        head = soft_capped(weight) if capped else weight
        options_of_both = {**options, "entropy_gradient": not constant}
        logp, entropy = g.token_logprobs_and_entropy(hidden, head, targets, **options_of_both)
        return (up[0] * logp + up[1] * entropy).sum(), logp, entropy

    (_, logp, entropy), (dh, dw) = mx.value_and_grad(loss, argnums=(0, 1))(hidden, weight)
    plain = g.token_logprobs(hidden, soft_capped(weight) if capped else weight, targets, **options)
    for got, value in zip((logp, plain, entropy, dh, dw), (want[0], *want), strict=True):
        assert_close(got, value)


@pytest.mark.parametrize("plain", [True, False])
def test_a_frozen_head(plain):
    """Parameters that a head closes over have no gradient; hidden states have theirs."""
    hidden, weight, targets, up = make_inputs(seed=4)
    if plain:
        head = Head({}, lambda params, h: h @ weight.T, lambda params: weight)
    else:
        head = Head({}, lambda params, h: 3 * mx.tanh(h @ weight.T / 3))

    def loss(h):
        logp, entropy = g.token_logprobs_and_entropy(h, head, targets, chunk=3)
        return (up[0] * logp + up[1] * entropy).sum()

    want = specified(hidden, weight, targets, up, cap=None if plain else 3.0)[2]
    assert_close(mx.grad(loss)(hidden), want)


@pytest.mark.parametrize("capped", [False, True])
def test_bfloat16_inputs_give_float32_numbers(capped):
    """The log-softmax is float32; gradients keep the dtypes of the inputs."""
    hidden, weight, targets, up = make_inputs(seed=6, dtype=mx.bfloat16)

    def loss(h, w, function=g.token_logprobs_and_entropy):
        logp, entropy = function(h, soft_capped(w) if capped else w, targets)
        return (up[0] * logp + up[1] * entropy).sum(), logp, entropy

    (_, logp, entropy), (dh, dw) = mx.value_and_grad(loss, argnums=(0, 1))(hidden, weight)
    assert logp.dtype == entropy.dtype == mx.float32 and dh.dtype == dw.dtype == mx.bfloat16
    # The logits are a bfloat16 product, and no worse than that.
    z = soft_capped(weight).function({"w": weight}, hidden) if capped else hidden @ weight.T
    z = z.astype(mx.float32)
    assert_close(logp, np.array(mx.take_along_axis(z, targets[..., None], -1)[..., 0] - mx.logsumexp(z, -1)))
    *_, want_dh, want_dw = specified(hidden, weight, targets, up, cap=3.0 if capped else None)
    assert_close(dh, want_dh, 3e-2)
    assert_close(dw, want_dw, 3e-2)


def test_many_bfloat16_chunks_lose_no_more_than_one():
    """The weight's gradient over 512 positions is as accurate in chunks of 2 as in one."""
    hidden, weight, targets, up = make_inputs(4, 128, seed=7, dtype=mx.bfloat16)
    want = specified(hidden, weight, targets, [up[0], mx.zeros_like(up[0])])[3]

    def error(chunk):
        dw = mx.grad(lambda w: (up[0] * g.token_logprobs(hidden, w, targets, chunk=chunk)).sum())(weight)
        return np.abs(np.array(dw.astype(mx.float32)) - want).max() / np.abs(want).max()

    assert error(2) < 2 * error(512) + 2**-8


def test_a_nearly_certain_token_keeps_a_finite_gradient():
    """Logits 200 apart: logp 0 or −200, entropy 0, no NaN in value or gradient."""
    hidden, weight = mx.array([[[200.0]], [[200.0]]]), mx.array([[1.0], [0.0]])
    targets = mx.array([[0], [1]])

    def loss(h, w):
        logp, entropy = g.token_logprobs_and_entropy(h, w, targets)
        return (logp + entropy).sum(), logp, entropy

    (_, logp, entropy), (dh, dw) = mx.value_and_grad(loss, argnums=(0, 1))(hidden, weight)
    assert logp.tolist() == [[0.0], [-200.0]] and np.abs(np.array(entropy)).max() < 1e-4
    assert dh.reshape(-1).tolist() == pytest.approx([0.0, -1.0])
    assert dw.reshape(-1).tolist() == pytest.approx([-200.0, 200.0])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("target", [0, 2])
@pytest.mark.parametrize("plain", [True, False])
def test_an_impossible_token_counts_nothing(plain, target, dtype):
    """Logits 1, 2, −∞: entropy and gradients are those of 1 and 2; the last token's log-prob is −∞."""
    weight = mx.diag(mx.array([1.0, 1.0, 2.0])).astype(dtype)
    hidden = mx.array([[[1.0, 2.0, {mx.float16: -6e4, mx.float32: -3e38}[dtype]]]], dtype)
    head = weight if plain else Head({"w": weight}, lambda params, h: h @ params["w"].T)

    def of(which, hidden):
        return g.token_logprobs_and_entropy(hidden, head, mx.array([[target]]))[which].sum()

    assert of(0, hidden).item() == pytest.approx(-1.313262 if target == 0 else -np.inf)
    assert of(1, hidden).item() == pytest.approx(0.582203, abs=1e-6)
    p = 0.268941
    for which, want in (
        (0, [1 - p, p - 1, 0] if target == 0 else [-p, p - 1, 2]),
        (1, [0.196612, -0.196612, 0]),
    ):
        found = mx.grad(lambda h, which=which: of(which, h))(hidden)
        assert found.reshape(-1).tolist() == pytest.approx(want, abs=1e-6 if dtype == mx.float32 else 1e-3)


def test_all_logits_are_never_held():
    """The peak over 1,024 positions × 2,048 tokens is below half of the naive way's."""
    rng = np.random.default_rng(0)
    hidden = mx.array(rng.normal(size=(1, 1024, 16)), mx.float32)
    weight = mx.array(rng.normal(size=(2048, 16)), mx.float32)
    targets = mx.array(rng.integers(0, 2048, (1, 1024)), mx.int32)
    mx.eval(hidden, weight, targets)

    def peak(function):
        held = memory_in_use()
        mx.reset_peak_memory()
        mx.eval(mx.grad(lambda h, w: function(h, w, targets)[0].sum(), argnums=(0, 1))(hidden, weight))
        return mx.get_peak_memory() - held

    chunked = peak(lambda *args: g.token_logprobs_and_entropy(*args, chunk=64, entropy_gradient=False))
    assert chunked < 0.5 * peak(naive)


def test_no_rows_give_no_logprobs():
    """A batch without rows has log-probs of shape [0,T]."""
    logp = g.token_logprobs(mx.zeros((0, 4, 6)), mx.zeros((11, 6)), mx.zeros((0, 4), mx.int32))
    assert logp.shape == (0, 4) and logp.dtype == mx.float32
    mx.eval(logp)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_btd": mx.zeros((4, WIDTH))}, r"hidden_btd has shape \(4, 6\), expected 3 axes"),
        ({"targets_bt": mx.zeros((2, 3), mx.int32)}, r"targets_bt has shape \(2, 3\), expected \(2, 4\)"),
        ({"targets_bt": mx.zeros((2, 4))}, "expected integers"),
        ({"head": mx.zeros((VOCAB, WIDTH + 1))}, r"head has shape \(11, 7\), expected \(11, 6\)"),
        ({"head": mx.zeros((WIDTH,))}, "head has shape"),
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"temperature": -1}, "temperature = -1"),
        ({"chunk": 0}, "chunk"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    """The message names the argument, what it is and what it should be."""
    hidden, weight, targets, _ = make_inputs()
    given = {"hidden_btd": hidden, "head": weight, "targets_bt": targets} | change
    for function in (g.token_logprobs, g.token_logprobs_and_entropy):
        with pytest.raises(ValueError, match=message):
            function(**given)
