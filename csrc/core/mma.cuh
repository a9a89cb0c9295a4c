// mma.sync for the two 16-bit types.
#pragma once

#include <stdint.h>

#include "params.h"
#include "ptx/mma.cuh"

namespace flash_ext {

template <DataType kType>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kType == DataType::kFloat16) {
        ptx::mma_m16n8k16_f16(d, a, b0, b1);
    } else {
        ptx::mma_m16n8k16_bf16(d, a, b0, b1);
    }
}

}  // namespace flash_ext
