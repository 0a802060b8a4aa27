"""A CUDA kernel that draws a token of each row of logits, and gives its log-prob.

A block draws for one row: the largest logit, the sums of the weights e^{z − top} of one tile of the
vocabulary after another, and the first token whose cumulative weight lies above the draw, sought in the tile
that holds it. What MLX composes for the same is a dozen passes over float32 copies. The sums of a row are
taken in an order that does not depend on the other rows.
"""

import mlx.core as mx

from grpo_fn.cuda_kernels import cuda_kernel, literal, takes_dtype

_THREADS = 1024

_SOURCE = """
    constexpr int N = V % (16 / sizeof(T)) == 0 ? 16 / sizeof(T) : 1;  // numbers that are read at once
    constexpr int TILE = THREADS * N, TILES = (V + TILE - 1) / TILE, WARPS = THREADS / 32;
    struct alignas(N * sizeof(T)) Numbers { T at[N]; };
    const int row = blockIdx.x, me = threadIdx.x, warp = me / 32, lane = me % 32;
    const T* from = logits + (size_t)row * V;
    __shared__ float of_warps[WARPS], of_tiles[TILES];
    __shared__ int first, last;

    float top = -INFINITY;
    for (int at = me * N; at < V; at += TILE) {
        const Numbers numbers = *reinterpret_cast<const Numbers*>(from + at);
        for (int i = 0; i < N; i++) top = fmaxf(top, float(numbers.at[i]) * INVERSE);
    }
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, step));
    if (lane == 0) of_warps[warp] = top;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, of_warps[w]);
    __syncthreads();

    float weights[N];
    auto weigh = [&](int tile) {  // this thread's share of a tile; its sum
        const int at = tile * TILE + me * N;
        float sum = 0;
        if (at < V) {
            const Numbers numbers = *reinterpret_cast<const Numbers*>(from + at);
            for (int i = 0; i < N; i++) sum += weights[i] = __expf(float(numbers.at[i]) * INVERSE - top);
        }
        return sum;
    };
    auto up_to_me = [&](float sum) {  // the sums of all threads so far
        for (int step = 1; step < 32; step *= 2) {
            const float before = __shfl_up_sync(0xffffffff, sum, step);
            if (lane >= step) sum += before;
        }
        if (lane == 31) of_warps[warp] = sum;
        __syncthreads();
        float before = 0;
        for (int w = 0; w < warp; w++) before += of_warps[w];
        __syncthreads();
        return before + sum;
    };
    for (int tile = 0; tile < TILES; tile++) {
        const float sum = up_to_me(weigh(tile));
        if (me == THREADS - 1) of_tiles[tile] = sum;
    }
    if (me == 0) {
        first = THREADS;
        last = -1;
    }
    __syncthreads();

    float total = 0, before = 0;
    for (int tile = 0; tile < TILES; tile++) total += of_tiles[tile];
    const float wanted = uniform[row] * total;
    int tile = 0;
    while (tile < TILES - 1 && !(before + of_tiles[tile] > wanted)) before += of_tiles[tile++];

    const float mine = weigh(tile), so_far = up_to_me(mine);
    if (mine > 0) {
        atomicMax(&last, me);
        if (before + so_far > wanted) atomicMin(&first, me);
    }
    __syncthreads();
    // Rounding may leave no thread above the draw: then the last of any weight.
    if (me != (first < THREADS ? first : max(last, 0))) return;
    int chosen = 0;
    float sum = before + (so_far - mine);
    for (int i = 0; i < N && tile * TILE + me * N < V; i++) {
        sum += weights[i];
        if (weights[i] > 0) chosen = i;
        if (weights[i] > 0 && sum > wanted) break;
    }
    token[row] = tile * TILE + me * N + chosen;
    logp[row] = float(from[token[row]]) * INVERSE - top - logf(total);
"""


def takes_logits(logits_bv: mx.array) -> bool:
    """Whether the kernel runs here, on logits like these."""
    return takes_dtype(logits_bv.dtype)


def draw_rows(logits_bv: mx.array, uniform_b: mx.array, temperature: float) -> tuple[mx.array, mx.array]:
    """The token of each row at a draw from [0, 1), and its log-prob: (int32 [B], float32 [B]).

    Args:
        logits_bv: −inf draws never; where `takes_logits(logits_bv)`.
        uniform_b: float32; below 1 also when multiplied.
        temperature: > 0.
    """
    rows, vocabulary = logits_bv.shape
    source = _SOURCE.replace("INVERSE", literal(1 / temperature))
    token_b, logp_b = cuda_kernel("draw_rows", ("logits", "uniform"), ("token", "logp"), source)(
        inputs=[logits_bv, uniform_b],
        template=[("T", logits_bv.dtype), ("V", vocabulary), ("THREADS", _THREADS)],
        grid=(rows * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows,), (rows,)],
        output_dtypes=[mx.int32, mx.float32],
    )
    return token_b, logp_b
