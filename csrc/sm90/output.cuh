// How a warpgroup's rows leave: normalised, rounded, straight from registers to global memory.
#pragma once

#include <stdint.h>

#include "core/numeric.cuh"
#include "core/sequence.cuh"
#include "sm90/forward_plan.cuh"
#include "sm90/softmax.cuh"

namespace flash_ext::sm90 {

// Among the four lanes of a quad: lane i's words[j] becomes lane j's words[i].
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int lane) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & step) continue;
            const uint32_t received = __shfl_xor_sync(kAllLanes, upper ? words[i] : words[i + step], step);
            (upper ? words[i] : words[i + step]) = received;
        }
    }
}

// Writes rows `row` and `row + 8` of the tile: those that are used from o_frag, slack as 0 and -inf. has_blocks: o_frag
// and softmax hold something.
template <DataType kType, int kHeadDimV>
__device__ __forceinline__ void write_rows(const float (&o_frag)[kHeadDimV / 2], const WarpgroupSoftmax& softmax,
                                           const ForwardArguments& arguments, const TileOutput& tile, int row, int lane,
                                           bool has_blocks, float scale_log2, float out_scale) {
    const ForwardParams& params = arguments.params;
    const bool packed = params.cu_seqlens_q != nullptr;
    const int batch = packed ? 0 : tile.batch;
    char* out = static_cast<char*>(params.out.data) + row_offset(params.out, batch, tile.tensor_row, tile.head) * 2;
    float* lse =
        params.lse + tile.tensor_row + (static_cast<int64_t>(batch) * params.heads_q + tile.head) * params.seqlen_q;
    const bool has_sink = params.sinks != nullptr;
    const float sink = has_sink ? load_as_float(params.sinks, params.sinks_dtype, tile.head) : 0.f;
    WarpgroupSoftmax state = softmax;
    if (!has_blocks) state.reset();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int here = row + half * 8;
        RowResult result = state.finish(0, half, scale_log2, has_sink, sink);
        result.out_scale *= out_scale;
        if (here >= tile.rows_used) result = {0.f, minus_infinity(), false};
        if (lane % 4 == 0 && here < tile.rows) lse[here] = result.lse;
        char* out_row = out + here * params.out.stride_row * 2 + lane % 4 * 16;
        const int columns = here < tile.rows ? params.head_dim_v - lane % 4 * 8 : 0;
#pragma unroll
        for (int group = 0; group < kHeadDimV / 32; ++group) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = &o_frag[(group * 4 + i) * 4 + 2 * half];
                words[i] = result.has_keys ? pack<kType>(pair[0] * result.out_scale, pair[1] * result.out_scale) : 0u;
            }
            transpose_quad(words, lane);
            if (group * 32 < columns) {
                *reinterpret_cast<uint4*>(out_row + group * 64) = uint4{words[0], words[1], words[2], words[3]};
            }
        }
    }
}

}  // namespace flash_ext::sm90
