"""Experts' load and the loss that evens it, against a loop in NumPy float64."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.algorithm import expert_shares, load_balancing_loss


def naive(logits, mask, k):
    """Shares, loss and gradient, token by token."""
    experts = logits.shape[1]
    counts, probs = np.zeros(experts), np.zeros(experts)
    chances = [np.exp(z - z.max()) / np.exp(z - z.max()).sum() for z in logits]
    for z, p, counted in zip(logits, chances, mask, strict=True):
        if counted:
            counts[np.argsort(-z)[:k]] += 1
            probs += p
    total = max(mask.sum(), 1)
    shares = counts / max(counts.sum(), 1)
    gradient = [
        experts / total * counted * p * (shares - (shares * p).sum())
        for p, counted in zip(chances, mask, strict=True)
    ]
    return shares, experts * (shares * probs / total).sum(), np.array(gradient)


@given(
    tokens=st.integers(1, 9), experts=st.integers(1, 6), chosen=st.integers(1, 6), seed=st.integers(0, 2**16)
)
def test_as_the_formula_says(tokens, experts, chosen, seed):
    """Shares add up to 1; masked tokens change neither value nor gradient, even if they are NaN."""
    chosen = min(chosen, experts)
    rng = np.random.default_rng(seed)
    logits, mask = rng.normal(size=(tokens, experts)) * 3, rng.random(tokens) < 0.7
    shares, loss, gradient = naive(logits, mask, chosen)
    given = mx.array(np.where(mask[:, None], logits, np.nan), mx.float32)
    assert np.allclose(np.array(expert_shares(given, mx.array(mask), chosen)), shares, atol=1e-6)
    found, gradients = mx.value_and_grad(lambda x: load_balancing_loss(x, mx.array(mask), chosen))(given)
    assert found.item() == pytest.approx(loss, abs=1e-5)
    assert np.allclose(np.array(gradients), gradient, atol=1e-5)


def test_even_is_one_and_all_on_one_is_e():
    """The two extremes of eq. 4: 4 tokens on 4 experts, one each, or all on the first."""
    even = 50 * mx.eye(4)
    mask = mx.ones((4,))
    assert load_balancing_loss(even, mask, 1).item() == pytest.approx(1)
    one = 50 * mx.broadcast_to(mx.eye(4)[:1], (4, 4))
    assert load_balancing_loss(one, mask, 1).item() == pytest.approx(4)
    assert load_balancing_loss(one, mx.zeros((4,)), 1).item() == 0


def test_arguments_are_checked():
    """More experts per token than there are, and a mask with a different length."""
    with pytest.raises(ValueError, match="experts_per_token = 5: expected 1 to 4"):
        expert_shares(mx.eye(4), mx.ones((4,)), 5)
    with pytest.raises(ValueError, match="mask_n"):
        expert_shares(mx.eye(4), mx.ones((3,)), 1)
