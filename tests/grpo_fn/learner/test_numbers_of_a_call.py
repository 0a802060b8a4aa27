"""Values passed with each call of the learner: rates, token weights, and log-probs that it returns."""

import operator

import attrs
import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn.learner import SFT, grad_step
from grpo_fn.trees import arrays_of
from tests.support.naive_learner import grad_step_of, make_batch, make_state
from tests.support.tiny_policies import tiny_policy


def adamw_float64(param, grad, m, v, step, rates):
    """One AdamW update in float64, as in the paper's algorithm 2."""
    b1, b2 = rates.betas
    m = b1 * m + (1 - b1) * grad
    v = b2 * v + (1 - b2) * grad**2
    size = rates.learning_rate * (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + rates.eps)
    return param - size - rates.learning_rate * rates.weight_decay * param, m, v


RATES = [
    g.Rates(3e-3, (0.9, 0.95), 1e-8, 0.0),
    g.Rates(1e-2, (0.5, 0.8), 1e-6, 0.1),
    g.Rates(5e-4, (0.0, 0.99), 1e-4, 0.02),
]


def test_rates_of_a_call_are_adamw_in_float64_without_a_new_trace():
    """Three updates with different rates equal the float64 twin's, in one trace."""
    policy = tiny_policy("llama")
    traced = []
    optimizer = g.adamw(1.0)

    def counted(*arguments):
        traced.append(len(arguments))
        return optimizer.apply(*arguments)

    update_step = g.make_update_step(attrs.evolve(optimizer, apply=counted))
    state = make_state(policy, optimizer=optimizer)
    leaves = g.named_leaves(state.params)
    name = sorted(leaves)[0]
    want = np.array(leaves[name], np.float64)
    m = v = np.zeros_like(want)
    for step, rates in enumerate(RATES, 1):
        grads = g.map_arrays(lambda a, s=step: mx.random.normal(a.shape, key=mx.random.key(s)), state.params)
        grad = np.array(g.named_leaves(grads)[name], np.float64)
        want, m, v = adamw_float64(want, grad, m, v, step, rates)
        state = attrs.evolve(state, accum_grads=grads, accum_weight=mx.array(1.0))
        state, stats = update_step(state, rates)
        assert stats.learning_rate.item() == pytest.approx(rates.learning_rate)
        np.testing.assert_allclose(np.array(g.named_leaves(state.params)[name]), want, rtol=2e-5, atol=2e-6)
    assert len(traced) == 1


def test_a_bound_of_a_call_clips_the_gradient():
    """With `max_grad_norm` in the rates, the update is that of the scaled gradient."""
    policy = tiny_policy("llama")
    start = make_state(policy)
    grads = g.map_arrays(lambda a: mx.ones(a.shape), start.params)
    norm = np.sqrt(sum(leaf.size for leaf in g.named_leaves(grads).values()))
    update_step = g.make_update_step(g.adamw(1.0))

    def after(grads, rates):
        state = attrs.evolve(start, accum_grads=grads, accum_weight=mx.array(1.0))
        return update_step(state, rates)[0].opt_state

    clipped = after(grads, g.Rates(1e-3, max_grad_norm=0.5))
    scaled = after(g.map_arrays(lambda a: a * (0.5 / norm), grads), g.Rates(1e-3))
    for one, other in zip(g.arrays_of(clipped), g.arrays_of(scaled), strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-4, atol=1e-12)


def test_the_grad_step_returns_the_log_probs_of_its_batch():
    """One array per micro-batch, equal to a separate forward pass."""
    policy = tiny_policy("llama")
    batch = make_batch()
    pieces = g.split_batch(batch, max_tokens=40)
    found: list[mx.array] = []
    plain, _ = grad_step_of(policy, g.LossSpec())(make_state(policy), pieces)
    state, _ = grad_step_of(policy, g.LossSpec())(make_state(policy), pieces, logprobs=found)
    for one, other in zip(g.arrays_of(plain.accum_grads), g.arrays_of(state.accum_grads), strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-5, atol=1e-6)
    step = g.make_logprob_step(policy, temperature=0.8)
    assert len(found) == len(pieces) > 1
    for piece, logp_bt in zip(pieces, found, strict=True):
        want = np.where(piece.mask_bt, step(policy.params, piece), 0)
        np.testing.assert_allclose(np.where(piece.mask_bt, logp_bt, 0), want, atol=2e-5)


ROWS = [((1, 2, 3), (4, 5)), ((6,), (7, 8, 9, 3))]
WEIGHTS = [[0.5, 2.0], [1.0, 0.0, 0.25, 3.0]]


def test_weights_of_tokens_multiply_their_loss():
    """Σ w · −log π over each row alone; the sum is not divided."""
    policy = tiny_policy("llama")
    batch = g.batch_of(ROWS, [[1.0] * len(completion) for _, completion in ROWS], WEIGHTS)
    spec = attrs.evolve(SFT, aggregation="sum")
    _, stats = g.make_grad_step(policy, spec, compile=False)(make_state(policy), batch)
    want = 0.0
    for (prompt, completion), weights in zip(ROWS, WEIGHTS, strict=True):
        tokens = [*prompt, *completion]
        z = np.array(policy.logits(policy.params, mx.array([tokens]))[0], np.float64)
        logp = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
        for place, weight in enumerate(weights):
            want -= weight * logp[len(prompt) + place - 1, completion[place]]
    assert stats.loss.item() == pytest.approx(want, rel=1e-5)
    assert stats.num_tokens.item() == 5  # a weight of 0 counts nowhere


def test_rows_with_log_probs_have_their_ratio():
    """`logp` is μ and π_old: the loss is Σ exp(log π − logp) · A."""
    policy = tiny_policy("llama")
    logp = [[-2.0, -3.0], [-1.5, -2.5, -4.0, -3.5]]
    advantages = [[1.0, -1.0], [0.5, 2.0, -0.25, 1.0]]
    batch = g.batch_of(ROWS, advantages, logp=logp)
    spec = g.LossSpec(aggregation="sum", epsilon_low=0.999, epsilon_high=1e6)
    _, stats = g.make_grad_step(policy, spec, compile=False)(make_state(policy), batch)
    found = np.array(g.make_logprob_step(policy, compile=False)(policy.params, batch), np.float64)
    want = 0.0
    for row, (own, drawn) in enumerate(zip(advantages, logp, strict=True)):
        for place, (a, old) in enumerate(zip(own, drawn, strict=True)):
            r = np.exp(found[row, place] - old)
            want -= min(r * a, np.clip(r, 0.001, 1 + 1e6) * a)
    assert stats.loss.item() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("name", ["advantages", "weights", "logp"])
def test_numbers_that_do_not_fit_the_tokens_are_refused(name):
    """The message has both counts of a row with one number too few."""
    numbers = {"advantages": [[1.0] * 2, [1.0] * 4], "weights": WEIGHTS, "logp": [[-1.0] * 2, [-1.0] * 4]}
    numbers[name] = [numbers[name][0], numbers[name][1][:3]]
    with pytest.raises(ValueError, match=rf"{name}: expected .*\[2, 4\], found \[2, 3\]"):
        g.batch_of(ROWS, numbers["advantages"], numbers["weights"], logp=numbers["logp"])


def test_a_gradient_leaves_the_state_s_containers_alone(monkeypatch):
    """MLX puts tracers into what it differentiates; another thread still finds the weights."""
    policy = tiny_policy("llama")
    state = make_state(policy)
    before = list(arrays_of(state.params))
    kept = []

    def noted(*arguments):
        kept.extend(map(operator.is_, arrays_of(state.params), before))
        return loss_sum(*arguments)

    loss_sum = grad_step.loss_sum
    monkeypatch.setattr(grad_step, "loss_sum", noted)
    batch = g.batch_of(ROWS, [[1.0] * len(completion) for _, completion in ROWS])
    g.make_grad_step(policy, attrs.evolve(SFT, aggregation="sum"), compile=False)(state, batch)
    assert len(kept) >= len(before) and all(kept)
