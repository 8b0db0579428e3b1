// y = x @ W of up to 16 tokens, W of EXL3's form and code `mul1` between its transforms: a prototype.
//
//   trellis  uint32 [k / 16, n / 16, 8 K], streams highest bit first
//   x        int8 [columns, k]; or float16 [tokens, k], each 16 in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15
//   svh      float16 [n] or null: then y is turned by Hadamard's matrix of 128 and scaled, by clusters of two blocks
//
// A block owns 64 out_features (4 tiles), its 16 warps divide k, each taking 64 in_features (4 tiles) a step. In
// mma.sync the weights are operand A, the tokens operand B. Lane 4 g + t takes of tile t along k, and of tile g / 2
// along n, the 16 K bytes of 4 neighbouring out_features and those 8 further: 128 weights, one stream. So a step costs
// a lane K loads of 16 bytes and one shuffle, which brings the word before its own.
//
//   HALF   sum of bytes s by dp4a, 0x6400 + s being float16 1024 + s; mma.m16n8k16 with float16 inputs
//   BYTES  the four bytes of a product are four elements of int8's mma.m16n8k32, the input stands four times in
//          operand B: the tensor core adds up the bytes. Inputs int8, or int16 as two columns, high and low byte.
//   DOT    one token: dp4a multiplies a product's bytes by the input, four times, and adds
//   READ   only fetches
#include <cstdint>
#ifndef EMULATED
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

enum Mode { HALF, BYTES, DOT, READ };
constexpr int WARPS = 16, THREADS = 32 * WARPS, TILES = 4, ROWS = 16 * TILES, STEP = 64;
constexpr int MOST_SHARED = 227 * 1024;
constexpr uint32_t MULTIPLIER = 0x83DCD12Du, ONES = 0x01010101u;
// A value is SCALE * (1024 + s) - 1329 / 128 = SCALE * (s - 510 - REST).
constexpr double SCALE = 1774.0 / 262144, REST = 1329.0 / 128 / SCALE - 1534;

// --- instructions --------------------------------------------------------------------------------
#ifndef EMULATED
__device__ __forceinline__ void mma_bytes(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_half(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ int32_t dot_bytes(uint32_t a, uint32_t b, int32_t c) {
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ __forceinline__ void copy_16(char* shared, const char* global, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(shared))),
                 "l"(global), "r"(there ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void await() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
// All lanes of a warp take part.
__device__ __forceinline__ uint32_t of_lane_xor(uint32_t value, int mask) {
    return __shfl_xor_sync(0xFFFFFFFF, value, mask);
}
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ float of_cluster(const float* shared, int rank) {
    uint32_t there;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there)
                 : "r"(uint32_t(__cvta_generic_to_shared(shared))), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
    return value;
}
// Launches that overlap: the next kernel may start; the one before has ended, and what it wrote is there.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ float of_float16(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
#endif

// --- windows -------------------------------------------------------------------------------------

// The 16 bits that end with bit `end` of a stream; words[0] is the word before it. All but the words is known when
// this is compiled. A shift to the left puts the window at a byte, so one permute takes it out.
template <int count>
__device__ __forceinline__ uint32_t window(const uint32_t (&words)[count], int end) {
    const int half = (end + 15) / 16, from = 16 * half - end, word = half / 2;
    const uint32_t x = half % 2 ? __byte_perm(words[word + 1], words[word], 0x5432) : words[word];
    const int shift = (8 - from % 8) % 8;
    const uint32_t shifted = x << shift;
    return from + shift == 16  ? __byte_perm(shifted, 0, 0x4432)
           : from + shift == 8 ? __byte_perm(shifted, 0, 0x4421)
                               : __byte_perm(shifted, 0, 0x4410);
}

// --- the ring ------------------------------------------------------------------------------------

// In units of 16 bytes. Segments of the four tiles along k are shifted against each other, so that eight lanes of a
// load of 16 bytes touch all banks.
template <int K, Mode mode, int groups>
struct Stage {
    static constexpr int segment = 8 * K, weights = 4 * segment + 8;
    static constexpr int inputs = groups * (mode == HALF ? 2 : 1);
    static constexpr int bytes = (weights + 32 * inputs) * 16;
    static constexpr int most = MOST_SHARED / (WARPS * bytes);
    static __device__ __forceinline__ int start(int t) {
        return t * segment + (K % 2 ? 2 * t : K == 2 ? (t & 1) + 4 * (t >> 1) : t);
    }
};

struct Arguments {
    const uint32_t* trellis;
    const void* x;
    const int32_t* sums;  // of the columns of int8; of float16 in float
    const float* scales;  // of a token's int8
    float* y;
    const uint16_t* svh;
    int k, n, tokens, parts;  // parts: columns of a token
};

constexpr int PITCH = ROWS + 4;  // of a column's sums in shared memory

template <int K, Mode mode, int groups, int depth>
__global__ void __launch_bounds__(THREADS, 1) few_tokens(const Arguments arguments) {
    using S = Stage<K, mode, groups>;
#ifdef EMULATED
    char* const room = dynamic_shared;
#else
    extern __shared__ __align__(128) char room[];
#endif
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int columns = arguments.tokens * arguments.parts, steps = arguments.k / STEP;
    char* const ring = room + warp * depth * S::bytes;
    const uint32_t row_bytes = arguments.n / 16 * 32 * K;  // of a tile's row of the trellis

    uint32_t from[K], to[K], x_from[S::inputs];
    const char* trellis = reinterpret_cast<const char*>(arguments.trellis) + size_t(blockIdx.x) * (TILES * 32 * K) +
                          size_t(warp) * 4 * row_bytes;
    constexpr int element = mode == HALF ? 2 : 1;
    const char* x = static_cast<const char*>(arguments.x) + warp * STEP * element;
#pragma unroll
    for (int i = 0; i < K; ++i) {
        const int piece = i * 32 + lane, segment = piece / S::segment, unit = piece % S::segment;
        from[i] = segment * row_bytes + unit * 16;
        to[i] = (S::start(segment) + unit) * 16;
    }
    uint32_t there = 0;
#pragma unroll
    for (int i = 0; i < S::inputs; ++i) {
        const int column = (mode == DOT ? 0 : g) + 8 * (i / (S::inputs / groups));
        there |= (column < columns) << i;
        x_from[i] =
            (column < columns ? column * arguments.k : 0) * element + t * 16 * element + i % (S::inputs / groups) * 16;
    }
    int fetched = warp;
    char* stage = ring;
    auto fetch_weights = [&](char* to_stage) {
#pragma unroll
        for (int i = 0; i < K; ++i) copy_16(to_stage + to[i], trellis + from[i], true);
        trellis += size_t(WARPS * 4) * row_bytes;
    };
    auto fetch = [&](bool weights) {
        if (fetched < steps) {
            if (weights) fetch_weights(stage);
#pragma unroll
            for (int i = 0; i < S::inputs; ++i) {
                copy_16(stage + (S::weights + 32 * i + lane) * 16, x + x_from[i], there >> i & 1);
            }
        }
        commit();
        fetched += WARPS;
        x += WARPS * STEP * element;
        stage = stage + S::bytes == ring + depth * S::bytes ? ring : stage + S::bytes;
    };
    // Weights are there already while the kernel before makes x.
#pragma unroll 1
    for (int i = 0; i < depth && warp + i * WARPS < steps; ++i) fetch_weights(ring + i * S::bytes);
    wait_for_before();
#pragma unroll 1
    for (int i = 0; i < depth; ++i) fetch(false);

    int32_t sums[4][groups][4] = {};
    float float_sums[4][groups][4] = {};
#pragma unroll 1
    for (int step = warp; step < steps; step += WARPS) {
        await<depth - 1>();
        __syncwarp();
        uint32_t words[4 * K + 1], inputs[S::inputs][4];
        auto load = [&](uint32_t* to, int unit) {
            const uint4 four = *reinterpret_cast<const uint4*>(stage + unit * 16);
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        };
#pragma unroll
        for (int i = 0; i < K; ++i) load(words + 1 + 4 * i, S::start(t) + g * K + i);
#pragma unroll
        for (int i = 0; i < S::inputs; ++i) load(inputs[i], S::weights + 32 * i + lane);
        __syncwarp();  // before the stage is filled again
        fetch(true);
        words[0] = of_lane_xor(words[4 * K], 4);  // two neighbouring groups of lanes have a tile, whose ends meet

        if constexpr (mode == READ) {
#pragma unroll
            for (int i = 0; i <= 4 * K; ++i) sums[0][0][0] ^= words[i];
            sums[0][0][0] ^= inputs[0][0];
        } else {
            uint32_t four_times[mode == HALF ? 1 : groups][16];
            if constexpr (mode != HALF) {
#pragma unroll
                for (int group = 0; group < groups; ++group)
#pragma unroll
                    for (int i = 0; i < 16; ++i)
                        four_times[group][i] = __byte_perm(inputs[group][i / 4], 0, 0x1111 * (i % 4));
            }
#pragma unroll
            for (int row = 0; row < 4; ++row)
#pragma unroll
                for (int i = 0; i < 4; ++i) {  // in_features 2 i, 2 i + 1, 2 i + 8, 2 i + 9
                    uint32_t p[8];
#pragma unroll
                    for (int j = 0; j < 8; ++j) p[j] = window(words, (row * 32 + i * 8 + j + 1) * K) * MULTIPLIER;
                    if constexpr (mode == HALF) {
#pragma unroll
                        for (int j = 0; j < 8; ++j) p[j] = __dp4a(p[j], ONES, 0x6400u);
                        const uint32_t a[4] = {__byte_perm(p[0], p[1], 0x5410), __byte_perm(p[4], p[5], 0x5410),
                                               __byte_perm(p[2], p[3], 0x5410), __byte_perm(p[6], p[7], 0x5410)};
#pragma unroll
                        for (int group = 0; group < groups; ++group)
                            mma_half(float_sums[row][group], a, inputs[2 * group + i / 2][i % 2 * 2],
                                     inputs[2 * group + i / 2][i % 2 * 2 + 1]);
                    } else if constexpr (mode == BYTES) {
                        const uint32_t a[4] = {p[0], p[4], p[1], p[5]}, b[4] = {p[2], p[6], p[3], p[7]};
#pragma unroll
                        for (int group = 0; group < groups; ++group) {
                            mma_bytes(sums[row][group], a, four_times[group][2 * i], four_times[group][2 * i + 1]);
                            mma_bytes(sums[row][group], b, four_times[group][2 * i + 8], four_times[group][2 * i + 9]);
                        }
                    } else {
#pragma unroll
                        for (int j = 0; j < 8; ++j)
                            sums[row][0][j / 4] =
                                dot_bytes(p[j], four_times[0][2 * i + j % 2 + j / 2 % 2 * 8], sums[row][0][j / 4]);
                    }
                }
        }
    }

    // The warps' sums meet in shared memory.
    __syncthreads();
    auto* all = reinterpret_cast<int32_t*>(room);
    const int first_row = 16 * (g / 2) + 4 * (g % 2);
    auto store = [&](int column, int upper, int32_t a, int32_t b, int32_t c, int32_t d) {
        int32_t* at = all + (warp * columns + column) * PITCH + first_row + 8 * upper;
        *reinterpret_cast<int4*>(at) = make_int4(a, b, c, d);
    };
    if constexpr (mode == DOT) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
            for (int row = 0; row < 4; ++row) {
                int32_t& sum = sums[row][0][upper];
                sum += of_lane_xor(sum, 1);
                sum += of_lane_xor(sum, 2);
            }
            if (t == 0) store(0, upper, sums[0][0][upper], sums[1][0][upper], sums[2][0][upper], sums[3][0][upper]);
        }
    } else if constexpr (mode == READ) {
        if (sums[0][0][0] == 0x12345678) arguments.y[0] = 1;
        return;
    } else {
#pragma unroll
        for (int group = 0; group < groups; ++group)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int column = 8 * group + 2 * t + c % 2;
                if (column >= columns) continue;
                if constexpr (mode == HALF)
                    store(column, c / 2, __float_as_int(float_sums[0][group][c]),
                          __float_as_int(float_sums[1][group][c]), __float_as_int(float_sums[2][group][c]),
                          __float_as_int(float_sums[3][group][c]));
                else
                    store(column, c / 2, sums[0][group][c], sums[1][group][c], sums[2][group][c], sums[3][group][c]);
            }
    }
    __syncthreads();
    auto* finished = reinterpret_cast<float*>(room) + WARPS * columns * PITCH;
    for (int i = threadIdx.x; i < ROWS * arguments.tokens; i += THREADS) {
        const int row = i % ROWS, token = i / ROWS;
        float y;
        if constexpr (mode == HALF) {
            float sum = 0;
            for (int w = 0; w < WARPS; ++w) sum += __int_as_float(all[(w * columns + token) * PITCH + row]);
            y = float(SCALE) * (sum - float(1534 + REST) * __int_as_float(arguments.sums[token]));
        } else {
            float value = 0;
            for (int part = 0; part < arguments.parts; ++part) {
                const int column = token * arguments.parts + part, of_x = arguments.sums[column];
                int32_t sum = -510 * of_x;
                for (int w = 0; w < WARPS; ++w) sum += all[(w * columns + column) * PITCH + row];
                value = value * 256 + (float(sum) - float(REST) * of_x);
            }
            y = float(SCALE) * arguments.scales[token] * value;
        }
        const int column = blockIdx.x * ROWS + row;
        if (arguments.svh) {  // the five lowest bits of a row are a lane's
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const float other = __int_as_float(of_lane_xor(__float_as_int(y), distance));
                y = lane & distance ? other - y : y + other;
            }
            finished[i] = y;
        } else {
            arguments.y[size_t(token) * arguments.n + column] = y;
        }
    }
    if (!arguments.svh) return;
    cluster_barrier();
    const int rank = blockIdx.x % 2;
    for (int i = threadIdx.x; i < ROWS * arguments.tokens; i += THREADS) {
        const int row = i % ROWS, quarter = i - row + lane;
        const float a = of_cluster(finished + quarter, 0), b = of_cluster(finished + quarter + 32, 0);
        const float c = of_cluster(finished + quarter, 1), d = of_cluster(finished + quarter + 32, 1);
        const float of_first = row < 32 ? a + b : a - b, of_second = row < 32 ? c + d : c - d;
        const int column = blockIdx.x * ROWS + row;
        arguments.y[size_t(i / ROWS) * arguments.n + column] = (rank ? of_first - of_second : of_first + of_second) *
                                                               0.08838834764831845f *
                                                               of_float16(arguments.svh[column]);
    }
    cluster_barrier();  // the other block may still read this one's sums
}

// --- inputs --------------------------------------------------------------------------------------
// A block a token of up to 8192 in_features, eight a thread: x * suh through Hadamard's matrix of 128, then int8 or
// the two bytes of int16, and their sums; or float16 and its sum.
__global__ void __launch_bounds__(1024) prepare(const __half* x, const __half* suh, void* to, int32_t* sums,
                                                float* scales, int k, int parts, int as_half) {
    __shared__ float most[32];
    __shared__ int32_t of_part[2];
    let_next_start();
    const int token = blockIdx.x, lane = threadIdx.x % 32, at = threadIdx.x * 8;
    float v[8] = {};
    if (threadIdx.x < 2) of_part[threadIdx.x] = 0;
    if (at < k) {
        const uint4 a = *reinterpret_cast<const uint4*>(x + size_t(token) * k + at),
                    b = *reinterpret_cast<const uint4*>(suh + at);
        const auto *ha = reinterpret_cast<const __half2*>(&a), *hb = reinterpret_cast<const __half2*>(&b);
        for (int i = 0; i < 4; ++i) {
            const float2 one = __half22float2(ha[i]), other = __half22float2(hb[i]);
            v[2 * i] = one.x * other.x, v[2 * i + 1] = one.y * other.y;
        }
    }
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2)
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (!(i & distance)) {
                const float a = v[i], b = v[i + distance];
                v[i] = a + b, v[i + distance] = a - b;
            }
#pragma unroll
    for (int distance = 1; distance < 16; distance *= 2)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float other = __shfl_xor_sync(0xFFFFFFFF, v[i], distance);
            v[i] = lane & distance ? other - v[i] : v[i] + other;
        }
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= 0.08838834764831845f, largest = fmaxf(largest, fabsf(v[i]));
    if (as_half) {
        __half2 h[4];
        float sum = 0;
        for (int i = 0; i < 4; ++i) {
            h[i] = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
            const float2 two = __half22float2(h[i]);
            sum += two.x + two.y;
        }
        const auto* own = reinterpret_cast<const uint32_t*>(h);
        const bool odd = lane & 1;
        const uint32_t first = __shfl_xor_sync(0xFFFFFFFF, odd ? own[0] : own[2], 1),
                       second = __shfl_xor_sync(0xFFFFFFFF, odd ? own[1] : own[3], 1);
        const uint4 four = odd ? make_uint4(first, own[2], second, own[3]) : make_uint4(own[0], first, own[1], second);
        if (at < k) *reinterpret_cast<uint4*>(static_cast<__half*>(to) + size_t(token) * k + at) = four;
        for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, d);
        if (lane == 0) most[threadIdx.x / 32] = sum;
        __syncthreads();
        if (threadIdx.x < 32) {
            sum = most[lane];
            for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, d);
            if (lane == 0) sums[token] = __float_as_int(sum);
        }
        return;
    }
    uint32_t bits = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(largest));
    if (lane == 0) most[threadIdx.x / 32] = __uint_as_float(bits);
    __syncthreads();
    largest = __uint_as_float(__reduce_max_sync(0xFFFFFFFF, __float_as_uint(most[lane])));
    const float limit = parts == 2 ? 127 * 256 : 127, factor = largest > 0 ? limit / largest : 0;
    uint64_t bytes[2] = {};
    int sum[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int q = __float2int_rn(v[i] * factor);
        const int high = parts == 2 ? (q + 128) >> 8 : q, low = q - high * 256;
        bytes[0] |= uint64_t(uint8_t(high)) << 8 * i, sum[0] += high;
        bytes[1] |= uint64_t(uint8_t(low)) << 8 * i, sum[1] += low;
    }
    for (int part = 0; part < parts; ++part) {
        if (at < k)
            *reinterpret_cast<uint64_t*>(static_cast<char*>(to) + size_t(token * parts + part) * k + at) = bytes[part];
        const int all = __reduce_add_sync(0xFFFFFFFF, sum[part]);
        if (lane == 0) atomicAdd(&of_part[part], all);
    }
    __syncthreads();
    if (threadIdx.x < parts) sums[token * parts + threadIdx.x] = of_part[threadIdx.x];
    if (threadIdx.x == 0) scales[token] = largest / limit;
}

#ifndef EMULATED
template <int K, Mode mode, int groups, int depth>
static int launch(const Arguments& arguments, cudaStream_t stream) {
    using S = Stage<K, mode, groups>;
    static_assert(depth <= S::most, "the ring fits into shared memory");
    const int of_sums = (WARPS * arguments.parts * PITCH + ROWS) * arguments.tokens * 4,
              of_ring = WARPS * depth * S::bytes;
    const int room = of_sums > of_ring ? of_sums : of_ring;
    static cudaError_t set = cudaFuncSetAttribute(few_tokens<K, mode, groups, depth>,
                                                  cudaFuncAttributeMaxDynamicSharedMemorySize, MOST_SHARED);
    if (set != cudaSuccess) return set;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {2, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = arguments.n / ROWS, config.blockDim = THREADS, config.dynamicSmemBytes = room,
    config.stream = stream;
    config.attrs = attributes, config.numAttrs = arguments.svh ? 2 : 1;
    const cudaError_t error = cudaLaunchKernelEx(&config, few_tokens<K, mode, groups, depth>, arguments);
    return error != cudaSuccess ? error : cudaGetLastError();
}

template <int K, Mode mode, int groups>
static int with_depth(const Arguments& arguments, int depth, cudaStream_t stream) {
    constexpr int most = Stage<K, mode, groups>::most < 8 ? Stage<K, mode, groups>::most : 8,
                  four = most < 4 ? most : 4;
    if constexpr (groups == 1) {
        if (depth == 2) return launch<K, mode, groups, 2>(arguments, stream);
        if constexpr (mode == BYTES || mode == READ)
            if (depth == 8) return launch<K, mode, groups, most>(arguments, stream);
    }
    return depth == 4 ? launch<K, mode, groups, four>(arguments, stream) : -2;
}

template <int K>
static int with_mode(const Arguments& arguments, int mode, int depth, cudaStream_t stream) {
    const int columns = arguments.tokens * arguments.parts;
    if (columns > 16 || arguments.n % (arguments.svh ? 2 * ROWS : ROWS) || arguments.k % STEP) return -3;
    if (mode == HALF)
        return columns > 8 ? with_depth<K, HALF, 2>(arguments, depth, stream)
                           : with_depth<K, HALF, 1>(arguments, depth, stream);
    if (mode == BYTES)
        return columns > 8 ? with_depth<K, BYTES, 2>(arguments, depth, stream)
                           : with_depth<K, BYTES, 1>(arguments, depth, stream);
    if (mode == DOT && columns == 1) return with_depth<K, DOT, 1>(arguments, depth, stream);
    if (mode == READ) return with_depth<K, READ, 1>(arguments, depth, stream);
    return -4;
}

extern "C" int few_tokens_run(const void* trellis, const void* x, const void* sums, const void* scales, void* y,
                              const void* svh, int k, int n, int tokens, int parts, int bits, int mode, int depth,
                              void* stream) {
    const Arguments arguments{static_cast<const uint32_t*>(trellis),
                              x,
                              static_cast<const int32_t*>(sums),
                              static_cast<const float*>(scales),
                              static_cast<float*>(y),
                              static_cast<const uint16_t*>(svh),
                              k,
                              n,
                              tokens,
                              parts};
    const auto s = static_cast<cudaStream_t>(stream);
    return bits == 2   ? with_mode<2>(arguments, mode, depth, s)
           : bits == 3 ? with_mode<3>(arguments, mode, depth, s)
           : bits == 4 ? with_mode<4>(arguments, mode, depth, s)
                       : -1;
}

extern "C" int few_tokens_prepare(const void* x, const void* suh, void* to, void* sums, void* scales, int k,
                                  int tokens, int parts, int as_half, void* stream) {
    if (k > 8192 || k % 128) return -3;
    prepare<<<tokens, 1024, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const __half*>(x), static_cast<const __half*>(suh), to, static_cast<int32_t*>(sums),
        static_cast<float*>(scales), k, parts, as_half);
    return cudaGetLastError();
}
#endif
