"""Two CUDA kernels for a chunk of the head's products: one computes log-probs and entropies, the
other their gradient.

A block of threads computes one row. MLX's composed form needs about a dozen passes over float32
copies of the logits. Here, each number of a product is read once and, for its gradient, written
once, in its own dtype. The running sums follow Milakov and Gimelshein (arXiv 1805.02867), and also
compute the moment that an entropy requires:

    top = max z      total = Σ e^{z − top}      moment = Σ e^{z − top} (z − top)
    lse = top + log total                       H = log total − moment / total
"""

from typing import Any

import mlx.core as mx

# `takes_dtype` is the predicate for both.
from grpo_fn.backends.cuda.kernels import cuda_kernel, takes_dtype  # noqa: F401

_THREADS = 512

# The start of both kernels. A capped or scaled logit is rounded as in the model, after each
# operation.
_LOGITS = """
    constexpr int N = V % (16 / sizeof(T)) == 0 ? 16 / sizeof(T) : 1;  // numbers that are read at once
    const int row = blockIdx.x, target = targets[row];
    const float inverse = inverse_temperature[0], scale = shape[0], cap = shape[1];
    const T* from = products + (size_t)row * V;
    struct alignas(N * sizeof(T)) Numbers { T at[N]; };
    const bool aligned = (size_t)from % sizeof(Numbers) == 0;  // not where the products are part of a row
    auto read = [&](int first) {
        if (aligned) return *reinterpret_cast<const Numbers*>(from + first);
        Numbers numbers;
        for (int i = 0; i < N; i++) numbers.at[i] = from[first + i];
        return numbers;
    };

    float tanh = 0;  // tanh of the last logit, where capped
    auto logit = [&](T product) {
        float z = float(product);
        if (SCALED) z = float(T(z * scale));
        if (CAPPED) {
            tanh = tanhf(float(T(z / cap)));
            z = float(T(cap * float(T(tanh))));
        }
        return z * inverse;
    };
"""

_LOGPROBS = (
    _LOGITS
    + """
    float top = -INFINITY, total = 0, moment = 0;
    auto join = [&](float other_top, float other_total, float other_moment) {
        const float high = fmaxf(top, other_top);
        const float mine = total == 0 ? 0 : __expf(top - high);
        const float others = other_total == 0 ? 0 : __expf(other_top - high);
        moment = (total == 0 ? 0 : mine * (moment + (top - high) * total))
            + (other_total == 0 ? 0 : others * (other_moment + (other_top - high) * other_total));
        total = mine * total + others * other_total;
        top = high;
    };

    for (int first = threadIdx.x * N; first < V; first += THREADS * N) {
        const Numbers numbers = read(first);
        float z[N], high = top;
        for (int i = 0; i < N; i++) {
            z[i] = logit(numbers.at[i]);
            high = fmaxf(high, z[i]);
        }
        if (high > top) join(high, 0, 0);
        for (int i = 0; i < N; i++) {
            if (z[i] == -INFINITY) continue;
            const float below = z[i] - top, weight = __expf(below);
            total += weight;
            if (weight != 0) moment += weight * below;
        }
    }

    __shared__ float sums[3][THREADS / 32];
    auto join_lanes = [&]() {
        for (int step = 16; step > 0; step /= 2) {
            const float other_top = __shfl_xor_sync(0xffffffff, top, step);
            const float other_total = __shfl_xor_sync(0xffffffff, total, step);
            join(other_top, other_total, __shfl_xor_sync(0xffffffff, moment, step));
        }
    };
    join_lanes();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) {
        sums[0][warp] = top;
        sums[1][warp] = total;
        sums[2][warp] = moment;
    }
    __syncthreads();
    if (warp > 0) return;
    const bool held = lane < THREADS / 32;
    top = held ? sums[0][lane] : -INFINITY;
    total = held ? sums[1][lane] : 0;
    moment = held ? sums[2][lane] : 0;
    join_lanes();
    if (lane == 0) {
        logp[row] = logit(from[target]) - top - logf(total);
        entropy[row] = logf(total) - moment / total;
        lse[row] = top + logf(total);
    }
"""
)

_GRADIENTS = (
    _LOGITS
    + """
    const float whole = lse[row];
    const float by_logp = logp_gradient[row] * inverse;
    const float by_entropy = ENTROPY ? entropy_gradient[row] * inverse : 0;
    const float spread = ENTROPY ? entropy[row] : 0;
    T* to = out + (size_t)row * V;
    for (int first = threadIdx.x * N; first < V; first += THREADS * N) {
        Numbers numbers = read(first);
        for (int i = 0; i < N; i++) {
            const float log_p = logit(numbers.at[i]) - whole, p = __expf(log_p);
            float gradient = -p * by_logp;
            if (ENTROPY && p != 0) gradient -= p * (log_p + spread) * by_entropy;
            if (first + i == target) gradient += by_logp;
            if (SCALED) gradient *= scale;
            if (CAPPED) gradient *= (1 - tanh) * (1 + tanh);
            numbers.at[i] = T(gradient);
        }
        *reinterpret_cast<Numbers*>(to + first) = numbers;
    }
"""
)


def _launch(
    kernel: Any,
    product_cv: mx.array,
    more: list[mx.array],
    scale_cap: tuple[float, float | None],
    temperature: float | mx.array,
    template: list[tuple[str, Any]],
    outputs: list[tuple[tuple[int, ...], mx.Dtype]],
) -> list[mx.array]:
    rows, vocabulary = product_cv.shape
    scale, cap = scale_cap
    return kernel(
        inputs=[product_cv, mx.array(1.0) / temperature, mx.array([scale, cap or 1.0]), *more],
        template=[
            ("T", product_cv.dtype),
            ("V", vocabulary),
            ("SCALED", scale != 1),
            ("CAPPED", cap is not None),
            ("THREADS", _THREADS),
            *template,
        ],
        grid=(rows * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )


_GIVEN = ("products", "inverse_temperature", "shape", "targets")


def row_logprobs(
    product_cv: mx.array,
    targets_c: mx.array,
    scale_cap: tuple[float, float | None],
    temperature: float | mx.array,
) -> tuple[mx.array, mx.array, mx.array]:
    """Computes for each row log softmax at the target, the entropy, and log Σ e^z; each is float32
    [C], in nats.

    Args:
        product_cv: hidden states times the head's matrix.
        targets_c: token ids.
        scale_cap: the logits are cap · tanh(scale · product / cap); without a cap, scale · product.
        temperature: the logits are divided by it.
    """
    kernel = cuda_kernel("row_logprobs", _GIVEN, ("logp", "entropy", "lse"), _LOGPROBS)
    outputs = [((product_cv.shape[0],), mx.float32)] * 3
    logp_c, entropy_c, lse_c = _launch(
        kernel, product_cv, [targets_c.astype(mx.int32)], scale_cap, temperature, [], outputs
    )
    return logp_c, entropy_c, lse_c


def row_gradients(
    product_cv: mx.array,
    targets_c: mx.array,
    found: tuple[mx.array, mx.array | None],
    upstream: tuple[mx.array, mx.array | None],
    scale_cap: tuple[float, float | None],
    temperature: float | mx.array,
) -> mx.array:
    """Computes the gradient of Σ upstream · (logp, entropy) with respect to the products [C,V], in
    their dtype.

    Args:
        product_cv, targets_c, scale_cap, temperature: as in `row_logprobs`.
        found: log Σ e^z and the entropy, from `row_logprobs`.
        upstream: gradients with respect to log-probs and entropies, float32 [C]; None means that
            entropies are constants.
    """
    lse_c, entropy_c = found
    by_logp_c, by_entropy_c = upstream
    kernel = cuda_kernel(
        "row_gradients",
        (*_GIVEN, "lse", "entropy", "logp_gradient", "entropy_gradient"),
        ("out",),
        _GRADIENTS,
    )
    unused = mx.zeros((1,))
    more = [
        targets_c.astype(mx.int32),
        lse_c,
        unused if entropy_c is None else entropy_c,
        by_logp_c,
        unused if by_entropy_c is None else by_entropy_c,
    ]
    template = [("ENTROPY", by_entropy_c is not None)]
    return _launch(
        kernel,
        product_cv,
        more,
        scale_cap,
        temperature,
        template,
        [(product_cv.shape, product_cv.dtype)],
    )[0]
