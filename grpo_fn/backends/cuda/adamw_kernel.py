"""CUDA kernels for AdamW's update of one leaf: a pass that finds numbers that are not finite, and one that
writes parameter and moments.

As single operations, an update of AdamW holds some ten arrays of a leaf's size until the device has done all:
for an embedding of 152 thousand rows that is more than weights and moments together.
"""

import mlx.core as mx

from grpo_fn.backends.cuda.kernels import cuda_kernel, literal, takes_dtype

_THREADS = 256
_INPUTS = ("p", "g", "m", "v", "numbers")

# numbers: gradient's factor, decay, the two bias corrections, and 1 if the update may be taken.
_NEW = """
    const int at = blockIdx.x * THREADS + threadIdx.x;
    const bool inside = at < p_shape[0];
    const float gradient = inside ? g[at] * numbers[0] : 0.0f;
    const float mean = inside ? BETA1 * m[at] + REST1 * gradient : 0.0f;
    const float square = inside ? BETA2 * v[at] + REST2 * (gradient * gradient) : 0.0f;
    const float moved = numbers[2] * mean / (sqrtf(square) * numbers[3] + EPSILON);
    const float parameter = inside ? p[at] * numbers[1] - moved : 0.0f;
"""
_LOOK = (
    _NEW
    + """
    const bool broken[3] = {!isfinite(parameter), !isfinite(mean), !isfinite(square)};
    for (int each = 0; each < 3; each++)
        if (__any_sync(0xffffffff, broken[each]) && threadIdx.x % 32 == 0) atomicOr(fault + each, 1);
"""
)
_WRITE = (
    _NEW
    + """
    if (!inside) return;
    const bool taken = numbers[4] > 0;
    new_p[at] = taken && !fault[0] ? parameter : p[at];
    new_m[at] = taken && !fault[1] ? mean : m[at];
    new_v[at] = taken && !fault[2] ? square : v[at];
"""
)


def takes_leaf(*arrays: mx.array) -> bool:
    """Whether the kernels run here on a parameter and its moments, all in float32."""
    float32 = all(array.dtype == mx.float32 for array in arrays)
    return float32 and takes_dtype(mx.float32) and 0 < arrays[0].size < 2**31 - _THREADS


def adamw_leaf(
    param: mx.array,
    grad: mx.array,
    m: mx.array,
    v: mx.array,
    numbers_5: mx.array,
    betas: tuple[float, float],
    eps: float,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """The leaf after an update: (parameter, m, v, fault int32 [3]), the shapes of the first three as before.

    Of a leaf's three arrays one stays as it was if its new values are not all finite; its fault is 1 then.

    Args:
        param, grad, m, v: float32 of one shape.
        numbers_5: float32: the factor of the gradient, 1 − rate·λ, rate / (1 − β1^t), 1 / √(1 − β2^t), and 1,
            or 0 where all three arrays have to stay as they are.
        betas, eps: AdamW's.
    """
    flat = [array.reshape(-1) for array in (param, grad, m, v)]
    replaced = {
        "BETA1": betas[0],
        "REST1": 1 - betas[0],
        "BETA2": betas[1],
        "REST2": 1 - betas[1],
        "EPSILON": eps,
    }
    look, write = _LOOK, _WRITE
    for name, value in replaced.items():
        look, write = look.replace(name, literal(value)), write.replace(name, literal(value))
    threads = -(-param.size // _THREADS) * _THREADS
    launch = {
        "template": [("THREADS", _THREADS)],
        "grid": (threads, 1, 1),
        "threadgroup": (_THREADS, 1, 1),
    }
    (fault,) = cuda_kernel("adamw_look", _INPUTS, ("fault",), look)(
        inputs=[*flat, numbers_5], output_shapes=[(3,)], output_dtypes=[mx.int32], init_value=0, **launch
    )
    new = cuda_kernel("adamw_write", (*_INPUTS, "fault"), ("new_p", "new_m", "new_v"), write)(
        inputs=[*flat, numbers_5, fault],
        output_shapes=[param.shape] * 3,
        output_dtypes=[mx.float32] * 3,
        **launch,
    )
    return (*new, fault)
