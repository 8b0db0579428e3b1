// Four lanes that hold four elements each transpose them.
#pragma once

#include <cstdint>

namespace hf_kbit::cuda {

struct Quad {
    bool upper, odd;

    __device__ __forceinline__ explicit Quad(int lane) : upper(lane & 2), odd(lane & 1) {}

    static __device__ __forceinline__ uint32_t from(int other, uint32_t value) {
        return __shfl_xor_sync(0xFFFFFFFF, value, other);
    }
    // Elements are the bytes of a word.
    __device__ __forceinline__ void transpose(uint32_t (&w)[1]) const {
        w[0] = __byte_perm(w[0], from(2, w[0]), upper ? 0x3276 : 0x5410);
        w[0] = __byte_perm(w[0], from(1, w[0]), odd ? 0x3715 : 0x6240);
    }
    // Elements are the halves of two words.
    __device__ __forceinline__ void transpose(uint32_t (&w)[2]) const {
        const uint32_t received = from(2, upper ? w[0] : w[1]);
        const uint32_t low = upper ? received : w[0], high = upper ? w[1] : received;
        const uint32_t two = from(1, __byte_perm(low, high, odd ? 0x5410 : 0x7632));
        w[0] = __byte_perm(low, two, odd ? 0x3254 : 0x5410);
        w[1] = __byte_perm(high, two, odd ? 0x3276 : 0x7610);
    }
    // Elements are four words.
    __device__ __forceinline__ void transpose(uint32_t (&w)[4]) const {
        const uint32_t first = from(2, upper ? w[0] : w[2]), second = from(2, upper ? w[1] : w[3]);
        const uint32_t low[2] = {upper ? first : w[0], upper ? second : w[1]};
        const uint32_t high[2] = {upper ? w[2] : first, upper ? w[3] : second};
        const uint32_t third = from(1, odd ? low[0] : low[1]), fourth = from(1, odd ? high[0] : high[1]);
        w[0] = odd ? third : low[0], w[1] = odd ? low[1] : third;
        w[2] = odd ? fourth : high[0], w[3] = odd ? high[1] : fourth;
    }
};

}  // namespace hf_kbit::cuda
