"""Twins of the surrogates of trust regions: float64 with central differences, verl's and TRL's own code."""

import attrs
import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from tests.support.properties.strategies import examples

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


@attrs.frozen(eq=False)
class Case:
    """A batch: log-probs [B,T], advantages [B] or [B,T], a mask with holes."""

    logp: np.ndarray
    old: np.ndarray
    mu: np.ndarray
    adv: np.ndarray
    mask: np.ndarray

    def row(self, n):
        """One row as a batch."""
        return Case(*(array[n : n + 1] for array in attrs.astuple(self)))

    def on_policy(self):
        """The first token of each row, with one log-prob for all three policies."""
        return Case(*(self.logp[:, :1],) * 3, self.adv, np.ones_like(self.mask[:, :1]))

    def with_garbage(self, value):
        """The same, with `value` behind the mask."""
        hidden = (np.where(self.mask > 0, array, value) for array in (self.logp, self.old, self.mu))
        return Case(*hidden, self.adv, self.mask)

    def _loss(self, spec, logp):
        old, mu, adv, mask = (mx.array(a, mx.float32) for a in (self.old, self.mu, self.adv, self.mask))
        return g.policy_loss(logp, adv, mask, spec, old_logp_bt=old, rollout_logp_bt=mu)

    def ours(self, spec):
        """(loss, gradient in logp)."""
        value, gradient = mx.value_and_grad(lambda logp: self._loss(spec, logp)[0])(
            mx.array(self.logp, mx.float32)
        )
        return float(value), np.array(gradient, np.float64)

    def stats(self, spec):
        """LossStats."""
        return self._loss(spec, mx.array(self.logp, mx.float32))[1]

    def inside(self, spec):
        """Whether each token is inside the trust region, [B,T]."""
        p = np.exp(self.logp)
        low, high = spec.epsilon_low, spec.upper_epsilon
        adv = self._adv()
        if spec.surrogate == "ipo":
            return np.abs(p - np.exp(self.mu)) <= low
        old = np.exp(self.old)
        if spec.surrogate == "dppo_tv":
            return np.where(adv > 0, p - old <= high, p - old >= -low)
        kl = old * (self.old - self.logp) + (1 - old) * np.log((1 - old + 1e-8) / (1 - p + 1e-8))
        return np.where(adv > 0, (kl <= high) | (p <= old), (kl <= low) | (p >= old))

    def _adv(self):
        return self.adv if self.adv.ndim == 2 else np.broadcast_to(self.adv[:, None], self.mask.shape)

    def formula(self, spec):
        """(loss, gradient in logp) in float64; what has a stop-gradient stays as it is."""
        value = self._formula(spec, self.logp)
        gradient = np.zeros_like(self.logp)
        for place in np.argwhere(self.mask > 0):
            moved = []
            for sign in (1, -1):
                logp = self.logp.copy()
                logp[tuple(place)] += sign * STEP
                moved.append(self._formula(spec, logp))
            gradient[tuple(place)] = (moved[0] - moved[1]) / (2 * STEP)
        return value, gradient

    def _formula(self, spec, logp):
        mask, adv = self.mask, self._adv()
        length = np.maximum(mask.sum(axis=1, keepdims=True), 1)
        held = np.clip(self.logp - self.old, -LIMIT, LIMIT)  # of what a stop-gradient holds
        weight = self._weights(spec)
        if spec.surrogate in ("dppo_tv", "dppo_kl"):
            loss = -np.minimum(np.exp(held), spec.ratio_cap) * adv * logp * self.inside(spec)
        elif spec.surrogate == "ipo":
            loss = -np.exp(logp - self.mu) * adv * self.inside(spec)
        elif spec.surrogate == "dro":
            loss = -(adv * logp - 0.5 * spec.dro_beta * (logp - self.old) ** 2)
        elif spec.surrogate == "geo_mean":
            x, s = logp - self.old, np.sign(adv)
            least = s * np.minimum(s * x, s * np.clip(x, -spec.epsilon_low, spec.upper_epsilon))
            mean_adv = (adv * mask).sum(axis=1, keepdims=True) / length
            loss = -mean_adv * np.exp((least * mask).sum(axis=1, keepdims=True) / length)
            loss = np.broadcast_to(loss, mask.shape)
        else:
            factors = held + np.clip(np.log(np.maximum(weight, 1e-30)), np.log(1e-8), LIMIT)
            w = np.clip((factors * mask).sum(axis=1, keepdims=True), np.log(1e-8), LIMIT)
            k = np.where(adv >= 0, spec.vespo_k_pos, spec.vespo_k_neg)
            rate = np.where(adv >= 0, spec.vespo_lambda_pos, spec.vespo_lambda_neg)
            loss = -np.exp(rate + k * w - rate * np.exp(w)) * adv * logp
            weight = np.ones_like(weight)
        loss = loss * weight * mask
        if spec.aggregation == "sum":
            return loss.sum()
        if spec.aggregation == "token_mean":
            return loss.sum() / max(mask.sum(), 1)
        return (loss.sum(axis=1, keepdims=True) / length).sum() / len(mask)

    def _weights(self, spec):
        drift = np.clip(self.old - self.mu, -LIMIT, LIMIT)
        ratio = np.exp(drift)
        if spec.correction == "token_truncate":
            return np.clip(ratio, spec.correction_floor, spec.correction_cap)
        if spec.correction == "token_mask":
            low, high = spec.correction_range
            return np.where((low <= ratio) & (ratio <= high), ratio, 0.0)
        if spec.correction == "sequence_truncate":
            length = np.maximum(self.mask.sum(axis=1, keepdims=True), 1)
            q = np.exp((drift * self.mask).sum(axis=1, keepdims=True) / length)
            return np.broadcast_to(np.clip(q, spec.correction_floor, spec.correction_cap), ratio.shape)
        return np.ones_like(ratio)


def random_case(seed, by_token=False, rows=4, tokens=6, drift=0.4):
    """Log-probs from −4 to −.05 and two policies near them, as float32 has them."""
    rng = np.random.default_rng(seed)
    shape = (rows, tokens)
    logp = rng.uniform(-4.0, -0.05, shape)
    old = np.minimum(logp + rng.normal(0, drift, shape), -1e-3)
    mu = np.minimum(old + rng.normal(0, 0.5 * drift, shape), -1e-3)
    adv = rng.normal(size=shape if by_token else rows)
    mask = (rng.random(shape) < 0.8).astype(np.float64)
    mask[:, 0] = 1
    return Case(*(array.astype(np.float32).astype(np.float64) for array in (logp, old, mu, adv, mask)))


def assert_close(got, want, tolerance):
    """Loss and gradient, relative to the larger of 1 and their size."""
    value, gradient = want
    assert abs(got[0] - value) <= tolerance * max(1, abs(value))
    assert np.abs(got[1] - gradient).max() <= tolerance * max(1, np.abs(gradient).max())


def compare_with_peer(name):
    """Values and gradients of the peer's own function on random batches; skips where it is not installed."""
    torch = pytest.importorskip("torch")
    peer = _trl(torch) if name == "vespo" else _verl(torch)
    for seed in range(examples(500)):
        case = random_case(seed, rows=3, tokens=5)
        spec = g.LossSpec(surrogate=name, aggregation="token_mean", **FIELDS[name])
        if name == "geo_mean":
            spec = attrs.evolve(spec, aggregation="sequence_mean")
        logp = torch.tensor(case.logp, dtype=torch.float32, requires_grad=True)
        value = peer(name, spec, case, logp)
        value.backward()
        assert_close(case.ours(spec), (float(value.detach()), logp.grad.numpy().astype(np.float64)), 1e-5)


def _tensors(torch, case):
    arrays = (case.old, np.broadcast_to(case.adv[:, None], case.mask.shape).copy(), case.mask)
    return [torch.tensor(array, dtype=torch.float32) for array in arrays]


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
