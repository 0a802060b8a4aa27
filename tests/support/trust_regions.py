"""The surrogates of trust regions and whole rows: float64 with central differences; verl's and TRL's code."""

import numpy as np
import pytest

import grpo_fn as g
from tests.support.properties.harness import run_library
from tests.support.properties.strategies import LossCase, examples

LIMIT = 20.0
STEP = 1e-6
FIELDS = {
    "dppo_tv": {"epsilon_low": 0.1, "epsilon_high": 0.2},
    "dppo_kl": {"epsilon_low": 0.05, "epsilon_high": 0.1},
    "ipo": {"epsilon_low": 0.3, "epsilon_high": 0.3},
    "geo_mean": {"epsilon_low": 0.4, "epsilon_high": 0.3},
    "vespo": {},
    "dro": {"dro_beta": 0.3},
}


def make_case(name, seed, *, by_token=False, rows=4, tokens=6, drift=0.4, **fields) -> LossCase:
    """Log-probs from −4 to −.05, two policies near them, a mask with holes, and the surrogate's fields."""
    rng = np.random.default_rng(seed)
    shape = (rows, tokens)
    logp = rng.uniform(-4.0, -0.05, shape)
    old = np.minimum(logp + rng.normal(0, drift, shape), -1e-3)
    mu = np.minimum(old + rng.normal(0, 0.5 * drift, shape), -1e-3)
    adv = rng.normal(size=shape if by_token else rows)
    mask = rng.random(shape) < 0.8
    mask[:, 0] = True
    logp, old, mu, adv, mask = (array.astype(np.float32) for array in (logp, old, mu, adv, mask))
    return LossCase({"surrogate": name, **FIELDS[name], **fields}, logp, adv, mask, old=old, rollout=mu)


def inside(case):
    """Whether each token is inside the trust region, [B,T]."""
    spec, adv = g.LossSpec(**case.fields), _advantages(case)
    p, old = np.exp(case.logp), np.exp(case.old)
    low, high = spec.epsilon_low, spec.upper_epsilon
    if spec.surrogate == "ipo":
        return np.abs(p - np.exp(case.rollout)) <= low
    if spec.surrogate == "dppo_tv":
        return np.where(adv > 0, p - old <= high, p - old >= -low)
    kl = old * (case.old - case.logp) + (1 - old) * np.log((1 - old + 1e-8) / (1 - p + 1e-8))
    return np.where(adv > 0, (kl <= high) | (p <= old), (kl <= low) | (p >= old))


def _advantages(case):
    return case.adv.reshape(len(case.mask), -1)  # [B,T] or [B,1]


def assert_is_the_formula(case):
    """Loss and gradient of the library are those of `_loss` in float64 and its central differences."""
    exact = case.with_tokens(lambda array: array.astype(np.float64))
    gradient = np.zeros_like(exact.logp)
    for place in map(tuple, np.argwhere(case.mask > 0)):
        moved = []
        for step in (STEP, -STEP):
            logp = exact.logp.copy()
            logp[place] += step
            moved.append(_loss(exact, logp))
        gradient[place] = (moved[0] - moved[1]) / (2 * STEP)
    assert_close(run_library(case), _loss(exact, exact.logp), gradient)


def _loss(case, logp):
    """The loss where the policy's own log-probs are `logp`; what a stop-gradient holds stays the case's."""
    spec, mask, adv = g.LossSpec(**case.fields), case.mask.astype(np.float64), _advantages(case)
    length = np.maximum(mask.sum(axis=1, keepdims=True), 1)
    held = np.clip(case.logp - case.old, -LIMIT, LIMIT)
    weight = _weights(case, spec)
    if spec.surrogate in ("dppo_tv", "dppo_kl"):
        loss = -np.minimum(np.exp(held), spec.ratio_cap) * adv * logp * inside(case)
    elif spec.surrogate == "ipo":
        loss = -np.exp(logp - case.rollout) * adv * inside(case)
    elif spec.surrogate == "dro":
        loss = -(adv * logp - 0.5 * spec.dro_beta * (logp - case.old) ** 2)
    elif spec.surrogate == "geo_mean":
        x, s = logp - case.old, np.sign(adv)
        least = s * np.minimum(s * x, s * np.clip(x, -spec.epsilon_low, spec.upper_epsilon))
        mean_adv = (adv * mask).sum(axis=1, keepdims=True) / length
        loss = -mean_adv * np.exp((least * mask).sum(axis=1, keepdims=True) / length)
    else:
        factors = held + np.clip(np.log(np.maximum(weight, 1e-30)), np.log(1e-8), LIMIT)
        w = np.clip((factors * mask).sum(axis=1, keepdims=True), np.log(1e-8), LIMIT)
        k = np.where(adv >= 0, spec.vespo_k_pos, spec.vespo_k_neg)
        rate = np.where(adv >= 0, spec.vespo_lambda_pos, spec.vespo_lambda_neg)
        loss = -np.exp(rate + k * w - rate * np.exp(w)) * adv * logp
        weight = 1.0
    loss = loss * weight * mask
    if spec.aggregation == "sequence_mean":
        return (loss.sum(axis=1, keepdims=True) / length).sum() / len(mask)
    return loss.sum() / (1 if spec.aggregation == "sum" else max(mask.sum(), 1))


def _weights(case, spec):
    drift = np.clip(case.old - case.rollout, -LIMIT, LIMIT)
    ratio = np.exp(drift)
    if spec.correction == "token_truncate":
        return np.clip(ratio, spec.correction_floor, spec.correction_cap)
    if spec.correction == "token_mask":
        low, high = spec.correction_range
        return np.where((low <= ratio) & (ratio <= high), ratio, 0.0)
    if spec.correction == "sequence_truncate":
        length = np.maximum(case.mask.sum(axis=1, keepdims=True), 1)
        q = np.exp((drift * case.mask).sum(axis=1, keepdims=True) / length)
        return np.clip(q, spec.correction_floor, spec.correction_cap)
    return np.ones_like(ratio)


def assert_close(got, value, gradient, tolerance=1e-5):
    """Loss and gradient, relative to the larger of 1 and their size."""
    assert abs(got.loss - value) <= tolerance * max(1, abs(value))
    assert np.abs(got.grad - gradient).max() <= tolerance * max(1, np.abs(gradient).max())


def compare_with_peer(name):
    """Values and gradients of the peer's own function on random batches; skips where it is not installed."""
    torch = pytest.importorskip("torch")
    peer = _trl(torch) if name == "vespo" else _verl(torch)
    aggregation = "sequence_mean" if name == "geo_mean" else "token_mean"
    for seed in range(examples(500)):
        case = make_case(name, seed, rows=3, tokens=5, aggregation=aggregation)
        logp = torch.tensor(case.logp, requires_grad=True)
        value = peer(name, g.LossSpec(**case.fields), case, logp)
        value.backward()
        assert_close(run_library(case), float(value.detach()), logp.grad.numpy().astype(np.float64))


def _tensors(torch, case):
    arrays = (case.old, np.broadcast_to(case.adv[:, None], case.mask.shape).copy(), case.mask)
    return [torch.tensor(array) for array in arrays]


def _verl(torch):
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    actor = pytest.importorskip("verl.workers.config").ActorConfig

    def loss(name, spec, case, logp):
        old, adv, mask = _tensors(torch, case)
        config = actor(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=spec.epsilon_low,
            clip_ratio_low=spec.epsilon_low, clip_ratio_high=spec.upper_epsilon, clip_ratio_c=spec.ratio_cap,
        )  # fmt: skip
        object.__setattr__(config.policy_loss, "dro_beta", spec.dro_beta)
        return core.get_policy_loss_fn(name)(old, logp, adv, mask, "token-mean", config)[0]

    return loss


def _trl(torch):
    trainer = pytest.importorskip("trl.trainer.grpo_trainer")

    def loss(name, spec, case, logp):
        old, adv, mask = _tensors(torch, case)
        phi = trainer.GRPOTrainer.get_gamma_weights(
            adv[:, :1], (logp - old).detach(), mask, None, spec.vespo_k_pos, spec.vespo_lambda_pos,
            spec.vespo_k_neg, spec.vespo_lambda_neg,
        )  # fmt: skip
        return ((-phi * adv * logp) * mask).sum() / mask.sum()

    return loss
