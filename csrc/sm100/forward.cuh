// Forward attention for sm100 (FlashAttention-4, arXiv 2603.05451).
//
// Persistent CTAs. A CTA has two query tiles of 128 rows that walk the same keys, from the last block to the first,
// half a step apart: while one is in its softmax the tensor core works for the other. Everything between the two
// products stays in tensor memory, where lane r holds row r of a tile, so that a thread has a row of scores to itself.
//
//   warps 0-3    softmax of query tile 0: S -> maximum, exponentials, row sums -> P
//   warps 4-7    softmax of query tile 1
//   warps 8-11   correction: O *= what the maximum grew by (seldom: it may lag by 2^8); O / row sum -> global memory
//   warp 12      issues all products          S0 | S1 | O0 += P0 V, next S0 | O1 += P1 V, next S1 | ...
//   warp 13      one thread plans the next tile and loads its Q
//   warp 14      one thread loads K
//   warp 15      V, with zeros behind the last key (sm90/forward.cuh says why)
//
// There is no epilogue warp: a thread of the correction has a row of O and writes it in whole sectors of 32 bytes, and
// a copy by TMA could not leave rows behind a sequence's end alone.
//
// Wide heads (256) leave room for one query tile, of warps 0-3: S has two buffers then, and S of the next block is
// computed under the softmax of this one:  S[j] | S[j-1] | O += P[j] V[j], S[j-2] | O += P[j-1] V[j-1], S[j-3] | ...
// K and V come in parts of a block, each handed back when its product is done.
//
// A pair of CTAs (cluster = 2, only where no mask cuts: tiles of 512 rows) works like one CTA whose tiles have 256
// rows, 128 in each: its products (cta_group::2) take half of K's rows and half of V's columns from each CTA, so each
// loads and keeps half. Rank 0 issues them, their commits signal both, and the barriers marked * count arrivals of both
// at rank 0. Everything else is done by each CTA for its own rows, from the same plan.
//
// t: query tile; b: buffer of S, which is t with two tiles; s, i: place in a ring.
//
// | barrier         | arrives                        | waits          | a phase ends when                             |
// | plan_full[i]    | warp 13                        | everyone else  | plan i is written                             |
// | plan_empty[i]   | products, Q, K, V, other warps | warp 13        | no one needs plan i any more                  |
// | q_full[t] *     | warp 13 and TMA                | products       | Q of tile t has landed                        |
// | q_empty[t]      | commit                         | warp 13        | the last S of tile t is there                 |
// | k_full[s] *     | warp 14 and TMA                | products       | K has landed                                  |
// | k_empty[s]      | commit                         | warp 14        | every S that needs it is there                |
// | v_full[s] *     | warp 15, and TMA unless V ends | products       | V has landed, zero behind the last key        |
// | v_empty[s]      | commit                         | warp 15        | every P V that needs it is done               |
// | v_landed        | warp 15 and TMA                | warp 15        | V has landed with whatever is behind it       |
// | s_full[b]       | commit                         | softmax        | S is there, and all products issued before it |
// | p_full[b] *     | softmax, by warps              | products       | the first 3/4 of P are there; S has been read |
// | p_tail[b] *     | softmax, by warps              | products       | P is there                                    |
// | rescale_full[b] | softmax, by warps              | correction     | rescale[b] is written (not for a first block) |
// | o_ready[b] *    | correction, by warps           | products       | O has the new scale, or has been written out  |
// | o_full[t]       | commit                         | correction     | P V has been added to O                       |
// | scale_full[t]   | softmax, by warps              | correction     | out_scale[t] is written, after the last block |
// | scale_empty[t]  | correction, by warps           | softmax        | out_scale[t] has been read                    |
//
// What needs no barrier: S overwrites the P of an earlier block, whose product the same thread has issued before
// (products of a CTA or pair run in the order of their issue). rescale[b] overwrites that of an earlier block: s_full
// follows, in that order, O += P V of the block before in this buffer, which waited for o_ready, which follows the
// reading.
//
// Tensor memory (512 columns of 32 bits, all of it, in one allocation for the life of the CTA):
//
//   columns                holds                         from               until
//   0   .. kBlockN         S of buffer 0, fp32           its product        softmax has loaded it (p_full)
//   0   .. kBlockN / 2     P of buffer 0, 16-bit pairs   softmax, over S    O += P V
//   128 ..                 S and P of buffer 1           likewise
//   256 .. 256 + d_v       O of tile 0, fp32             its first product  the correction has loaded it (o_ready)
//   .. 256 + 2 d_v         O of tile 1                   likewise; d 96 takes the columns of d 128, the last of them 0
//
// Shared memory: Q of the tiles, kStages of K, kVStages of V, in panels of 64 columns (sm90/panel.cuh); rescale,
// out_scale, barriers, plans.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include <type_traits>

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
    using Shape::kCtasOfTile, Shape::kIsPair;
    using Shape::kSoftmaxRegisters, Shape::kCorrectionRegisters, Shape::kSupplyRegisters;
    using Shape::kTiles, Shape::kSBuffers, Shape::kStages, Shape::kVStages, Shape::kPlans, Shape::kPlanReaders;
    using typename Shape::Control;

    __device__ __forceinline__ static void run(const ForwardArguments& arguments) {
        extern __shared__ __align__(1024) unsigned char smem[];
        Control& control = *reinterpret_cast<Control*>(smem + kControlOffset);
        const int group = uniform(threadIdx.x / 128);
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        std::conditional_t<kIsPair, cute::TMEM::Allocator2Sm, cute::TMEM::Allocator1Sm> allocator;
        if (group == kSupplyGroup && warp == 1 && lane == 0) init_barriers(arguments, control);
        // The other CTA runs, and its barriers exist: a pair's allocation writes into its shared memory.
        if constexpr (kIsPair) {
            cute::cluster_arrive();
            cute::cluster_wait();
        }
        if (group == kSupplyGroup && warp == 0) {
            allocator.allocate(kTensorMemoryColumns, &control.tmem);
            allocator.release_allocation_lock();
        }
        __syncthreads();

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
        } else if (group == kCorrectionGroup) {
            cutlass::arch::warpgroup_reg_dealloc<kCorrectionRegisters>();
            ForwardCorrection<Shape>::run(arguments, control);
        } else {
            cutlass::arch::warpgroup_reg_alloc<kSoftmaxRegisters>();
            ForwardSoftmax<Shape>::run(arguments, control, group, threadIdx.x % 128);
        }

        // No one reads tensor memory any more. The products' warp has been there already, before its last waits.
        const bool is_products = ptx::tid_x() / 32 == kSupplyGroup * 4;
        if (!is_products) __syncthreads();
        if constexpr (kIsPair) {  // no one signals the other CTA any more
            cute::cluster_arrive();
            cute::cluster_wait();
        }
        if (is_products) allocator.free(0, kTensorMemoryColumns);
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
        constexpr int kWarps = 4 * kCtasOfTile;  // of a group, in a pair of both
        cute::prefetch_tma_descriptor(&arguments.q.map);
        cute::prefetch_tma_descriptor(&arguments.k.map);
        cute::prefetch_tma_descriptor(&arguments.v.map);
        for (int i = 0; i < kPlans; ++i) {
            Barrier::init(&control.plan_full[i], 1);
            Barrier::init(&control.plan_empty[i], kPlanReaders);
        }
        for (int i = 0; i < kStages; ++i) {
            Barrier::init(&control.k_full[i], kCtasOfTile);
            Barrier::init(&control.k_empty[i], 1);
        }
        for (int i = 0; i < kVStages; ++i) {
            Barrier::init(&control.v_full[i], kCtasOfTile);
            Barrier::init(&control.v_empty[i], 1);
        }
        Barrier::init(&control.v_landed, 1);
        for (int tile = 0; tile < kTiles; ++tile) {
            Barrier::init(&control.q_full[tile], kCtasOfTile);
            Barrier::init(&control.q_empty[tile], 1);
            Barrier::init(&control.o_full[tile], 1);
            Barrier::init(&control.scale_full[tile], 4);
            Barrier::init(&control.scale_empty[tile], 4);
        }
        for (int buffer = 0; buffer < kSBuffers; ++buffer) {
            Barrier::init(&control.s_full[buffer], 1);
            Barrier::init(&control.p_full[buffer], kWarps);
            Barrier::init(&control.p_tail[buffer], kWarps);
            Barrier::init(&control.rescale_full[buffer], 4);
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
