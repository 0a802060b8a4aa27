"""CUDA source code for attention on tensor cores, one token per row. `prefix_attention` and
`block_kernel` use it.

A warp computes attention for one row, one key head and all query heads that share this key head. If
n warps share this work, each processes every n-th tile of 16 keys. A warp keeps a running softmax
(Milakov and Gimelshein, arXiv 1805.02867); at the end, the warps' sums are combined, so the last
bits depend on the number of warps. Keys and values bypass shared memory: the order of a head's
numbers in a product is arbitrary, so a lane reads 16 consecutive bytes of a key. Weights are
rounded to the values' dtype, as in FlashAttention (arXiv 2205.14135).

Names in capitals are constants of the kernel: HD (size of a head), R (query heads that share keys),
SCALE, and MMA (the dtype's name in PTX).
"""

import mlx.core as mx

MMA = {mx.bfloat16: "bf16", mx.float16: "f16"}  # supported dtypes and their names in PTX
HEAD_WIDTHS = (64, 128)
MOST_SHARING = 8  # most query heads per key head
_WARPS = (1, 2, 4, 8)  # allowed numbers of warps per row
_PREPARATION = 4  # a warp's other work, as a number of tiles
_TILES = 16  # tiles of a typical row


def warps_of_row(items: int, room: int) -> int:
    """Returns the fastest number of warps per item (a row and a key head) if there are `items`
    items and `room` warps run at the same time.
    """
    return min(
        _WARPS, key=lambda warps: -(-items * warps // room) * (_PREPARATION + _TILES / warps)
    )


# c += a b for 16 × 16 and 16 × 8 numbers, distributed over a warp as in mma.m16n8k16.
PRODUCT = """
    auto mma = [](float (&c)[4], const unsigned int (&a)[4], unsigned int b0, unsigned int b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.MMA.MMA.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    };
"""

# A lane has the numbers `g` (of 8) and `t` (of 4). Among 16 keys, it reads for the scores 8
# numbers, from 32i + 8t, of the keys g and 8 + g. For the sums, it reads 8 numbers, from 64i + 8g,
# of the values 2t, 2t + 1, 8 + 2t and 9 + 2t. The scores of head g are then where the second
# product needs its weights.
ATTENTION = """
    // To `warps` warps, of which this is `which`: the tops, totals [R,warps] and sums [R,warps,HD] of a row.
    // query(head, at, to) gives 8 numbers; find(j, key, value) where the j-th of `length` begin.
    // `taken()` is called when all queries are: what holds them may be the sums' place.
    auto attend_over = [&](auto query, auto find, int length, int which, int warps, auto taken,
                           float* tops, float* totals, float* parts) {
        struct alignas(16) Words { unsigned int at[4]; };
        constexpr int CHUNKS = HD / 32, VALUES = HD / 64;
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        auto pair = [](float low, float high) {
            unsigned int both;
            asm("cvt.rn.MMAx2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
            return both;
        };
        auto eight = [](const T* from) { return *reinterpret_cast<const Words*>(from); };
        Words k[2][CHUNKS], v[4][VALUES], q[CHUNKS] = {};
        auto read_keys = [&](int tile) {
            #pragma unroll
            for (int n = 0; n < 2; n++) {
                const T *key, *value;
                const int j = tile * 16 + n * 8 + g;
                const bool there = j < length;
                if (there) find(j, key, value);
                #pragma unroll
                for (int i = 0; i < CHUNKS; i++) k[n][i] = there ? eight(key + i * 32 + t * 8) : Words{};
            }
        };
        auto read_values = [&](int tile) {
            #pragma unroll
            for (int n = 0; n < 4; n++) {
                const T *key, *value;
                const int j = tile * 16 + n / 2 * 8 + t * 2 + n % 2;
                const bool there = j < length;
                if (there) find(j, key, value);
                #pragma unroll
                for (int i = 0; i < VALUES; i++) v[n][i] = there ? eight(value + i * 64 + g * 8) : Words{};
            }
        };
        read_keys(which);
        #pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            if (g < R) query(g, i * 32 + t * 8, q[i].at);
        taken();
        float sums[HD / 16][4] = {}, top = -INFINITY, total = 0;
        #pragma unroll 1
        for (int tile = which; tile * 16 < length; tile += warps) {
            read_values(tile);
            float scores[2][4] = {};
            #pragma unroll
            for (int i = 0; i < CHUNKS; i++)
                #pragma unroll
                for (int half = 0; half < 4; half += 2) {
                    const unsigned int heads[4] = {q[i].at[half], 0, q[i].at[half + 1], 0};
                    #pragma unroll
                    for (int n = 0; n < 2; n++) mma(scores[n], heads, k[n][i].at[half], k[n][i].at[half + 1]);
                }
            read_keys(tile + warps);
            float weights[4], higher = top;
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool there = tile * 16 + i / 2 * 8 + t * 2 + i % 2 < length;
                weights[i] = there ? scores[i / 2][i % 2] : -INFINITY;
                higher = fmaxf(higher, weights[i]);
            }
            higher = fmaxf(higher, __shfl_xor_sync(0xffffffff, higher, 1));
            higher = fmaxf(higher, __shfl_xor_sync(0xffffffff, higher, 2));
            const float shrink = __expf((top - higher) * SCALE);
            top = higher;
            total *= shrink;
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                weights[i] = __expf((weights[i] - higher) * SCALE);
                total += weights[i];
            }
            const float one = __shfl_sync(0xffffffff, shrink, t * 8);
            const float two = __shfl_sync(0xffffffff, shrink, t * 8 + 4);
            const unsigned int first = pair(weights[0], weights[1]), second = pair(weights[2], weights[3]);
            #pragma unroll
            for (int n = 0; n < HD / 16; n++) {
                sums[n][0] *= one, sums[n][1] *= two, sums[n][2] *= one, sums[n][3] *= two;
                unsigned int numbers[4];  // 2n % 8 and the next: of two keys each
                #pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const unsigned int low = v[i][n / 4].at[n % 4], high = v[i + 1][n / 4].at[n % 4];
                    numbers[i] = __byte_perm(low, high, 0x5410);
                    numbers[i + 1] = __byte_perm(low, high, 0x7632);
                }
                mma(sums[n], numbers, first, second);
            }
        }
        total += __shfl_xor_sync(0xffffffff, total, 1);
        total += __shfl_xor_sync(0xffffffff, total, 2);
        if (t == 0 && g < R) {
            tops[g * warps + which] = top * SCALE;
            totals[g * warps + which] = total;
        }
        #pragma unroll
        for (int head = 0; head < 2; head++) {
            if (t * 2 + head >= R) continue;
            float* to = parts + ((t * 2 + head) * warps + which) * HD + g * 8;
            #pragma unroll
            for (int n = 0; n < HD / 16; n++)
                *reinterpret_cast<float2*>(to + n / 4 * 64 + n % 4 * 2) =
                    make_float2(sums[n][head], sums[n][2 + head]);
        }
    };
"""

# Combines the tops, totals and sums that the warps of a row have stored, on tensor cores or not:
# returns the n-th number of the row.
COMBINATION = """
    auto combined = [](int n, int warps, const float* tops, const float* totals, const float* parts) {
        const int r = n / HD * warps;
        float highest = -INFINITY, sum = 0, whole = 0;
        for (int w = 0; w < warps; w++) highest = fmaxf(highest, tops[r + w]);
        for (int w = 0; w < warps; w++) {
            const float share = tops[r + w] == -INFINITY ? 0.0f : __expf(tops[r + w] - highest);
            whole += share * totals[r + w];
            sum += share * parts[(r + w) * HD + n % HD];
        }
        return T(sum / whole);
    };
"""
