// Short vectors as GCC and Clang have them on any processor.
#pragma once

#include <cstdint>
#include <cstring>

#include "numeric.h"

namespace ptx_emulator {

using Float4 = float __attribute__((vector_size(16)));
using Float8 = float __attribute__((vector_size(32)));
using Word8 = uint32_t __attribute__((vector_size(32)));
using Half8 = uint16_t __attribute__((vector_size(16)));

// 8 elements of 16 bits that lie side by side.
template <bool kBf16>
inline Float8 widen(const void* data) {
    Half8 bits;
    std::memcpy(&bits, data, sizeof bits);
    Float8 values;
    if (kBf16) {
        const Word8 words = __builtin_convertvector(bits, Word8) << 16;
        std::memcpy(&values, &words, sizeof values);
    } else {
#ifdef __F16C__
        __m128i packed;
        std::memcpy(&packed, &bits, sizeof packed);
        const __m256 wide = _mm256_cvtph_ps(packed);
        std::memcpy(&values, &wide, sizeof values);
#else
        for (int e = 0; e < 8; ++e) values[e] = f16_to_float(bits[e]);
#endif
    }
    return values;
}

// rows[i][j] becomes rows[j][i].
inline void transpose(Float8* rows) {
    Float8 pairs[8], quads[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        pairs[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; ++j) {
            quads[i + j] = __builtin_shufflevector(pairs[i + j], pairs[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            quads[i + j + 2] = __builtin_shufflevector(pairs[i + j], pairs[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    }
    for (int j = 0; j < 4; ++j) {
        rows[j] = __builtin_shufflevector(quads[j], quads[j + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        rows[j + 4] = __builtin_shufflevector(quads[j], quads[j + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

}  // namespace ptx_emulator
