// Forward attention for sm90 (FlashAttention-3, arXiv 2407.08608, algorithm 2).
//
// Persistent CTAs. Each: a producer warpgroup, whose warps have a job each, and kWarpgroups consumer warpgroups of 64
// query rows. The keys are walked from the last block to the first, so that the blocks cut by the diagonal or the end
// of the keys come first.
//
//   scheduler   plan of tile t+1                        under tile t
//   Q warp      Q of tile t+1                           likewise, with two buffers; else after the last S of tile t
//   K warp      K[j-1], K[j-2] ...                      as stages of its ring fall free
//   V warp      V[j], V[j-1] ...
//   consumer 0  S = Q K[j-1] | softmax of S under O += P V[j] | ...
//   consumer 1               | the same, half a step later: while one is in its softmax the other has the tensor cores
//
// | barrier       | arrives                             | waits            | a phase ends when                       |
// | plan_full[i]  | scheduler                           | everyone else    | plan i is written                       |
// | plan_empty[i] | Q, K, V and each consumer warp      | scheduler        | no one needs plan i any more            |
// | q_full[i]     | Q warp and TMA                      | consumers        | Q has landed                            |
// | q_empty[i] *  | each consumer warp                  | Q warp           | the last S of the tile is there         |
// | k_full[s]     | K warp and TMA                      | consumers        | K has landed                            |
// | k_empty[s]    | each consumer warp                  | K warp           | S is there, so K has been read          |
// | v_full[s]     | V warp, and TMA unless V ends here  | consumers        | V has landed, zero behind the last key  |
// | v_empty[s]    | each consumer warp                  | V warp           | O += P V is done                        |
// | v_landed      | V warp and TMA                      | V warp           | V has landed with whatever is behind it |
// | turn w        | warpgroup before w, then w (named)  | warpgroup w      | it may issue its products               |
//
// * with one buffer: with two, plan_full of tile t+2 says that plan t has gone back, and so that its Q has been read.
// A warpgroup that does not need a block hands it back without waiting for it (skip_blocks in forward_consumer.cuh).
//
// TMA brings a box of rows whatever it is. Rows of Q beyond the sequence give results that are not written; keys beyond
// it get the score -inf; but 0 * NaN is NaN, so rows of V beyond it are overwritten with zeros (generic stores, then
// fence.proxy.async) unless they lie outside the tensor, where TMA itself writes zeros.
//
// With kCluster = 2 and tiles that all walk the same keys (dense, no mask), two CTAs with neighbouring tiles of a head
// each copy one half of every block of K and V into the shared memory of both; a stage is empty when the consumers of
// both have said so.
//
// A block without a mask is exponentiated under the row maxima so far; that its own are not much larger follows from
// the sums (softmax.cuh). The first block of a tile, and blocks with a mask, are searched for theirs;
// in the rich variant, and where registers are short (ForwardTile::search), all are.
//
// Registers of a consumer thread: S (64 x kBlockN) becomes P, packed in pairs, the A operand of P V; O (64 x d_v) stays
// to the end and leaves straight to global memory, 16 bytes a lane, while the first S of the next tile is computed
// (kCrossTile).
// Shared memory: kQBuffers of Q, kStages of K, kStages of V, in panels of 64 columns (panel.cuh), plans and barriers.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>

#include "core/launch.cuh"
#include "params.h"
#include "sm90/forward_consumer.cuh"
#include "sm90/forward_launch.cuh"
#include "sm90/forward_plan.cuh"
#include "sm90/forward_producer.cuh"
#include "sm90/forward_shape.cuh"

namespace flash_ext::sm90 {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArguments arguments);

template <DataType kType, int kHeadDim, int kHeadDimV, ForwardTile kTile, bool kRich>
struct Forward : ForwardShape<kType, kHeadDim, kHeadDimV, kTile, kRich> {
    using Shape = ForwardShape<kType, kHeadDim, kHeadDimV, kTile, kRich>;
    using Producer = ForwardProducer<Shape>;
    using Shape::kControlOffset, Shape::kThreads, Shape::kConsumerWarps, Shape::kSharedMemory;
    using Shape::kProducerRegisters, Shape::kConsumerRegisters;
    using Shape::kStages, Shape::kQBuffers, Shape::kPlans, Shape::kCluster;
    using typename Shape::Control;

    __device__ __forceinline__ static void run(const ForwardArguments& arguments) {
        extern __shared__ __align__(1024) unsigned char smem[];
        Control& control = *reinterpret_cast<Control*>(smem + kControlOffset);
        // The same in all lanes, and the compiler shall know it: descriptors then stay in uniform registers.
        const int warpgroup = uniform(threadIdx.x / 128);
        const bool shares_keys = kCluster > 1 && arguments.shares_keys;
        const int ctas = shares_keys ? 2 : 1;  // that hand K and V back
        if (threadIdx.x == 0) {
            cute::prefetch_tma_descriptor(&arguments.q.map);
            cute::prefetch_tma_descriptor(&arguments.k.map);
            cute::prefetch_tma_descriptor(&arguments.v.map);
            for (int i = 0; i < kPlans; ++i) {
                Barrier::init(&control.plan_full[i], 1);
                Barrier::init(&control.plan_empty[i], 3 + kConsumerWarps);
            }
            for (int i = 0; i < kQBuffers; ++i) {
                Barrier::init(&control.q_full[i], 1);
                if constexpr (Shape::kHandsQBack) Barrier::init(&control.q_empty[i], kConsumerWarps);
            }
            for (int i = 0; i < kStages; ++i) {
                Barrier::init(&control.k_full[i], 1);
                Barrier::init(&control.k_empty[i], kConsumerWarps * ctas);
                Barrier::init(&control.v_full[i], 1);
                Barrier::init(&control.v_empty[i], kConsumerWarps * ctas);
            }
            Barrier::init(&control.v_landed, 1);
            cutlass::arch::fence_barrier_init();
        }
        __syncthreads();
        if (shares_keys) {  // the other CTA's barriers exist
            cute::cluster_arrive_relaxed();
            cute::cluster_wait();
        }
        if (warpgroup == 0) {
            cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
            const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
            if (warp == 0) {
                if (lane == 0) Producer::schedule(arguments, control);
            } else if (warp == 1) {
                if (lane == 0) Producer::load_queries(arguments, smem, control);
            } else if (warp == 2) {
                if (lane == 0) Producer::load_keys(arguments, smem, control);
            } else {
                Producer::load_values(arguments, smem, control, lane);
            }
        } else {
            cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
            ForwardConsumer<Shape>::consume(arguments, smem, control, warpgroup - 1, threadIdx.x % 128);
        }
        if (shares_keys) {  // a CTA's shared memory outlives what the other does in it
            __syncwarp();
            cute::cluster_arrive();
            cute::cluster_wait();
        }
    }

    static int64_t workspace(const void* forward_params, const LaunchContext* context) {
        return ForwardLaunch<Shape>::workspace(*static_cast<const ForwardParams*>(forward_params), *context);
    }

    static int32_t launch(const void* forward_params, const LaunchContext* context) {
        static SharedMemoryOptIn opt_in;
        return ForwardLaunch<Shape>::launch(*static_cast<const ForwardParams*>(forward_params), *context,
                                            reinterpret_cast<const void*>(&forward_kernel<Forward>), opt_in);
    }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArguments arguments) {
    Kernel::run(arguments);
}

}  // namespace flash_ext::sm90
