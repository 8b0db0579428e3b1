// The encoder of EXL3's trellis, for code mul1. common/trellis.h has what it rests on.
//
// V offers besides what algorithms.h says: add_words, multiply_words, least (of unsigned numbers), where_equal(a, b,
// yes, no), load_words and store_words, store_bytes (the lowest byte of each lane), and
//   difference_squared(a, b)   of numbers below 2**15
//   repeat<n>(numbers)         n numbers, over and over
//   in_order<n>(a)             lane `place * n + i` of it becomes lane `i * (kWidth / n) + place`
#pragma once

#include "common/trellis.h"
#include "cpu/scalar.h"

namespace hf_kbit::cpu {

// Calls f(std::integral_constant<int, bits>).
template <int least = 1, class F>
static inline void with_trellis_bits(int bits, F f) {
    if (bits == least) return f(std::integral_constant<int, least>{});
    if constexpr (least < kMostTrellisBits) with_trellis_bits<least + 1>(bits, f);
}

// What a thread needs, from `scratch` on: for each vector of states and each branch the sums of its windows, the costs
// of all states before and after a step, the branches of a whole turn.
template <int bits>
constexpr int64_t kTrellisScratch =
    4 * (kWindows + 2 * Trellis<bits>::states) + int64_t{kTrellisSteps} * Trellis<bits>::states;

template <class V, int bits>
struct TrellisEncoder {
    using T = Trellis<bits>;
    using I = typename V::I;
    // States of a vector with the same states before them are neighbours, and as many as there are branches; with
    // fewer than lanes, it needs `kFrom` costs for each branch. Then lane `place * kFrom + i` is that of state `i *
    // kRun + place`: no shuffle makes a vector of costs.
    static constexpr int kFrom = V::kWidth > T::branches ? V::kWidth / T::branches : 1, kRun = V::kWidth / kFrom;

    uint32_t *sums, *cost, *next;
    uint8_t* branches;

    explicit TrellisEncoder(void* scratch)
        : sums(static_cast<uint32_t*>(scratch)),
          cost(sums + kWindows),
          next(cost + T::states),
          branches(reinterpret_cast<uint8_t*>(next + T::states)) {
        uint32_t* to = sums;
        for (uint32_t first = 0; first < T::states; first += V::kWidth) {
            for (uint32_t branch = 0; branch < T::branches; ++branch) {
                for (uint32_t lane = 0; lane < V::kWidth; ++lane) {
                    const uint32_t state = first + lane % kFrom * kRun + lane / kFrom;
                    const uint32_t x = (branch << T::state_bits | state) * code_factor(Code::mul1);
                    *to++ = T::factor * ((x & 0xFF) + (x >> 8 & 0xFF) + (x >> 16 & 0xFF) + (x >> 24));
                }
            }
        }
    }

    // The branch of which a state is the end, when it is the next one's beginning.
    static constexpr uint32_t of_state(uint32_t state) { return T::packed ? state >> (T::state_bits - bits) : 0; }

    // One weight: the costs of all states after it, from those before.
    template <bool store>
    void step(uint32_t target, uint8_t* to) {
        const I targets = V::splat(target);
        const uint32_t* its_sums = sums;
        for (int first = 0; first < T::states; first += V::kWidth) {
            const uint32_t* from = cost + (first >> bits);
            I best{}, taken{};
#pragma GCC unroll 8
            for (int branch = 0; branch < T::branches; ++branch, its_sums += V::kWidth) {
                const I added = V::difference_squared(V::load_words(its_sums), targets);
                const I before = V::template repeat<kFrom>(from + (branch << (T::state_bits - bits)));
                const I sum = V::add_words(added, before);
                const I least = branch == 0 ? sum : V::least(best, sum);
                if constexpr (!T::packed) {
                    const I number = V::splat(static_cast<uint32_t>(branch));
                    taken = branch == 0 ? number : V::where_equal(least, best, taken, number);
                }
                best = least;
            }
            best = V::template in_order<kFrom>(best);
            if constexpr (store) V::store_bytes(to + first, T::packed ? best : taken);
            if constexpr (T::packed) {
                best = V::bit_or(V::bit_and(best, V::splat(~T::branch_mask)),
                                 V::splat(of_state(static_cast<uint32_t>(first))));
            }
            V::store_words(next + first, best);
        }
        uint32_t* other = cost;
        cost = next;
        next = other;
    }

    // The window by which a state was come to in a step of the last turn.
    uint32_t window(int step, uint32_t state) const {
        const uint32_t stored = branches[int64_t{step} * T::states + state];
        return (T::packed ? stored & T::branch_mask : stored) << T::state_bits | state;
    }

    void tile(const float* weights, int lead, uint32_t* words) {
        uint32_t targets[kTrellisSteps];
        constexpr float kSteps = T::factor / T::quantum;
        for (int i = 0; i < kTrellisSteps; ++i) {
            const float product = weights[i] * kSumOfOne, sum = (product + kSumOfZero) * kSteps;
            const float above = sum > 0 ? sum : 0, held = above < kMostSum * kSteps ? above : kMostSum * kSteps;
            targets[i] = static_cast<uint32_t>((held + 0x1p23f) - 0x1p23f) * T::quantum;  // half to even
        }
        for (uint32_t state = 0; state < T::states; ++state) cost[state] = of_state(state);
        for (int i = kTrellisSteps - lead; i < kTrellisSteps; ++i) step<false>(targets[i], nullptr);
        for (int i = 0; i < lead; ++i) step<true>(targets[i], branches + int64_t{i} * T::states);
        uint32_t joint = 0;
        for (uint32_t state = 1; state < T::states; ++state) {
            if ((cost[state] & ~T::branch_mask) < (cost[joint] & ~T::branch_mask)) joint = state;
        }
        for (int i = lead; i-- > 0;) joint = window(i, joint) >> bits;
        for (uint32_t state = 0; state < T::states; ++state) {
            cost[state] = (state == joint ? 0 : T::closed) | of_state(state);
        }
        for (int i = 0; i < kTrellisSteps; ++i) step<true>(targets[i], branches + int64_t{i} * T::states);
        uint32_t state = joint;
        std::memset(words, 0, kTrellisSteps * bits / 8);
        for (int i = kTrellisSteps; i-- > 0;) {
            const uint32_t found = window(i, state), own = found & (T::branches - 1);
            const int first = i * bits, word = first / 32, left = 32 - bits - first % 32;  // may end in the next word
            words[word] |= left >= 0 ? own << left : own >> -left;
            if (left < 0) words[word + 1] |= own << (32 + left);
            state = found >> bits;
        }
    }
};

template <class V>
static void encode_trellis_with(const float* targets, int bits, int lead, uint32_t* words, void* scratch,
                                int64_t begin, int64_t end) {
    with_trellis_bits(bits, [&](auto width) {
        TrellisEncoder<V, width()> encoder(scratch);
        for (int64_t tile = begin; tile < end; ++tile) {
            encoder.tile(targets + tile * kTrellisSteps, lead, words + tile * 8 * width());
        }
    });
}

}  // namespace hf_kbit::cpu
