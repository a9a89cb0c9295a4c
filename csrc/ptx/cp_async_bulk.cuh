// cp.async.bulk: what cute/arch/copy_sm90_tma.hpp leaves out.
#pragma once

#include <stdint.h>

namespace flash_ext::ptx {

// PTX ISA 9.7.9.25.4.1 (cp.async.bulk, shared::cta to shared::cluster). Copies `bytes` (a multiple of 16) into another
// CTA of the cluster, and then takes them from what the mbarrier there expects.
__device__ __forceinline__ void cp_async_bulk_to_cluster(uint32_t destination_cluster, uint32_t source_smem,
                                                         uint32_t bytes, uint32_t barrier_cluster) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     destination_cluster),
                 "r"(source_smem), "r"(bytes), "r"(barrier_cluster)
                 : "memory");
}

// PTX ISA 9.7.9.25.4.2 (cp.reduce.async.bulk, .add.f32). Adds `bytes` (a multiple of 16) of shared memory to global
// memory, in this thread's bulk group. cache_hint: a policy of createpolicy.
__device__ __forceinline__ void cp_reduce_async_bulk_add_f32(float* address, uint32_t source_smem, uint32_t bytes,
                                                             uint64_t cache_hint) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;" ::"l"(address),
        "r"(source_smem), "r"(bytes), "l"(cache_hint)
        : "memory");
}

// PTX ISA 9.7.9.25.4.1 (cp.async.bulk, shared::cta to global). Writes `bytes` (a multiple of 16), likewise.
__device__ __forceinline__ void cp_async_bulk_store(float* address, uint32_t source_smem, uint32_t bytes,
                                                    uint64_t cache_hint) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(address),
                 "r"(source_smem), "r"(bytes), "l"(cache_hint)
                 : "memory");
}

// PTX ISA 9.7.9.27.2.2 (cp.async.bulk.wait_group). At most kPending of this thread's groups of bulk copies are not
// complete: what the others wrote is in place. (With .read, which cute has, their sources alone are free.)
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// PTX ISA 9.7.13.4 (fence.proxy.async.global). What this thread knows of global memory, be it of another CTA's bulk
// copies, comes before its own later ones: PTX ISA 8.9.5 orders accesses of one proxy within a CTA only, unfenced.
__device__ __forceinline__ void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace flash_ext::ptx
