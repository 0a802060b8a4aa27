"""The CUDA source of `block_kernel`.

One block of threads runs on each multiprocessor. Between the parts of the computation, all blocks
wait for each other by counting in `barrier`, which contains two numbers that are updated in place.
Therefore, the number of launched blocks must not exceed the number that can run at once, and
launches with the same barrier must not overlap.

Products: tiles of 128 rows × 64 columns, 64 numbers of K at a time through a ring of stages in
shared memory, on tensor cores (mma.m16n8k16). If there are fewer tiles than multiprocessors, K is
split, and the reader of the product adds the parts in a fixed order, so a row's products do not
depend on other rows. Attention: `attention_source`, with a group of warps for each row and head of
keys.

Names in capitals are constants of the shape, or optional weights of a block; `block_kernel` inserts
them.
"""

from grpo_fn.backends.cuda.decoding.attention_source import ATTENTION, COMBINATION, PRODUCT

_SOURCE = """
    constexpr int NQ = HEADS * HD, NKV = SHARED * HD, NALL = NQ + 2 * NKV, WARPS = THREADS / 32;
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ float of_warps[WARPS];
    const unsigned int ring_at = (unsigned int)__cvta_generic_to_shared(ring);
    const int me = threadIdx.x, lane = me % 32, warp = me / 32;
    const int rows = x_shape[0], blocks_m = (rows + 127) / 128;
    struct alignas(16) Numbers { T at[8]; };
    struct alignas(4) Pair { T at[2]; };

    // What a part leaves for the next, in device memory. It is read past the L1 cache, which other
    // multiprocessors do not write to.
    float* sums_at = scratch;
    T* n_at = reinterpret_cast<T*>(scratch + (size_t)MOST_SUMS * rows);
    T* a_at = n_at + (size_t)rows * D;
    T* h_at = a_at + (size_t)rows * NQ;
    T* f_at = h_at + (size_t)rows * D;

    auto everyone = [&]() {
        __syncthreads();
        if (me == 0) {
            unsigned int *count = const_cast<unsigned int*>(barrier), *turn = count + 32, now, was;
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(was) : "l"(turn));
            __threadfence();
            if (atomicAdd(count, 1u) == gridDim.x - 1) {
                *count = 0;
                __threadfence();
                atomicAdd(turn, 1u);
            } else {
                do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn));
                while (now == was);
            }
            __threadfence();
        }
        __syncthreads();
    };
PRODUCT
    auto cold = [](const float* from) {
        float x;
        asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from));
        return x;
    };
    auto copy16 = [](unsigned int to, const T* from) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
    };
    auto cold4 = [](const float* from) {
        float4 x;
        asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from));
        return x;
    };
    auto cold8 = [](const T* from) {
        union { unsigned int words[4]; Numbers numbers; } x;
        asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.words[0]), "=r"(x.words[1]), "=r"(x.words[2]), "=r"(x.words[3]) : "l"(from));
        return x.numbers;
    };

    // y = x + the parts of a product, and its norm; a row at a time. 0 parts: the norm of x.
    auto finish_rows = [&](const T* from, bool fresh, int parts, T* y, const T* weight, T* normal) {
        for (int row = blockIdx.x; row < rows; row += gridDim.x) {
            float numbers[8], squares = 0;
            const int at = me * 8;
            if (at < D) {
                const T* place = from + (size_t)row * D + at;
                const Numbers x = fresh ? cold8(place) : *reinterpret_cast<const Numbers*>(place);
                float added[8] = {};
                for (int s = 0; s < parts; s++) {
                    const float* part = sums_at + ((size_t)s * rows + row) * D + at;
                    #pragma unroll
                    for (int i = 0; i < 8; i += 4) {
                        const float4 four = cold4(part + i);
                        added[i] += four.x, added[i + 1] += four.y;
                        added[i + 2] += four.z, added[i + 3] += four.w;
                    }
                }
                Numbers whole;
                #pragma unroll
                for (int i = 0; i < 8; i++) {
                    numbers[i] = float(x.at[i]);
                    if (parts) numbers[i] = float(T(numbers[i] + float(T(added[i]))));
                    whole.at[i] = T(numbers[i]);
                    squares += numbers[i] * numbers[i];
                }
                if (parts) *reinterpret_cast<Numbers*>(y + (size_t)row * D + at) = whole;
            }
            if (normal == nullptr) continue;
            for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xffffffff, squares, step);
            __syncthreads();
            if (lane == 0) of_warps[warp] = squares;
            __syncthreads();
            squares = 0;
            for (int w = 0; w < WARPS; w++) squares += of_warps[w];
            const float inverse = rsqrtf(squares / D + EPSILON);
            if (at < D) {
                Numbers out;
                for (int i = 0; i < 8; i++)
                    out.at[i] = T(numbers[i] * inverse * (weight ? float(weight[at + i]) : 1.0f));
                *reinterpret_cast<Numbers*>(normal + (size_t)row * D + at) = out;
            }
        }
    };

    // Attention of one row and one head of keys, with all query heads that share it: by GROUP threads.
    constexpr int R = HEADS / SHARED;
ATTENTION
    auto attend = [&]() {
        constexpr int ATTENDING = GROUP / 32, ALL = R * ATTENDING * HD;
        constexpr int FLOATS = 2 * R * ATTENDING + (ALL > (R + 2) * HD ? ALL : (R + 2) * HD);
        static_assert(FLOATS * 4 * (THREADS / GROUP) <= RING && FLOATS % 2 == 0, "of shared memory");
        const int group = me / GROUP, t = me % GROUP, group_warp = t / 32;
        float* parts = reinterpret_cast<float*>(ring) + group * FLOATS;    // [R][ATTENDING][HD], and before:
        float (*heads)[HD] = reinterpret_cast<float (*)[HD]>(parts);       // R queries, the key, the value
        float* tops = parts + FLOATS - 2 * R * ATTENDING;                  // [R][ATTENDING]
        float* totals = tops + R * ATTENDING;
        auto together = [&]() {
            if (GROUP == 32) __syncwarp();
            else asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(GROUP) : "memory");
        };

        for (int item = blockIdx.x * (THREADS / GROUP) + group; item < rows * SHARED;
             item += gridDim.x * (THREADS / GROUP)) {
            const int row = item / SHARED, head = item % SHARED;
            const int own = own_lengths[row];
            together();
            for (int at = t; at < (R + 2) * HD; at += GROUP) {
                const int which = at / HD, d = at % HD;
                const int column = which < R ? (head * R + which) * HD + d
                                 : which == R ? NQ + head * HD + d : NQ + NKV + head * HD + d;
                float sum = 0;
                #pragma unroll
                for (int s = 0; s < SPLIT_QKV; s++)
                    sum += cold(sums_at + ((size_t)s * rows + row) * NALL + column);
                if (BIASED && which < R) sum += float(BQ[column]);
                if (BIASED && which == R) sum += float(BK[column - NQ]);
                if (BIASED && which > R) sum += float(BV[column - NQ - NKV]);
                heads[which][d] = float(T(sum));
            }
            together();
            auto normalise = [&]() {
                for (int which = group_warp; which < R + 1; which += ATTENDING) {
                    float squares = 0;
                    for (int d = lane; d < HD; d += 32) squares += heads[which][d] * heads[which][d];
                    for (int step = 16; step > 0; step /= 2)
                        squares += __shfl_xor_sync(0xffffffff, squares, step);
                    const float inverse = rsqrtf(squares / HD + EPSILON);
                    for (int d = lane; d < HD; d += 32) {
                        const float weight = HEAD_NORMS == 2 ? 1.0f : float(which < R ? QN[d] : KN[d]);
                        heads[which][d] = float(T(heads[which][d] * inverse * weight));
                    }
                }
                together();
            };
            if (HEAD_NORMS == 1) normalise();
            for (int at = t; at < (R + 1) * (HD / 2); at += GROUP) {
                const int which = at / (HD / 2), d = at % (HD / 2);
                const float one = heads[which][d], two = heads[which][d + HD / 2];
                const float c = turns[row * HD + d], s = turns[row * HD + HD / 2 + d];
                heads[which][d] = float(T(one * c - two * s));
                heads[which][d + HD / 2] = float(T(one * s + two * c));
            }
            together();
            if (HEAD_NORMS == 2) normalise();

            const int prompt = prompt_of[row], prompt_length = lengths[prompt];
            const size_t at = (size_t)(prompt * SHARED + head) * prompt_keys_shape[2] * HD;
            const size_t own_at = (size_t)(row * SHARED + head) * own_keys_shape[2] * HD;
            for (int d = t; d < HD; d += GROUP) {
                const_cast<T*>(own_keys)[own_at + (size_t)own * HD + d] = T(heads[R][d]);
                const_cast<T*>(own_values)[own_at + (size_t)own * HD + d] = T(heads[R + 1][d]);
            }
            together();  // the new key and value are read as the others are
            auto query = [&](int r, int at, unsigned int (&to)[4]) {
                Numbers eight;
                #pragma unroll
                for (int i = 0; i < 8; i++) eight.at[i] = T(heads[r][at + i]);
                #pragma unroll
                for (int i = 0; i < 4; i++) to[i] = reinterpret_cast<const unsigned int*>(&eight)[i];
            };
            auto find = [&](int j, const T*& key, const T*& value) {
                const bool shared = j < prompt_length;
                const size_t place = shared ? at + (size_t)j * HD : own_at + (size_t)(j - prompt_length) * HD;
                key = (shared ? prompt_keys : own_keys) + place;
                value = (shared ? prompt_values : own_values) + place;
            };
            const int length = prompt_length + own + 1;
            attend_over(query, find, length, group_warp, ATTENDING, together, tops, totals, parts);
            together();
            for (int n = t; n < R * HD; n += GROUP)
                a_at[(size_t)row * NQ + head * R * HD + n] = combined(n, ATTENDING, tops, totals, parts);
        }
    };

    // The four products. Two halves of the warps take a half of each stage's K.
    const int half = warp / (WARPS / 2), warp_m = warp % (WARPS / 2) / 2 * 32, warp_n = warp % 2 * 32;
    const int load_row = me / 8, load_part = me % 8;
    const unsigned int load_at = load_row * 128 + (load_part ^ load_row % 8) * 16;
    #pragma unroll 1
    for (int product = 0; product < 4; product++) {
        const T* from = product == 1 ? a_at : product == 3 ? f_at : n_at;
        const int depth = product == 1 ? NQ : product == 3 ? F : D;
        const int columns = product == 0 ? NALL : product == 2 ? (GATED ? 2 * F : F) : D;
        const int split = product == 0 ? SPLIT_QKV : product == 1 ? SPLIT_O : product == 3 ? SPLIT_DOWN : 1;
        if (product == 0) finish_rows(x, false, 0, nullptr, N1, n_at);
        if (product == 1) attend();
        if (product == 2) finish_rows(x, false, SPLIT_O, h_at, N2, n_at);
        if (product != 3) everyone();

        const int tiles = columns / 64;
        #pragma unroll 1
        for (int item = blockIdx.x; item < tiles * blocks_m * split; item += gridDim.x) {
            const int first_row = item % blocks_m * 128, tile = item / blocks_m % tiles;
            const int part = item / (blocks_m * tiles);
            const int begin = part * (depth / 64) / split, steps = (part + 1) * (depth / 64) / split - begin;
            const T* w;
            if (product == 0) {
                const int column = tile * 64;
                w = column < NQ ? wq + (size_t)column * D
                  : column < NQ + NKV ? wk + (size_t)(column - NQ) * D : wv + (size_t)(column - NQ - NKV) * D;
                w += (size_t)load_row * D;
            } else if (product == 2 && GATED) {  // 16 columns of gate beside the same of up
                const int column = tile * 32 + load_row / 32 * 16 + load_row % 16;
                w = (load_row % 32 < 16 ? WG : wu) + (size_t)column * D;
            } else {
                w = (product == 1 ? wo : product == 2 ? wu : wd) + (size_t)(tile * 64 + load_row) * depth;
            }
            const int first = begin * 64 + load_part * 8;
            w += first;
            const T* upper = from + (size_t)min(first_row + load_row, rows - 1) * depth + first;
            const T* lower = from + (size_t)min(first_row + load_row + 64, rows - 1) * depth + first;
            auto load = [&](int step, int stage) {
                const unsigned int to = ring_at + stage * (192 * 128) + load_at;
                copy16(to, upper + step * 64);
                copy16(to + 64 * 128, lower + step * 64);
                copy16(to + 128 * 128, w + step * 64);
            };
            auto four = [](unsigned int (&into)[4], unsigned int at) {
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3]) : "r"(at));
            };
            float sums[2][4][4] = {};
            __syncthreads();  // nobody reads the ring any more
            for (int step = 0; step < STAGES - 1; step++) {
                if (step < steps) load(step, step);
                asm volatile("cp.async.commit_group;");
            }
            int stage = 0, free = STAGES - 1;
            #pragma unroll 1
            for (int step = 0; step < steps; step++) {
                asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
                __syncthreads();
                if (step + STAGES - 1 < steps) load(step + STAGES - 1, free);
                asm volatile("cp.async.commit_group;");
                const unsigned int at = ring_at + stage * (192 * 128);
                const unsigned int x_row = at + (warp_m + lane % 16) * 128;
                const unsigned int w_row = at + (128 + warp_n + lane % 8 + lane / 16 * 8) * 128;
                #pragma unroll
                for (int deep = 0; deep < 2; deep++) {
                    const int k = half * 2 + deep;
                    unsigned int a[2][4], b[2][4];
                    #pragma unroll
                    for (int n = 0; n < 2; n++) {
                        four(a[n], x_row + n * 16 * 128 + ((k * 2 + lane / 16) ^ lane % 8) * 16);
                        four(b[n], w_row + n * 16 * 128 + ((k * 2 + lane / 8 % 2) ^ lane % 8) * 16);
                    }
                    #pragma unroll
                    for (int m = 0; m < 2; m++)
                        #pragma unroll
                        for (int n = 0; n < 4; n++)
                            mma(sums[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
                }
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                free = free + 1 == STAGES ? 0 : free + 1;
            }
            asm volatile("cp.async.wait_group 0;");
            __syncthreads();
            float* other = reinterpret_cast<float*>(ring) + me % (THREADS / 2);
            #pragma unroll
            for (int i = 0; i < 32; i++)
                if (half) other[i * (THREADS / 2)] = sums[i / 16][i / 4 % 4][i % 4];
            __syncthreads();
            if (half) continue;
            #pragma unroll
            for (int i = 0; i < 32; i++) sums[i / 16][i / 4 % 4][i % 4] += other[i * (THREADS / 2)];
            #pragma unroll
            for (int m = 0; m < 2; m++)
                #pragma unroll
                for (int upper = 0; upper < 2; upper++) {
                    const int row = first_row + warp_m + m * 16 + upper * 8 + lane / 4;
                    if (row >= rows) continue;
                    #pragma unroll
                    for (int n = 0; n < 4; n++) {
                        const float one = sums[m][n][upper * 2], two = sums[m][n][upper * 2 + 1];
                        const int pair = n * 8 + lane % 4 * 2;
                        if (product != 2) {
                            float* to = sums_at + ((size_t)part * rows + row) * columns + tile * 64;
                            *reinterpret_cast<float2*>(to + warp_n + pair) = make_float2(one, two);
                        } else if (!GATED) {
                            Pair out;
                            const float a = fmaxf(float(T(one)), 0.0f), b = fmaxf(float(T(two)), 0.0f);
                            out.at[0] = T(a * a);
                            out.at[1] = T(b * b);
                            T* to = f_at + (size_t)row * F + tile * 64 + warp_n + pair;
                            *reinterpret_cast<Pair*>(to) = out;
                        } else if (n < 2) {
                            Pair out;
                            #pragma unroll
                            for (int i = 0; i < 2; i++) {
                                const float gate = float(T(sums[m][n][upper * 2 + i]));
                                const float up = float(T(sums[m][n + 2][upper * 2 + i]));
                                out.at[i] = T(gate / (1 + __expf(-gate)) * up);
                            }
                            T* to = f_at + (size_t)row * F + tile * 32 + warp_n / 2 + pair;
                            *reinterpret_cast<Pair*>(to) = out;
                        }
                    }
                }
        }
        everyone();
    }
    finish_rows(h_at, true, SPLIT_DOWN, y, nullptr, nullptr);
"""
SOURCE = _SOURCE.replace("PRODUCT", PRODUCT).replace("ATTENTION", ATTENTION + COMBINATION)
