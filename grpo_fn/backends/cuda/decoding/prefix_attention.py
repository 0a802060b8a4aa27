"""A CUDA kernel that computes attention over a shared prompt and a row's own tokens, and also
stores the newest token's key and value.

A block of threads computes one row, one key head and all query heads that share this key head;
16-bit numbers use tensor cores (`attention_source`). Other dtypes and narrow heads do not use
tensor cores: groups of lanes process keys in turn, 8 numbers of each key per lane, prefetch the
next keys, and keep a running softmax (Milakov and Gimelshein, arXiv 1805.02867); at the end, the
groups' sums are combined. The rows of a prompt read the same keys, mostly from the device's cache.

The new key and value are written into the row's own buffers, which are inputs; MLX does not know
this. Writing in place is correct only if no other code uses these buffers and steps do not overlap.
A step's tokens depend on the previous step's tokens, which orders the steps.
"""

import mlx.core as mx

from grpo_fn.backends.cuda.decoding.attention_source import (
    ATTENTION,
    COMBINATION,
    HEAD_WIDTHS,
    MMA,
    MOST_SHARING,
    PRODUCT,
    warps_of_row,
)
from grpo_fn.backends.cuda.kernels import compiles, cuda_kernel, device_limits, literal

_ROW = """
    constexpr int WARPS = THREADS / 32;
    const int row = blockIdx.x / HEADS, head = blockIdx.x % HEADS, warp = threadIdx.x / 32;
    const int prompt = prompt_of[row], own = own_lengths[row];
    const int prompt_length = lengths[prompt], length = prompt_length + own + 1;
    const size_t at = (size_t)(prompt * HEADS + head) * prompt_keys_shape[2] * HD;
    const size_t own_at = (size_t)(row * HEADS + head) * own_keys_shape[2] * HD;
    const size_t new_at = (size_t)(row * HEADS + head) * HD;
    // The j-th of the prompt's, the row's own, the new one.
    auto find = [&](int j, const T*& key, const T*& value) {
        const bool shared = j < prompt_length, mine = j < prompt_length + own;
        const size_t place = shared ? at + (size_t)j * HD
                           : mine ? own_at + (size_t)(j - prompt_length) * HD : new_at;
        key = (shared ? prompt_keys : mine ? own_keys : new_keys) + place;
        value = (shared ? prompt_values : mine ? own_values : new_values) + place;
    };
    auto keep_the_new = [&]() {
        const size_t kept_at = own_at + (size_t)own * HD;
        for (int i = threadIdx.x; i < HD; i += THREADS) {
            const_cast<T*>(own_keys)[kept_at + i] = new_keys[new_at + i];
            const_cast<T*>(own_values)[kept_at + i] = new_values[new_at + i];
        }
    };
"""

_ON_TENSOR_CORES = """
    __shared__ float tops[R * WARPS], totals[R * WARPS], parts[R * WARPS * HD];
    auto query = [&](int r, int at, unsigned int (&to)[4]) {
        const uint4 words = *reinterpret_cast<const uint4*>(
            queries + ((size_t)(row * HEADS + head) * R + r) * HD + at);
        to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
    };
    attend_over(query, find, length, warp, WARPS, []() {}, tops, totals, parts);
    keep_the_new();
    __syncthreads();
    for (int n = threadIdx.x; n < R * HD; n += THREADS)
        out[(size_t)(row * HEADS + head) * R * HD + n] = combined(n, WARPS, tops, totals, parts);
"""

_PLAIN = """
    constexpr int LANES = HD / 8;             // that share a key, 8 of its numbers each
    constexpr int SLOTS = THREADS / LANES;    // keys at a time
    const int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES;
    struct alignas(16) Numbers { T at[8]; };
    auto read = [&](Numbers& k, Numbers& v, int j) {
        const T *key, *value;
        find(j, key, value);
        k = *reinterpret_cast<const Numbers*>(key + lane * 8);
        v = *reinterpret_cast<const Numbers*>(value + lane * 8);
    };
    Numbers k, v;
    if (slot < length) read(k, v, slot);  // on its way while the queries are read

    float q[R][8], sums[R][8], top[R], total[R];
    for (int r = 0; r < R; r++) {
        top[r] = -INFINITY;
        total[r] = 0;
        const Numbers query = *reinterpret_cast<const Numbers*>(
            queries + ((size_t)(row * HEADS + head) * R + r) * HD + lane * 8);
        for (int i = 0; i < 8; i++) {
            q[r][i] = float(query.at[i]) * SCALE;
            sums[r][i] = 0;
        }
    }
    #pragma unroll 1
    for (int first = 0; first < length; first += SLOTS) {
        const bool there = first + slot < length;
        Numbers next_k, next_v;
        if (first + SLOTS + slot < length) read(next_k, next_v, first + SLOTS + slot);
        for (int r = 0; r < R; r++) {
            float score = 0;
            if (there)
                for (int i = 0; i < 8; i++) score += q[r][i] * float(k.at[i]);
            for (int step = LANES / 2; step > 0; step /= 2)
                score += __shfl_xor_sync(0xffffffff, score, step);
            if (there) {
                const float higher = fmaxf(top[r], score);
                const float shrink = __expf(top[r] - higher), weight = __expf(score - higher);
                top[r] = higher;
                total[r] = total[r] * shrink + weight;
                for (int i = 0; i < 8; i++) sums[r][i] = sums[r][i] * shrink + weight * float(v.at[i]);
            }
        }
        k = next_k;
        v = next_v;
    }
    keep_the_new();

    // Slots of a warp by shuffles, then warps by shared memory. A slot without a key has the weight 0.
    __shared__ float tops[R * WARPS], totals[R * WARPS], parts[R * WARPS * HD];
    for (int r = 0; r < R; r++) {
        float highest = top[r];
        for (int step = LANES; step < 32; step *= 2)
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, step));
        const float share = top[r] == -INFINITY ? 0.0f : __expf(top[r] - highest);
        total[r] *= share;
        for (int step = LANES; step < 32; step *= 2) total[r] += __shfl_xor_sync(0xffffffff, total[r], step);
        for (int i = 0; i < 8; i++) {
            sums[r][i] *= share;
            for (int step = LANES; step < 32; step *= 2)
                sums[r][i] += __shfl_xor_sync(0xffffffff, sums[r][i], step);
            if (threadIdx.x % 32 < LANES) parts[(r * WARPS + warp) * HD + lane * 8 + i] = sums[r][i];
        }
        if (threadIdx.x % 32 == 0) {
            tops[r * WARPS + warp] = highest;
            totals[r * WARPS + warp] = total[r];
        }
    }
    __syncthreads();
    for (int n = threadIdx.x; n < R * HD; n += THREADS)
        out[(size_t)(row * HEADS + head) * R * HD + n] = combined(n, WARPS, tops, totals, parts);
"""


# warps that fit into a multiprocessor's registers, by head size
_WARPS_AT_A_TIME = {64: 20, 128: 12}
_INPUTS = (
    *(
        "queries",
        "new_keys",
        "new_values",
        "prompt_keys",
        "prompt_values",
        "own_keys",
        "own_values",
    ),
    *("prompt_of", "lengths", "own_lengths"),
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
    own_length_b: mx.array,
    scale: float,
) -> mx.array:
    """Computes attention [B,H,1,D] for one token per row, and writes the token's key and value to
    the row's own buffers.

    Args:
        queries: [B,H,1,D].
        new_keys, new_values: [B,K,1,D], the new token's.
        prompt_keys, prompt_values: [P,K,L,D]; the first `lengths_p` are used.
        own_keys, own_values: [B,K,T,D]; the first `own_length_b` < T are used, and the new token is
            written after them.
        prompt_of_b: each row's prompt, int32 like the lengths.

    Raises:
        ValueError: the kernel does not support these heads or dtypes.
    """
    rows, heads, _, width = queries.shape
    shared = own_keys.shape[1]
    arrays = [queries, new_keys, new_values, prompt_keys, prompt_values, own_keys, own_values]
    dtypes = {a.dtype for a in arrays}
    if width not in (32, 64, 128) or own_keys.shape[-1] != width or own_values.shape[-1] != width:
        raise ValueError(
            f"heads of {width}: expected 32, 64 or 128 numbers in queries, keys and values"
        )
    if heads // shared > MOST_SHARING:
        raise ValueError(
            f"{heads // shared} query heads share keys: expected at most {MOST_SHARING}"
        )
    if len(dtypes) > 1 or queries.dtype not in (mx.float16, mx.bfloat16, mx.float32):
        raise ValueError(f"dtypes {', '.join(map(str, dtypes))}: expected one, of 16 or 32 bits")
    group = heads // shared
    if queries.dtype in MMA and width in HEAD_WIDTHS and compiles("sm_80"):
        device = device_limits()
        room = _WARPS_AT_A_TIME[width] * (device.multiprocessors if device else 1)
        threads = 32 * warps_of_row(rows * shared, room)
        name = "attention_on_tensor_cores"
        source = _ROW + PRODUCT + ATTENTION + COMBINATION + _ON_TENSOR_CORES
        source = source.replace("MMA", MMA[queries.dtype])
    else:
        # more threads would not fit into the registers of one multiprocessor
        threads = 512 if group <= 2 else 256
        name = "attention_over_a_shared_prompt"
        source = _ROW + COMBINATION + _PLAIN
    kernel = cuda_kernel(name, _INPUTS, ("out",), source.replace("SCALE", literal(scale)))
    return kernel(
        inputs=[*arrays, prompt_of_b, lengths_p, own_length_b],
        template=[
            ("T", queries.dtype),
            ("HD", width),
            ("R", group),
            ("HEADS", shared),
            ("THREADS", threads),
        ],
        grid=(rows * shared * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )[0]
