"""The reverse KL to a teacher, compared with all logits at once, with TRL, and in the grad step."""

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import grpo_fn as g
from grpo_fn.learner import Teacher, reverse_kl
from grpo_fn.policy.head import Head, linear_head
from tests.support.closeness import assert_same_figures, assert_same_gradients
from tests.support.naive_learner import (
    SPECS,
    TEMPERATURE,
    grad_step_of,
    gradient_of,
    make_batch,
    make_state,
    mean_gradient,
    naive_loss,
    near_policy,
)
from tests.support.tiny_policies import tiny_module, tiny_policy

WIDTH, OTHER = 6, 5


def make_inputs(seed=0, *, ids=13, teacher_ids=13, rows=2, length=5):
    """Hidden states and head matrices of student and teacher, and the KL's cotangents [B,T]."""
    rng = np.random.default_rng(seed)
    sizes = [(rows, length, WIDTH), (ids, WIDTH), (rows, length, OTHER), (teacher_ids, OTHER), (rows, length)]
    return [mx.array(rng.normal(size=size), mx.float32) for size in sizes]


def specified(hidden, weight, teacher, teacher_weight, up, temperature=1.0):
    """KL and the gradients of Σ up·KL in hidden and weight, in NumPy float64: dz = p·(log p/q − KL)."""
    h, w, e, v, a = (np.array(x, np.float64) for x in (hidden, weight, teacher, teacher_weight, up))
    ids = min(len(w), len(v))
    logs = []
    for states, matrix in ((h, w[:ids]), (e, v[:ids])):
        z = states @ matrix.T / temperature
        top = z.max(axis=-1, keepdims=True)
        logs.append(z - top - np.log(np.exp(z - top).sum(axis=-1, keepdims=True)))
    p, ratio = np.exp(logs[0]), logs[0] - logs[1]
    kl = (p * ratio).sum(axis=-1)
    dz = a[..., None] * p * (ratio - kl[..., None]) / temperature
    dw = np.zeros_like(w)
    dw[:ids] = np.einsum("btv,btd->vd", dz, h)
    return kl, dz @ w[:ids], dw


def computed(inputs, **options):
    """The same from the library."""
    hidden, weight, teacher, teacher_weight, up = inputs

    def weighed(hidden, weight):
        head = linear_head(teacher_weight)
        kl_bt = reverse_kl(hidden, linear_head(weight), teacher, head, **options)
        return (up * kl_bt).sum(), kl_bt

    (_, kl_bt), grads = mx.value_and_grad(weighed, argnums=(0, 1))(hidden, weight)
    return [np.array(x) for x in (kl_bt, *grads)]


@given(
    seed=st.integers(0, 2**32 - 1),
    chunk=st.sampled_from([None, 1, 3, 100]),
    temperature=st.sampled_from([1.0, 0.7]),
    ids=st.sampled_from([(13, 13), (13, 16), (16, 13)]),
)
def test_value_and_gradient_are_those_of_all_logits(seed, chunk, temperature, ids):
    """For any chunk; vocabularies of different padding are compared over their common ids."""
    inputs = make_inputs(seed, ids=ids[0], teacher_ids=ids[1])
    want = specified(*inputs, temperature=temperature)
    for found, wanted in zip(computed(inputs, chunk=chunk, temperature=temperature), want, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
def test_the_loss_is_that_of_gkd_with_beta_1():
    """TRL's GKDTrainer with beta = 1 on the student's own tokens: same value and gradient."""
    gkd = pytest.importorskip("trl.experimental.gkd", reason="TRL is not installed")
    torch = pytest.importorskip("torch")
    inputs = make_inputs(3)
    hidden, weight, teacher, teacher_weight = (torch.tensor(np.array(x)) for x in inputs[:4])
    hidden.requires_grad_(), weight.requires_grad_()
    mask = np.ones((2, 5), np.float32)
    mask[1, 3:] = 0
    logits, labels = (hidden @ weight.T, teacher @ teacher_weight.T), torch.tensor(np.where(mask, 1, -100))
    loss = gkd.GKDTrainer.generalized_jsd_loss(*logits, labels, beta=1.0, temperature=0.9)
    loss.backward()
    inputs[4] = mx.array(mask / mask.sum())
    kl_bt, dh, dw = computed(inputs, temperature=0.9, chunk=4)
    assert (kl_bt * mask).sum() / mask.sum() == pytest.approx(loss.item(), rel=1e-5)
    np.testing.assert_allclose(dh, hidden.grad.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(dw, weight.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_a_model_has_no_distance_to_itself():
    """The KL and its gradient are 0 to rounding; an id that the teacher excludes keeps it finite."""
    hidden, weight, *_, up = make_inputs(1)
    kl_bt, dh, dw = computed([hidden, weight, hidden, weight, up])
    assert max(abs(x).max() for x in (kl_bt, dh, dw)) < 1e-5
    excluded = Head({}, lambda _, h: mx.where(mx.arange(13) < 2, -mx.inf, h @ weight.T))
    kl_bt = np.array(reverse_kl(hidden, linear_head(weight), hidden, excluded))
    assert np.isfinite(kl_bt).all() and (kl_bt > 0).all()


def teacher_of(kl_coef):
    """Another model with the same vocabulary, for inference."""
    return Teacher(g.Policy.for_inference(tiny_module("qwen2", seed=5)), {}, kl_coef)


def naive_kl(module, teacher, batch):
    """The mean over rows of each row's mean KL, row by row from all logits."""
    total = mx.array(0.0)
    for row in range(batch.mask_bt.shape[0]):
        start, count = batch.prompt_lengths_b[row].item(), int(batch.mask_bt[row].sum().item())
        places = slice(start - 1, start + count - 1)
        tokens = batch.tokens_bl[row : row + 1, : start + count]
        own, other = (each(tokens)[0, places].astype(mx.float32) / TEMPERATURE for each in (module, teacher))
        own, other = (z - mx.logsumexp(z, axis=-1, keepdims=True) for z in (own, other))
        total = total + (mx.exp(own) * (own - other)).sum(axis=-1).mean()
    return total / batch.mask_bt.shape[0]


@pytest.mark.parametrize("compile", [False, True])
def test_the_grad_step_adds_the_kl_to_the_loss(compile):
    """Loss, gradient and statistics are those of the naive loss and coefficient · naive KL."""
    policy, teacher = tiny_policy("llama"), teacher_of(0.3)
    batch = near_policy(make_batch(), policy)
    step = grad_step_of(policy, SPECS["grpo"], teacher=teacher, compile=compile)
    state, stats = step(make_state(policy), batch)

    def loss_of(module):
        kl = naive_kl(module, teacher.policy.module, batch)
        return naive_loss(module, None, batch, SPECS["grpo"]) + 0.3 * kl

    loss, want = gradient_of(loss_of, "llama", policy.params)
    assert_same_figures(stats, {"loss": loss})
    assert_same_gradients(mean_gradient(state), want)
    assert float(stats.teacher_kl) > 0


@pytest.mark.parametrize("hinted", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_any_split_gives_the_same_kl(hinted, shared):
    """With micro-batches, shared prompts, and hints that only the teacher reads."""
    policy, teacher = tiny_policy("llama"), teacher_of(1.0)
    batch = near_policy(make_batch(prompts=(4, 2, 7)), policy)
    if hinted:
        rows = batch.tokens_bl.shape[0]
        longer = mx.concatenate([mx.full((rows, 3), 1, mx.int32), batch.tokens_bl], axis=1)
        lengths = batch.prompt_lengths_b + 3
        batch = attrs.evolve(batch, hinted_tokens_bm=longer, hinted_lengths_b=lengths)
    step = grad_step_of(policy, SPECS["token_mean"], teacher=teacher, compile=False)
    want, want_stats = step(make_state(policy), batch)
    state, stats = step(make_state(policy), g.split_batch(batch, max_tokens=60, share_prompts=shared))
    assert_same_gradients(state.accum_grads, want.accum_grads)
    assert stats.teacher_kl.item() == pytest.approx(want_stats.teacher_kl.item(), rel=1e-5)
    plain = attrs.evolve(batch, hinted_tokens_bm=None, hinted_lengths_b=None)
    _, plain_stats = step(make_state(policy), plain)
    assert (plain_stats.teacher_kl.item() != want_stats.teacher_kl.item()) == hinted


def test_the_expected_reward_gradient_is_that_of_the_kl():
    """Σ over all tokens of π·(log μ − log π)·∇log π = −∇KL: the reward form estimates the loss form."""
    hidden, weight, teacher, teacher_weight, _ = make_inputs(7, rows=1, length=1)
    one = mx.ones((1, 1))
    _, want, _ = computed([hidden, weight, teacher, teacher_weight, one])
    every = mx.arange(13)[:, None]
    repeated = [mx.broadcast_to(x, (13, 1, x.shape[2])) for x in (hidden, teacher)]
    logq = g.token_logprobs(repeated[1], teacher_weight, every)

    held = g.token_logprobs(repeated[0], weight, every)
    adv_bt = mx.exp(held) * (logq - held)  # each token as often as π draws it
    spec = g.LossSpec(surrogate="none", aggregation="sequence_mean")

    def loss_of(h):
        logp = g.token_logprobs(mx.broadcast_to(h, (13, 1, WIDTH)), weight, every)
        loss, stats = g.policy_loss(logp, adv_bt, mx.ones((13, 1)), spec, teacher_kl_bt=held - logq)
        return 13 * loss, stats

    (_, stats), gradient = mx.value_and_grad(loss_of)(hidden)
    np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-5)
    assert stats.teacher_kl.item() == pytest.approx((held - logq).mean().item(), rel=1e-5)
