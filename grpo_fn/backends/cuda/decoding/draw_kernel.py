"""A CUDA kernel that draws a token of each row of logits, and gives its log-prob: `categorical.draw`.

A block of threads draws for one row: the largest logit, the sums of the weights e^{z − top} of blocks of
groups, then by the random bits one block, one group of it and one token of that. MLX's composed form needs a
dozen passes over float32 copies. The order of a row's sums does not depend on the other rows.
"""

import mlx.core as mx

from grpo_fn.backends.cuda.kernels import cuda_kernel, literal, takes_dtype

_THREADS = 1024

_SOURCE = """
    constexpr int N = V % (16 / sizeof(T)) == 0 ? 16 / sizeof(T) : 1;  // numbers that are read at once
    constexpr int TILE = THREADS * N, TILES = (V + TILE - 1) / TILE, WARPS = THREADS / 32;
    constexpr int BLOCK = WIDTH * WIDTH, BLOCKS = (V + BLOCK - 1) / BLOCK;
    constexpr int PARTS = TILE / BLOCK, PART = WARPS / PARTS;  // blocks of a tile, warps of a block
    struct alignas(N * sizeof(T)) Numbers { T at[N]; };
    const int row = blockIdx.x, me = threadIdx.x, warp = me / 32, lane = me % 32;
    const T* from = logits + (size_t)row * V;
    __shared__ float of_warps[WARPS], of_blocks[BLOCKS], members[WIDTH];
    __shared__ int chosen;

    float top = -INFINITY;
    #pragma unroll 2
    for (int at = me * N; at < V; at += TILE) {
        const Numbers numbers = *reinterpret_cast<const Numbers*>(from + at);
        for (int i = 0; i < N; i++) top = fmaxf(top, float(numbers.at[i]) * INVERSE);
    }
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, step));
    if (lane == 0) of_warps[warp] = top;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, of_warps[w]);
    __syncthreads();

    #pragma unroll 1
    for (int tile = 0; tile < TILES; tile++) {
        const int at = tile * TILE + me * N;
        float sum = 0;
        if (at < V) {
            const Numbers numbers = *reinterpret_cast<const Numbers*>(from + at);
            for (int i = 0; i < N; i++) sum += __expf(float(numbers.at[i]) * INVERSE - top);
        }
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
        if (lane == 0) of_warps[warp] = sum;
        __syncthreads();
        if (me < PARTS && tile * PARTS + me < BLOCKS) {
            float block = 0;
            for (int w = 0; w < PART; w++) block += of_warps[me * PART + w];
            of_blocks[tile * PARTS + me] = block;
        }
        __syncthreads();
    }
    float total = 0;
    #pragma unroll 4
    for (int block = 0; block < BLOCKS; block++) total += of_blocks[block];

    // The first whose cumulative count lies above the word's share of all; as categorical._inverted.
    auto place = [](const float* weights, int number, unsigned int word) {
        float sum = 0;
        #pragma unroll 4
        for (int n = 0; n < number; n++) sum += weights[n];
        const float scale = sum > 0 ? 1073741824.0f / sum : 0.0f;
        auto count = [&](int n) { return weights[n] > 0 ? (unsigned int)(weights[n] * scale) + 1 : 0u; };
        unsigned int all = 0, upto = 0;
        #pragma unroll 4
        for (int n = 0; n < number; n++) all += count(n);
        const unsigned int wanted = ((unsigned long long)all * word) >> 32;
        #pragma unroll 4
        for (int n = 0; n < number; n++) {
            upto += count(n);
            if (upto > wanted) return n;
        }
        return 0;
    };
    const unsigned int* word = words + row * 3;
    if (me == 0) chosen = place(of_blocks, BLOCKS, word[2]) * WIDTH;
    __syncthreads();
    if (me < WIDTH) {
        float group = 0;
        for (int at = (chosen + me) * WIDTH, i = 0; i < WIDTH && at + i < V; i++)
            group += __expf(float(from[at + i]) * INVERSE - top);
        members[me] = group;
    }
    __syncthreads();
    if (me == 0) chosen = (chosen + place(members, WIDTH, word[1])) * WIDTH;
    __syncthreads();
    if (me < WIDTH) members[me] = chosen + me < V ? __expf(float(from[chosen + me]) * INVERSE - top) : 0.0f;
    __syncthreads();
    if (me != 0) return;
    token[row] = chosen + place(members, WIDTH, word[0]);
    logp[row] = float(from[token[row]]) * INVERSE - top - logf(total);
"""


def takes_logits(logits_bv: mx.array) -> bool:
    """Whether the kernel runs here on such logits."""
    return takes_dtype(logits_bv.dtype)


def draw_rows(
    logits_bv: mx.array, bits_bw: mx.array, temperature: float, width: int
) -> tuple[mx.array, mx.array]:
    """The token of each row by its random bits, and its log-prob: (int32 [B], float32 [B]).

    Args:
        logits_bv: −inf is never drawn; `takes_logits(logits_bv)` must hold.
        bits_bw: uint32 [B,3], as `categorical.draw` takes them.
        temperature: > 0.
        width: tokens of a group and groups of a block, as `categorical` has them.
    """
    rows, vocabulary = logits_bv.shape
    source = _SOURCE.replace("INVERSE", literal(1 / temperature))
    token_b, logp_b = cuda_kernel("draw_rows", ("logits", "words"), ("token", "logp"), source)(
        inputs=[logits_bv, bits_bw],
        template=[("T", logits_bv.dtype), ("V", vocabulary), ("WIDTH", width), ("THREADS", _THREADS)],
        grid=(rows * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows,), (rows,)],
        output_dtypes=[mx.int32, mx.float32],
    )
    return token_b, logp_b
