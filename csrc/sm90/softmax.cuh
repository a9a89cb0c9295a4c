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

    // For a block of scores without a mask: probabilities under the maximum so far, without a look at the new scores'
    // own, which takes a third of the instructions of update() and all of its latency. Returns whether a row of this
    // warp may have outgrown its maximum (or holds NaN): then outgrown() is to follow. block_sum is to be added
    // to row_sum after that.
    template <int kCount>
    __device__ __forceinline__ bool exponentiate(float (&s_frag)[kCount], float scale_log2,
                                                 float (&block_sum)[2]) const {
        bool fits = true;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float scaled_max = row_max[0][half] * scale_log2;
            float sums[2] = {0.f, 0.f};
#pragma unroll
            for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& score = s_frag[4 * i + 2 * half + c];
                    score = ptx::ex2_approx_ftz(fmaf(score, scale_log2, -scaled_max));
                    sums[c] += score;
                }
            }
            block_sum[half] = sums[0] + sums[1];
            fits = fits && block_sum[half] <= kLargest;
        }
        return !__all_sync(kAllLanes, fits);
    }

    // What a row does depends on that row alone. A row whose largest probability is more than kLargest takes on a new
    // maximum: that probability's score, and the probabilities are scaled down. Where they have left the range of
    // numbers (the row saw no key before, or its scores have grown by more than 64 in base 2), score_again(lost) brings
    // the scores back, for the rows in `lost`. rescale is for what has been accumulated so far.
    template <int kCount, class ScoreAgain>
    __device__ __forceinline__ void outgrown(float (&p_frag)[kCount], float scale_log2, float (&block_sum)[2],
                                             float (&rescale)[2], const ScoreAgain& score_again) {
        constexpr float kLost = 0x1p64f;
        float largest[2], score_max[2] = {};
        bool lost[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            largest[half] = block_max(p_frag, half);
            lost[half] = largest[half] > kLost;
        }
        if (__any_sync(kAllLanes, lost[0] || lost[1])) {
            score_again(lost);
#pragma unroll
            for (int half = 0; half < 2; ++half) score_max[half] = block_max(p_frag, half);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rescale[half] = 1.f;
            if (!(largest[half] > kLargest)) continue;
            const float scaled_old = row_max[0][half] * scale_log2;
            row_max[0][half] = lost[half] ? fmaxf(row_max[0][half], score_max[half])
                                          : row_max[0][half] + log2f(largest[half]) / scale_log2;
            const float scaled_max = row_max[0][half] * scale_log2;
            rescale[half] = ptx::ex2_approx_ftz(scaled_old - scaled_max);
            row_sum[0][half] *= rescale[half];
            block_sum[half] = 0.f;
#pragma unroll
            for (int i = 0; i < kCount / 2; ++i) {
                float& p = p_frag[i / 2 * 4 + 2 * half + i % 2];
                p = lost[half] ? ptx::ex2_approx_ftz(fmaf(p, scale_log2, -scaled_max)) : p * rescale[half];
                block_sum[half] += p;
            }
        }
    }

    __device__ __forceinline__ void add(const float (&block_sum)[2]) {
        row_sum[0][0] += block_sum[0];
        row_sum[0][1] += block_sum[1];
    }

  private:
    static constexpr float kLag = 8.f;  // in base 2, as in OnlineSoftmax::update
    // Far below what fp16 holds. Rows that see few keys of their first block often meet scores beyond kLag in the next.
    static constexpr float kLargest = 0x1p14f;

    // Of a whole row; passes over NaN. Every lane takes part.
    template <int kCount>
    __device__ __forceinline__ static float block_max(const float (&s_frag)[kCount], int half) {
        float maximum = minus_infinity();
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) maximum = fmaxf(maximum, s_frag[i / 2 * 4 + 2 * half + i % 2]);
        return quad_max(maximum);
    }
};

}  // namespace flash_ext::sm90
