"""Surrogate objectives ℓ of one token, which are minimised instead of −E[A].

Each takes the ratio r of the spec's level, the advantage A and log π_θ of the token, broadcast to
one shape, and the LossSpec's fields that it needs as keywords. It returns ℓ; r and log π_θ carry
the gradient. To add one: write the function, and give it a line in SURROGATES.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx


def clip(
    ratio: mx.array,
    advantage: mx.array,
    logp: mx.array,
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None,
) -> mx.array:
    """ℓ = −min( min(r, δ)·A, clip(r, 1−ε_low, 1+ε_high)·A ).

    PPO (arXiv 1707.06347, eq. 7), with DAPO's separate ε_high (2503.14476) and, if `delta` is set,
    the two-sided bound δ that keeps r·A finite for A < 0 (INTELLECT-2, 2505.07291, eq. 2).
    """
    bounded = ratio if delta is None else mx.minimum(ratio, delta)
    clipped = mx.clip(ratio, 1 - epsilon_low, 1 + epsilon_high)
    return -mx.minimum(bounded * advantage, clipped * advantage)


def dual_clip(
    ratio: mx.array,
    advantage: mx.array,
    logp: mx.array,
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None,
    dual_clip: float,
) -> mx.array:
    """`clip`, and at most −c·A if A < 0 (arXiv 1912.09729, eq. 5)."""
    loss = clip(
        ratio, advantage, logp, epsilon_low=epsilon_low, epsilon_high=epsilon_high, delta=delta
    )
    return mx.where(advantage < 0, mx.minimum(loss, -dual_clip * advantage), loss)


def cispo(ratio: mx.array, advantage: mx.array, logp: mx.array, *, epsilon_high: float) -> mx.array:
    """ℓ = −sg(min(r, 1+ε_high))·A·log π_θ (MiniMax-M1, arXiv 2506.13585, eq. 4–5).

    As in the paper, the cap is 1 + ε_high; TRL's `epsilon_high` is the cap itself.
    """
    weight = mx.stop_gradient(mx.minimum(ratio, 1 + epsilon_high))
    return -weight * advantage * logp


def sapo(
    ratio: mx.array,
    advantage: mx.array,
    logp: mx.array,
    *,
    sapo_tau_pos: float,
    sapo_tau_neg: float,
) -> mx.array:
    """ℓ = −(4/τ)·σ(τ(r−1))·A, where τ depends on the sign of A (arXiv 2511.20347): a soft gate
    instead of a clip."""
    tau = mx.where(advantage > 0, sapo_tau_pos, sapo_tau_neg)
    return -(4 / tau) * mx.sigmoid(tau * (ratio - 1)) * advantage


def plain(ratio: mx.array, advantage: mx.array, logp: mx.array) -> mx.array:
    """ℓ = −exp(log π_θ − sg(log π_θ))·A: the plain policy gradient, independent of π_old."""
    return -mx.exp(logp - mx.stop_gradient(logp)) * advantage


def likelihood(ratio: mx.array, advantage: mx.array, logp: mx.array) -> mx.array:
    """ℓ = −A·log π_θ: the gradient of `plain`; with A = 1 the value is the cross-entropy."""
    return -advantage * logp


class Surrogate(NamedTuple):
    """A surrogate and its properties."""

    function: Callable[..., mx.array]  # (ratio, advantage, logp, **fields) -> ℓ
    fields: tuple[str, ...] = ()  # of LossSpec, which the function takes as keywords
    # "low", "high": the sides on which it clips the ratio; the log reports the shares
    clipped_sides: tuple[str, ...] = ()


SURROGATES: dict[str, Surrogate] = {
    "clip": Surrogate(clip, ("epsilon_low", "epsilon_high", "delta"), ("low", "high")),
    "dual_clip": Surrogate(
        dual_clip, ("epsilon_low", "epsilon_high", "delta", "dual_clip"), ("low", "high")
    ),
    "cispo": Surrogate(cispo, ("epsilon_high",), ("high",)),
    "sapo": Surrogate(sapo, ("sapo_tau_pos", "sapo_tau_neg")),
    "none": Surrogate(plain),
    "likelihood": Surrogate(likelihood),
}
