// The dropout mask: a documented function of (rng_state, batch, query head, row, key), the same on every path and tile.
//
// A score is kept if its 16-bit number is >= threshold = round(dropout_p * 65536). The numbers come from Philox4x32
// with 7 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers, as easy as 1, 2, 3, SC 2011):
//   key     = rng_state[0] ^ (rng_state[1] * 0x9E3779B97F4A7C15), 64 bits
//   counter = ((key_position / 32) * 4 + (key_position % 8) / 2, row, batch, head)
//   number  = 16 bits e % 2 of output word e / 2, where e = ((key_position / 8) % 4) * 2 + key_position % 2
// so one call gives the 8 numbers that one thread of an m16n8 accumulator needs for 32 keys of a row.
#pragma once

#include <stdint.h>

namespace flash_ext {

struct PhiloxKey {
    uint32_t low;
    uint32_t high;
};

__device__ __forceinline__ PhiloxKey philox_key(const int64_t* rng_state) {
    const uint64_t key =
        static_cast<uint64_t>(rng_state[0]) ^ (static_cast<uint64_t>(rng_state[1]) * 0x9E3779B97F4A7C15ull);
    return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

// The four output words for the counter (x, y, z, w).
__device__ __forceinline__ uint4 philox4x32_7(PhiloxKey key, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
    constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
#pragma unroll
    for (int round = 0; round < 7; ++round) {
        const uint32_t high0 = __umulhi(kMultiplier0, x), low0 = kMultiplier0 * x;
        const uint32_t high1 = __umulhi(kMultiplier1, z), low1 = kMultiplier1 * z;
        x = high1 ^ y ^ key.low;
        y = low1;
        z = high0 ^ w ^ key.high;
        w = low0;
        key.low += kWeyl0;
        key.high += kWeyl1;
    }
    return {x, y, z, w};
}

// Whether to keep element e (0..7) of a call's output.
__device__ __forceinline__ bool dropout_keeps(uint4 words, int element, uint32_t threshold) {
    const uint32_t word = element / 2 == 0   ? words.x
                          : element / 2 == 1 ? words.y
                          : element / 2 == 2 ? words.z
                                             : words.w;
    return ((word >> (16 * (element % 2))) & 0xFFFFu) >= threshold;
}

}  // namespace flash_ext
