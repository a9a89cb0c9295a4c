// What a CTA of the sm90 backward works on: which keys of which key head, and which query blocks they are seen by.
#pragma once

#include <stdint.h>

#include "common/backward_helpers.h"
#include "core/fast_division.cuh"
#include "core/mask.cuh"
#include "core/sequence.cuh"
#include "core/tile_order.cuh"
#include "params.h"
#include "sm90/forward_shape.cuh"
#include "sm90/tensor_map.cuh"

namespace flash_ext::sm90 {

// What the host works out once for all CTAs of a launch.
struct BackwardArguments {
    TensorMap q, k, v, dout;
    BackwardParams params;
    BackwardScratch scratch;
    MaskBounds bounds;
    TileOrder order;                // over (batch, key head) and key tiles
    int32_t query_slots;            // query tiles per head
    int32_t key_tail_is_garbage;    // 1: what TMA brings from behind a sequence's keys may be anything
    int32_t query_tail_is_garbage;  // 1: likewise queries
    float scale_log2;               // softmax_scale * log2(e)
    float inner_scale;              // softmax_scale / softcap
    float softcap_log2;             // softcap * log2(e)
    float dropout_scale;            // 1 / the probability to keep
};

// Found by one thread, kept in shared memory, read where it is used: the accumulators leave no registers to spare.
struct BackwardWork {
    int32_t is_empty;    // nothing to do
    int32_t batch;       // sequence; -1 or batch: slack
    int32_t head_k;      // key head
    int32_t begin;       // first key, from the start of the sequence
    int32_t rows;        // keys of the tile
    int32_t rows_used;   // of these, how many count
    int32_t keys_start;  // first key of the sequence in its tensor
    int32_t keys_used;   // keys of the sequence that count
    int32_t queries_start;
    int32_t queries_used;
    int32_t first_slot;  // of the sequence's query tiles
    KeyBlocks blocks;    // query blocks that see any of the keys
};

template <int kBlockM, int kBlockN>
__device__ __forceinline__ BackwardWork find_work(const BackwardArguments& arguments) {
    const ForwardParams& attention = arguments.params.attention;
    BackwardWork work{};
    uint64_t position = static_cast<uint64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    if (arguments.scratch.ticket != nullptr) position = atomicAdd(arguments.scratch.ticket, 1ull);
    work.is_empty = position >= static_cast<uint64_t>(arguments.order.heads) * arguments.order.tiles;
    if (work.is_empty) return work;
    TileIndex index = tile_at(arguments.order, position);
    // Seen from the keys a causal mask leaves the first tile the most to do.
    if (arguments.order.heaviest_first) index.tile = arguments.order.tiles - 1 - index.tile;
    const int dense_batch = attention.cu_seqlens_k != nullptr ? 0 : static_cast<int>(index.head / attention.heads_k);
    work.head_k = static_cast<int>(index.head - static_cast<int64_t>(dense_batch) * attention.heads_k);
    const TileRows tile = find_tile(attention.cu_seqlens_k, attention.seqused_k, attention.seqlen_k, attention.batch,
                                    dense_batch, index.tile, kBlockN);
    work.batch = tile.batch;
    work.begin = tile.begin;
    work.rows = min(tile.sequence.length - tile.begin, kBlockN);
    work.is_empty = work.rows <= 0;  // an unused slot
    work.rows_used = min(max(tile.sequence.used - tile.begin, 0), kBlockN);
    work.keys_start = tile.sequence.start;
    work.keys_used = tile.sequence.used;
    if (work.is_empty || work.rows_used <= 0) return work;
    const SequenceRows queries =
        sequence_rows(attention.cu_seqlens_q, attention.seqused_q, attention.seqlen_q, tile.batch);
    work.queries_start = queries.start;
    work.queries_used = queries.used;
    work.first_slot = attention.cu_seqlens_q != nullptr ? queries.start / kBlockM + tile.batch + 1 : 0;
    const Mask mask{arguments.bounds, work.keys_used - work.queries_used, work.keys_used};
    work.blocks = key_blocks(mask.transposed(work.queries_used), work.begin, work.begin + work.rows_used, kBlockM);
    // Keys past the end of the sequence are masked in every step: exp(0 - lse) may overflow.
    if (work.rows_used < kBlockN) work.blocks.full_begin = work.blocks.full_end = work.blocks.begin;
    return work;
}

// A query block of a query head, as a CTA walks them: head by head, blocks from the last to the first. Deterministic
// calls need that order: with a causal mask the key tiles of a head then follow one another closely.
struct QueryWalk {
    int head;
    int block;
    int left;  // steps, this one included
    int begin, end;

    __device__ __forceinline__ QueryWalk(const ForwardParams& attention, const volatile BackwardWork& work) {
        // Read from shared memory, but the same in all lanes: uniform registers then hold it.
        const int group = attention.heads_q / attention.heads_k;
        begin = uniform(work.blocks.begin);
        end = uniform(work.blocks.end);
        head = uniform(work.head_k) * group;
        block = end - 1;
        left = (end - begin) * group;
    }
    __device__ __forceinline__ void advance() {
        --left;
        if (--block < begin) {
            block = end - 1;
            ++head;
        }
    }
};

// The number of a query tile in the scratch.
__device__ __forceinline__ int64_t scratch_tile(const BackwardArguments& arguments, const volatile BackwardWork& work,
                                                int head, int block) {
    const ForwardParams& attention = arguments.params.attention;
    const int64_t sequence_head =
        attention.cu_seqlens_q != nullptr ? head : static_cast<int64_t>(work.batch) * attention.heads_q + head;
    return sequence_head * arguments.query_slots + work.first_slot + block;
}

}  // namespace flash_ext::sm90
