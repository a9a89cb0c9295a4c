// Backward attention for sm90 (FlashAttention-3, arXiv 2407.08608, section 3.1).
//
// One CTA: kBlockN keys of one key head, for the whole walk over the query blocks of all its query heads. Scores are
// computed transposed, so that P^T and dS^T leave the tensor cores as the A operands of dV and dK, which stay in
// registers to the end:
//
//   S^T = K Q^T      dP^T = V dO^T      P = exp(S - lse)      dS = P * (dP - delta)
//   dV += P^T dO     dK += dS^T Q       dQ += dS K
//
// dS passes through shared memory, for dQ, which is added to an fp32 scratch in global memory in the order in which
// registers hold it. Nobody clears the scratch (but for long calls of small head dims): whoever is the first to come to
// a part of a query tile claims it, stores, and lets the others add. Two designs, for which kernels.toml chooses tile
// by tile:
//   backward_keys.cuh    every consumer warpgroup has 64 of the keys; head dims whose dK and dV it can hold
//   backward_roles.cuh   a warpgroup each for dV, dK and dQ; 64 keys, head dims beyond that
//
// Rows of Q, dO, K and V behind a sequence's end are zero in shared memory before a product reads them: there TMA
// brings zeros from outside the tensor and anything from inside, which the loader overwrites. Their lse is +inf, so P
// is 0.
//
// Deterministic: the additions into a query tile are made in ascending order of the key tile. A CTA takes its place
// from a ticket counter, so it only ever waits for CTAs that have started; the reducers wait for the turn of a query
// tile, not the consumers. Whoever has the first turn stores.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_desc.hpp>
#include <type_traits>

#include "common/backward_helpers.h"
#include "core/launch.cuh"
#include "core/programmatic_launch.cuh"
#include "params.h"
#include "ptx/griddepcontrol.cuh"
#include "sm90/backward_keys.cuh"
#include "sm90/backward_roles.cuh"
#include "sm90/backward_shape.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/tensor_map.cuh"

namespace flash_ext::sm90 {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArguments arguments);

template <DataType kType, int kHeadDim, int kHeadDimV, BackwardTile kTile, bool kRich>
using BackwardDesign =
    std::conditional_t<kTile.roles, BackwardRoles<BackwardRolesShape<kType, kHeadDim, kHeadDimV, kTile, kRich>>,
                       BackwardKeys<BackwardShape<kType, kHeadDim, kHeadDimV, kTile, kRich>>>;

template <DataType kType, int kHeadDim, int kHeadDimV, BackwardTile kTile, bool kRich>
struct Backward : BackwardDesign<kType, kHeadDim, kHeadDimV, kTile, kRich> {
    using Design = BackwardDesign<kType, kHeadDim, kHeadDimV, kTile, kRich>;
    using Design::kBlockM, Design::kBlockN, Design::kRows, Design::kThreads, Design::kControlOffset,
        Design::kSharedMemory;
    using typename Design::Control;

    static constexpr ScratchShape kScratch{kBlockM, kHeadDim, Design::kDqColumns, Design::kRows, true};
    static_assert(kScratch.parts() == Design::kTurns);  // the reducers count parts of a tile, too

    __device__ __forceinline__ static void run(const BackwardArguments& arguments) {
        extern __shared__ __align__(1024) unsigned char smem[];
        Control& control = *reinterpret_cast<Control*>(smem + kControlOffset);
        // The same in all lanes, and the compiler shall know it: descriptors then stay in uniform registers.
        const int warpgroup = uniform(threadIdx.x / 128);
        if constexpr (Design::kProgrammatic) ptx::griddepcontrol_launch_dependents();
        if (threadIdx.x == 0) {
            cute::prefetch_tma_descriptor(&arguments.q.map);
            cute::prefetch_tma_descriptor(&arguments.k.map);
            cute::prefetch_tma_descriptor(&arguments.v.map);
            cute::prefetch_tma_descriptor(&arguments.dout.map);
            Design::init_barriers(control);
            cutlass::arch::fence_barrier_init();
            // What the kernel before this one prepared is touched only from here on, the ticket first, and by the other
            // threads behind the barrier below.
            if constexpr (Design::kProgrammatic) ptx::griddepcontrol_wait();
            control.work = find_work<kBlockM, kBlockN>(arguments);
        }
        __syncthreads();  // barriers and work are there
        if (control.work.is_empty) return;
        Design::run_warpgroup(arguments, smem, control, warpgroup, threadIdx.x % 128);
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
        // seqlen_q: of a sequence, or of all of them when packed.
        const int64_t packed = attention.cu_seqlens_q != nullptr ? attention.batch : 1;
        const bool stores_first = attention.deterministic || attention.seqlen_q <= packed * Design::kStoresFirstRows;
        arguments.scratch = backward_scratch(params, kScratch, context->workspace, stores_first);
        cudaError_t error = launch_backward_preprocess(params, arguments.scratch, kScratch, stream);
        if (error != cudaSuccess) return error;

        // Without queries no kernel of this call comes before.
        const bool programmatic = Design::kProgrammatic && attention.seqlen_q > 0;
        const auto [heads, tiles] = key_tiles(attention, kBlockN);
        if (heads * tiles > 0) {
            error = encode_backward_maps(arguments, kBlockM, kBlockN, Design::kPromotion);
            if (error != cudaSuccess) return error;
            fill_backward_arguments(arguments, kBlockM);
            order_key_tiles(arguments, heads, tiles);

            const void* kernel = reinterpret_cast<const void*>(&backward_kernel<Backward>);
            static SharedMemoryOptIn opt_in;
            error = opt_in.ensure(kernel, context->device, kSharedMemory);
            if (error != cudaSuccess) return error;
            void* kernel_arguments[] = {&arguments};
            error = launch_kernel(kernel, linear_grid(heads * tiles), kThreads, kSharedMemory, stream, kernel_arguments,
                                  programmatic);
            if (error != cudaSuccess) return error;
        }
        return launch_backward_postprocess(params, arguments.scratch, kScratch, stream, programmatic);
    }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArguments arguments) {
    Kernel::run(arguments);
}

}  // namespace flash_ext::sm90
