// Powers of two on the multiply-add pipe, for kernels whose softmax waits for the special function unit
// (FlashAttention-4, arXiv 2603.05451, section 3).
#pragma once

#include "ptx/max.cuh"

namespace flash_ext {

// 2^x for x <= 127 as 2^n 2^f with n = round(x), f in [-1/2, 1/2]. Relative error at most 2.9e-6, 0 where x is whole; 0
// below -127; NaN for NaN. Degree 3 (8e-5) would miss the bound on lse where one key dominates.
struct Exp2Polynomial {
    static constexpr float kLeast = -127.f;
    static constexpr float kRound = 12582912.f;  // 1.5 * 2^23: leaves round(x) in the low bits of the sum
    static constexpr float kCoefficient1 = 0.693124193358897f;
    static constexpr float kCoefficient2 = 0.24024098616719466f;
    static constexpr float kCoefficient3 = 0.05590642492336183f;
    static constexpr float kCoefficient4 = 0.009582852866843156f;

    // 2^n in the exponent field, 0 for n = -127; shifted: n in the low 9 bits.
    __device__ __forceinline__ static float power_of_two(float shifted) {
        return __int_as_float((__float_as_int(shifted) << 23) + 0x3f800000);
    }
};

__device__ __forceinline__ float exp2_polynomial(float x) {
    using P = Exp2Polynomial;
    x = ptx::max_nan(x, P::kLeast);
    const float shifted = x + P::kRound;
    const float f = x - (shifted - P::kRound);
    float p = fmaf(P::kCoefficient4, f, P::kCoefficient3);
    p = fmaf(p, f, P::kCoefficient2);
    p = fmaf(p, f, P::kCoefficient1);
    p = fmaf(p, f, 1.f);
    return p * P::power_of_two(shifted);
}

// Whether number `i` of every 16 is one of `polynomials` that are evenly spread.
__device__ constexpr bool is_polynomial(int i, int polynomials) {
    return (i % 16 + 1) * polynomials / 16 != i % 16 * polynomials / 16;
}

}  // namespace flash_ext
