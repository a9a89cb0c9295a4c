// Forward attention for sm100 (FlashAttention-4, arXiv 2603.05451).
//
// Persistent CTAs. A CTA has two query tiles of 128 rows that walk the same keys, from the last block to the first,
// half a step apart: while one is in its softmax the tensor core works for the other. Everything between the two
// products stays in tensor memory, where lane r holds row r of a tile, so that a thread has a row of scores to itself.
//
//   warps 0-3    softmax of query tile 0: S -> maximum, exponentials, row sums -> P
//   warps 4-7    softmax of query tile 1
//   warps 8-11   correction: O *= what the maximum grew by (seldom: it may lag by 2^8); O / row sum -> global memory
//   warp 12      issues all products                S0 | S1 | O0 += P0 V, S0' = Q0 K' | O1 += P1 V, S1' | ...
//   warp 13      one thread plans the next tile and loads its Q
//   warp 14      one thread loads K
//   warp 15      V, with zeros behind the last key (sm90/forward_producer.cuh says why)
//
// There is no epilogue warp: a thread of the correction has a row of O and writes it in whole sectors of 32 bytes, and
// a copy by TMA could not leave rows behind a sequence's end alone.
//
// | barrier         | arrives                        | waits          | a phase ends when | | plan_full[i]    | warp 13
// | everyone else  | plan i is written                               | | plan_empty[i]   | products, Q, K, V, other
// warps | warp 13        | no one needs plan i any more                    | | q_full[t]       | warp 13 and TMA |
// products       | Q of tile t has landed                          | | q_empty[t]      | commit | warp 13        | the
// last S of tile t is there                   | | k_full[s]       | warp 14 and TMA                | products       | K
// has landed                                    | | k_empty[s]      | commit                         | warp 14        |
// S of both tiles is there                        | | v_full[s]       | warp 15, and TMA unless V ends | products | V
// has landed, zero behind the last key          | | v_empty[s]      | commit                         | warp 15        |
// P V of both tiles is done                       | | v_landed        | warp 15 and TMA                | warp 15 | V
// has landed with whatever is behind it         | | s_full[t]       | commit                         | softmax t      |
// S is there, and all products before it are done | | p_full[t]       | softmax t, by warps            | products | the
// first 3/4 of P are there; S has been read   | | p_tail[t]       | softmax t, by warps            | products       | P
// is there                                      | | rescale_full[t] | softmax t, by warps            | correction     |
// rescale[t] is written (not for the first block) | | o_ready[t]      | correction, by warps           | products | O
// has the new scale, or has been written out    | | scale_full[t]   | softmax t, by warps            | correction     |
// out_scale[t] is written, after the last block   | | scale_empty[t]  | correction, by warps           | softmax t |
// out_scale[t] has been read                      | | o_full[t]       | commit                         | correction |
// the last P V of tile t is done                  |
//
// What needs no barrier: S of block j - 1 overwrites P of block j, whose product the same thread has issued before it
// (products of a CTA run in the order of their issue). rescale[t] of block j - 1 overwrites that of block j: s_full of
// j - 1 follows O += P V of j, which waited for o_ready, which follows the reading. The correction finds O += P V of
// j + 1 done when it rescales for j, for s_full of j covers it.
//
// Tensor memory (512 columns of 32 bits, all of it, in one allocation for the life of the CTA):
//
//   columns            holds                       from                           until
//   0      .. N        S of tile 0, fp32           its product                    softmax has loaded it (p_full)
//   0      .. N / 2    P of tile 0, 16-bit pairs   softmax, over S                O += P V
//   N      .. 2 N      S and P of tile 1           likewise
//   2 N    .. + d_v    O of tile 0, fp32           its first product              the correction has loaded it
//   (o_ready)
//   .. + d_v           O of tile 1                 likewise
//
// Shared memory: Q of two tiles, kStages of K, kVStages of V, in panels of 64 columns; rescale, out_scale, barriers,
// plans.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/tmem_allocator_sm100.hpp>

#include "core/launch.cuh"
#include "params.h"
#include "ptx/special_registers.cuh"
#include "ptx/tcgen05.cuh"
#include "sm100/forward_correction.cuh"
#include "sm100/forward_products.cuh"
#include "sm100/forward_shape.cuh"
#include "sm100/forward_softmax.cuh"
#include "sm100/forward_supply.cuh"
#include "sm90/forward_launch.cuh"

namespace flash_ext::sm100 {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArguments arguments);

template <DataType kType, int kHeadDim, int kHeadDimV, ForwardTile kTile, bool kRich>
struct Forward : ForwardShape<kType, kHeadDim, kHeadDimV, kTile, kRich> {
    using Shape = ForwardShape<kType, kHeadDim, kHeadDimV, kTile, kRich>;
    using Producer = sm90::ForwardProducer<Shape>;
    using Shape::kCorrectionGroup, Shape::kSupplyGroup, Shape::kControlOffset;
    using Shape::kSoftmaxRegisters, Shape::kCorrectionRegisters, Shape::kSupplyRegisters;
    using Shape::kTiles, Shape::kSBuffers, Shape::kStages, Shape::kVStages, Shape::kPlans, Shape::kPlanReaders;
    using typename Shape::Control;

    __device__ __forceinline__ static void run(const ForwardArguments& arguments) {
        extern __shared__ __align__(1024) unsigned char smem[];
        Control& control = *reinterpret_cast<Control*>(smem + kControlOffset);
        const int group = uniform(threadIdx.x / 128);
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        cute::TMEM::Allocator1Sm allocator;
        if (group == kSupplyGroup && warp == 0) {
            if (lane == 0) init_barriers(arguments, control);
            __syncwarp();
            allocator.allocate(kTensorMemoryColumns, &control.tmem);
            allocator.release_allocation_lock();
            ptx::tcgen05_fence_before_thread_sync();
        }
        __syncthreads();
        ptx::tcgen05_fence_after_thread_sync();

        if (group == kSupplyGroup) {
            cutlass::arch::warpgroup_reg_dealloc<kSupplyRegisters>();
            if (warp == 0) {
                ForwardProducts<Shape>::run(smem, control);
            } else if (warp == 1) {
                if (lane == 0) ForwardSupply<Shape>::plan_and_load_queries(arguments, smem, control);
            } else if (warp == 2) {
                if (lane == 0) Producer::load_keys(arguments, smem, control);
            } else {
                Producer::load_values(arguments, smem, control, lane);
            }
            __syncwarp();
        } else if (group == kCorrectionGroup) {
            cutlass::arch::warpgroup_reg_dealloc<kCorrectionRegisters>();
            ForwardCorrection<Shape>::run(arguments, control);
        } else {
            cutlass::arch::warpgroup_reg_alloc<kSoftmaxRegisters>();
            ForwardSoftmax<Shape>::run(arguments, control, group, threadIdx.x % 128);
        }

        ptx::tcgen05_fence_before_thread_sync();
        __syncthreads();  // no one reads tensor memory any more
        if (ptx::tid_x() / 32 == kSupplyGroup * 4) {
            ptx::tcgen05_fence_after_thread_sync();
            allocator.free(0, kTensorMemoryColumns);
        }
    }

    static int64_t workspace(const void* forward_params, const LaunchContext* context) {
        return sm90::ForwardLaunch<Shape>::workspace(*static_cast<const ForwardParams*>(forward_params), *context);
    }

    static int32_t launch(const void* forward_params, const LaunchContext* context) {
        static SharedMemoryOptIn opt_in;
        return sm90::ForwardLaunch<Shape>::launch(*static_cast<const ForwardParams*>(forward_params), *context,
                                                  reinterpret_cast<const void*>(&forward_kernel<Forward>), opt_in);
    }

  private:
    __device__ __forceinline__ static void init_barriers(const ForwardArguments& arguments, Control& control) {
        constexpr int kWarps = 4;  // of a group
        cute::prefetch_tma_descriptor(&arguments.q.map);
        cute::prefetch_tma_descriptor(&arguments.k.map);
        cute::prefetch_tma_descriptor(&arguments.v.map);
        for (int i = 0; i < kPlans; ++i) {
            Barrier::init(&control.plan_full[i], 1);
            Barrier::init(&control.plan_empty[i], kPlanReaders);
        }
        for (int i = 0; i < kStages; ++i) {
            Barrier::init(&control.k_full[i], 1);
            Barrier::init(&control.k_empty[i], 1);
        }
        for (int i = 0; i < kVStages; ++i) {
            Barrier::init(&control.v_full[i], 1);
            Barrier::init(&control.v_empty[i], 1);
        }
        Barrier::init(&control.v_landed, 1);
        for (int tile = 0; tile < kTiles; ++tile) {
            Barrier::init(&control.q_full[tile], 1);
            Barrier::init(&control.q_empty[tile], 1);
            Barrier::init(&control.o_full[tile], 1);
            Barrier::init(&control.scale_full[tile], kWarps);
            Barrier::init(&control.scale_empty[tile], kWarps);
        }
        for (int buffer = 0; buffer < kSBuffers; ++buffer) {
            Barrier::init(&control.s_full[buffer], 1);
            Barrier::init(&control.p_full[buffer], kWarps);
            Barrier::init(&control.p_tail[buffer], kWarps);
            Barrier::init(&control.rescale_full[buffer], kWarps);
            Barrier::init(&control.o_ready[buffer], kWarps);
        }
        cutlass::arch::fence_barrier_init();
    }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArguments arguments) {
    Kernel::run(arguments);
}

}  // namespace flash_ext::sm100
