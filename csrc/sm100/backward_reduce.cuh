// The warpgroup of the sm100 backward that adds dQ to the scratch. A warp has 32 rows (in a pair, 32 of the CTA's 64,
// and half of their columns) and goes its own way: tensor memory -> registers -> shared memory -> bulk reduction, 32
// columns at a time.
#pragma once

#include <stdint.h>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/mask.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/memory.cuh"
#include "ptx/tcgen05.cuh"
#include "sm100/backward_shape.cuh"
#include "sm100/tensor_memory.cuh"

namespace flash_ext::sm100 {

template <class Shape>
struct BackwardReduce : Shape {
    using Shape::kBlockM, Shape::kBlockN, Shape::kHeadDim, Shape::kDqColumn, Shape::kDqOffset;
    using Shape::kCtasOfTile, Shape::kDqColumns;
    using Shape::kSlices, Shape::kSliceColumns, Shape::kSliceBytes, Shape::kSliceBuffers;
    using typename Shape::Control, typename Shape::Transfer;

    static constexpr int kAtOnce = 2;  // slices in registers
    static_assert(kSliceBuffers == 1 || kSliceBuffers == 2);
    static constexpr int kWarps = 4 * kCtasOfTile;  // that add to a query tile

    // One warp. PTX ISA 9.7.16.10.5: M 128 of a pair has 64 rows in each CTA, and the upper half of their columns in
    // lanes 64-127.
    __device__ __forceinline__ static void run(const BackwardArguments& arguments, unsigned char* smem,
                                               Control& control, int warp, int lane) {
        const volatile BackwardWork& work = control.work;
        const bool deterministic = arguments.scratch.turns != nullptr;
        const uint32_t dq_tmem = own_lanes(kDqColumn, warp);
        unsigned char* const slices_smem = smem + kDqOffset + warp * kSliceBuffers * kSliceBytes;
        const int part_number = kCtasOfTile == 1 ? warp : (Transfer::rank() * 2 + warp % 2) * 2 + warp / 2;
        uint32_t phase = 0, buffer = 0;
#pragma unroll 1
        for (sm90::ProducerWalk walk(arguments, work); walk.left > 0; walk.advance(work)) {
            const int64_t tile = sm90::scratch_tile(arguments, work, walk.head, walk.block);
            float* const part = arguments.scratch.dq + tile * (kBlockM * kHeadDim) + part_number * (32 * kDqColumns);
            Barrier::wait(&control.dq_full, phase);
            phase ^= 1;
            ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
            for (int begin = 0; begin < kSlices; begin += kAtOnce) {
                // dQ is handed back before its last slices wait for the bulk reductions of the ones before.
                uint32_t dq[kAtOnce][kSliceColumns];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    if (begin + i < kSlices) load_columns<kSliceColumns>(dq[i], dq_tmem + (begin + i) * kSliceColumns);
                }
                // Values are there when they are needed (PTX ISA 9.7.16.6.4.5); the wait is for who overwrites dQ.
                if (begin + kAtOnce >= kSlices) {
                    wait_loads();
                    ptx::tcgen05_fence_before_thread_sync();
                    __syncwarp();
                    if (lane == 0) Transfer::arrive(&control.dq_empty);
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    if (begin + i >= kSlices) continue;
                    if (lane == 0) cute::tma_store_wait<kSliceBuffers - 1>();  // what this buffer held has been read
                    __syncwarp();
                    unsigned char* const slice_smem = slices_smem + buffer * kSliceBytes;
                    if (kSliceBuffers == 2) buffer ^= 1;
#pragma unroll
                    for (int j = 0; j < kSliceColumns / 4; ++j) {
                        reinterpret_cast<uint4*>(slice_smem)[j * 32 + lane] = {dq[i][4 * j], dq[i][4 * j + 1],
                                                                               dq[i][4 * j + 2], dq[i][4 * j + 3]};
                    }
                    cutlass::arch::fence_view_async_shared();  // the bulk reduction reads through the async proxy
                    __syncwarp();
                    if (lane == 0) {
                        if (deterministic && begin + i == 0) wait_turn(arguments, work, tile, walk.block);
                        ptx::cp_reduce_async_bulk_add_f32(part + (begin + i) * (kSliceBytes / 4),
                                                          cute::cast_smem_ptr_to_uint(slice_smem), kSliceBytes,
                                                          static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST));
                        cute::tma_store_arrive();
                    }
                }
            }
            if (deterministic && lane == 0) {
                ptx::cp_async_bulk_wait_group<0>();  // the additions are made, not only their source read
                ptx::red_release_gpu_add(arguments.scratch.turns + tile, 1);
            }
        }
        if (lane == 0) ptx::cp_async_bulk_wait_group<0>();
    }

  private:
    // Until the key blocks before this one have added to the query tile, each with all its warps.
    __device__ __forceinline__ static void wait_turn(const BackwardArguments& arguments,
                                                     const volatile BackwardWork& work, int64_t tile, int block) {
        const Mask mask{arguments.bounds, work.keys_used - work.queries_used, work.keys_used};
        const int begin = block * kBlockM, end = min(begin + kBlockM, static_cast<int>(work.queries_used));
        const int mine = (work.begin / kBlockN - key_blocks(mask, begin, end, kBlockN).begin) * kWarps;
        while (ptx::ld_acquire_gpu(arguments.scratch.turns + tile) < mine) {
        }
        ptx::fence_proxy_async_global();  // this thread's reductions come behind theirs
    }
};

}  // namespace flash_ext::sm100
