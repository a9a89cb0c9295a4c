// What happens to a block of scores between the two products, in the accumulator layout of softmax.cuh.
#pragma once

#include <stdint.h>

#include "core/mask.cuh"
#include "core/mma.cuh"
#include "core/numeric.cuh"
#include "core/philox.cuh"
#include "core/tanh.cuh"
#include "ptx/ldmatrix.cuh"
#include "sm90/panel.cuh"

namespace flash_ext::sm90 {

// A thread's place in its warpgroup's block of scores.
struct Place {
    int row;     // of half 0, from the start of the sequence; half 1 is 8 rows on
    int column;  // of element 0, within the block
};

// Of a row's elements, in the order of their columns, how many lie left of `limit` (from the thread's first column).
__device__ __forceinline__ int elements_before(int limit) {
    return limit <= 0 ? 0 : limit / 8 * 2 + min(limit % 8, 2);
}

// Which of 32 elements of a row are visible, from the `word`-th 32 on. Rows from row_end on see no key. first_key is
// that of element 0.
__device__ __forceinline__ uint32_t visible_elements(const Mask& mask, int row, int row_end, int first_key, int word) {
    KeyRange keys = mask.visible(row);
    if (row >= row_end) keys.end = 0;
    const int begin = elements_before(keys.begin - first_key), end = elements_before(keys.end - first_key);
    return low_bits(end - 32 * word) & ~low_bits(begin - 32 * word);
}

// -inf where a row does not see a key. A word holds the visibility of 32 elements (128 keys), so that an element costs
// one predicated move, whatever the bounds.
template <int kCount>
__device__ __forceinline__ void mask_scores(float (&s_frag)[kCount], const Mask& mask, Place place, int first_key,
                                            int row_end = INT32_MAX) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int word = 0; word < (kCount / 2 + 31) / 32; ++word) {
            const uint32_t visible =
                visible_elements(mask, place.row + half * 8, row_end, first_key + place.column, word);
#pragma unroll
            for (int bit = 0; bit < 32 && 32 * word + bit < kCount / 2; ++bit) {
                const int element = 32 * word + bit;
                if ((visible >> bit & 1) == 0) s_frag[element / 2 * 4 + 2 * half + element % 2] = minus_infinity();
            }
        }
    }
}

// A warp's raw scores once more, without wgmma, which would need the whole warpgroup, and without the block of K in
// shared memory, which may have been overwritten: K comes from global memory. Q: 16 rows in swizzled panels
// (panel.cuh). Only the rows (of half 0, half 1) asked for are replaced. Not meant to be fast.
template <DataType kType, int kQkSteps, int kBlockN>
__device__ __forceinline__ void multiply_again(float (&s_frag)[kBlockN / 2], const bool (&rows)[2], uint32_t q_smem,
                                               uint32_t q_panel_bytes, const char* k, int64_t k_row_bytes, int columns,
                                               int lane) {
    constexpr int kPanelSteps = kPanelColumns / 16;
    k += lane / 4 * k_row_bytes;
#pragma unroll
    for (int n = 0; n < kBlockN / 8; ++n) {
        float products[4] = {};
#pragma unroll 1
        for (int step = 0; step < kQkSteps; ++step) {
            uint32_t q_frag[4], k_frag[2];
            ptx::ldmatrix_x4(q_frag, q_smem + step / kPanelSteps * q_panel_bytes +
                                         swizzled_chunk(lane % 16, step % kPanelSteps * 2 + lane / 16));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = step * 16 + i * 8 + lane % 4 * 2;
                k_frag[i] = column < columns ? *reinterpret_cast<const uint32_t*>(k + column * 2) : 0u;
            }
            mma<kType>(products, q_frag, k_frag[0], k_frag[1]);
        }
        k += 8 * k_row_bytes;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                if (rows[half]) s_frag[4 * n + 2 * half + c] = products[2 * half + c];
            }
        }
    }
}

// Raw products to scores in base 2: scale, softcap, bias.
template <int kCount>
__device__ __forceinline__ void transform_scores(float (&s_frag)[kCount], float scale_log2, float inner_scale,
                                                 float softcap_log2, float slope_log2, Place place, int shift,
                                                 int first_key) {
    if (softcap_log2 > 0.f) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) s_frag[i] = softcap_log2 * tanh_ex2(s_frag[i] * inner_scale);
    } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) s_frag[i] *= scale_log2;
    }
    if (slope_log2 != 0.f) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float distance = static_cast<float>(place.row + half * 8 + shift - (first_key + place.column));
#pragma unroll
            for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    s_frag[4 * i + 2 * half + c] -= slope_log2 * fabsf(distance - static_cast<float>(i * 8 + c));
                }
            }
        }
    }
}

// 0 where dropout drops a probability. first_key is a multiple of 16.
template <int kCount>
__device__ __forceinline__ void drop_scores(float (&p_frag)[kCount], PhiloxKey key, uint32_t threshold, Place place,
                                            int first_key, int batch, int head) {
    constexpr bool kWhole = kCount % 16 == 0;  // blocks of 32 keys: one call serves 8 elements of a row
    constexpr int kElements = kWhole ? 8 : 4;  // else two calls' halves meet in a block
    constexpr int kKeys = 4 * kElements;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int group = 0; group < kCount / 2 / kElements; ++group) {
            const int group_key = first_key + group * kKeys;
            uint4 words = philox4x32_7(key, group_key / 32 * 4 + place.column / 2, place.row + half * 8, batch, head);
            if (!kWhole && group_key % 32 != 0) words = {words.z, words.w, words.z, words.w};
#pragma unroll
            for (int element = 0; element < kElements; ++element) {
                if (!dropout_keeps(words, element, threshold)) {
                    p_frag[(group * kElements + element) / 2 * 4 + 2 * half + element % 2] = 0.f;
                }
            }
        }
    }
}

}  // namespace flash_ext::sm90
