// Backward attention on sm80: what the launch hands to every CTA, what a CTA works on, and in which order the CTAs of a
// deterministic launch add to dQ.
#pragma once

#include <stdint.h>

#include "common/backward_helpers.h"
#include "core/mask.cuh"
#include "core/sequence.cuh"
#include "core/tile_order.cuh"
#include "params.h"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flash_ext::sm80 {

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

// Heads in sections of `section` at least, the tiles of each from the first to the last: with a causal mask the first
// key tiles are the heaviest (core/tile_order.cuh has the order for query tiles).
inline TileOrder ascending_order(int64_t heads, int64_t tiles, int64_t section) {
    TileOrder order = make_tile_order(heads, tiles, false, 0);
    const int64_t sections = heads > section ? heads / section : 1;
    section = heads / sections;
    order.section = make_fast_divisor(static_cast<uint32_t>(section));
    order.last_section = make_fast_divisor(static_cast<uint32_t>(heads - (sections - 1) * section));
    order.per_section = make_fast_divisor(order.is_large ? 1 : static_cast<uint32_t>(section * tiles));
    order.sections = sections;
    return order;
}

// What a CTA works on: found by one thread, kept in shared memory. Read where it is used (volatile), not kept in
// registers, of which dK, dV and the scores leave none to spare.
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
    KeyBlocks blocks;  // query blocks that see any of the keys
    int32_t* turn;     // deterministic: the counter to raise once all warps have added; nullptr before the first
};

template <int kBlockM, int kBlockN>
__device__ __forceinline__ BackwardWork find_work(const BackwardArguments& arguments) {
    const ForwardParams& attention = arguments.params.attention;
    BackwardWork work{};
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

// Row of (batch, query head, query) in row_terms and, times head_dim, in dq.
__device__ __forceinline__ int64_t scratch_row(const ForwardParams& attention, const volatile BackwardWork& work,
                                               int head, int query) {
    const int64_t sequence_head =
        attention.cu_seqlens_q != nullptr ? head : static_cast<int64_t>(work.batch) * attention.heads_q + head;
    return sequence_head * attention.seqlen_q + work.queries_start + query;
}

// How many key blocks have added to the query block so far (the counter), and how many must have before this one.
struct BackwardTurn {
    int32_t* counter;
    int32_t mine;
};

template <int kBlockM, int kBlockN>
__device__ __forceinline__ BackwardTurn find_turn(const BackwardArguments& arguments, const volatile BackwardWork& work,
                                                  int head, int block) {
    const ForwardParams& attention = arguments.params.attention;
    const bool packed = attention.cu_seqlens_q != nullptr;
    const int64_t sequence_head = packed ? head : static_cast<int64_t>(work.batch) * attention.heads_q + head;
    const int first_slot = packed ? work.queries_start / kBlockM + work.batch + 1 : 0;
    const Mask mask{arguments.bounds, work.keys_used - work.queries_used, work.keys_used};
    const int begin = block * kBlockM, end = min(begin + kBlockM, work.queries_used);
    return {arguments.scratch.turns + sequence_head * arguments.query_slots + first_slot + block,
            work.begin / kBlockN - key_blocks(mask, begin, end, kBlockN).begin};
}

// Waits until the key blocks before this one have added to the query block. For a warp. (threadIdx.x, which the
// compiler knows to be the same everywhere, gives a better schedule here than ptx::tid_x(): 3 % at d 192.)
template <int kBlockM, int kBlockN>
__device__ __forceinline__ void wait_for_turn(const BackwardArguments& arguments, volatile BackwardWork& work, int head,
                                              int block) {
    if (threadIdx.x % 32 == 0) {
        const BackwardTurn turn = find_turn<kBlockM, kBlockN>(arguments, work, head, block);
        if (threadIdx.x == 0) work.turn = turn.counter;
        while (ptx::ld_acquire_gpu(turn.counter) != turn.mine) {
        }
    }
    __syncwarp();  // what lane 0 has seen is there for all
}

// Behind a barrier that all warps reach after their additions: lets the next key block add.
__device__ __forceinline__ void pass_turn_on(const volatile BackwardWork& work) {
    if (threadIdx.x == 0 && work.turn != nullptr) ptx::red_release_gpu_add(work.turn, 1);
}

}  // namespace flash_ext::sm80
