"""Runs a LossCase through the library and the reference, and compares the results."""

from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from tests.support import reference

RELATIVE = 1e-5
ARGUMENTS = {"old": "old_logp_bt", "rollout": "rollout_logp_bt", "ref": "ref_logp_bt", "keep": "keep_bt"}


@attrs.frozen(eq=False)
class Outcome:
    """Value, gradients in logp and entropy, and statistics, as NumPy float64."""

    loss: float
    grad: np.ndarray
    entropy_grad: np.ndarray
    stats: dict


def run_library(case, *, dtype=mx.float32, mask_dtype=mx.float32):
    """policy_loss of a case with its gradients in logp and entropy."""
    spec = g.LossSpec(**case.fields)
    mask, adv = mx.array(case.mask).astype(mask_dtype), mx.array(case.adv)
    names = [name for name in case.tokens() if name in ARGUMENTS]
    given: Any = {ARGUMENTS[name]: mx.array(getattr(case, name)).astype(dtype) for name in names}
    given["max_completion_length"] = case.max_completion_length

    def loss_of(logp, entropy):
        entropy = None if case.entropy is None else entropy
        return g.policy_loss(logp, adv, mask, spec, entropy_bt=entropy, **given)

    logp = mx.array(case.logp).astype(dtype)
    entropy = mx.array(np.zeros_like(case.logp) if case.entropy is None else case.entropy).astype(dtype)
    (loss, stats), (grad, entropy_grad) = mx.value_and_grad(loss_of, argnums=(0, 1))(logp, entropy)
    mx.eval(loss, stats, grad, entropy_grad)
    assert loss.dtype == mx.float32 and loss.shape == ()
    numbers = {name: _scalar(value) for name, value in stats._asdict().items()}
    return Outcome(float(loss), _numpy(grad), _numpy(entropy_grad), numbers)


def run_reference(case):
    """The same case by the specification."""
    arrays = {name: getattr(case, name).astype(np.float64) for name in case.tokens()}
    logp, adv = arrays.pop("logp"), case.adv.astype(np.float64)
    arrays["max_completion_length"] = case.max_completion_length
    return reference.policy_loss(g.LossSpec(**case.fields), logp, adv, case.mask, **arrays)


def assert_matches_reference(case, *, relative=RELATIVE, want=None):
    """Value, both gradients and every statistic agree with the specification.

    `want`: the outcome of `run_reference(case)`, where it is there already.
    """
    got, want = run_library(case), run_reference(case) if want is None else want
    assert abs(got.loss - want.loss) <= relative * want.loss_scale, f"loss {got.loss} for {want.loss}: {case}"
    close(got.grad, want.grad, want.grad_scale, relative, f"gradient: {case}")
    by_entropy = want.entropy_grad
    close(got.entropy_grad, by_entropy, np.abs(by_entropy), relative, f"entropy gradient: {case}")
    assert got.stats.keys() == want.stats.keys()
    same_stats(got.stats, want.stats, want.loss_scale, relative)


def same_stats(got, want, loss_scale, relative):
    """Each statistic, relative to itself or 1; the loss relative to its terms."""
    for name, value in want.items():
        size = loss_scale if name == "loss" else max(abs(value), 1.0)
        assert abs(got[name] - value) <= relative * size, f"{name} {got[name]} for {value}"


def close(got, want, scale, relative, what):
    """Elementwise |got − want| ≤ relative · scale; where the scale is 0, exactly equal."""
    excess = np.abs(got - want) - relative * scale
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert (excess <= 0).all(), f"{got[worst]} for {want[worst]} at {worst}, {what}"


def same_outcome(one, other, case, *, relative=1e-6):
    """Two library outcomes of one case agree, relative to the largest term that enters each number."""
    want = run_reference(case)
    assert abs(one.loss - other.loss) <= relative * want.loss_scale, (one.loss, other.loss)
    sizes = (want.grad_scale.max(initial=0.0), np.abs(want.entropy_grad).max(initial=0.0))
    pairs = ((one.grad, other.grad), (one.entropy_grad, other.entropy_grad))
    for (a, b), size in zip(pairs, sizes, strict=True):
        assert a.shape == b.shape and np.abs(a - b).max(initial=0.0) <= relative * size, (a, b)
    same_stats(one.stats, other.stats, want.loss_scale, relative)


def _numpy(array):
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _scalar(value):
    assert value.dtype == mx.float32 and value.shape == (), (value.dtype, value.shape)
    return float(value)
