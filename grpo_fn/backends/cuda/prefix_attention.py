"""One CUDA kernel for attention over a shared prompt and a row's own tokens, which takes in the newest.

A block computes one row and one head of keys, with all the query heads that share it. Groups of lanes take
keys in turn, 16 bytes of each a lane, and keep a running softmax (Milakov and Gimelshein, arXiv 1805.02867);
at the end the groups' sums are combined. The rows of a prompt read the same keys, mostly out of the cache.

The new key and value are written into the row's own buffers, which are inputs: MLX knows nothing of it. Right
only where whoever calls holds these buffers alone and lets no two steps overlap; a step's tokens depend on
those of the step before, which orders them.
"""

import mlx.core as mx

from grpo_fn.backends.cuda.kernels import cuda_kernel

_THREADS = 128

_SOURCE = """
    constexpr int LANES = D / 8;              // that share a key, 8 of its numbers each
    constexpr int SLOTS = THREADS / LANES;    // keys at a time
    const int row = blockIdx.x / HEADS, head = blockIdx.x % HEADS;
    const int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES;
    const int prompt = prompt_of[row], prompt_length = lengths[prompt];

    float q[R][8], sums[R][8], top[R], total[R];
    for (int r = 0; r < R; r++) {
        top[r] = -INFINITY;
        total[r] = 0;
        for (int i = 0; i < 8; i++) {
            q[r][i] = float(queries[((size_t)(row * HEADS + head) * R + r) * D + lane * 8 + i]) * scale[0];
            sums[r][i] = 0;
        }
    }

    auto visit = [&](const T* keys, const T* values, int length) {
        #pragma unroll 1
        for (int first = 0; first < length; first += SLOTS) {
            const int j = first + slot;
            const bool there = j < length;
            alignas(16) T k[8], v[8];
            if (there) {
                const float4* from_k = reinterpret_cast<const float4*>(keys + (size_t)j * D + lane * 8);
                const float4* from_v = reinterpret_cast<const float4*>(values + (size_t)j * D + lane * 8);
                for (int i = 0; i < sizeof(T) / 2; i++) {
                    reinterpret_cast<float4*>(k)[i] = from_k[i];
                    reinterpret_cast<float4*>(v)[i] = from_v[i];
                }
            }
            for (int r = 0; r < R; r++) {
                float score = 0;
                if (there)
                    for (int i = 0; i < 8; i++) score += q[r][i] * float(k[i]);
                for (int step = LANES / 2; step > 0; step /= 2)
                    score += __shfl_xor_sync(0xffffffff, score, step);
                if (there) {
                    const float higher = fmaxf(top[r], score);
                    const float shrink = __expf(top[r] - higher), weight = __expf(score - higher);
                    top[r] = higher;
                    total[r] = total[r] * shrink + weight;
                    for (int i = 0; i < 8; i++) sums[r][i] = sums[r][i] * shrink + weight * float(v[i]);
                }
            }
        }
    };
    const size_t at = (size_t)(prompt * HEADS + head) * prompt_keys_shape[2] * D;
    const size_t own_at = (size_t)(row * HEADS + head) * own_keys_shape[2] * D;
    const size_t new_at = (size_t)(row * HEADS + head) * D;
    #pragma unroll 1  // three copies of the code would take three times as long to compile
    for (int part = 0; part < 3; part++) {
        visit(part == 0 ? prompt_keys + at : part == 1 ? own_keys + own_at : new_keys + new_at,
              part == 0 ? prompt_values + at : part == 1 ? own_values + own_at : new_values + new_at,
              part == 0 ? prompt_length : part == 1 ? own_length[0] : 1);
    }
    const size_t kept_at = own_at + (size_t)own_length[0] * D;
    for (int i = threadIdx.x; i < D; i += THREADS) {
        const_cast<T*>(own_keys)[kept_at + i] = new_keys[new_at + i];
        const_cast<T*>(own_values)[kept_at + i] = new_values[new_at + i];
    }

    __shared__ float tops[SLOTS], totals[SLOTS], parts[SLOTS][D];
    for (int r = 0; r < R; r++) {
        __syncthreads();
        if (lane == 0) {
            tops[slot] = top[r];
            totals[slot] = total[r];
        }
        for (int i = 0; i < 8; i++) parts[slot][lane * 8 + i] = sums[r][i];
        __syncthreads();
        if (threadIdx.x < D) {
            float highest = -INFINITY, sum = 0, whole = 0;
            for (int s = 0; s < SLOTS; s++) highest = fmaxf(highest, tops[s]);
            for (int s = 0; s < SLOTS; s++) {
                const float share = __expf(tops[s] - highest);
                whole += share * totals[s];
                sum += share * parts[s][threadIdx.x];
            }
            out[((size_t)(row * HEADS + head) * R + r) * D + threadIdx.x] = T(sum / whole);
        }
    }
"""


_INPUTS = (
    "queries",
    "new_keys",
    "new_values",
    "prompt_keys",
    "prompt_values",
    "own_keys",
    "own_values",
    "prompt_of",
    "lengths",
    "own_length",
    "scale",
)


def append_and_attend(
    queries: mx.array,
    new_keys: mx.array,
    new_values: mx.array,
    prompt_keys: mx.array,
    prompt_values: mx.array,
    own_keys: mx.array,
    own_values: mx.array,
    prompt_of_b: mx.array,
    lengths_p: mx.array,
    own_length: mx.array,
    scale: float,
) -> mx.array:
    """Attention [B,H,1,D] of one token a row; its key and value are written to the rows' own buffers.

    Args:
        queries: [B,H,1,D].
        new_keys, new_values: [B,K,1,D], of the token itself.
        prompt_keys, prompt_values: [P,K,L,D], of which the first `lengths_p` count.
        own_keys, own_values: [B,K,T,D], of which the first `own_length` < T count; written at `own_length`.
        prompt_of_b: each row's prompt; int32, as are the lengths.
        own_length: 0-d.

    Raises:
        ValueError: the kernel is not made for these heads or dtypes.
    """
    rows, heads, _, width = queries.shape
    shared = own_keys.shape[1]
    dtypes = {a.dtype for a in (queries, new_keys, new_values, own_keys, own_values, prompt_keys)}
    if width not in (32, 64, 128) or own_keys.shape[-1] != width or own_values.shape[-1] != width:
        raise ValueError(f"heads of {width}: wanted 32, 64 or 128 numbers in queries, keys and values")
    if heads // shared > 8:
        raise ValueError(f"{heads // shared} query heads share keys: wanted at most 8")
    if len(dtypes) > 1 or queries.dtype not in (mx.float16, mx.bfloat16, mx.float32):
        raise ValueError(f"dtypes {', '.join(map(str, dtypes))}: wanted one, of 16 or 32 bits")
    kernel = cuda_kernel("attention_over_a_shared_prompt", _INPUTS, ("out",), _SOURCE)
    return kernel(
        inputs=[
            queries,
            new_keys,
            new_values,
            prompt_keys,
            prompt_values,
            own_keys,
            own_values,
            prompt_of_b,
            lengths_p,
            own_length,
            mx.array(scale, mx.float32),
        ],
        template=[
            ("T", queries.dtype),
            ("D", width),
            ("R", heads // shared),
            ("HEADS", shared),
            ("THREADS", _THREADS),
        ],
        grid=(rows * shared * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )[0]
