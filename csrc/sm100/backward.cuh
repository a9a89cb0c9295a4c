// Backward attention for sm100 (FlashAttention-4, arXiv 2603.05451, section 4).
//
// One CTA: 128 keys of one key head, for the whole walk over the blocks of 128 queries of all its query heads. Scores
// are computed transposed, so that lane r of tensor memory holds key r, P^T and dS^T are the A operands of dV and dK
// without leaving it, and dK and dV stay there to the end:
//
//   S^T = K Q^T      dP^T = V dO^T      P = exp(S - lse)      dS = P * (dP - delta)
//   dV += P^T dO     dK += dS^T Q       dQ = dS K
//
// Only dS passes through shared memory as well, for dQ, whose lanes are queries. dQ is added to an fp32 scratch in
// global memory by bulk reductions, in the order in which a warp holds it (common/backward_helpers.h).
//
//   warps 0-3    dQ: tensor memory -> shared memory -> scratch, each warp its 32 lanes by itself
//   warps 4-7    P and dS of queries 0-63 of a block; in the end dV -> global memory
//   warps 8-11   P and dS of queries 64-127;          in the end dK
//   warp 12      issues all products (of a pair: in rank 0)
//   warp 13      loads
//   warp 14      in a pair: says when dS from the other CTA is there
//   warp 15      nothing (registers are dealt out to groups of four warps)
//
// A step of the products (query block m, whose S and dP have been issued); what is waited for stands in brackets:
//
//   [P m] dV m | S m+1 | [dS m] dK m, dQ m | [dQ m has been read] dP m+1
//
// so that S of the next block and dV run under the making of dS, dK and dQ under that of P. Where S and dP leave dQ no
// columns of its own but theirs, (192, 128), S m+1 comes behind dQ as well, and dP follows in halves, the second behind
// P.
//
// A pair of CTAs (cluster = 2, along z: both find the same tile) has 256 keys, 128 in each, and works like one CTA with
// products of M = 256 (cta_group::2). Of a B operand each CTA loads half: Q and dO by rows (64 queries) for S and dP, Q
// and dO by columns for dK and dV, K of all 256 keys by columns for dQ. dS of queries 0-63 ends up in the shared memory
// of CTA 0, of the others in CTA 1 (backward_exchange.cuh), so that dQ of a CTA's 64 queries sums over 256 keys, and
// half as much is added to the scratch. Rank 0 issues the products, their commits signal both; barriers marked * count
// arrivals of both at rank 0.
//
// | barrier            | arrives               | waits    | a phase ends when                                        |
// | k_full *           | loader and TMA        | products | K has landed, zero behind the last key                   |
// | v_full *           | likewise              |          |                                                          |
// | k_columns_full *   | likewise; of a pair   |          |                                                          |
// | q_full[s] *        | loader and TMA        | products | Q has landed, zero behind the last query                 |
// | q_empty[s]         | commit; not of a pair | loader   | dK has read Q                                            |
// | q_columns_full *   | as q_full; of a pair  |          |                                                          |
// | q_columns_empty    | commit                | loader   | dK has read Q                                            |
// | terms_full[s]      | loader and copy       | scores   | lse and delta have landed                                |
// | dout_full[s] *     | loader and TMA        | products | dO has landed                                            |
// | dout_empty[s]      | commit                | loader   | dV (in a pair dP) has read dO                            |
// | dout_columns_full *| as dout_full; pair    |          |                                                          |
// | dout_columns_empty | commit                | loader   | dV has read dO                                           |
// | landed             | loader and TMA        | loader   | a tile with a tail of garbage has landed                 |
// | s_full             | commit                | scores   | S is there, and all products issued before it; for the   |
// |                    |                       | loader   | loader of a pair: S has read Q                           |
// | p_full *           | scores, by warps      | products | P is there; S has been read                              |
// | dp_full            | commit                | scores   | dP is there, and all products issued before it           |
// | ds_full *          | scores, by warps      | products | dS is there for dK, and for dQ but for what is exchanged;|
// |                    |                       |          | dP, lse and delta have been read                         |
// | ds_landed          | relay and copies; pair| relay    | dS from the other CTA has landed                         |
// | ds_exchanged *     | relays; of a pair     | products | dS is where dQ reads it, in both CTAs                    |
// | dq_full            | commit                | dQ       | dQ is there                                              |
// | dq_empty *         | dQ, by warps          | products | dQ has been read                                         |
// | sums_full          | commit                | scores   | dK and dV are complete                                   |
//
// From s_full to dq_empty, every barrier ends one phase a step, so its parity is that of the step.
//
// What needs no barrier, because products run in the order of their issue: S overwrites P of the block before, which
// dV has read; dP and dQ overwrite dS, which dK has read. dS in shared memory, also what a pair's CTAs send each other,
// is overwritten after dp_full, which follows dQ of the block before. lse and delta of kTermsStages steps ago: their dK
// has been waited for, for Q or, in a pair, in the step before, for Q by columns.
//
// Rows of Q, dO, K and V behind a sequence's end are zero in shared memory before a product reads them: there TMA
// brings zeros from outside the tensor and anything from inside, which the loader overwrites. Their lse is +inf, so P
// is 0.
//
// Deterministic: the additions into a query tile are made in ascending order of the key tile. A CTA (a pair, by rank
// 0) takes its place from a ticket counter, so it only ever waits for CTAs that have started; each warp waits for the
// turn of a query tile before it adds its rows, and waits for its additions to be made, not only read, before it passes
// the turn on.
//
// Tensor memory (512 columns of 32 bits, all of it, in one allocation for the life of the CTA). h: the warpgroup of
// scores, 0 or 1, whose own 64 columns of S and dP are.
//
//   columns  d 64         96           128          128, pair         (192, 128)       holds                 until
//   S        0-127        0-127        0-127        0-127             0-127            S, fp32               p_full
//   P[h]     64 h + 0-31  likewise     likewise     likewise          0-31, 96-127     P in pairs, over S    dV
//   dP[h]    128-255      128-255      128-255      128-255           128-191, 32-95   dP, fp32              ds_full
//   dS[h]    128-159, 192-223          likewise     128-159, 224-255  128-159, 32-63   dS in pairs, over dP  dK
//   dV       256-319      256-383      256-383      256-383           192-319          dV                    the end
//   dK       320-383      384-511      384-511      384-511           320-511          dK                    the end
//   dQ       384-447      128-255      128-255      160-223           0-191            dQ, lanes are queries dq_empty
//
// With d 96 the last 32 columns of dV, dK and dQ are 0.
//
// In a pair M of dQ is 128, 64 queries in each CTA: lanes 64-127 hold the upper half of their columns.
//
// Shared memory: K, V, kStages x Q, kDoutStages x dO, dS^T (rows are keys, 64 queries to a panel), in a pair the half
// of it that is the other CTA's, 4 x kSliceBuffers slices of dQ, in a pair K, Q and dO by columns, kTermsStages x (lse,
// delta), barriers; tiles in panels of 64 columns (sm90/panel.cuh).
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/tmem_allocator_sm100.hpp>

#include "common/backward_helpers.h"
#include "core/launch.cuh"
#include "params.h"
#include "ptx/cluster.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tcgen05.cuh"
#include "sm100/backward_compute.cuh"
#include "sm100/backward_exchange.cuh"
#include "sm100/backward_products.cuh"
#include "sm100/backward_reduce.cuh"
#include "sm100/backward_shape.cuh"
#include "sm100/backward_supply.cuh"
#include "sm90/tensor_map.cuh"

namespace flash_ext::sm100 {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArguments arguments);

template <DataType kType, int kHeadDim, int kHeadDimV, BackwardTile kTile, bool kRich>
struct Backward : BackwardShape<kType, kHeadDim, kHeadDimV, kTile, kRich> {
    using Shape = BackwardShape<kType, kHeadDim, kHeadDimV, kTile, kRich>;
    using Shape::kBlockM, Shape::kBlockN, Shape::kStages, Shape::kTermsStages, Shape::kDoutStages, Shape::kThreads;
    using Shape::kControlOffset, Shape::kSharedMemory;
    using Shape::kIsPair, Shape::kCtasOfTile, Shape::kKeys, Shape::kQRows;
    using Shape::kReduceGroup, Shape::kComputeGroup, Shape::kSupplyGroup, Shape::kComputeWarps;
    using Shape::kReduceRegisters, Shape::kComputeRegisters, Shape::kSupplyRegisters;
    using typename Shape::Control, typename Shape::Transfer;

    static constexpr ScratchShape kScratch{kBlockM, kHeadDim, Shape::kDqColumns, 32};

    __device__ __forceinline__ static void run(const BackwardArguments& arguments) {
        extern __shared__ __align__(1024) unsigned char smem[];
        Control& control = *reinterpret_cast<Control*>(smem + kControlOffset);
        const int group = uniform(threadIdx.x / 128);
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        if (threadIdx.x == 0) init_barriers(arguments, control);
        if constexpr (kIsPair) {  // the other CTA runs: its shared memory may be written
            cute::cluster_arrive();
            cute::cluster_wait();
        }
        if (threadIdx.x == 0 && Transfer::rank() == 0) hand_out_work(arguments, control);
        std::conditional_t<kIsPair, cute::TMEM::Allocator2Sm, cute::TMEM::Allocator1Sm> allocator;
        const bool allocates = group == kSupplyGroup && warp == 0;
        if (allocates) {
            allocator.allocate(kTensorMemoryColumns, &control.tmem);
            allocator.release_allocation_lock();
        }
        if constexpr (kIsPair) {  // barriers, work and tensor memory are there
            cute::cluster_arrive();
            cute::cluster_wait();
        } else {
            __syncthreads();
        }
        if (control.work.is_empty) {
            if (allocates) allocator.free(0, kTensorMemoryColumns);
            return;
        }

        if (group == kSupplyGroup) {
            cutlass::arch::warpgroup_reg_dealloc<kSupplyRegisters>();
            if (warp == 0) {
                if (Transfer::rank() == 0) BackwardProducts<Shape>::run(smem, control);
            } else if (warp == 1) {
                BackwardSupply<Shape>::load_all(arguments, smem, control, lane);
            } else if (kIsPair && warp == 2) {
                if (lane == 0) BackwardExchange<Shape>::pass_on(control);
            }
        } else if (group == kReduceGroup) {
            cutlass::arch::warpgroup_reg_dealloc<kReduceRegisters>();
            BackwardReduce<Shape>::run(arguments, smem, control, warp, lane);
        } else {
            cutlass::arch::warpgroup_reg_alloc<kComputeRegisters>();
            BackwardCompute<Shape>::run(arguments, smem, control, group - kComputeGroup, threadIdx.x % 128);
        }

        __syncthreads();          // no one reads tensor memory any more
        if constexpr (kIsPair) {  // or writes to the other CTA
            cute::cluster_arrive();
            cute::cluster_wait();
        }
        if (ptx::tid_x() / 32 == kSupplyGroup * 4) allocator.free(0, kTensorMemoryColumns);
    }

    static int64_t workspace(const void* backward_params, const LaunchContext*) {
        return backward_scratch_size(*static_cast<const BackwardParams*>(backward_params), kScratch);
    }

    static int32_t launch(const void* backward_params, const LaunchContext* context) {
        const BackwardParams& params = *static_cast<const BackwardParams*>(backward_params);
        const ForwardParams& attention = params.attention;
        const cudaStream_t stream = static_cast<cudaStream_t>(context->stream);
        BackwardArguments arguments;
        arguments.params = params;
        arguments.scratch = backward_scratch(params, kScratch, context->workspace);
        cudaError_t error = launch_backward_preprocess(params, arguments.scratch, kScratch, stream);
        if (error != cudaSuccess) return error;

        const auto [heads, tiles] = key_tiles(attention, kBlockN);
        if (heads * tiles > 0) {
            error = sm90::encode_backward_maps(arguments, kQRows, kKeys);
            if (error != cudaSuccess) return error;
            fill_backward_arguments(arguments, kBlockM);
            sm90::order_key_tiles(arguments, heads, tiles);

            const void* kernel = reinterpret_cast<const void*>(&backward_kernel<Backward>);
            static SharedMemoryOptIn opt_in;
            error = opt_in.ensure(kernel, context->device, kSharedMemory);
            if (error != cudaSuccess) return error;
            void* kernel_arguments[] = {&arguments};
            cudaLaunchAttribute cluster;
            cluster.id = cudaLaunchAttributeClusterDimension;
            cluster.val.clusterDim = {1, 1, kCtasOfTile};
            cudaLaunchConfig_t config{};
            config.gridDim = linear_grid(heads * tiles);
            config.gridDim.z = kCtasOfTile;  // so that both CTAs of a pair find the same tile
            config.blockDim = dim3(kThreads);
            config.dynamicSmemBytes = kSharedMemory;
            config.stream = stream;
            config.attrs = &cluster;
            config.numAttrs = kIsPair ? 1 : 0;
            error = cudaLaunchKernelExC(&config, kernel, kernel_arguments);
            if (error != cudaSuccess) return error;
        }
        return launch_backward_postprocess(params, arguments.scratch, kScratch, stream);
    }

  private:
    __device__ __forceinline__ static void init_barriers(const BackwardArguments& arguments, Control& control) {
        cute::prefetch_tma_descriptor(&arguments.q.map);
        cute::prefetch_tma_descriptor(&arguments.k.map);
        cute::prefetch_tma_descriptor(&arguments.v.map);
        cute::prefetch_tma_descriptor(&arguments.dout.map);
        Barrier::init(&control.k_full, kCtasOfTile);
        Barrier::init(&control.v_full, kCtasOfTile);
        Barrier::init(&control.landed, 1);
        for (int i = 0; i < kStages; ++i) {
            Barrier::init(&control.q_full[i], kCtasOfTile);
            if (!kIsPair) Barrier::init(&control.q_empty[i], 1);
        }
        for (int i = 0; i < kTermsStages; ++i) Barrier::init(&control.terms_full[i], 1);
        for (int i = 0; i < kDoutStages; ++i) {
            Barrier::init(&control.dout_full[i], kCtasOfTile);
            Barrier::init(&control.dout_empty[i], 1);
        }
        if constexpr (kIsPair) {
            Barrier::init(&control.k_columns_full, 2);
            Barrier::init(&control.q_columns_full, 2);
            Barrier::init(&control.q_columns_empty, 1);
            Barrier::init(&control.dout_columns_full, 2);
            Barrier::init(&control.dout_columns_empty, 1);
            Barrier::init(&control.ds_landed, 1);
            Barrier::init(&control.ds_exchanged, 2);
        }
        Barrier::init(&control.s_full, 1);
        Barrier::init(&control.p_full, kComputeWarps * kCtasOfTile);
        Barrier::init(&control.dp_full, 1);
        Barrier::init(&control.ds_full, kComputeWarps * kCtasOfTile);
        Barrier::init(&control.dq_full, 1);
        Barrier::init(&control.dq_empty, 4 * kCtasOfTile);
        Barrier::init(&control.sums_full, 1);
        cutlass::arch::fence_barrier_init();
    }

    // What the tile is, into the shared memory of each of its CTAs: a place from the ticket counter is drawn once.
    __device__ __forceinline__ static void hand_out_work(const BackwardArguments& arguments, Control& control) {
        const BackwardWork work = sm90::find_work<kBlockM, kBlockN>(arguments);
        control.work = work;
        if constexpr (kIsPair) {
            uint4 words[(sizeof(BackwardWork) + 15) / 16] = {};
            memcpy(words, &work, sizeof(work));
            const uint32_t other = cute::set_block_rank(cute::cast_smem_ptr_to_uint(&control.work), 1);
#pragma unroll
            for (int i = 0; i < static_cast<int>(sizeof(words) / 16); ++i) {
                ptx::st_shared_cluster_v4_b32(other + i * 16, words[i]);
            }
        }
    }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArguments arguments) {
    Kernel::run(arguments);
}

}  // namespace flash_ext::sm100
