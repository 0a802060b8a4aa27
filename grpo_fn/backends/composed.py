"""exp, softmax, entropy, SwiGLU, ReLU² and RMSNorm, computed by MLX or by this machine's backend.

Every backend is compared with these composed forms. The gradients of SwiGLU and ReLU² recompute
their forward pass, so that only the inputs are saved.
"""

from typing import Any, NamedTuple, cast

import mlx.core as mx

from grpo_fn.backends.mechanisms import find, load
from grpo_fn.compile import recomputed


def exp(x: mx.array) -> mx.array:
    """Returns e^x."""
    fast = find("exp", x)
    return mx.exp(x) if fast is None else fast(x)


def row_sum(x: mx.array) -> mx.array:
    """Returns Σ x over the last axis, which is removed."""
    fast = find("row_sum", x)
    return x.sum(axis=-1) if fast is None else fast(x)


# nats: e^x is 0 far above it, so that 0 · LEAST_LOG stands for 0 · −∞, which would be NaN
LEAST_LOG = -1e3


class SoftmaxSums(NamedTuple):
    """The entropy of softmax z along the last axis, for logits z, and the sums that the entropy
    needs.
    """

    top: mx.array  # max z; the axis stays, with size 1
    below: mx.array  # z − max z
    log_total: mx.array  # log Σ e^{z − max z}
    entropy: mx.array  # of softmax z, nats; both of its terms are >= 0, so nothing cancels


def softmax_sums(z: mx.array) -> SoftmaxSums:
    """Computes the `SoftmaxSums` of float32 logits; a logit of −∞ contributes nothing."""
    top = mx.stop_gradient(z.max(axis=-1, keepdims=True))
    below = z - top
    weight = exp(below)
    total = row_sum(weight)
    log_total = mx.log(total)
    entropy = log_total - row_sum(weight * mx.maximum(below, LEAST_LOG)) / total
    return SoftmaxSums(top, below, log_total, entropy)


def softmax(x: mx.array) -> mx.array:
    """Computes softmax along the last axis, in float32."""
    fast = find("softmax", x)
    return mx.softmax(x, axis=-1, precise=True) if fast is None else fast(x)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Computes silu(gate) · x, where silu(g) = g / (1 + e^{−g}) (GLU variants, arXiv 2002.05202,
    eq. 6).
    """
    return cast(mx.array, _swiglu(gate, x))


def relu2(x: mx.array) -> mx.array:
    """Computes max(x, 0)² (arXiv 2109.08668, section 3); its gradient saves only the input."""
    return cast(mx.array, _relu2(x))


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Computes x / sqrt(mean x² + ε) · weight along the last axis (arXiv 1910.07467, eq. 4)."""
    fast = find("rms_norm", x, weight)
    return mx.fast.rms_norm(x, weight, eps) if fast is None else fast(x, weight, eps)


@mx.custom_function
def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    fast = find("swiglu", gate, x)
    return gate * mx.sigmoid(gate) * x if fast is None else fast(gate, x)


@_swiglu.vjp
def _swiglu_vjp(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, mx.array]:
    # The exponential is computed again, which is cheaper than the memory to save it.
    gate, x = recomputed(primals, cotangent)
    fast = find("swiglu_gradient", gate, x, cotangent)
    if fast is not None:
        return fast(gate, x, cotangent)
    share = mx.sigmoid(gate)
    return cotangent * x * share * (1 + gate * (1 - share)), cotangent * gate * share


@mx.custom_function
def _relu2(x: mx.array) -> mx.array:
    return mx.square(mx.maximum(x, 0))


@_relu2.vjp
def _relu2_vjp(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    (x,) = recomputed([x], cotangent)
    return 2 * mx.maximum(x, 0) * cotangent


# Loaded now on every machine, because its functions must be traced outside every gradient and
# compiled step.
load("cpu", "exp")
