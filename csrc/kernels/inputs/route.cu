// The way of tokens to the experts of a mixture, and back.
//
// route_experts: a stable counting sort by expert in one CTA, each of whose warps has an equal run of the numbers. It
// counts them in shared memory, all warps' counts become first places, and each warp goes through its run again. Lanes
// with the same expert find each other by a vote on each bit of its number. What comes out is put in order in shared
// memory, if it has room, and stored from there: one processor is slow to store to many places. Of few numbers a
// thread compares one with all others.
//
// combine_experts: a thread has 16 bytes of a token's row, or one number where rows do not begin at their multiples.
#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/ptx.cuh"

namespace hf_kbit::cuda {

namespace {

constexpr int kMostWarps = 32, kThreads = kMostWarps * kLanes;
constexpr int kWarpNumbers = 128;  // for which a further warp is worth its counts
constexpr int kCompared = 128;     // numbers up to which each is compared with all

struct Routing {
    const void* numbers;               // int64 or int32
    int count, slots, experts, warps;  // warps that count
    bool staged;
    int32_t *rows, *places, *offsets;
};

// Number i; `experts` for what is none.
template <typename Number>
__device__ __forceinline__ int expert_of(const Routing& routing, int i) {
    const Number number = static_cast<const Number*>(routing.numbers)[i];
    return number >= 0 && number < routing.experts ? static_cast<int>(number) : routing.experts;
}

// Those of the lanes whose number, below 2^bits, is the same as this lane's.
__device__ __forceinline__ unsigned lanes_with(int number, int bits) {
    unsigned same = 0xFFFFFFFF;
    for (int bit = 0; bit < bits; ++bit) {
        const bool set = number >> bit & 1;
        const unsigned with_bit = __ballot_sync(0xFFFFFFFF, set);
        same &= set ? with_bit : ~with_bit;
    }
    return same;
}

template <typename Number>
__device__ __forceinline__ void route_few(const Routing& routing, int* numbers) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < routing.count) numbers[thread] = expert_of<Number>(routing, thread);
    __syncthreads();
    const auto before = [&](int number, int i) {  // how many come before number i, were it this one
        int place = 0;
        for (int k = 0; k < routing.count; ++k) place += numbers[k] < number + (k < i);
        return place;
    };
    if (thread < routing.count) {
        const int place = before(numbers[thread], thread);
        routing.rows[place] = thread / routing.slots;
        routing.places[thread] = place;
    }
    for (int expert = thread; expert <= routing.experts; expert += kThreads) {
        routing.offsets[expert] = before(expert, 0);
    }
}

template <typename Number>
__global__ void __launch_bounds__(kThreads) route_kernel(const __grid_constant__ Routing routing) {
    extern __shared__ int totals[];           // [kMostWarps]
    int* const counts = totals + kMostWarps;  // [warps, bins]: of each warp, then the first places of each
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes, warps = routing.warps;
    let_next_kernel_start();  // which waits for what is written here
    if (routing.count <= kCompared) return route_few<Number>(routing, totals);
    const int bins = routing.experts + 1;
    int* const own = counts + warp * bins;
    int* const sorted = counts + warps * bins;  // [count], if staged
    for (int i = threadIdx.x; i < warps * bins; i += kThreads) counts[i] = 0;
    __syncthreads();
    const int run = (routing.count + warps - 1) / warps;
    const int first = min(warp * run, routing.count), last = warp < warps ? min(first + run, routing.count) : first;
#pragma unroll 8
    for (int i = first + lane; i < last; i += kLanes) atomicAdd(own + expert_of<Number>(routing, i), 1);
    __syncthreads();

    int before = 0;  // of all bins below those at hand
    for (int begin = 0; begin < bins; begin += kThreads) {
        const int bin = begin + threadIdx.x;
        int of_bin = 0;
        if (bin < bins) {
            for (int i = 0; i < warps; ++i) of_bin += counts[i * bins + bin];
        }
        const int up_to = sum_up_to_lane(of_bin, lane);
        if (lane == kLanes - 1) totals[warp] = up_to;
        __syncthreads();
        int of_warps = 0, all = 0;
        for (int i = 0; i < kMostWarps; ++i) {
            if (i < warp) of_warps += totals[i];
            all += totals[i];
        }
        int place = before + of_warps + up_to - of_bin;
        if (bin < bins) {
            routing.offsets[bin] = place;
            for (int i = 0; i < warps; ++i) {
                const int of_warp = counts[i * bins + bin];
                counts[i * bins + bin] = place;
                place += of_warp;
            }
        }
        before += all;
        __syncthreads();  // before totals are written again
    }

    constexpr int kAtOnce = 4;                                 // numbers of a lane under way
    const int bits = 32 - __clz(static_cast<unsigned>(bins));  // of 0 to bins
#pragma unroll 1
    for (int begin = first + lane; begin - lane < last; begin += kAtOnce * kLanes) {
        int numbers[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            const int i = begin + k * kLanes;
            numbers[k] = i < last ? expert_of<Number>(routing, i) : bins;
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            const int i = begin + k * kLanes, expert = numbers[k];
            const unsigned same = lanes_with(expert, bits);
            const int rank = __popc(same & ((1u << lane) - 1));
            const int place = expert < bins ? own[expert] + rank : 0;
            __syncwarp();
            if (expert < bins && rank == 0) own[expert] += __popc(same);
            __syncwarp();
            if (expert < bins) {
                (routing.staged ? sorted : routing.rows)[place] = i / routing.slots;
                routing.places[i] = place;
            }
        }
    }
    if (!routing.staged) return;
    __syncthreads();
    for (int i = threadIdx.x; i < routing.count; i += kThreads) routing.rows[i] = sorted[i];
}

struct Combination {
    const void* y;
    const int32_t* places;
    const void* weights;
    void* out;
    int slots, last_row, columns, token_ctas;  // CTAs for all columns of a token
};

constexpr int kCombiners = 128;

template <typename T, int kColumns>
struct alignas(sizeof(T) * kColumns) Columns {
    T values[kColumns];
};

template <typename T, typename Weight, int kColumns>
__global__ void __launch_bounds__(kCombiners) combine_kernel(const __grid_constant__ Combination combination) {
    using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;
    using Piece = Columns<T, kColumns>;
    wait_for_kernel_before();
    const int64_t token = blockIdx.x / combination.token_ctas;
    const int piece = static_cast<int>(blockIdx.x - token * combination.token_ctas) * kCombiners + threadIdx.x;
    const int pieces = combination.columns / kColumns;
    if (piece >= pieces) return;
    const int32_t* places = combination.places + token * combination.slots;
    const auto* weights = static_cast<const Weight*>(combination.weights) + token * combination.slots;
    const auto* y = static_cast<const Piece*>(combination.y) + piece;
    Sum sums[kColumns] = {};
#pragma unroll 4
    for (int slot = 0; slot < combination.slots; ++slot) {
        const int row = min(max(places[slot], 0), combination.last_row);
        const auto weight = static_cast<Sum>(weights[slot]);
        const Piece found = y[int64_t{row} * pieces];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sums[i] += weight * static_cast<Sum>(found.values[i]);
    }
    Piece out;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) out.values[i] = static_cast<T>(sums[i]);
    static_cast<Piece*>(combination.out)[token * pieces + piece] = out;
}

template <typename T, typename Weight, int kColumns>
cudaError_t combine(Combination combination, int64_t tokens, const Gpu& gpu, cudaStream_t stream) {
    static Launcher launcher(combine_kernel<T, Weight, kColumns>, kCombiners, 0);
    combination.token_ctas = static_cast<int>(ceil_div(combination.columns, int64_t{kCombiners} * kColumns));
    return launcher.launch_overlapping(gpu, tokens * combination.token_ctas, 1, 0, stream, combination);
}

}  // namespace

cudaError_t route_experts(const void* numbers, bool wide, int64_t tokens, int64_t slots, int64_t experts,
                          int32_t* rows, int32_t* places, int32_t* offsets, const Gpu& gpu, cudaStream_t stream) {
    constexpr int64_t kInt = sizeof(int);
    const int64_t count = tokens * slots, room = (gpu.shared_limit / kInt - kMostWarps) / (experts + 1);
    const int64_t warps = std::min({std::max(int64_t{1}, ceil_div(count, kWarpNumbers)), int64_t{kMostWarps}, room});
    if (warps < 1) return cudaErrorInvalidValue;
    const int64_t ints = std::max<int64_t>(kCompared, kMostWarps + warps * (experts + 1));
    const bool staged = (ints + count) * kInt <= gpu.shared_limit;
    const Routing routing{numbers,
                          static_cast<int>(count),
                          static_cast<int>(slots),
                          static_cast<int>(experts),
                          static_cast<int>(warps),
                          staged,
                          rows,
                          places,
                          offsets};
    const auto shared = static_cast<int>((ints + (staged ? count : 0)) * kInt);
    static Launcher of_int64(route_kernel<int64_t>, kThreads, kAllShared);
    static Launcher of_int32(route_kernel<int32_t>, kThreads, kAllShared);
    return (wide ? of_int64 : of_int32).launch(gpu, 1, 1, shared, stream, routing);
}

cudaError_t combine_experts(const void* y, Dtype dtype, const int32_t* places, const void* weights, Dtype of_weights,
                            int64_t tokens, int64_t slots, int64_t rows, int64_t columns, void* out, const Gpu& gpu,
                            cudaStream_t stream) {
    const Combination combination{
        y, places, weights, out, static_cast<int>(slots), static_cast<int>(rows - 1), static_cast<int>(columns), 0};
    return dispatch<__half, __nv_bfloat16, float, double>(dtype, [&](auto value) {
        using T = decltype(value);
        constexpr int kColumns = 16 / sizeof(T);
        const auto run = [&](auto weight) {
            using Weight = decltype(weight);
            return columns % kColumns == 0 ? combine<T, Weight, kColumns>(combination, tokens, gpu, stream)
                                           : combine<T, Weight, 1>(combination, tokens, gpu, stream);
        };
        return of_weights == dtype ? run(T{}) : of_weights == Dtype::float32 ? run(float{}) : cudaErrorInvalidValue;
    });
}

}  // namespace hf_kbit::cuda
