"""exp, softmax, row sums, the SwiGLU gate and RMSNorm, vectorized for CPUs.

MLX's CPU kernels call the C library's `exp` one element at a time, which takes most of a small
model's time. The exponential here uses only sums and products, which `mx.compile` turns into vector
instructions. All functions here are for float32: see `on_cpu`.

    e^x = 2^n · e^r,   n = round(x / ln 2),   r = x − n ln 2 ∈ [−ln 2 / 2, ln 2 / 2]

e^r is a polynomial of degree 6 (least squares on Chebyshev nodes, relative error 4e-9), evaluated
by Estrin's scheme, which has few dependent steps. Each of the four functions below therefore needs
one pass over memory, or less inside a compiled step. 2^n is computed by writing n into the
exponent's bits; n itself is in the lowest bits of the sum that rounds it.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import mlx.core as mx

from grpo_fn.compile import recomputed

_COEFFICIENTS = (1.0, 1.0, 0.4999998860, 0.1666651846, 0.0416695331, 0.0083689163, 0.0013751408)
_ROUNDER = 12582912.0  # 1.5 · 2^23: a float32 next to it has no fraction
_LEAST, _MOST = _ROUNDER - 127, _ROUNDER + 128  # where 2^n is 0 and infinity
_LOG2_E = 1.4426950408889634
# high + low = ln 2; n · high is exact (Cody and Waite)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4


def on_cpu(*arrays: mx.array) -> bool:
    """Returns whether this module's functions support these arrays."""
    return all(a.dtype == mx.float32 for a in arrays)


def exp(x: mx.array) -> mx.array:
    """Computes e^x with a relative error of at most 2e-7; the result is 0 below −88 and infinity
    above 88.3.
    """
    return cast(mx.array, _exp(x))


def row_sum(x: mx.array) -> mx.array:
    """Computes Σ x along the last axis, which is removed. The sum is computed as a product with a
    column, because MLX adds one number at a time.
    """
    return (x @ mx.ones((x.shape[-1], 1)))[..., 0]


def softmax(x: mx.array) -> mx.array:
    """Computes softmax along the last axis."""
    return cast(mx.array, _softmax(x))


def softmax_gradient(output: mx.array, cotangent: mx.array) -> mx.array:
    """Computes the gradient with respect to softmax's argument."""
    weighted_nd, flat_nd = (
        each.reshape(-1, each.shape[-1]) for each in (cotangent * output, output)
    )
    return (weighted_nd - flat_nd * weighted_nd.sum(axis=-1, keepdims=True)).reshape(output.shape)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Computes silu(gate) · x, without a custom gradient."""
    power, scale = _powers_of_minus(gate)
    return _gated(gate, x, power, scale)


def swiglu_gradient(gate: mx.array, x: mx.array, cotangent: mx.array) -> tuple[mx.array, mx.array]:
    """Computes the gradients with respect to `swiglu`'s gate and x."""
    power, scale = _powers_of_minus(gate)
    return _gated_gradient(gate, x, power, scale, cotangent)


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Computes x / sqrt(mean x² + ε) · weight along the last axis (arXiv 1910.07467, eq. 4)."""
    return cast(mx.array, _rms_norm(x, weight, mx.array(eps)))


def add_at(array_cv: mx.array, index_c: mx.array, values_c: mx.array) -> mx.array:
    """Adds a number to one entry of each row, in place."""
    return array_cv.at[mx.arange(array_cv.shape[0]), index_c].add(values_c)


def _rounded(x: mx.array, per_unit: float) -> mx.array:
    """Returns the exponent n for e^x in the lowest bits of a float32, bounded by -127 and 128; NaN
    stays NaN.

    `per_unit` is log2 e, or −log2 e for e^{−x}.

    The bounds are compared after the sum: g++ does not vectorize arithmetic on a bounded number,
    because it computes the two constant results beforehand and branches to them.
    """
    sum_ = x * per_unit + _ROUNDER
    return mx.where(sum_ < _LEAST, _LEAST, mx.where(sum_ > _MOST, _MOST, sum_))


def _remainder(x: mx.array, rounded: mx.array) -> mx.array:
    """Returns r = x − n ln 2, or −1/2 if x is far below the bounds of n, so that e^r is finite.

    The −1/2 is computed, for the same reason as the bounds in `_rounded`.
    """
    n = rounded - _ROUNDER
    return mx.maximum((x - n * _LN2_HIGH) - n * _LN2_LOW, (rounded - rounded) - 0.5)


def _power(r: mx.array) -> mx.array:
    """Computes e^r."""
    c = _COEFFICIENTS
    square = r * r
    low = (c[0] + c[1] * r) + square * (c[2] + c[3] * r)
    return low + (square * square) * ((c[4] + c[5] * r) + square * c[6])


def _scale_bits(rounded_bits: mx.array) -> mx.array:
    """Returns the bits of 2^n: 0 below −88, infinity above 88.3."""
    return mx.left_shift(rounded_bits + 127, mx.array(23))


_MOST_AXES = 6


def _fused(function: FunctionType, dtype: mx.Dtype = mx.float32) -> Callable[..., Any]:
    """Compiles an expression to one kernel, also in eager code; its arrays must have the same shape
    and dtype.

    The kernel is traced immediately, for any number of axes, because a trace inside `mx.grad` fixes
    the shapes that constants are broadcast to and is then used for every shape.
    """
    fused = mx.compile(function, shapeless=True)
    for axes in range(_MOST_AXES + 1):
        fused(*[mx.zeros((2,) * axes, dtype) for _ in range(function.__code__.co_argcount)])
    return fused


_fused_remainder = _fused(_remainder)
_fused_power = _fused(_power)
_fused_scale_bits = _fused(_scale_bits, mx.int32)
_fused_rounded = _fused(lambda x: _rounded(x, _LOG2_E))
_fused_rounded_of_minus = _fused(lambda x: _rounded(x, -_LOG2_E))
_fused_remainder_of_minus = _fused(lambda x, rounded: _remainder(-x, rounded))


def _powers_of_minus(gate: mx.array) -> tuple[mx.array, mx.array]:
    """Returns two arrays whose product is e^(−gate), so that callers can fuse the product.

    The two views force a kernel boundary, because MLX limits a kernel's depth: if the chain up to
    SwiGLU exceeds it, the constants of its second half become strided inputs, and g++ does not
    vectorize that loop.
    """
    rounded = _fused_rounded_of_minus(gate)
    remainder = _fused_remainder_of_minus(gate, rounded)
    return _fused_power(remainder.view(mx.int32).view(mx.float32)), _scale(rounded)


def _scale(rounded: mx.array) -> mx.array:
    """Returns 2^n."""
    return _fused_scale_bits(rounded.view(mx.int32)).view(mx.float32)


@mx.custom_function
def _exp(x: mx.array) -> mx.array:
    rounded = _fused_rounded(x)
    return _fused_power(_fused_remainder(x, rounded)) * _scale(rounded)


@_exp.vjp
def _exp_vjp(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    return cotangent * output


@mx.custom_function
def _softmax(x: mx.array) -> mx.array:
    flat_nd = x.reshape(-1, x.shape[-1])
    raised_nd = exp(flat_nd - flat_nd.max(axis=-1, keepdims=True))
    return (raised_nd / raised_nd.sum(axis=-1, keepdims=True)).reshape(x.shape)


@_softmax.vjp
def _softmax_vjp(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    return softmax_gradient(output, cotangent)


@_fused
def _gated(gate: mx.array, x: mx.array, power: mx.array, scale: mx.array) -> mx.array:
    return gate * x / (1 + power * scale)


@_fused
def _gated_gradient(
    gate: mx.array, x: mx.array, power: mx.array, scale: mx.array, cotangent: mx.array
) -> tuple[mx.array, mx.array]:
    sigmoid = 1 / (1 + power * scale)
    return cotangent * x * sigmoid * (1 + gate * (1 - sigmoid)), cotangent * gate * sigmoid


def weighted_values(weights: mx.array, values: mx.array) -> mx.array:
    """Multiplies attention weights and values in float32, which is faster on a CPU.

    The sum of two such products is rounded to 16 bits once, like a single product over copied
    prompts. If the sum were rounded twice, log-probs would differ from the learner's by up to 0.12
    nats.
    """
    return weights.astype(mx.float32) @ values.astype(mx.float32)


def gather_mm(x: mx.array, weights: mx.array, **options: Any) -> mx.array:
    """Computes `mx.gather_mm` for any floating dtype; on a CPU, MLX's own supports only float32."""
    return mx.gather_mm(x.astype(mx.float32), weights.astype(mx.float32), **options).astype(x.dtype)


# On a CPU, MLX computes a sum along the last axis, or a product that broadcasts, one number at a
# time; the BLAS does not. Therefore, row sums are products with a column, and factors for rows and
# columns are an outer product.
@mx.custom_function
def _rms_norm(x: mx.array, weight: mx.array, eps: mx.array) -> mx.array:
    flat_nd = x.reshape(-1, x.shape[-1])
    return (flat_nd * (_inverse_rms(flat_nd, eps) @ weight[None])).reshape(x.shape)


@_rms_norm.vjp
def _rms_norm_vjp(
    primals: Any, cotangent: mx.array, output: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    # Only the input is saved for this pass.
    x, weight, eps = primals
    (x,) = recomputed([x], cotangent)
    width = x.shape[-1]
    flat_nd = x.reshape(-1, width)
    cotangent_nd = cotangent.reshape(-1, width)
    inverse_n1 = _inverse_rms(flat_nd, eps)
    along_nd = cotangent_nd * flat_nd
    back_n1 = (along_nd @ weight[:, None]) * inverse_n1 * inverse_n1 * inverse_n1 * (1 / width)
    gradient_nd = cotangent_nd * (inverse_n1 @ weight[None]) - flat_nd * (
        back_n1 @ mx.ones((1, width))
    )
    of_weight = (inverse_n1.reshape(1, -1) @ along_nd).reshape(-1)
    return gradient_nd.reshape(x.shape), of_weight, mx.zeros_like(eps)


def _inverse_rms(flat_nd: mx.array, eps: mx.array) -> mx.array:
    width = flat_nd.shape[-1]
    return mx.rsqrt(mx.square(flat_nd) @ mx.full((width, 1), 1 / width) + eps)
