// What becomes of scores and their gradients in the sm100 backward, a key and consecutive queries to a thread.
#pragma once

#include <stdint.h>

#include "core/mask.cuh"
#include "core/numeric.cuh"
#include "core/philox.cuh"
#include "core/softmax.cuh"
#include "core/tanh.cuh"
#include "ptx/ex2.cuh"
#include "sm100/backward_shape.cuh"
#include "sm100/exponential.cuh"

namespace flash_ext::sm100 {

constexpr int kScoresAtOnce = 32;  // queries whose registers are worked on together

// Which of 64 queries dropout keeps for a key, a bit each. A call of the generator serves 8 keys, those of lanes
// 2 a, 2 a + 1 and 8, 16 and 24 further, which share the calls and pass on the bits. All lanes of a warp, whose keys
// begin at a multiple of 32.
__device__ __forceinline__ void kept_queries(uint32_t (&kept)[2], PhiloxKey philox, uint32_t threshold, int key,
                                             int first_query, int batch, int head) {
    constexpr int kSharers = 8;
    const int lane = key % 32, sharer = lane / 8 * 2 + lane % 2, first_lane = lane % 8 / 2 * 2;
    uint32_t bits[2] = {};  // byte t: of query `sharer` + 8 t, a bit for each sharer
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        const uint4 words =
            philox4x32_7(philox, key / 32 * 4 + lane % 8 / 2, first_query + sharer + 8 * t, batch, head);
#pragma unroll
        for (int element = 0; element < kSharers; ++element) {
            if (dropout_keeps(words, element, threshold)) bits[t / 4] |= 1u << (t % 4 * 8 + element);
        }
    }
    kept[0] = kept[1] = 0;
#pragma unroll
    for (int other = 0; other < kSharers; ++other) {
#pragma unroll
        for (int word = 0; word < 2; ++word) {
            const uint32_t theirs = __shfl_sync(kAllLanes, bits[word], first_lane + other / 2 * 8 + other % 2);
            kept[word] |= (theirs >> sharer & 0x01010101u) << other;
        }
    }
}

// What the rich variant knows of a thread's key and 64 queries.
struct RichKey {
    uint32_t visible[2], kept[2];  // a bit for each query: whether it sees the key; whether dropout keeps it
    float slope_log2;
    float distance;  // from the diagonal to the key and the first query
};

// Raw products become P: in s, and packed.
template <DataType kDataType>
__device__ __forceinline__ void make_p(float* s, uint32_t (&p)[kScoresAtOnce / 2], const float4* lse,
                                       float scale_log2) {
    const float2 scale2 = both(-scale_log2);
#pragma unroll
    for (int i = 0; i < kScoresAtOnce; i += 4) {
        const float4 terms = lse[i / 4];
        const float2 low = __ffma2_rn(make_float2(s[i], s[i + 1]), scale2, make_float2(terms.x, terms.y));
        const float2 high = __ffma2_rn(make_float2(s[i + 2], s[i + 3]), scale2, make_float2(terms.z, terms.w));
        s[i] = ptx::ex2_approx_ftz(-low.x);
        s[i + 1] = ptx::ex2_approx_ftz(-low.y);
        s[i + 2] = ptx::ex2_approx_ftz(-high.x);
        s[i + 3] = ptx::ex2_approx_ftz(-high.y);
        p[i / 2] = pack<kDataType>(s[i], s[i + 1]);
        p[i / 2 + 1] = pack<kDataType>(s[i + 2], s[i + 3]);
    }
}

// The same with all that scores may go through. s gets P times the derivative of the softcap; p is P as it multiplies
// dO, 0 where dropped. column: of s[0].
template <DataType kDataType>
__device__ __forceinline__ void make_p_rich(float* s, uint32_t (&p)[kScoresAtOnce / 2],
                                            const BackwardArguments& arguments, const RichKey& rich, int column,
                                            const float4* lse) {
    const uint32_t visible = rich.visible[column / 32], kept = rich.kept[column / 32];
#pragma unroll
    for (int i = 0; i < kScoresAtOnce; i += 4) {
        const float4 row_terms = lse[i / 4];
        const float terms[4] = {row_terms.x, row_terms.y, row_terms.z, row_terms.w};
        float chain[4], multiplied[4];
        if (arguments.softcap_log2 > 0.f) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float t = tanh_ex2(s[i + c] * arguments.inner_scale);
                s[i + c] = t * arguments.softcap_log2;
                chain[c] = fmaf(-t, t, 1.f);
            }
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                s[i + c] *= arguments.scale_log2;
                chain[c] = 1.f;
            }
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            float score = s[i + c];
            if (rich.slope_log2 != 0.f) {
                score -= rich.slope_log2 * fabsf(rich.distance - static_cast<float>(column + i + c));
            }
            float exponential = ptx::ex2_approx_ftz(score - terms[c]);
            if ((visible >> (i + c) & 1) == 0) exponential = 0.f;
            s[i + c] = exponential * chain[c];
            multiplied[c] = kept >> (i + c) & 1 ? exponential : 0.f;
        }
        p[i / 2] = pack<kDataType>(multiplied[0], multiplied[1]);
        p[i / 2 + 1] = pack<kDataType>(multiplied[2], multiplied[3]);
    }
}

__device__ __forceinline__ RichKey make_rich(const BackwardArguments& arguments, const volatile BackwardWork& work,
                                             int head, int first, int key, KeyRange columns, int shift) {
    const ForwardParams& attention = arguments.params.attention;
    RichKey rich;
    rich.slope_log2 = 0.f;
    if (attention.alibi_slopes != nullptr) {
        rich.slope_log2 = attention.alibi_slopes[work.batch * attention.alibi_stride_batch + head] * kLog2E;
    }
    rich.distance = static_cast<float>(work.begin + key + shift - first);
#pragma unroll
    for (int word = 0; word < 2; ++word) {
        rich.visible[word] = low_bits(columns.end - 32 * word) & ~low_bits(columns.begin - 32 * word);
        rich.kept[word] = ~0u;
    }
    if (attention.rng_state != nullptr && attention.dropout_threshold > 0) {
        kept_queries(rich.kept, philox_key(attention.rng_state), attention.dropout_threshold, work.begin + key, first,
                     work.batch, head);
    }
    return rich;
}

// s, P of some queries (times what the derivative of the softcap makes of it), and dP become dS, packed.
template <DataType kDataType>
__device__ __forceinline__ void make_ds(const float* s, const float (&dp)[kScoresAtOnce], uint32_t* ds,
                                        const float4* delta) {
#pragma unroll
    for (int i = 0; i < kScoresAtOnce; i += 4) {
        const float4 terms = delta[i / 4];
        float2 low = __ffma2_rn(make_float2(terms.x, terms.y), both(-1.f), make_float2(dp[i], dp[i + 1]));
        float2 high = __ffma2_rn(make_float2(terms.z, terms.w), both(-1.f), make_float2(dp[i + 2], dp[i + 3]));
        low = __fmul2_rn(make_float2(s[i], s[i + 1]), low);
        high = __fmul2_rn(make_float2(s[i + 2], s[i + 3]), high);
        ds[i / 2] = pack<kDataType>(low.x, low.y);
        ds[i / 2 + 1] = pack<kDataType>(high.x, high.y);
    }
}

}  // namespace flash_ext::sm100
