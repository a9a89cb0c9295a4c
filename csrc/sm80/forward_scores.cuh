// Forward attention on sm80: what happens to a block of scores between the two products, in the accumulator layout of
// core/softmax.cuh.
#pragma once

#include <stdint.h>

#include "core/mask.cuh"
#include "core/numeric.cuh"
#include "core/philox.cuh"
#include "core/tanh.cuh"

namespace flash_ext::sm80 {

// This thread's place in its warp's tile of scores.
struct RowPlace {
    int row;     // of half 0 of m-tile 0, from the start of the sequence
    int column;  // of element 0 of n-tile 0, within the block
};

// Raw products to scores in base 2: scale, softcap, bias.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void transform_scores(float (&s_frag)[kMTiles][kNTiles][4], float softcap_log2,
                                                 float inner_scale, float scale_log2, float slope_log2, RowPlace place,
                                                 int shift, int first_key) {
    if (softcap_log2 > 0.f) {
#pragma unroll
        for (int i = 0; i < kMTiles * kNTiles * 4; ++i) {
            float& score = s_frag[i / 4 / kNTiles][i / 4 % kNTiles][i % 4];
            score = softcap_log2 * tanh_ex2(score * inner_scale);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kMTiles * kNTiles * 4; ++i) {
            s_frag[i / 4 / kNTiles][i / 4 % kNTiles][i % 4] *= scale_log2;
        }
    }
    if (slope_log2 != 0.f) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float distance =
                    static_cast<float>(place.row + m * 16 + half * 8 + shift - (first_key + place.column));
#pragma unroll
                for (int n = 0; n < kNTiles; ++n) {
                    s_frag[m][n][2 * half] -= slope_log2 * fabsf(distance - n * 8);
                    s_frag[m][n][2 * half + 1] -= slope_log2 * fabsf(distance - (n * 8 + 1));
                }
            }
        }
    }
}

template <int kMTiles, int kNTiles>
__device__ __forceinline__ void mask_scores(float (&s_frag)[kMTiles][kNTiles][4], const Mask& mask, RowPlace place,
                                            int first_key) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const KeyRange keys = mask.visible(place.row + m * 16 + half * 8);
            const int begin = keys.begin - first_key - place.column;
            const int end = keys.end - first_key - place.column;
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int key = n * 8 + c;
                    if (key < begin || key >= end) s_frag[m][n][2 * half + c] = minus_infinity();
                }
            }
        }
    }
}

template <int kMTiles, int kNTiles>
__device__ __forceinline__ void drop_scores(float (&p_frag)[kMTiles][kNTiles][4], PhiloxKey key, uint32_t threshold,
                                            RowPlace place, int first_key, int batch, int head) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = place.row + m * 16 + half * 8;
#pragma unroll
            for (int group = 0; group < kNTiles / 4; ++group) {
                const uint4 words =
                    philox4x32_7(key, (first_key / 32 + group) * 4 + place.column / 2, row, batch, head);
#pragma unroll
                for (int element = 0; element < 8; ++element) {
                    if (!dropout_keeps(words, element, threshold)) {
                        p_frag[m][group * 4 + element / 2][2 * half + element % 2] = 0.f;
                    }
                }
            }
        }
    }
}

}  // namespace flash_ext::sm80
