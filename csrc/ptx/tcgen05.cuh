// tcgen05: the products of sm100's tensor core and what orders them, each issued by the one thread that calls.
// (CUTLASS's wrappers elect a thread of the warp at every call; its loads, stores and allocations of tensor memory are
// used as they are.)
#pragma once

#include <stdint.h>

namespace flash_ext::ptx {

// PTX ISA 9.7.16.10.9.1 (tcgen05.mma.kind::f16). D = A B, or += with accumulate; A and B in shared memory, by matrix
// descriptors (9.7.16.4.1); shape: instruction descriptor (9.7.16.4.2). Asynchronous.
template <int kCtaGroup>
__device__ __forceinline__ void tcgen05_mma_f16_ss(uint32_t d_tmem, uint64_t a, uint64_t b, uint32_t shape,
                                                   bool accumulate) {
    static_assert(kCtaGroup == 1 || kCtaGroup == 2);
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::%5.kind::f16 [%0], %1, %2, %3, p;\n"
        "}" ::"r"(d_tmem),
        "l"(a), "l"(b), "r"(shape), "r"(static_cast<uint32_t>(accumulate)), "n"(kCtaGroup)
        : "memory");
}

// The same with A in tensor memory, two 16-bit values to a column, K-major.
template <int kCtaGroup>
__device__ __forceinline__ void tcgen05_mma_f16_ts(uint32_t d_tmem, uint32_t a_tmem, uint64_t b, uint32_t shape,
                                                   bool accumulate) {
    static_assert(kCtaGroup == 1 || kCtaGroup == 2);
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::%5.kind::f16 [%0], [%1], %2, %3, p;\n"
        "}" ::"r"(d_tmem),
        "r"(a_tmem), "l"(b), "r"(shape), "r"(static_cast<uint32_t>(accumulate)), "n"(kCtaGroup)
        : "memory");
}

// PTX ISA 9.7.16.12.1 (tcgen05.commit). One arrival at the mbarrier once all products that this thread has issued are
// complete; implies tcgen05.fence::before_thread_sync.
__device__ __forceinline__ void tcgen05_commit(uint32_t barrier_smem) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier_smem)
                 : "memory");
}

// The same for products of pairs of CTAs: an arrival at the mbarrier at this place in each CTA of the mask.
__device__ __forceinline__ void tcgen05_commit_multicast(uint32_t barrier_smem, uint16_t ctas) {
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
            barrier_smem),
        "h"(ctas)
        : "memory");
}

// PTX ISA 9.7.16.11.1 (tcgen05.fence). Earlier tcgen05 operations of this thread stay before, later ones behind, the
// barrier or mbarrier operation next to it.
__device__ __forceinline__ void tcgen05_fence_before_thread_sync() {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

__device__ __forceinline__ void tcgen05_fence_after_thread_sync() {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

}  // namespace flash_ext::ptx
