// max: maxima that C++ cannot name.
#pragma once

namespace flash_ext::ptx {

// PTX ISA 9.7.3.12 (max.NaN.f32). NaN if either operand is; fmaxf would return the other.
__device__ __forceinline__ float max_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

}  // namespace flash_ext::ptx
