"""Surrogate objectives ℓ of one token: what is minimised in place of −E[A].

Each takes `(ratio, advantage, logp, spec)`, broadcast to one shape, and returns ℓ. `ratio` is r of the
spec's level, with gradient; `logp` is log π_θ of the token, with gradient. To add one: write the
function, and give it a line in SURROGATES.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import mlx.core as mx

from grpo_fn.backends.cpu.elementwise import exp, sigmoid

if TYPE_CHECKING:
    from grpo_fn.algorithm.spec import LossSpec


def clip(ratio: mx.array, advantage: mx.array, logp: mx.array, spec: LossSpec) -> mx.array:
    """ℓ = −min( min(r, δ)·A, clip(r, 1−ε_low, 1+ε_high)·A ).

    PPO (arXiv 1707.06347, eq. 7), with DAPO's separate ε_high (2503.14476) and, where `delta` is set, the
    two-sided bound δ that keeps r·A finite for A < 0 (INTELLECT-2, 2505.07291, eq. 2).
    """
    bounded = ratio if spec.delta is None else mx.minimum(ratio, spec.delta)
    clipped = mx.clip(ratio, 1 - spec.epsilon_low, 1 + spec.upper_epsilon)
    return -mx.minimum(bounded * advantage, clipped * advantage)


def dual_clip(ratio: mx.array, advantage: mx.array, logp: mx.array, spec: LossSpec) -> mx.array:
    """`clip`, and where A < 0 at most −c·A (arXiv 1912.09729, eq. 5)."""
    assert spec.dual_clip is not None  # LossSpec sees to it
    loss = clip(ratio, advantage, logp, spec)
    return mx.where(advantage < 0, mx.minimum(loss, -spec.dual_clip * advantage), loss)


def cispo(ratio: mx.array, advantage: mx.array, logp: mx.array, spec: LossSpec) -> mx.array:
    """ℓ = −sg(min(r, 1+ε_high))·A·log π_θ (MiniMax-M1, arXiv 2506.13585, eq. 4–5).

    Our ε_high is the cap less one, as in the paper; TRL's `epsilon_high` is the cap itself.
    """
    weight = mx.stop_gradient(mx.minimum(ratio, 1 + spec.upper_epsilon))
    return -weight * advantage * logp


def sapo(ratio: mx.array, advantage: mx.array, logp: mx.array, spec: LossSpec) -> mx.array:
    """ℓ = −(4/τ)·σ(τ(r−1))·A with τ by the sign of A (arXiv 2511.20347): a soft gate for a hard clip."""
    tau = mx.where(advantage > 0, spec.sapo_tau_pos, spec.sapo_tau_neg)
    return -(4 / tau) * sigmoid(tau * (ratio - 1)) * advantage


def plain(ratio: mx.array, advantage: mx.array, logp: mx.array, spec: LossSpec) -> mx.array:
    """ℓ = −exp(log π_θ − sg(log π_θ))·A: the plain policy gradient, whatever π_old was."""
    return -exp(logp - mx.stop_gradient(logp)) * advantage


Surrogate = Callable[[mx.array, mx.array, mx.array, "LossSpec"], mx.array]

SURROGATES: dict[str, Surrogate] = {
    "clip": clip,
    "dual_clip": dual_clip,
    "cispo": cispo,
    "sapo": sapo,
    "none": plain,
}

# At which sides of the ratio a surrogate clips, for the log; one that is not here clips nothing.
CLIPPED_SIDES: dict[str, tuple[str, ...]] = {
    "clip": ("low", "high"),
    "dual_clip": ("low", "high"),
    "cispo": ("high",),
}
