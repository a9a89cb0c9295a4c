// Backward attention for sm90 (FlashAttention-3, arXiv 2407.08608, section 3.1).
//
// One CTA: kBlockN keys of one key head, for the whole walk over the query blocks of all its query heads. A consumer
// warpgroup owns 64 of the keys. Scores are computed transposed, so that P^T and dS^T leave the tensor cores as the A
// operands of dV and dK, which stay in registers to the end:
//
//   S^T = K Q^T      dP^T = V dO^T      P = exp(S - lse)      dS = P * (dP - delta)
//   dV += P^T dO     dK += dS^T Q       dQ += dS K
//
// Only dS passes through shared memory, for dQ, of which each warpgroup computes a part (rows or columns) and which is
// added to an fp32 scratch in global memory by bulk reductions, in the order in which registers hold it.
//
// A step of a consumer (query block m, whose S is there); what stands on the right runs in the tensor cores meanwhile:
//   issue dP[m]; P                                             dP[m]
//   issue dV; wait dP; dS                                      dV       (early_dv = 0: dV is issued behind dS)
//   dS -> shared memory; issue dK
//   wait dS of the other warpgroups; issue dQ                  dV, dK
//   wait dV, dK; Q, dO are free                                dQ
//   wait dQ; issue S[m+1]; dQ -> shared memory                 S[m+1]
//   wait S[m+1]                                                         (not left in flight over the loop's back edge:
//                                                                        ptxas would serialise all products)
//
// | barrier       | arrives                              | waits         | a phase ends when                         |
// | k_full        | loader and TMA                       | consumers     | K has landed, zero behind the last key    |
// | v_full        | likewise                             |               |                                           |
// | q_full[s]     | loader and TMA                       | consumers     | Q and the terms of its rows have landed   |
// | q_empty[s]    | each consumer warp                   | loader        | dK has read Q                             |
// | dout_full[s]  | loader and TMA                       | consumers     | dO has landed                             |
// | dout_empty[s] | each consumer warp                   | loader        | dV has read dO                            |
// | landed        | loader and TMA                       | loader        | a tile with a tail of garbage has landed  |
// | ds_full[i]    | each consumer warp                   | consumers     | dS is written                             |
// | dq_full[w]    | each warp of warpgroup w             | reducer w     | its part of dQ is written                 |
// | dq_empty[w]   | reducer w                            | warpgroup w   | the bulk reduction has read it            |
//
// ds_full orders the reuse of its buffers as well: a warpgroup arrives at step m only after its dQ[m-1] is done, and
// writes at step m + 1 the buffer of m - 1 only after it has waited, at step m, for all to have arrived.
//
// Rows of Q, dO, K and V behind a sequence's end are zero in shared memory before a product reads them: there TMA
// brings zeros from outside the tensor and anything from inside, which the loader overwrites. Their lse is +inf, so P
// is 0.
//
// Deterministic: the additions into a query tile are made in ascending order of the key tile. A CTA takes its place
// from a ticket counter, so it only ever waits for CTAs that have started; the reducers wait for the turn of a query
// tile, not the consumers.
//
// Shared memory: K, V, kStages x (Q, dO), 2 x dS^T (rows are keys), dQ (fp32), kStages x (lse, delta), barriers; tiles
// in panels of 64 columns (wgmma.cuh).
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/copy_sm90_desc.hpp>

#include "common/backward_helpers.h"
#include "core/launch.cuh"
#include "core/numeric.cuh"
#include "params.h"
#include "sm90/backward_consumer.cuh"
#include "sm90/backward_producer.cuh"
#include "sm90/backward_shape.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/tensor_map.cuh"

namespace flash_ext::sm90 {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArguments arguments);

template <DataType kType, int kHeadDim, int kHeadDimV, BackwardTile kTile, bool kRich>
struct Backward : BackwardShape<kType, kHeadDim, kHeadDimV, kTile, kRich> {
    using Shape = BackwardShape<kType, kHeadDim, kHeadDimV, kTile, kRich>;
    using Producer = BackwardProducer<Shape>;
    using Shape::kBlockM, Shape::kBlockN, Shape::kStages, Shape::kWarpgroups, Shape::kThreads, Shape::kDsBuffers;
    using Shape::kControlOffset, Shape::kSharedMemory, Shape::kProducerRegisters, Shape::kConsumerRegisters;
    using typename Shape::Control;

    static constexpr ScratchShape kScratch{kBlockM, kHeadDim, Shape::kDqColumns};

    __device__ __forceinline__ static void run(const BackwardArguments& arguments) {
        extern __shared__ __align__(1024) unsigned char smem[];
        Control& control = *reinterpret_cast<Control*>(smem + kControlOffset);
        constexpr int kConsumerWarps = 4 * kWarpgroups;
        // The same in all lanes, and the compiler shall know it: descriptors then stay in uniform registers.
        const int warpgroup = uniform(threadIdx.x / 128);
        if (threadIdx.x == 0) {
            cute::prefetch_tma_descriptor(&arguments.q.map);
            cute::prefetch_tma_descriptor(&arguments.k.map);
            cute::prefetch_tma_descriptor(&arguments.v.map);
            cute::prefetch_tma_descriptor(&arguments.dout.map);
            Barrier::init(&control.k_full, 1);
            Barrier::init(&control.v_full, 1);
            Barrier::init(&control.landed, 1);
            for (int i = 0; i < kStages; ++i) {
                Barrier::init(&control.q_full[i], 1);
                Barrier::init(&control.q_empty[i], kConsumerWarps);
                Barrier::init(&control.dout_full[i], 1);
                Barrier::init(&control.dout_empty[i], kConsumerWarps);
            }
            for (int i = 0; i < kDsBuffers; ++i) Barrier::init(&control.ds_full[i], kConsumerWarps);
            for (int i = 0; i < kWarpgroups; ++i) {
                Barrier::init(&control.dq_full[i], 4);
                Barrier::init(&control.dq_empty[i], 1);
            }
            cutlass::arch::fence_barrier_init();
            control.work = find_work<kBlockM, kBlockN>(arguments);
        }
        __syncthreads();  // barriers and work are there
        if (control.work.is_empty) return;
        if (warpgroup == 0) {
            cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
            const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
            if (warp == 0) {
                Producer::load_all(arguments, smem, control, lane);
            } else if (warp <= kWarpgroups && lane == 0) {
                Producer::reduce_dq(arguments, smem, control, warp - 1);
            }
        } else {
            cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
            BackwardConsumer<Shape>::consume(arguments, smem, control, warpgroup - 1, threadIdx.x % 128);
        }
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
            error = encode_maps(arguments);
            if (error != cudaSuccess) return error;
            fill_backward_arguments(arguments, kBlockM);
            // What the key tiles of a head read (and add to): Q, dO and the scratch.
            const int64_t query_bytes = static_cast<int64_t>(attention.seqlen_q) * attention.heads_q /
                                        attention.heads_k * (2 * attention.head_dim_v + 6 * attention.head_dim);
            arguments.order = make_tile_order(heads, tiles, arguments.bounds.right == 0, query_bytes);
            // Seen from the keys a causal mask leaves the first tile the most to do: sections of heads, but tiles in
            // order.
            arguments.order.heaviest_first = 0;

            const void* kernel = reinterpret_cast<const void*>(&backward_kernel<Backward>);
            static SharedMemoryOptIn opt_in;
            error = opt_in.ensure(kernel, context->device, kSharedMemory);
            if (error != cudaSuccess) return error;
            void* kernel_arguments[] = {&arguments};
            error = cudaLaunchKernel(kernel, linear_grid(heads * tiles), dim3(kThreads), kernel_arguments,
                                     kSharedMemory, stream);
            if (error != cudaSuccess) return error;
        }
        return launch_backward_postprocess(params, arguments.scratch, kScratch, stream);
    }

  private:
    static cudaError_t encode_maps(BackwardArguments& arguments) {
        const BackwardParams& params = arguments.params;
        const ForwardParams& attention = params.attention;
        const int32_t q_batch = attention.cu_seqlens_q != nullptr ? 1 : attention.batch;
        const int32_t k_batch = attention.cu_seqlens_k != nullptr ? 1 : attention.batch;
        cudaError_t error = encode(&arguments.k, attention.k, attention.dtype, k_batch, attention.seqlen_k,
                                   attention.heads_k, attention.head_dim, kBlockN);
        if (error != cudaSuccess) return error;
        error = encode(&arguments.v, attention.v, attention.dtype, k_batch, attention.seqlen_k, attention.heads_k,
                       attention.head_dim_v, kBlockN);
        if (error != cudaSuccess) return error;
        arguments.key_tail_is_garbage = attention.cu_seqlens_k != nullptr || attention.seqused_k != nullptr ||
                                        arguments.k.row_step == 0 || arguments.v.row_step == 0;
        if (attention.seqlen_q == 0) {  // no query is ever loaded
            arguments.q = arguments.dout = arguments.k;
            arguments.query_tail_is_garbage = 0;
            return cudaSuccess;
        }
        error = encode(&arguments.q, attention.q, attention.dtype, q_batch, attention.seqlen_q, attention.heads_q,
                       attention.head_dim, kBlockM);
        if (error != cudaSuccess) return error;
        error = encode(&arguments.dout, params.dout, attention.dtype, q_batch, attention.seqlen_q, attention.heads_q,
                       attention.head_dim_v, kBlockM);
        arguments.query_tail_is_garbage = attention.cu_seqlens_q != nullptr || attention.seqused_q != nullptr ||
                                          arguments.q.row_step == 0 || arguments.dout.row_step == 0;
        return error;
    }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArguments arguments) {
    Kernel::run(arguments);
}

}  // namespace flash_ext::sm90
