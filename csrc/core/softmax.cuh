// Online softmax in base 2 over score fragments in the m16n8 accumulator layout (Milakov, Gimelshein 2018; deferred
// normalisation as in FlashAttention-2, arXiv 2307.08691, section 3.1).
//
// A thread of a quad holds 2 of every 8 columns of rows l / 4 and l / 4 + 8 of each of kMTiles 16-row tiles. Row maxima
// are those of the whole row; row sums are this thread's part until finish() adds them up.
#pragma once

#include <stdint.h>

#include "core/numeric.cuh"
#include "ptx/ex2.cuh"

namespace flash_ext {

constexpr uint32_t kAllLanes = 0xffffffffu;

// Over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
    return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}

__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(kAllLanes, value, 1);
    return value + __shfl_xor_sync(kAllLanes, value, 2);
}

// What a row ends with.
struct RowResult {
    float out_scale;  // multiplies the accumulated P V; 0 for a row that saw no key
    float lse;        // natural logarithm
    bool has_keys;    // false: the output is 0 whatever was accumulated
};

// Lets the sink (natural-unit logit; has_sink false: none) take part, normalises. row_max: of the scores before
// scaling.
__device__ __forceinline__ RowResult finish_row(float row_max, float sum, float scale_log2, bool has_sink, float sink) {
    float maximum = row_max * scale_log2;
    // The maximum passes over NaN, the sum does not: a row of NaN alone has keys.
    const bool has_keys = row_max != minus_infinity() || sum != 0.f;
    float factor = 1.f;
    if (has_sink) {
        const float sink_log2 = sink * kLog2E;
        const float larger = fmaxf(maximum, sink_log2);
        if (larger != minus_infinity()) {
            factor = ptx::ex2_approx_ftz(maximum - larger);
            sum = sum * factor + ptx::ex2_approx_ftz(sink_log2 - larger);
            maximum = larger;
        }
    }
    if (sum == 0.f) return {0.f, minus_infinity(), false};
    return {has_keys ? factor / sum : 0.f, (maximum + log2f(sum)) * kLn2, has_keys};
}

template <int kMTiles>
struct OnlineSoftmax {
    float row_max[kMTiles][2];  // of the scores before scaling
    float row_sum[kMTiles][2];  // of exp2(scale_log2 * (score - row_max)); row_max may lag

    __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                row_max[m][half] = minus_infinity();
                row_sum[m][half] = 0.f;
            }
        }
    }

    // Turns scores into unnormalised probabilities exp2(scale_log2 * (score - row_max)), scale_log2 > 0. Returns
    // whether what a row of this warp has accumulated so far is to be multiplied by something else than 1; rescale
    // holds that. kMasked: a row may have seen no key so far.
    //
    // row_max follows the row's true maximum only when that has grown by more than 2^kLag in the result: until then
    // probabilities are at most 2^kLag instead of 1, which costs no accuracy in floating point (FlashAttention-4, arXiv
    // 2603.05451), and almost all blocks leave the accumulated output alone. A row decides for itself.
    template <bool kMasked, int kNTiles>
    __device__ __forceinline__ bool update(float (&s_frag)[kMTiles][kNTiles][4], float scale_log2,
                                           float (&rescale)[kMTiles][2]) {
        constexpr float kLag = 8.f;
        bool grows = false;
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float maximum = row_max[m][half];
#pragma unroll
                for (int n = 0; n < kNTiles; ++n) {
                    maximum = fmaxf(maximum, fmaxf(s_frag[m][n][2 * half], s_frag[m][n][2 * half + 1]));
                }
                maximum = quad_max(maximum);
                rescale[m][half] = 1.f;
                if ((maximum - row_max[m][half]) * scale_log2 > kLag) {  // false while the row has seen no key
                    rescale[m][half] = ptx::ex2_approx_ftz((row_max[m][half] - maximum) * scale_log2);
                    row_max[m][half] = maximum;
                    grows = true;
                }
                float scaled_max = row_max[m][half] * scale_log2;
                if (kMasked && row_max[m][half] == minus_infinity()) scaled_max = 0.f;
                float sum = row_sum[m][half] * rescale[m][half];
#pragma unroll
                for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
                    for (int c = 2 * half; c < 2 * half + 2; ++c) {
                        s_frag[m][n][c] = ptx::ex2_approx_ftz(fmaf(s_frag[m][n][c], scale_log2, -scaled_max));
                        sum += s_frag[m][n][c];
                    }
                }
                row_sum[m][half] = sum;
            }
        }
        return __any_sync(kAllLanes, grows);
    }

    // Adds up the row sum, lets the sink take part, normalises.
    __device__ __forceinline__ RowResult finish(int m, int half, float scale_log2, bool has_sink, float sink) const {
        return finish_row(row_max[m][half], quad_sum(row_sum[m][half]), scale_log2, has_sink, sink);
    }
};

}  // namespace flash_ext
