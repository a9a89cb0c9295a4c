// Online softmax over the accumulator of a 64-row wgmma: a thread holds 2 of every 8 columns of two rows, 8 apart
// (element 4 i + 2 half + c is column 8 i + 2 (lane % 4) + c of row half).
#pragma once

#include <stdint.h>

#include "core/softmax.cuh"

namespace flash_ext::sm90 {

// A warpgroup's rows, two to a thread. What rows end with is core's finish().
struct WarpgroupSoftmax : OnlineSoftmax<1> {
    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            row_max[0][half] = minus_infinity();
            row_sum[0][half] = 0.f;
        }
    }

    // As OnlineSoftmax::update, with two independent chains for the maximum and for the sum of a row: with one warp per
    // scheduler and warpgroup, the latency of one chain would show.
    template <bool kMasked, int kCount>
    __device__ __forceinline__ bool update(float (&s_frag)[kCount], float scale_log2, float (&rescale)[2]) {
        constexpr float kLag = 8.f;
        bool grows = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int first = 2 * half;
            float maxima[2] = {row_max[0][half], fmaxf(s_frag[first], s_frag[first + 1])};
#pragma unroll
            for (int i = 1; i < kCount / 4; ++i) {
                maxima[i % 2] = fmaxf(maxima[i % 2], fmaxf(s_frag[4 * i + first], s_frag[4 * i + first + 1]));
            }
            const float maximum = quad_max(fmaxf(maxima[0], maxima[1]));
            rescale[half] = 1.f;
            if ((maximum - row_max[0][half]) * scale_log2 > kLag) {
                rescale[half] = ptx::ex2_approx_ftz((row_max[0][half] - maximum) * scale_log2);
                row_max[0][half] = maximum;
                grows = true;
            }
            float scaled_max = row_max[0][half] * scale_log2;
            if (kMasked && row_max[0][half] == minus_infinity()) scaled_max = 0.f;
            float sums[2] = {row_sum[0][half] * rescale[half], 0.f};
#pragma unroll
            for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& score = s_frag[4 * i + first + c];
                    score = ptx::ex2_approx_ftz(fmaf(score, scale_log2, -scaled_max));
                    sums[c] += score;
                }
            }
            row_sum[0][half] = sums[0] + sums[1];
        }
        return __any_sync(kAllLanes, grows);
    }
};

}  // namespace flash_ext::sm90
