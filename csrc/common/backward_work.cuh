// What the main kernel of a backward is told and what a CTA of it works on, the same on every path that walks the query
// blocks of a key tile.
#pragma once

#include <stdint.h>

#include "common/backward_helpers.h"
#include "core/mask.cuh"
#include "core/numeric.cuh"
#include "core/sequence.cuh"
#include "core/tile_order.cuh"
#include "params.h"

namespace flash_ext {

// What the host works out once for all CTAs of a launch.
struct BackwardArguments {
    BackwardParams params;
    BackwardScratch scratch;
    MaskBounds bounds;
    TileOrder order;      // over (batch, key head) and key tiles
    int32_t query_slots;  // query tiles per head
    float scale_log2;     // softmax_scale * log2(e)
    float inner_scale;    // softmax_scale / softcap
    float softcap_log2;   // softcap * log2(e)
    float dropout_scale;  // 1 / the probability to keep
};

// All but params, scratch (set before) and order, which the path chooses.
inline void fill_backward_arguments(BackwardArguments& arguments, int block_m) {
    const ForwardParams& attention = arguments.params.attention;
    arguments.bounds = mask_bounds(attention);
    arguments.query_slots = static_cast<int32_t>(backward_query_slots(attention, block_m));
    arguments.scale_log2 = attention.softmax_scale * kLog2E;
    arguments.inner_scale = attention.softcap > 0.f ? attention.softmax_scale / attention.softcap : 0.f;
    arguments.softcap_log2 = attention.softcap * kLog2E;
    arguments.dropout_scale = 65536.f / static_cast<float>(65536u - attention.dropout_threshold);
}

// The CTAs of a launch: key tiles of key heads; tiles 0: none.
struct KeyTiles {
    int64_t heads;  // batch * heads_k (dense) or heads_k (packed)
    int64_t tiles;  // per head
};

inline KeyTiles key_tiles(const ForwardParams& attention, int block_n) {
    if (attention.seqlen_k == 0) return {0, 0};
    if (attention.cu_seqlens_k != nullptr) {
        return {attention.heads_k, varlen_slots(attention.seqlen_k, attention.batch, block_n)};
    }
    return {static_cast<int64_t>(attention.batch) * attention.heads_k,
            (static_cast<int64_t>(attention.seqlen_k) + block_n - 1) / block_n};
}

// Found by one thread, kept in shared memory, read where it is used: the accumulators leave no registers to spare.
struct KeyTileWork {
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
    KeyBlocks blocks;  // query blocks that see any of the keys
};

template <int kBlockM, int kBlockN>
__device__ __forceinline__ KeyTileWork find_key_tile(const BackwardArguments& arguments) {
    const ForwardParams& attention = arguments.params.attention;
    KeyTileWork work{};
    uint64_t position = static_cast<uint64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    if (arguments.scratch.ticket != nullptr) position = atomicAdd(arguments.scratch.ticket, 1ull);
    work.is_empty = position >= static_cast<uint64_t>(arguments.order.heads) * arguments.order.tiles;
    if (work.is_empty) return work;
    const TileIndex index = tile_at(arguments.order, position);
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
    const Mask mask{arguments.bounds, work.keys_used - work.queries_used, work.keys_used};
    work.blocks = key_blocks(mask.transposed(work.queries_used), work.begin, work.begin + work.rows_used, kBlockM);
    // Keys past the end of the sequence are masked in every step: exp(0 - lse) may overflow.
    if (work.rows_used < kBlockN) work.blocks.full_begin = work.blocks.full_end = work.blocks.begin;
    return work;
}

}  // namespace flash_ext
