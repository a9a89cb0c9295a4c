// The exchange of dS between the two CTAs of a pair, for dQ. Each computes dS of its own keys and all queries, and dQ
// of its own queries sums over all keys, so half of dS goes into the other CTA.
//
//   scores: write dS beside its place | proxy fence | cp.async.bulk into the other CTA ----> ds_landed there
//   relay:  waits for ds_landed of its own CTA, arrives at ds_exchanged of rank 0 ---------> products
//
// The copy writes through the async proxy, as dQ reads, and its complete-tx at ds_landed is a release at cluster scope
// (PTX ISA 9.7.9.25.4.1): nothing that a thread of one CTA stores is read from the other's shared memory. The barrier
// of a copy lies in the CTA that it writes to, but the products of both wait in rank 0, hence the relay, whose wait and
// arrival have no .scope, as FlashAttention-4's have none (benchmarks/notes/sm100.md).
#pragma once

#include <stdint.h>

#include <cute/arch/cluster_sm90.hpp>

#include "ptx/cp_async_bulk.cuh"
#include "sm100/backward_shape.cuh"

namespace flash_ext::sm100 {

template <class Shape>
struct BackwardExchange : Shape {
    using Shape::kDsOffset, Shape::kDsPartBytes, Shape::kDsStagingOffset;
    using typename Shape::Control, typename Shape::Transfer;

    // One thread of a warp of scores, behind the proxy fences of all its lanes: the warp's 32 rows of dS go where they
    // belong. What they are read from and written to is free until dp_full of the next step, which follows dQ of this
    // one.
    __device__ __forceinline__ static void send(unsigned char* smem, Control& control, int warp) {
        constexpr uint32_t kBytes = kDsPartBytes / 4;
        const auto in_other = [](const void* address) {
            return cute::set_block_rank(cute::cast_smem_ptr_to_uint(address), Transfer::rank() ^ 1);
        };
        const unsigned char* const place = smem + kDsOffset + Transfer::rank() * kDsPartBytes + warp * kBytes;
        const unsigned char* const staged = smem + kDsStagingOffset + warp * kBytes;
        ptx::cp_async_bulk_to_cluster(in_other(place), cute::cast_smem_ptr_to_uint(staged), kBytes,
                                      in_other(&control.ds_landed));
    }

    // The relay, one thread of each CTA.
    __device__ __forceinline__ static void pass_on(Control& control) {
        const uint32_t steps = control.work.steps;
#pragma unroll 1
        for (uint32_t number = 0; number < steps; ++number) {
            TransactionBarrier::arrive_and_expect_tx(&control.ds_landed, kDsPartBytes);
            Barrier::wait(&control.ds_landed, number & 1);
            Transfer::arrive(&control.ds_exchanged);
        }
    }
};

}  // namespace flash_ext::sm100
