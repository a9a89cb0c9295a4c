// Special registers.
#pragma once

#include <stdint.h>

namespace flash_ext::ptx {

// PTX ISA 10.1 (%tid.x). Like threadIdx.x, but read anew at each use: what is computed from it is not kept in registers
// across a loop.
__device__ __forceinline__ int32_t tid_x() {
    int32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

}  // namespace flash_ext::ptx
