// Barriers and rings of buffers between producers and consumers.
#pragma once

#include <stdint.h>

#include <cutlass/arch/barrier.h>

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

// A value that is the same in all lanes, in a uniform register: what wgmma's descriptors and branches are best made of.
__device__ __forceinline__ int uniform(int value) {
    return __reduce_max_sync(kAllLanes, value);
}

}  // namespace flash_ext::sm90
