// Barriers and rings of buffers between producers and consumers.
#pragma once

#include <stdint.h>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/softmax.cuh"

namespace flash_ext::sm90 {

using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

// A position in a ring of kSize buffers. Who fills waits for phase ^ 1, who reads for phase.
template <int kSize>
struct Ring {
    uint32_t index = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        if constexpr (kSize == 1) {
            phase ^= 1;
        } else {
            ++index;
            if (index == kSize) {
                index = 0;
                phase ^= 1;
            }
        }
    }
};

// How copies from global memory report: to a barrier of the CTA that issues them.
struct LocalTransfer {
    using Copy = cute::SM90_TMA_LOAD_4D;
    // Which part of a block of keys the CTA loads.
    __device__ __forceinline__ static int rank() { return 0; }
    // Announces bytes, as the one arrival of the phase.
    __device__ __forceinline__ static void expect(uint64_t* barrier, uint32_t bytes) {
        TransactionBarrier::arrive_and_expect_tx(barrier, bytes);
    }
    // The same without bytes.
    __device__ __forceinline__ static void arrive(uint64_t* barrier) { Barrier::arrive(barrier); }
};

// A value that is the same in all lanes, in a uniform register: what wgmma's descriptors and branches are best made of.
__device__ __forceinline__ int uniform(int value) {
    return __reduce_max_sync(kAllLanes, value);
}

}  // namespace flash_ext::sm90
