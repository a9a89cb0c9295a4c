// cp.async: 16-byte copies from global to shared memory that bypass registers.
#pragma once

#include <stdint.h>

namespace flash_ext::ptx {

// PTX ISA 9.7.9.25.3.1 (cp.async), .cg: through L2 only. Copies the first source_bytes (0..16) of 16 bytes and fills
// the rest with zeros; with 0 the source is not read. Both addresses are 16-byte aligned.
__device__ __forceinline__ void cp_async_cg_16(uint32_t destination_smem, const void* source, uint32_t source_bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination_smem), "l"(source),
                 "r"(source_bytes)
                 : "memory");
}

// The same for 8 bytes, .ca: through L1. 8-byte aligned.
__device__ __forceinline__ void cp_async_ca_8(uint32_t destination_smem, const void* source, uint32_t source_bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(destination_smem), "l"(source), "r"(source_bytes)
                 : "memory");
}

// PTX ISA 9.7.9.25.3.2 (cp.async.commit_group). Makes one group of this thread's copies since the last commit.
__device__ __forceinline__ void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// PTX ISA 9.7.9.25.3.3 (cp.async.wait_group). Waits until at most kPending of this thread's groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flash_ext::ptx
