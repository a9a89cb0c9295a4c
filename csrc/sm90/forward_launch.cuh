// How a forward kernel that plans its tiles itself is launched (sm90, sm100): grid, workspace, tensor maps.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "core/launch.cuh"
#include "core/mask.cuh"
#include "core/numeric.cuh"
#include "core/sequence.cuh"
#include "params.h"
#include "sm90/forward_plan.cuh"
#include "sm90/tensor_map.cuh"

namespace flash_ext::sm90 {

template <class Shape>
struct ForwardLaunch {
    static constexpr int kBlockM = Shape::kBlockM, kCluster = Shape::kCluster, kThreads = Shape::kThreads;
    static constexpr int kQBoxRows = Shape::kQBoxRows, kKeyBoxRows = Shape::kKeyBoxRows, kVBoxRows = Shape::kVBoxRows;
    static constexpr int kCtasOfTile = Shape::kCtasOfTile;  // 2: a pair works on one tile, and tiles are not handed out
    static constexpr int64_t kSharedMemory = Shape::kSharedMemory;

    // The grid, and what it is made of.
    struct Grid {
        int64_t heads, tiles;
        int64_t blocks;
        bool is_uneven;   // tiles differ in work
        bool is_dynamic;  // and are handed out one by one
    };
    static Grid make_grid(const ForwardParams& params, const LaunchContext& context, const MaskBounds& bounds) {
        const bool packed = params.cu_seqlens_q != nullptr;
        Grid grid;
        grid.heads = packed ? params.heads_q : static_cast<int64_t>(params.batch) * params.heads_q;
        grid.tiles = packed ? varlen_slots(params.seqlen_q, params.batch, kBlockM)
                            : (static_cast<int64_t>(params.seqlen_q) + kBlockM - 1) / kBlockM;
        if (params.seqlen_q == 0) grid.tiles = 0;
        const int64_t sms = context.sm_count - params.sm_margin > 1 ? context.sm_count - params.sm_margin : 1;
        const int64_t units = sms / kCtasOfTile > 0 ? sms / kCtasOfTile : 1;
        grid.blocks = (grid.heads * grid.tiles < units ? grid.heads * grid.tiles : units) * kCtasOfTile;
        if (kCluster > 1 && grid.blocks > 1) grid.blocks -= grid.blocks % 2;
        grid.is_uneven = bounds.left >= 0 || bounds.right >= 0 || packed || params.cu_seqlens_k != nullptr ||
                         params.seqused_q != nullptr || params.seqused_k != nullptr;
        grid.is_dynamic = grid.is_uneven && grid.heads * grid.tiles > grid.blocks && kCtasOfTile == 1;
        return grid;
    }

    static int64_t workspace(const ForwardParams& params, const LaunchContext& context) {
        return make_grid(params, context, mask_bounds(params)).is_dynamic ? sizeof(unsigned long long) : 0;
    }

    // opt_in: the kernel's own.
    static int32_t launch(const ForwardParams& params, const LaunchContext& context, const void* kernel,
                          SharedMemoryOptIn& opt_in) {
        ForwardArguments arguments;
        arguments.params = params;
        arguments.bounds = mask_bounds(params);
        const Grid grid = make_grid(params, context, arguments.bounds);
        if (grid.blocks == 0) return cudaSuccess;

        const int32_t q_batch = params.cu_seqlens_q != nullptr ? 1 : params.batch;
        const int32_t k_batch = params.cu_seqlens_k != nullptr ? 1 : params.batch;
        cudaError_t error = encode(&arguments.q, params.q, params.dtype, q_batch, params.seqlen_q, params.heads_q,
                                   params.head_dim, kQBoxRows);
        if (error == cudaSuccess && params.seqlen_k > 0) {
            error = encode(&arguments.k, params.k, params.dtype, k_batch, params.seqlen_k, params.heads_k,
                           params.head_dim, kKeyBoxRows);
            if (error == cudaSuccess) {
                error = encode(&arguments.v, params.v, params.dtype, k_batch, params.seqlen_k, params.heads_k,
                               params.head_dim_v, kVBoxRows);
            }
            if (error != cudaSuccess) return error;
        } else {
            if (error != cudaSuccess) return error;
            arguments.k = arguments.v = arguments.q;  // no key is ever loaded
        }
        arguments.v_tail_is_garbage =
            params.cu_seqlens_k != nullptr || params.seqused_k != nullptr || arguments.v.row_step == 0;
        // Tiles 2 i and 2 i + 1 of a head always run at the same time in a pair of CTAs, and walk the same keys.
        arguments.shares_keys = kCluster > 1 && !grid.is_uneven && grid.tiles % 2 == 0 && grid.blocks % 2 == 0 &&
                                arguments.k.row_step != 0 && arguments.v.row_step != 0;
        const int64_t key_bytes = static_cast<int64_t>(params.seqlen_k) * (params.head_dim + params.head_dim_v) * 2 *
                                  params.heads_k / params.heads_q;
        arguments.order = make_tile_order(grid.heads, grid.tiles, arguments.bounds.right == 0, key_bytes);
        arguments.heads = make_fast_divisor(params.heads_q);
        arguments.group = make_fast_divisor(params.heads_q / params.heads_k);
        arguments.scale_log2 = params.softmax_scale * kLog2E;
        arguments.inner_scale = params.softcap > 0.f ? params.softmax_scale / params.softcap : 0.f;
        arguments.softcap_log2 = params.softcap * kLog2E;
        arguments.dropout_scale = 65536.f / static_cast<float>(65536u - params.dropout_threshold);

        const auto stream = static_cast<cudaStream_t>(context.stream);
        arguments.positions = nullptr;
        if (grid.is_dynamic) {
            arguments.positions = static_cast<unsigned long long*>(context.workspace);
            error = cudaMemsetAsync(arguments.positions, 0, sizeof(unsigned long long), stream);
            if (error != cudaSuccess) return error;
        }
        error = opt_in.ensure(kernel, context.device, kSharedMemory);
        if (error != cudaSuccess) return error;
        void* kernel_arguments[] = {&arguments};
        cudaLaunchAttribute cluster;
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {2, 1, 1};
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
        config.blockDim = dim3(kThreads);
        config.dynamicSmemBytes = kSharedMemory;
        config.stream = stream;
        config.attrs = &cluster;
        config.numAttrs = arguments.shares_keys || kCtasOfTile == 2 ? 1 : 0;
        return cudaLaunchKernelExC(&config, kernel, kernel_arguments);
    }
};

}  // namespace flash_ext::sm90
