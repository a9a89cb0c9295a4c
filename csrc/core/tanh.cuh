// tanh for the softcap. tanh.approx (relative error 2^-11) is too coarse for the accuracy rule, tanhf branches.
#pragma once

#include "core/numeric.cuh"
#include "ptx/ex2.cuh"

namespace flash_ext {

// One exponential; the series where that would cancel. Relative error about 3e-7.
__device__ __forceinline__ float tanh_ex2(float x) {
    const float square = x * x;
    float series = fmaf(square, 62.f / 2835.f, -17.f / 315.f);
    series = fmaf(square, series, 2.f / 15.f);
    series = fmaf(square, series, -1.f / 3.f);
    series = fmaf(square * x, series, x);
    const float far = 1.f - __fdividef(2.f, ptx::ex2_approx_ftz(x * (2.f * kLog2E)) + 1.f);
    return fabsf(x) < 0.3f ? series : far;
}

}  // namespace flash_ext
