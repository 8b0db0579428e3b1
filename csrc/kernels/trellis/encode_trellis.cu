// Encodes tiles of 256 weights by code mul1: of each the path around it of least squared error (Viterbi, tail-biting
// by a first pass over `lead` weights on either side of the joint; hf_kbit/format/trellis.py defines it to the bit,
// common/trellis.h says what states and costs are).
//
//   targets    float32 [tiles, 256]
//   words      32-bit ones [tiles, 8 * bits]
//   workspace  uint8, for each CTA the branches of 256 steps, and the costs of all states where they lie there
//
// A CTA encodes a tile. The costs of all states lie in shared memory, once or, where there is room, twice; a thread
// takes some states, holds their new costs in registers until all have read, and writes them back. States that come
// from the same ones, as many as there are branches, are neighbours and a thread's. Each step makes the windows'
// products again, an addition each, for a product is linear; DP4A adds up the bytes, times the factor, less the
// weight. The limit is arithmetic: for each window and step an addition, DP4A, a multiplication and half of a minimum
// of three.
#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "kernels/launch.h"

namespace hf_kbit::cuda {

namespace {

// How it is done. Where shared memory has no room for costs, they lie in the workspace, twice: 128 KB for 1 bit, which
// GPUs of 99 KB lack; those before sm_80 also lack the 64 KB for 2 and 3.
template <int its_bits, bool in_shared>
struct EncodeTrellis : Trellis<its_bits> {
    using T = Trellis<its_bits>;
    static constexpr int bits = its_bits;
    static constexpr bool shared = in_shared;
    static constexpr int threads = bits == 1 ? 1024 : bits == 8 ? 256 : 512;
    static constexpr int least_ctas = bits == 1 ? 1 : 2;               // of a processor
    static constexpr int buffers = shared && bits < 3 ? 1 : 2;         // of costs
    static constexpr int own = T::states / threads;                    // states of a thread
    static constexpr int run = own < T::branches ? own : T::branches;  // of them neighbours
    static constexpr int runs = own / run;
    static constexpr int step_bytes = T::states / (bits == 1 ? 8 : bits == 2 ? 4 : 1);  // of branches
    static constexpr int branch_bytes = kTrellisSteps * step_bytes;
    static constexpr int cost_bytes = buffers * T::states * static_cast<int>(sizeof(uint32_t));
};

// A weight, negated, and a zero that the compiler does not know of: else it would keep the products of all windows of
// a thread from step to step, in more registers than there are.
struct Target {
    uint32_t minus, zero;
};

// Stores the branches of a thread's states for one step: they are the lowest bits.
template <class T>
__device__ __forceinline__ void store_branches(uint8_t* to, const uint32_t (&branch)[T::runs][T::run]) {
    const int thread = threadIdx.x;
    const auto four = [&](int i, int j) {
        const uint32_t low = __byte_perm(branch[i][j], branch[i][j + 1], 0x0040);
        const uint32_t high = __byte_perm(branch[i][j + 2], branch[i][j + 3], 0x0040);
        return __byte_perm(low, high, 0x5410) & (T::branches - 1) * 0x01010101u;
    };
    if constexpr (T::bits == 1) {  // a bit a state, a word a thread
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < T::runs; ++i) word |= (branch[i][0] & 1) << 2 * i | (branch[i][1] & 1) << (2 * i + 1);
        reinterpret_cast<uint32_t*>(to)[thread] = word;
    } else if constexpr (T::bits == 2) {  // two bits a state, a byte a run
#pragma unroll
        for (int i = 0; i < T::runs; ++i)
            to[thread + T::threads * i] = static_cast<uint8_t>((four(i, 0) * 0x01041040u) >> 24);
    } else {  // a byte a state
#pragma unroll
        for (int i = 0; i < T::runs; ++i) {
            uint8_t* at = to + (thread + T::threads * i) * T::run;
            if constexpr (T::run % 4 == 0) {
#pragma unroll
                for (int j = 0; j < T::run; j += 4) *reinterpret_cast<uint32_t*>(at + j) = four(i, j);
            } else {
#pragma unroll
                for (int j = 0; j < T::run; ++j) at[j] = static_cast<uint8_t>(branch[i][j] & (T::branches - 1));
            }
        }
    }
}

// The window by which a state was come to in a step.
template <class T>
__device__ __forceinline__ uint32_t window_of(const uint8_t* branches, int step, uint32_t state) {
    const uint8_t* from = branches + step * T::step_bytes;
    uint32_t branch;
    if constexpr (T::bits == 1) {
        const uint32_t run = state >> 1, word = reinterpret_cast<const uint32_t*>(from)[run % T::threads];
        branch = word >> (2 * (run / T::threads) + (state & 1)) & 1;
    } else if constexpr (T::bits == 2) {
        branch = from[state >> 2] >> 2 * (state & 3) & 3;
    } else {
        branch = from[state];
    }
    return branch << T::state_bits | state;
}

// One weight: the new costs of all states. With one buffer they wait in registers until all threads have read.
template <class T, bool stores>
__device__ __forceinline__ void step(uint32_t*& cost, uint32_t*& next, Target target, uint8_t* to) {
    constexpr uint32_t kFactors = T::factor * 0x01010101u;
    uint32_t best[T::runs][T::run], branch[T::runs][T::run];
    const uint32_t keep = ~T::branch_mask + target.zero;
    const auto write = [next](int i, const uint32_t (&costs)[T::run]) {
        uint32_t* at = next + (threadIdx.x + T::threads * i) * T::run;
        if constexpr (T::run % 4 == 0) {
#pragma unroll
            for (int j = 0; j < T::run; j += 4)
                *reinterpret_cast<uint4*>(at + j) = make_uint4(costs[j], costs[j + 1], costs[j + 2], costs[j + 3]);
        } else if constexpr (T::run == 2) {
            *reinterpret_cast<uint2*>(at) = make_uint2(costs[0], costs[1]);
        } else {
            at[0] = costs[0];
        }
    };
#pragma unroll
    for (int i = 0; i < T::runs; ++i) {
        const uint32_t first = (threadIdx.x + T::threads * i) * T::run, from = first >> T::bits;
        const uint32_t product = first * code_factor(Code::mul1) + target.zero;
#pragma unroll
        for (int h = 0; h < T::branches; h += 2) {
            uint32_t before[2];
#pragma unroll
            for (int l = 0; l < 2; ++l) {
                before[l] = cost[((h + l) << (T::state_bits - T::bits)) + from];
                if constexpr (T::packed) before[l] = (before[l] & keep) | (h + l);
            }
#pragma unroll
            for (int j = 0; j < T::run; ++j) {
                uint32_t sum[2];
#pragma unroll
                for (int l = 0; l < 2; ++l) {
                    const uint32_t window = (h + l) << T::state_bits | j;
                    const uint32_t off = __dp4a(product + window * code_factor(Code::mul1), kFactors, target.minus);
                    sum[l] = off * off + before[l];
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
        if constexpr (T::buffers == 2) write(i, best[i]);
    }
    if constexpr (stores) {
        if constexpr (T::packed) {
            store_branches<T>(to, best);
        } else {
            store_branches<T>(to, branch);
        }
    }
    __syncthreads();
    if constexpr (T::buffers == 2) {
        uint32_t* other = cost;
        cost = next;
        next = other;
    } else {
#pragma unroll
        for (int i = 0; i < T::runs; ++i) write(i, best[i]);
        __syncthreads();
    }
}

// A weight as a whole number; NaN becomes 0.
template <int bits>
__device__ __forceinline__ uint32_t to_units(float weight) {
    using T = Trellis<bits>;
    constexpr float kSteps = T::factor / T::quantum;
    const float sum = __fmul_rn(__fadd_rn(__fmul_rn(weight, kSumOfOne), kSumOfZero), kSteps);
    return __float2uint_rn(fminf(fmaxf(sum, 0.0f), kMostSum * kSteps)) * T::quantum;
}

template <class T>
__global__ void __launch_bounds__(T::threads, T::least_ctas)
    encode_trellis_kernel(const float* gmem_targets, uint32_t* gmem_words, uint8_t* workspace, int64_t tiles, int lead,
                          uint32_t zero) {
    constexpr int bits = T::bits;
    extern __shared__ uint4 dynamic_shared[];
    __shared__ Target target[kTrellisSteps];
    __shared__ uint8_t own[kTrellisSteps];
    __shared__ unsigned long long least;
    __shared__ uint32_t joint;
    const int thread = threadIdx.x;
    uint8_t* branches = workspace + blockIdx.x * int64_t{T::branch_bytes + (T::shared ? 0 : T::cost_bytes)};
    uint32_t* cost = T::shared ? reinterpret_cast<uint32_t*>(dynamic_shared)
                               : reinterpret_cast<uint32_t*>(branches + T::branch_bytes);
    uint32_t* next = cost + (T::buffers - 1) * T::states;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        for (int i = thread; i < kTrellisSteps; i += T::threads)
            target[i] = {0u - to_units<bits>(gmem_targets[tile * kTrellisSteps + i]), zero};
        for (int state = thread; state < T::states; state += T::threads) cost[state] = 0;
        if (thread == 0) least = ~0ull;
        __syncthreads();
        for (int i = kTrellisSteps - lead; i < kTrellisSteps; ++i) step<T, false>(cost, next, target[i], nullptr);
        for (int i = 0; i < lead; ++i) step<T, true>(cost, next, target[i], branches + i * T::step_bytes);
        unsigned long long low = ~0ull;
        for (int state = thread; state < T::states; state += T::threads)
            low = min(low, static_cast<unsigned long long>(cost[state] & ~T::branch_mask) << 32 | uint32_t(state));
        atomicMin(&least, low);
        __syncthreads();
        if (thread == 0) {
            auto state = static_cast<uint32_t>(least);
            for (int i = lead; i-- > 0;) state = window_of<T>(branches, i, state) >> bits;
            joint = state;
        }
        __syncthreads();
        for (int state = thread; state < T::states; state += T::threads)
            cost[state] = uint32_t(state) == joint ? 0 : T::closed;
        __syncthreads();
        for (int i = 0; i < kTrellisSteps; ++i) step<T, true>(cost, next, target[i], branches + i * T::step_bytes);
        if (thread == 0) {
            uint32_t state = joint;
            for (int i = kTrellisSteps; i-- > 0;) {
                const uint32_t window = window_of<T>(branches, i, state);
                own[i] = static_cast<uint8_t>(window & (T::branches - 1));
                state = window >> bits;
            }
        }
        __syncthreads();
        if (thread < 8 * bits) {  // a word each, its highest bit first
            uint32_t word = 0;
            for (int i = 32 * thread / bits; i * bits < 32 * (thread + 1); ++i) {
                const int left = 32 * (thread + 1) - (i + 1) * bits;
                word |= left >= 0 ? uint32_t{own[i]} << left : uint32_t{own[i]} >> -left;
            }
            gmem_words[tile * 8 * bits + thread] = word;
        }
        // The next tile's threads write `own` after many barriers, and nothing else that is read here.
    }
}

// run(EncodeTrellis<bits, shared>{}): costs of 4 bits and more are 32 KB, which all GPUs have.
template <typename Run>
cudaError_t dispatch_costs(int bits, const Gpu& gpu, const Run& run) {
    return dispatch_trellis(bits, [&](auto width) {
        using T = EncodeTrellis<width(), true>;
        if constexpr (width() <= 3) {
            constexpr int kStatic = kTrellisSteps * (sizeof(Target) + 1) + 64;
            if (T::cost_bytes + kStatic + gpu.shared_reserved > gpu.shared_limit) {
                return run(EncodeTrellis<width(), false>{});
            }
        }
        return run(T{});
    });
}

}  // namespace

int64_t encode_trellis_ctas(int bits, int64_t tiles, const Gpu& gpu) {
    return std::min(tiles, int64_t{gpu.processors} * (bits == 1 ? 1 : 2));
}

int64_t encode_trellis_bytes(int bits, const Gpu& gpu) {
    int64_t bytes = 0;
    dispatch_costs(bits, gpu, [&](auto how) {
        using T = decltype(how);
        bytes = T::branch_bytes + (T::shared ? 0 : T::cost_bytes);
        return cudaSuccess;
    });
    return bytes;
}

cudaError_t encode_trellis(const float* targets, int bits, int lead, int64_t tiles, uint32_t* words, void* workspace,
                           int64_t ctas, const Gpu& gpu, cudaStream_t stream) {
    return dispatch_costs(bits, gpu, [&](auto how) {
        using T = decltype(how);
        constexpr int kShared = T::shared ? T::cost_bytes : 0;
        static Launcher launcher(encode_trellis_kernel<T>, T::threads, kShared);
        return launcher.launch(gpu, ctas, 1, kShared, stream, targets, words, static_cast<uint8_t*>(workspace), tiles,
                               lead, 0u);
    });
}

}  // namespace hf_kbit::cuda
