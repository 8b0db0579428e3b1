// The encoder on a CPU, written for clearness: costs of 64 bits, branches apart. See encode.cu.
#include <cstdint>
#include <vector>

extern "C" void reference_encode(const int32_t* targets, uint16_t* windows, long tiles, int bits, int lead,
                                 int factor) {
    const int state_bits = 16 - bits, states = 1 << state_bits, branches = 1 << bits;
    std::vector<int32_t> value(65536);
    for (uint32_t w = 0; w < 65536; ++w) {
        uint32_t x = w * 0x83DCD12Du;
        value[w] = factor * int32_t((x & 255) + (x >> 8 & 255) + (x >> 16 & 255) + (x >> 24));
    }
#pragma omp parallel for
    for (long tile = 0; tile < tiles; ++tile) {
        const int32_t* target = targets + tile * 256;
        std::vector<int64_t> cost(states), next(states);
        std::vector<uint8_t> branch(256l * states);
        auto step = [&](int s) {
            for (int e = 0; e < states; ++e) {
                int64_t best = INT64_MAX;
                int taken = 0;
                for (int h = 0; h < branches; ++h) {
                    int64_t d = value[h << state_bits | e] - target[s],
                            sum = cost[(h << state_bits | e) >> bits] + d * d;
                    if (sum < best) best = sum, taken = h;
                }
                next[e] = best;
                branch[(long)s * states + e] = taken;
            }
            cost.swap(next);
        };
        auto back = [&](int s, uint32_t state) {
            return uint32_t(branch[(long)s * states + state]) << state_bits | state;
        };
        for (int s = 256 - lead; s < 256; ++s) step(s);
        for (int s = 0; s < lead; ++s) step(s);
        uint32_t state = 0;
        for (int e = 1; e < states; ++e)
            if (cost[e] < cost[state]) state = e;
        for (int s = lead; s--;) state = back(s, state) >> bits;
        for (int e = 0; e < states; ++e) cost[e] = e == int(state) ? 0 : int64_t(1) << 40;
        for (int s = 0; s < 256; ++s) step(s);
        for (int s = 256; s--;) {
            uint32_t w = back(s, state);
            windows[tile * 256 + s] = w;
            state = w >> bits;
        }
    }
}
