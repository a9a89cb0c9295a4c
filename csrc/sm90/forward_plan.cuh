// What a CTA of the sm90 forward does next: which rows of which head, and which key blocks each warpgroup walks.
#pragma once

#include <stdint.h>

#include "core/fast_division.cuh"
#include "core/mask.cuh"
#include "core/sequence.cuh"
#include "core/tile_order.cuh"
#include "params.h"
#include "sm90/tensor_map.cuh"

namespace flash_ext::sm90 {

// What the host works out once for all CTAs of a launch.
struct ForwardArguments {
    TensorMap q, k, v;
    ForwardParams params;
    MaskBounds bounds;
    TileOrder order;
    FastDivisor heads;  // heads_q
    FastDivisor group;  // query heads of a key head
    unsigned long long*
        positions;              // next position to hand out beyond the first of each CTA; nullptr: every gridDim.x-th
    int32_t v_tail_is_garbage;  // 1: what TMA brings from behind a sequence's keys may be anything
    int32_t shares_keys;        // 1: clusters of two CTAs, each loads half of every block of keys for both
    float scale_log2;           // softmax_scale * log2(e)
    float inner_scale;          // softmax_scale / softcap
    float softcap_log2;         // softcap * log2(e)
    float dropout_scale;        // 1 / the probability to keep
};

// Where the results of a tile go.
struct TileOutput {
    int tensor_row;  // first row of the tile, from the start of the batch entry (dense) or buffer (packed)
    int rows;        // rows of the tile to write; 0: there are no more tiles
    int rows_used;   // of these, the first so many are computed, the rest is slack
    int head;
    int batch;  // of the tensors' stride_batch; the sequence's number otherwise
};

// One tile of query rows of one head.
struct ForwardPlan {
    static constexpr int kMaxWarpgroups = 3;
    TileOutput output;
    Mask mask;
    int row_begin;  // first row of the tile, from the start of the sequence
    int head_k;
    int key_row;                       // the sequence's first key row, as tensor_row
    int begin, end;                    // key blocks that any row needs; equal: none
    KeyBlocks blocks[kMaxWarpgroups];  // of each group of kRows rows, within [begin, end)
};

// The plan of position `position`; false if there is nothing to do there.
template <int kBlockM, int kBlockN, int kRows>
__device__ __forceinline__ bool make_plan(ForwardPlan& plan, const ForwardArguments& arguments, uint64_t position) {
    const ForwardParams& params = arguments.params;
    const TileIndex index = tile_at(arguments.order, position);
    const Quotient batch_head = divide_any(index.head, arguments.heads);
    plan.output.head = static_cast<int>(batch_head.remainder);
    plan.head_k = static_cast<int>(divide(batch_head.remainder, arguments.group).quotient);
    const TileRows tile = find_tile(params.cu_seqlens_q, params.seqused_q, params.seqlen_q, params.batch,
                                    static_cast<int>(batch_head.quotient), index.tile, kBlockM);
    plan.output.rows = min(tile.sequence.length - tile.begin, kBlockM);
    if (plan.output.rows <= 0) return false;  // an empty slot
    plan.output.rows_used = min(max(tile.sequence.used - tile.begin, 0), kBlockM);
    plan.output.batch = tile.batch;
    plan.row_begin = tile.begin;
    plan.output.tensor_row = tile.sequence.start + tile.begin;
    SequenceRows keys{};
    if (plan.output.rows_used > 0) {
        keys = sequence_rows(params.cu_seqlens_k, params.seqused_k, params.seqlen_k, plan.output.batch);
    }
    plan.key_row = keys.start;
    plan.mask = {arguments.bounds, keys.used - tile.sequence.used, keys.used};
    const int row_end = tile.begin + plan.output.rows_used;
    const KeyBlocks all = key_blocks(plan.mask, tile.begin, row_end, kBlockN);
    plan.begin = all.begin;
    plan.end = all.end;
#pragma unroll
    for (int i = 0; i < kBlockM / kRows; ++i) {
        const int begin = tile.begin + i * kRows;
        const KeyBlocks own = key_blocks(plan.mask, begin, min(begin + kRows, row_end), kBlockN);
        plan.blocks[i] = own.end > own.begin ? own : KeyBlocks{all.begin, all.begin, all.begin, all.begin};
    }
    return true;
}

// Where a CTA is in the order of tiles. It takes its positions one by one, in turn with the others or as they come.
struct TileWalk {
    uint64_t position;
    uint32_t step;
    bool is_first = true;

    // ctas: neighbours that do the same.
    __device__ __forceinline__ explicit TileWalk(int ctas = 1) : position(blockIdx.x / ctas), step(gridDim.x / ctas) {}

    // The next plan that has something to do; else one with no rows and no blocks, and false.
    template <int kBlockM, int kBlockN, int kRows>
    __device__ __forceinline__ bool next(ForwardPlan& plan, const ForwardArguments& arguments) {
        const uint64_t positions = static_cast<uint64_t>(arguments.order.heads) * arguments.order.tiles;
        const auto take_position = [&] {
            position = arguments.positions != nullptr ? step + atomicAdd(arguments.positions, 1ull) : position + step;
        };
        if (!is_first) take_position();
        is_first = false;
        while (position < positions && !make_plan<kBlockM, kBlockN, kRows>(plan, arguments, position)) take_position();
        if (position < positions) return true;
        plan.output.rows = 0;
        plan.begin = plan.end = 0;
        for (KeyBlocks& blocks : plan.blocks) blocks = {};
        return false;
    }
};

}  // namespace flash_ext::sm90
