// What every launcher does on the host.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

namespace flash_ext {

// Allows a kernel its dynamic shared memory, once per device. Thread-safe (setting it twice does no harm) and legal
// while a stream is being captured.
struct SharedMemoryOptIn {
    static constexpr int kMaxDevices = 64;
    bool done[kMaxDevices];

    cudaError_t ensure(const void* kernel, int32_t device, int64_t bytes) {
        const bool remember = device >= 0 && device < kMaxDevices;
        if (remember && __atomic_load_n(&done[device], __ATOMIC_ACQUIRE)) return cudaSuccess;
        const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
        if (error == cudaSuccess && remember) __atomic_store_n(&done[device], true, __ATOMIC_RELEASE);
        return error;
    }
};

// A grid of `blocks` blocks, in rows of up to 2^30 where one row is not enough: the kernel's position is
// blockIdx.y * gridDim.x + blockIdx.x, and positions from `blocks` on have nothing to do.
inline dim3 linear_grid(int64_t blocks) {
    constexpr int64_t kMaxRow = INT32_MAX, kRow = int64_t{1} << 30;
    if (blocks <= kMaxRow) return dim3(static_cast<unsigned>(blocks));
    return dim3(static_cast<unsigned>(kRow), static_cast<unsigned>((blocks + kRow - 1) / kRow));
}

}  // namespace flash_ext
