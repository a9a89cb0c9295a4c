// What happens to a row of scores between the two products, a row of consecutive keys to a thread.
#pragma once

#include <stdint.h>

#include "core/mask.cuh"
#include "core/numeric.cuh"
#include "core/philox.cuh"
#include "core/tanh.cuh"
#include "sm90/scores.cuh"

namespace flash_ext::sm100 {

// -inf where the row does not see a key. columns: those of the block that it sees. A word holds the visibility of 32
// keys, so that a key costs one predicated move, whatever the bounds.
template <int kCount>
__device__ __forceinline__ void mask_row(float (&s)[kCount], KeyRange columns) {
#pragma unroll
    for (int word = 0; word < kCount / 32; ++word) {
        const uint32_t visible = low_bits(columns.end - 32 * word) & ~low_bits(columns.begin - 32 * word);
#pragma unroll
        for (int bit = 0; bit < 32; ++bit) {
            if ((visible >> bit & 1) == 0) s[32 * word + bit] = minus_infinity();
        }
    }
}

// Raw products to scores in base 2: scale, softcap, bias. distance: from the first key to the row's diagonal.
template <int kCount>
__device__ __forceinline__ void transform_row(float (&s)[kCount], float scale_log2, float inner_scale,
                                              float softcap_log2, float slope_log2, int distance) {
    if (softcap_log2 > 0.f) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) s[i] = softcap_log2 * tanh_ex2(s[i] * inner_scale);
    } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) s[i] *= scale_log2;
    }
    if (slope_log2 != 0.f) {
        const auto first = static_cast<float>(distance);
#pragma unroll
        for (int i = 0; i < kCount; ++i) s[i] -= slope_log2 * fabsf(first - static_cast<float>(i));
    }
}

// Which of 32 keys dropout keeps, a bit each. first_key is a multiple of 32.
__device__ __forceinline__ uint32_t kept_keys(PhiloxKey key, uint32_t threshold, int first_key, int row, int batch,
                                              int head) {
    uint32_t kept = 0;
#pragma unroll
    for (int call = 0; call < 4; ++call) {  // serves two of every 8 keys
        const uint4 words = philox4x32_7(key, first_key / 32 * 4 + call, row, batch, head);
#pragma unroll
        for (int element = 0; element < 8; ++element) {
            const uint32_t bit = 1u << (element / 2 * 8 + 2 * call + element % 2);
            if (dropout_keeps(words, element, threshold)) kept |= bit;
        }
    }
    return kept;
}

}  // namespace flash_ext::sm100
