// ex2: powers of two on the special function unit.
#pragma once

namespace flash_ext::ptx {

// PTX ISA 9.7.3.21 (ex2.approx.ftz.f32). 2^x, relative error at most 2^-22; 2^-inf is +0.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace flash_ext::ptx
