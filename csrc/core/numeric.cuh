// The 16-bit types as the kernels see them: pairs packed into 32-bit registers.
#pragma once

#include <stdint.h>

#include "params.h"
#include "ptx/cvt.cuh"

namespace flash_ext {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float minus_infinity() {
    return __int_as_float(0xff800000);
}

// Two fp32 values rounded to kType; low is the element at the lower address.
template <DataType kType>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    static_assert(kType == DataType::kFloat16 || kType == DataType::kBFloat16);
    if constexpr (kType == DataType::kFloat16) {
        return ptx::cvt_rn_f16x2_f32(high, low);
    } else {
        return ptx::cvt_rn_bf16x2_f32(high, low);
    }
}

// Element index of an array whose type is known at run time only (sinks).
__device__ __forceinline__ float load_as_float(const void* data, DataType type, int64_t index) {
    if (type == DataType::kFloat32) return static_cast<const float*>(data)[index];
    const uint16_t bits = static_cast<const uint16_t*>(data)[index];
    return type == DataType::kFloat16 ? ptx::cvt_f32_f16(bits) : __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

}  // namespace flash_ext
