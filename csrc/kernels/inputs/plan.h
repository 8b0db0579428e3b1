// How tokens_to_int8.cu divides its work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/format.h"
#include "kernels/plan.h"

namespace hf_kbit {

// CTAs whose warps are groups, each of which has a token at a time. No groups: rows are too long.
struct Int8TokensPlan {
    int threads, group_warps, groups;  // of a CTA, of a group, of a CTA
    int resident;                      // CTAs that a processor has room for
    int ctas;                          // of each weight
    int shared_bytes;
};
inline std::string to_string(const Int8TokensPlan& plan) {
    return print_fields({{"threads", plan.threads},
                         {"group_warps", plan.group_warps},
                         {"groups", plan.groups},
                         {"resident", plan.resident},
                         {"ctas", plan.ctas},
                         {"shared_bytes", plan.shared_bytes}});
}

// A thread has a block. Of so many threads with 64 registers each a processor has room for one CTA, of fewer for more.
constexpr int kMostInt8Threads = 1024, kMostInt8Warps = kMostInt8Threads / 32;
// Shared memory: the largest numbers of warps, two tokens in turns; of the columns of each warp of a group the scales,
// and of each warp x.
constexpr int kInt8LargestBytes = 2 * kMostInt8Warps * 4, kInt8ScalesBytes = 32 * kBlockSize * 4;
constexpr int int8_x_bytes(bool swiglu) { return 32 * kBlockSize * 2 * (swiglu ? 2 : 1); }

// The most tokens at a time, and the smallest CTAs that have these: then a processor soon has room for the next
// kernel. For `count` weights.
inline Int8TokensPlan plan_int8_tokens(int64_t tokens, int64_t in_features, bool swiglu, int count, const Gpu& gpu) {
    Int8TokensPlan best{};
    const auto group_warps = static_cast<int>(ceil_div(num_blocks(in_features), 32));
    const int own = kInt8LargestBytes + group_warps * kInt8ScalesBytes,
              group_bytes = group_warps * int8_x_bytes(swiglu);
    for (int threads = 256; threads <= kMostInt8Threads; threads *= 2) {
        const int groups = std::min(threads / 32 / group_warps, (gpu.shared_limit - own) / group_bytes);
        if (groups < 1) continue;
        const int bytes = own + groups * group_bytes;
        const int fit = (gpu.shared_limit + gpu.shared_reserved) / (bytes + gpu.shared_reserved);
        const int resident = std::min(kMostInt8Threads / threads, fit);
        if (groups * resident <= best.groups * best.resident) continue;
        const int64_t ctas = std::min<int64_t>(tokens, std::max(1, gpu.processors * resident / count));
        best = {threads, group_warps, groups, resident, static_cast<int>(ctas), bytes};
    }
    return best;
}

}  // namespace hf_kbit
