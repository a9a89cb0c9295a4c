// cvt: conversions between fp32 and the 16-bit types, without the toolkit's half headers (they double the compile
// time).
#pragma once

#include <stdint.h>

namespace flash_ext::ptx {

// PTX ISA 9.7.9.21 (cvt.rn.f16x2.f32, cvt.rn.bf16x2.f32). Rounds to nearest even; low in bits 0..15.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_f32(float high, float low) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ uint32_t cvt_rn_bf16x2_f32(float high, float low) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// PTX ISA 9.7.9.21 (cvt.f32.f16). Exact.
__device__ __forceinline__ float cvt_f32_f16(uint16_t half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

}  // namespace flash_ext::ptx
