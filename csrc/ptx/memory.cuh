// Plain loads and stores that C++ cannot name: shared memory by its 32-bit address, and ordered global memory.
#pragma once

#include <stdint.h>

namespace flash_ext::ptx {

// PTX ISA 9.7.9.8 (ld.shared.v4.f32). 16-byte aligned.
__device__ __forceinline__ void ld_shared_v4_f32(float (&values)[4], uint32_t address_smem) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
                 : "r"(address_smem)
                 : "memory");
}

// PTX ISA 9.7.9.11 (st.shared).
__device__ __forceinline__ void st_shared_b32(uint32_t address_smem, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address_smem), "r"(value) : "memory");
}

// PTX ISA 9.7.9.8 (ld.acquire.gpu). Later accesses of this thread stay behind it.
__device__ __forceinline__ int32_t ld_acquire_gpu(const int32_t* address) {
    int32_t value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// PTX ISA 9.7.9.11 (st.release.gpu). Earlier accesses of this thread are visible to whoever acquires the value.
__device__ __forceinline__ void st_release_gpu(int32_t* address, int32_t value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// PTX ISA 9.7.13.6 (red.release.gpu.add). Earlier accesses of this thread, and those it has seen through a barrier, are
// visible to whoever acquires the result.
__device__ __forceinline__ void red_release_gpu_add(int32_t* address, int32_t value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// PTX ISA 9.7.13.6 (red.relaxed.gpu.global.add.f32), if `execute`. Nothing comes back.
__device__ __forceinline__ void red_add_f32(float* address, float value, bool execute) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "@p red.relaxed.gpu.global.add.f32 [%0], %1;\n"
        "}" ::"l"(address),
        "f"(value), "r"(static_cast<int32_t>(execute))
        : "memory");
}

}  // namespace flash_ext::ptx
