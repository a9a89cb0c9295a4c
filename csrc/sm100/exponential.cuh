// Powers of two, two at a time: on the special function unit, whose 16 a cycle and SM are what bounds the softmax of
// compute capability 10.0, or on the multiply-add pipe (FlashAttention-4, arXiv 2603.05451, section 3).
#pragma once

#include <stdint.h>

#include "ptx/ex2.cuh"
#include "ptx/max.cuh"

namespace flash_ext::sm100 {

__device__ __forceinline__ float2 both(float value) {
    return make_float2(value, value);
}

__device__ __forceinline__ float2 exp2_unit(float2 x) {
    return make_float2(ptx::ex2_approx_ftz(x.x), ptx::ex2_approx_ftz(x.y));
}

// 2^n in the exponent field, 0 for n = -127; shifted: n in the low 9 bits.
__device__ __forceinline__ float power_of_two(float shifted) {
    return __int_as_float((__float_as_int(shifted) << 23) + 0x3f800000);
}

// 2^x for x <= 127 as 2^n 2^f with n = round(x), f in [-1/2, 1/2]. Relative error at most 2.9e-6, 0 where x is whole; 0
// below -127; NaN for NaN. Degree 3 (8e-5) would miss the bound on lse where one key dominates.
__device__ __forceinline__ float2 exp2_polynomial(float2 x) {
    constexpr float kRound = 12582912.f;  // 1.5 * 2^23: leaves round(x) in the low bits of the sum
    x = make_float2(ptx::max_nan(x.x, -127.f), ptx::max_nan(x.y, -127.f));
    const float2 shifted = __fadd2_rn(x, both(kRound));
    const float2 whole = __fadd2_rn(shifted, both(-kRound));
    const float2 f = __ffma2_rn(whole, both(-1.f), x);
    float2 p = __ffma2_rn(both(0.009582852866843156f), f, both(0.05590642492336183f));
    p = __ffma2_rn(p, f, both(0.24024098616719466f));
    p = __ffma2_rn(p, f, both(0.693124193358897f));
    p = __ffma2_rn(p, f, both(1.f));
    return __fmul2_rn(p, make_float2(power_of_two(shifted.x), power_of_two(shifted.y)));
}

// Whether pair `pair` of every 16 is one of `polynomials` that are evenly spread.
__device__ constexpr bool is_polynomial(int pair, int polynomials) {
    return (pair % 16 + 1) * polynomials / 16 != pair % 16 * polynomials / 16;
}

}  // namespace flash_ext::sm100
