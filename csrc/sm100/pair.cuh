// Pairs of CTAs: two neighbours of a cluster whose tensor cores work as one. The one of rank 0 leads: it issues the
// products of both, and what the products wait for are barriers of its shared memory.
#pragma once

#include <stdint.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm100_tma.hpp>

#include "sm90/pipeline.cuh"

namespace flash_ext::sm100 {

// How copies from global memory report in a pair: to the leader's barrier, each CTA its own.
struct PairTransfer {
    using Copy = cute::SM100_TMA_2SM_LOAD_4D;
    __device__ __forceinline__ static int rank() { return static_cast<int>(cute::block_rank_in_cluster()); }
    __device__ __forceinline__ static void expect(uint64_t* barrier, uint32_t bytes) {
        sm90::TransactionBarrier::arrive_and_expect_tx(barrier, bytes, /*cta_id=*/0, /*pred=*/1);
    }
    __device__ __forceinline__ static void arrive(uint64_t* barrier) {
        sm90::Barrier::arrive(barrier, /*cta_id=*/0, /*pred=*/1);
    }
};

}  // namespace flash_ext::sm100
