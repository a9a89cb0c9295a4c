// Special registers.
#pragma once

#include <stdint.h>

namespace flash_ext::ptx {

// PTX ISA 10.1 (%tid). threadIdx.x, read anew at each call: what is derived from threadIdx.x itself the compiler
// computes once and keeps in registers, which a loop short of registers cannot afford.
__device__ __forceinline__ uint32_t tid_x() {
    uint32_t value;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(value));
    return value;
}

}  // namespace flash_ext::ptx
