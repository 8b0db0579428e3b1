// Trellis encoder: the path of least squared error through 65,536 windows, for tiles of 256 weights, code `mul1`.
//
// Weights arrive as integers T = F(K) * (147.7 x + 510), rounded and held to [0, 1020] * F: the sum of a window's
// product's bytes is then as far from T / F as the weight is from the window's value. Costs are sums of squares of
// integers, so any order and any device gives the same bits. The K lowest bits of a cost are the branch that it came
// by: F is a multiple of 2^ceil(K / 2), so squares leave them alone, and of equal costs the lowest branch wins.
//
// A state is the 16 - K bits that the next window keeps. State e comes from the 2^K states (h << (16 - 2 K)) | (e >>
// K) by the window (h << (16 - K)) | e. One block a tile: all costs lie in shared memory, each thread takes some
// states, holds their new costs in registers until all have read, and writes them back.
#include <cstdint>
#ifndef EMULATED
#include <cuda_runtime.h>
#endif

constexpr uint32_t MULTIPLIER = 0x83DCD12Du;
constexpr int STEPS = 256;

template <int K>
struct Trellis {
    static constexpr bool packed = K <= 6;  // the branch lies in the cost's low bits
    static constexpr int state_bits = 16 - K, states = 1 << state_bits, branches = 1 << K;
    static constexpr int threads = K == 1 ? 1024 : K == 8 ? 256 : 512;
    static constexpr int factor = K <= 2 ? 4 : K == 3 ? 4 : K == 4 ? 8 : 16;
    static constexpr int own = states / threads;                 // states of a thread
    static constexpr int run = own < branches ? own : branches;  // of them neighbours that come from the same states
    static constexpr int runs = own / run;
    static constexpr int step_bytes = K == 1 ? states / 8 : K == 2 ? states / 4 : states;  // of stored branches
};

// A weight, negated, and a zero that the compiler does not know of: else it would keep the products of all windows of
// a thread from step to step, in more registers than there are.
struct Target {
    uint32_t minus, zero;
};

// Costs lie once or, where there is room, twice.
template <int K, bool held>
constexpr int buffers = K >= 3 || held ? 2 : 1;

// What a thread's windows have in every step: the sums of bytes, two in a register. Else each step computes them.
template <int K, bool held>
struct Sums {
    static constexpr int runs = held ? Trellis<K>::runs : 1, pairs = held ? Trellis<K>::branches / 2 : 1;
    static constexpr int run = held ? Trellis<K>::run : 1;
    uint32_t pair[runs][pairs][run];
    __device__ __forceinline__ Sums() {
        if constexpr (held) {
#pragma unroll
            for (int i = 0; i < runs; ++i)
#pragma unroll
                for (int h = 0; h < pairs; ++h)
#pragma unroll
                    for (int j = 0; j < run; ++j) {
                        uint32_t window =
                            (2 * h) << Trellis<K>::state_bits | ((threadIdx.x + Trellis<K>::threads * i) * run + j);
                        uint32_t other = window + (1 << Trellis<K>::state_bits);
                        pair[i][h][j] = __dp4a(window * MULTIPLIER, 0x01010101u, 0u) |
                                        __dp4a(other * MULTIPLIER, 0x01010101u, 0u) << 16;
                    }
        }
    }
};

// Stores the branches of a thread's states for one step.
template <int K>
__device__ __forceinline__ void store_branches(uint8_t* to,
                                               const uint32_t (&branch)[Trellis<K>::runs][Trellis<K>::run]) {
    using T = Trellis<K>;
    constexpr uint32_t mask = T::branches - 1;
    const int thread = threadIdx.x;
    if constexpr (K == 1) {  // a bit a state, a word a thread
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < T::runs; ++i) word |= (branch[i][0] & 1) << 2 * i | (branch[i][1] & 1) << 2 * i + 1;
        reinterpret_cast<uint32_t*>(to)[thread] = word;
    } else if constexpr (K == 2) {  // two bits a state, a byte a run
#pragma unroll
        for (int i = 0; i < T::runs; ++i) {
            uint32_t bytes = __byte_perm(__byte_perm(branch[i][0], branch[i][1], 0x0040),
                                         __byte_perm(branch[i][2], branch[i][3], 0x0040), 0x5410);
            to[thread + T::threads * i] = ((bytes & 0x03030303u) * 0x01041040u) >> 24;
        }
    } else {  // a byte a state
#pragma unroll
        for (int i = 0; i < T::runs; ++i)
#pragma unroll
            for (int j = 0; j < T::run; j += 4) {
                uint8_t* at = to + (thread + T::threads * i) * T::run + j;
                if constexpr (T::run >= 4) {
                    uint32_t bytes = __byte_perm(__byte_perm(branch[i][j], branch[i][j + 1], 0x0040),
                                                 __byte_perm(branch[i][j + 2], branch[i][j + 3], 0x0040), 0x5410);
                    *reinterpret_cast<uint32_t*>(at) = bytes & mask * 0x01010101u;
                } else
#pragma unroll
                    for (int l = 0; l < T::run; ++l) at[l] = branch[i][l] & mask;
            }
    }
}

template <int K>
__device__ __forceinline__ uint32_t stored_branch(const uint8_t* from, uint32_t state) {
    using T = Trellis<K>;
    if constexpr (K == 1) {
        uint32_t run = state >> 1, word = reinterpret_cast<const uint32_t*>(from)[run % T::threads];
        return word >> (2 * (run / T::threads) + (state & 1)) & 1;
    } else if constexpr (K == 2) {
        return from[state >> 2] >> 2 * (state & 3) & 3;
    } else {
        return from[state];
    }
}

// One weight: the new costs of all states. With one buffer they wait in registers until all threads have read.
template <int K, bool held, bool store>
__device__ __forceinline__ void step(uint32_t*& cost, uint32_t*& next, Target target, uint8_t* to,
                                     const Sums<K, held>& sums) {
    using T = Trellis<K>;
    constexpr uint32_t weights = T::factor * 0x01010101u, mask = T::branches - 1;
    constexpr bool twice = buffers<K, held> == 2;
    uint32_t best[T::runs][T::run], branch[T::runs][T::run];
    const uint32_t keep = ~mask + target.zero;
    auto write = [&](int i) {
        uint32_t* at = next + (threadIdx.x + T::threads * i) * T::run;
        if constexpr (T::run % 4 == 0) {
#pragma unroll
            for (int j = 0; j < T::run; j += 4)
                *reinterpret_cast<uint4*>(at + j) =
                    make_uint4(best[i][j], best[i][j + 1], best[i][j + 2], best[i][j + 3]);
        } else if constexpr (T::run == 2) {
            *reinterpret_cast<uint2*>(at) = make_uint2(best[i][0], best[i][1]);
        } else {
            at[0] = best[i][0];
        }
    };
#pragma unroll
    for (int i = 0; i < T::runs; ++i) {
        const uint32_t first = (threadIdx.x + T::threads * i) * T::run, from = first >> K;
        const uint32_t product = first * MULTIPLIER + target.zero;
#pragma unroll
        for (int h = 0; h < T::branches; h += 2) {
            uint32_t before[2];
#pragma unroll
            for (int l = 0; l < 2; ++l) {
                before[l] = cost[((h + l) << (T::state_bits - K)) + from];
                if constexpr (T::packed) before[l] = (before[l] & keep) | (h + l);
            }
#pragma unroll
            for (int j = 0; j < T::run; ++j) {
                uint32_t sum[2];
#pragma unroll
                for (int l = 0; l < 2; ++l) {
                    uint32_t d;
                    if constexpr (held) {
                        d = __dp2a_lo(sums.pair[i][h / 2][j], uint32_t(T::factor) << 8 * l, target.minus);
                    } else {
                        const uint32_t window = (h + l) << T::state_bits | j;
                        d = __dp4a(product + window * MULTIPLIER, weights, target.minus);
                    }
                    sum[l] = d * d + before[l];
                }
                if constexpr (T::packed) {
                    best[i][j] = h == 0 ? min(sum[0], sum[1]) : __vimin3_u32(best[i][j], sum[0], sum[1]);
                } else {
#pragma unroll
                    for (int l = 0; l < 2; ++l) {
                        const bool less = h + l == 0 || sum[l] < best[i][j];
                        best[i][j] = less ? sum[l] : best[i][j];
                        branch[i][j] = less ? h + l : branch[i][j];
                    }
                }
            }
        }
        if constexpr (twice) write(i);
    }
    if constexpr (store) {
        if constexpr (T::packed)
            store_branches<K>(to, best);
        else
            store_branches<K>(to, branch);
    }
    __syncthreads();
    if constexpr (twice) {
        uint32_t* other = cost;
        cost = next;
        next = other;
    } else {
#pragma unroll
        for (int i = 0; i < T::runs; ++i) write(i);
        __syncthreads();
    }
}

// targets: [tiles, 256]. windows: [tiles, 256]. branches: for each block 256 steps of stored branches.
// lead: weights on either side of the joint that the first pass reads to find the state there, 1 to 128.
template <int K, bool held>
__global__ void __launch_bounds__(Trellis<K>::threads, K == 1 || held ? 1 : 2)
    encode(const int32_t* targets, uint16_t* windows, uint8_t* branches, int tiles, int lead, uint32_t zero) {
    using T = Trellis<K>;
#ifdef EMULATED
    uint32_t* const room = dynamic_shared;
#else
    extern __shared__ uint32_t room[];
#endif
    uint32_t *cost = room, *next = room + (buffers<K, held> - 1) * Trellis<K>::states;
    const Sums<K, held> sums;
    __shared__ Target target[STEPS];
    __shared__ unsigned long long least;
    __shared__ uint32_t joint;
    const int thread = threadIdx.x;
    constexpr uint32_t mask = T::packed ? T::branches - 1 : 0;
    uint8_t* own = branches + size_t(blockIdx.x) * STEPS * T::step_bytes;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        for (int s = thread; s < STEPS; s += T::threads) target[s] = {0u - targets[size_t(tile) * STEPS + s], zero};
        for (int e = thread; e < T::states; e += T::threads) cost[e] = 0;
        if (thread == 0) least = ~0ull;
        __syncthreads();
        for (int s = STEPS - lead; s < STEPS; ++s) step<K, held, false>(cost, next, target[s], nullptr, sums);
        for (int s = 0; s < lead; ++s) step<K, held, true>(cost, next, target[s], own + s * T::step_bytes, sums);
        unsigned long long low = ~0ull;
        for (int e = thread; e < T::states; e += T::threads)
            low = min(low, (unsigned long long)(cost[e] & ~mask) << 32 | uint32_t(e));
        atomicMin(&least, low);
        __syncthreads();
        if (thread == 0) {
            uint32_t state = uint32_t(least);
            for (int s = lead; s--;)
                state = (stored_branch<K>(own + s * T::step_bytes, state) << T::state_bits | state) >> K;
            joint = state;
        }
        __syncthreads();
        for (int e = thread; e < T::states; e += T::threads) cost[e] = e == joint ? 0 : 1u << 31;
        __syncthreads();
        for (int s = 0; s < STEPS; ++s) step<K, held, true>(cost, next, target[s], own + s * T::step_bytes, sums);
        if (thread == 0) {
            uint32_t state = joint;
            for (int s = STEPS; s--;) {
                uint32_t window = stored_branch<K>(own + s * T::step_bytes, state) << T::state_bits | state;
                windows[size_t(tile) * STEPS + s] = uint16_t(window);
                state = window >> K;
            }
        }
    }
}

#ifndef EMULATED
template <int K, bool held>
static int launch(const int32_t* targets, uint16_t* windows, uint8_t* branches, int tiles, int lead, int blocks,
                  cudaStream_t stream) {
    constexpr int room = buffers<K, held> * Trellis<K>::states * 4;
    cudaError_t error = cudaFuncSetAttribute(encode<K, held>, cudaFuncAttributeMaxDynamicSharedMemorySize, room);
    if (error != cudaSuccess) return error;
    encode<K, held><<<blocks, Trellis<K>::threads, room, stream>>>(targets, windows, branches, tiles, lead, 0);
    return cudaGetLastError();
}

extern "C" int trellis_factor(int bits) {
    const int of[] = {0,
                      Trellis<1>::factor,
                      Trellis<2>::factor,
                      Trellis<3>::factor,
                      Trellis<4>::factor,
                      Trellis<5>::factor,
                      Trellis<6>::factor,
                      Trellis<7>::factor,
                      Trellis<8>::factor};
    return of[bits];
}

extern "C" int trellis_step_bytes(int bits) {
    const int of[] = {0,
                      Trellis<1>::step_bytes,
                      Trellis<2>::step_bytes,
                      Trellis<3>::step_bytes,
                      Trellis<4>::step_bytes,
                      Trellis<5>::step_bytes,
                      Trellis<6>::step_bytes,
                      Trellis<7>::step_bytes,
                      Trellis<8>::step_bytes};
    return of[bits];
}

extern "C" int trellis_encode(const void* targets, void* windows, void* branches, int tiles, int bits, int held,
                              int lead, int blocks, void* stream) {
    auto x = static_cast<const int32_t*>(targets);
    auto w = static_cast<uint16_t*>(windows);
    auto b = static_cast<uint8_t*>(branches);
    auto s = static_cast<cudaStream_t>(stream);
    switch (bits) {
        case 1:
            return held ? -1 : launch<1, false>(x, w, b, tiles, lead, blocks, s);
        case 2:
            return held ? launch<2, true>(x, w, b, tiles, lead, blocks, s)
                        : launch<2, false>(x, w, b, tiles, lead, blocks, s);
        case 3:
            return held ? launch<3, true>(x, w, b, tiles, lead, blocks, s)
                        : launch<3, false>(x, w, b, tiles, lead, blocks, s);
        case 4:
            return held ? launch<4, true>(x, w, b, tiles, lead, blocks, s)
                        : launch<4, false>(x, w, b, tiles, lead, blocks, s);
        case 5:
            return held ? -1 : launch<5, false>(x, w, b, tiles, lead, blocks, s);
        case 6:
            return held ? -1 : launch<6, false>(x, w, b, tiles, lead, blocks, s);
        case 7:
            return held ? -1 : launch<7, false>(x, w, b, tiles, lead, blocks, s);
        case 8:
            return held ? -1 : launch<8, false>(x, w, b, tiles, lead, blocks, s);
    }
    return -1;
}
#endif
