// Powers of two, two at a time: on the special function unit, whose 16 a cycle and SM are what bounds the softmax of
// compute capability 10.0, or on the multiply-add pipe (core/exp2_polynomial.cuh).
#pragma once

#include <stdint.h>

#include "core/exp2_polynomial.cuh"
#include "ptx/ex2.cuh"
#include "ptx/max.cuh"

namespace flash_ext::sm100 {

__device__ __forceinline__ float2 both(float value) {
    return make_float2(value, value);
}

__device__ __forceinline__ float2 exp2_unit(float2 x) {
    return make_float2(ptx::ex2_approx_ftz(x.x), ptx::ex2_approx_ftz(x.y));
}

// The same on the multiply-add pipe.
__device__ __forceinline__ float2 exp2_polynomial(float2 x) {
    using P = Exp2Polynomial;
    x = make_float2(ptx::max_nan(x.x, P::kLeast), ptx::max_nan(x.y, P::kLeast));
    const float2 shifted = __fadd2_rn(x, both(P::kRound));
    const float2 whole = __fadd2_rn(shifted, both(-P::kRound));
    const float2 f = __ffma2_rn(whole, both(-1.f), x);
    float2 p = __ffma2_rn(both(P::kCoefficient4), f, both(P::kCoefficient3));
    p = __ffma2_rn(p, f, both(P::kCoefficient2));
    p = __ffma2_rn(p, f, both(P::kCoefficient1));
    p = __ffma2_rn(p, f, both(1.f));
    return __fmul2_rn(p, make_float2(P::power_of_two(shifted.x), P::power_of_two(shifted.y)));
}

}  // namespace flash_ext::sm100
