// Backward attention on sm90: what its launch adds to what every path has, and how a CTA walks its query blocks.
#pragma once

#include <stdint.h>

#include <algorithm>

#include "common/backward_work.cuh"
#include "params.h"
#include "sm90/forward_shape.cuh"
#include "sm90/tensor_map.cuh"

namespace flash_ext::sm90 {

struct BackwardArguments : flash_ext::BackwardArguments {
    TensorMap q, k, v, dout;
    int32_t key_tail_is_garbage;    // 1: what TMA brings from behind a sequence's keys may be anything
    int32_t query_tail_is_garbage;  // 1: likewise queries
};

// The maps of Q, K, V and dO, for boxes of so many rows. Without queries none of theirs is used.
inline cudaError_t encode_backward_maps(BackwardArguments& arguments, int query_rows, int key_rows,
                                        CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    const BackwardParams& params = arguments.params;
    const ForwardParams& attention = params.attention;
    const int32_t q_batch = attention.cu_seqlens_q != nullptr ? 1 : attention.batch;
    const int32_t k_batch = attention.cu_seqlens_k != nullptr ? 1 : attention.batch;
    cudaError_t error = encode(&arguments.k, attention.k, attention.dtype, k_batch, attention.seqlen_k,
                               attention.heads_k, attention.head_dim, key_rows, promotion);
    if (error != cudaSuccess) return error;
    error = encode(&arguments.v, attention.v, attention.dtype, k_batch, attention.seqlen_k, attention.heads_k,
                   attention.head_dim_v, key_rows, promotion);
    if (error != cudaSuccess) return error;
    arguments.key_tail_is_garbage = attention.cu_seqlens_k != nullptr || attention.seqused_k != nullptr ||
                                    arguments.k.row_step == 0 || arguments.v.row_step == 0;
    if (attention.seqlen_q == 0) {  // no query is ever loaded
        arguments.q = arguments.dout = arguments.k;
        arguments.query_tail_is_garbage = 0;
        return cudaSuccess;
    }
    error = encode(&arguments.q, attention.q, attention.dtype, q_batch, attention.seqlen_q, attention.heads_q,
                   attention.head_dim, query_rows, promotion);
    if (error != cudaSuccess) return error;
    error = encode(&arguments.dout, params.dout, attention.dtype, q_batch, attention.seqlen_q, attention.heads_q,
                   attention.head_dim_v, query_rows, promotion);
    arguments.query_tail_is_garbage = attention.cu_seqlens_q != nullptr || attention.seqused_q != nullptr ||
                                      arguments.q.row_step == 0 || arguments.dout.row_step == 0;
    return error;
}

inline void order_key_tiles(BackwardArguments& arguments, int64_t heads, int64_t tiles) {
    const ForwardParams& attention = arguments.params.attention;
    // What the key tiles of a head read (and add to): Q, dO and the scratch.
    const int64_t query_bytes = static_cast<int64_t>(attention.seqlen_q) * attention.heads_q / attention.heads_k *
                                (2 * attention.head_dim_v + 6 * attention.head_dim);
    // Sections of heads that share the L2 cache, but for plain calls, whose tiles of a head all walk the same blocks:
    // with a causal mask for evenly long rows, in deterministic calls so that few tiles of a head run at once, which
    // wait for one another. At least as many tiles as there are SMs, which begin the next section early else; a head's
    // tiles of packed calls are those of many sequences. Tiles in order: seen from the keys a causal mask leaves
    // the first tile the most to do.
    constexpr int64_t kSectionBytes = int64_t{20} << 20, kTilesAtOnce = 128;  // an H200 has 132 SMs
    constexpr int64_t kDeterministicHeads = 8, kPackedHeads = 4, kLastHeads = 4;
    const bool deterministic = arguments.scratch.turns != nullptr, packed = attention.cu_seqlens_k != nullptr;
    const int64_t least = deterministic ? kDeterministicHeads
                          : packed      ? kPackedHeads
                                        : (kTilesAtOnce + tiles - 1) / std::max<int64_t>(tiles, 1);
    const int64_t fitting = query_bytes > 0 ? kSectionBytes / query_bytes : heads;
    const bool in_sections = arguments.bounds.right == 0 || deterministic;
    arguments.order = in_sections ? ascending_order(heads, tiles, std::max(fitting, least), kLastHeads)
                                  : ascending_order(heads, tiles, 1);
}

// A CTA walks query blocks of its key tile's query heads, head by head, each head from `first_block` down and round to
// the block behind it: from the last one, or, where whoever comes first stores dQ, from the blocks beside its keys. So
// tiles of a head that start together do not all wait for the first of them at one query tile: each is the first in its
// own, stores there, and then comes to what another has stored: without a mask the tile before it, with a causal one
// the last tile of the head. Tiles that start together stay close, so that the L2 cache has what they read and add to:
// deterministic causal calls that began at their diagonals took up to twice as long.
struct BackwardWork : KeyTileWork {
    int32_t first_slot;  // of the sequence's query tiles
    int32_t first_block;
    int32_t steps;  // of the whole walk
};

template <int kBlockM, int kBlockN>
__device__ __forceinline__ BackwardWork find_work(const BackwardArguments& arguments) {
    BackwardWork work{};
    static_cast<KeyTileWork&>(work) = find_key_tile<kBlockM, kBlockN>(arguments);
    if (arguments.params.attention.cu_seqlens_q != nullptr) {
        work.first_slot = work.queries_start / kBlockM + work.batch + 1;
    }
    const int blocks = work.blocks.end - work.blocks.begin;
    work.steps = blocks * (arguments.params.attention.heads_q / arguments.params.attention.heads_k);
    work.first_block = work.blocks.end - 1;
    if (arguments.scratch.states != nullptr && blocks > 1) {
        constexpr int kBlocks = kBlockN > kBlockM ? kBlockN / kBlockM : 1;  // of queries, beside a key tile
        const int last_beside = work.begin / kBlockN * kBlocks + kBlocks - 1;
        work.first_block = work.blocks.begin + max(last_beside - work.blocks.begin, 0) % blocks;
    }
    return work;
}

__device__ __forceinline__ int first_head(const BackwardArguments& arguments, int head_k) {
    return head_k * (arguments.params.attention.heads_q / arguments.params.attention.heads_k);
}

__device__ __forceinline__ int next_block(int block, int begin, int end) {
    return block == begin ? end - 1 : block - 1;
}

// The walk of a consumer warpgroup: all in uniform registers, for a step that waits for shared memory costs several %.
struct QueryWalk {
    int head;
    int block;
    int left;  // steps, this one included
    int begin, end, first;
    int full_begin, full_end;

    __device__ __forceinline__ QueryWalk(const BackwardArguments& arguments, const volatile BackwardWork& work) {
        head = first_head(arguments, uniform(work.head_k));
        begin = uniform(work.blocks.begin);
        end = uniform(work.blocks.end);
        block = first = uniform(work.first_block);
        left = uniform(work.steps);
        full_begin = uniform(work.blocks.full_begin);
        full_end = uniform(work.blocks.full_end);
    }
    // Whether the mask hides something of the block.
    __device__ __forceinline__ bool is_masked() const { return block >= full_end || block < full_begin; }
    __device__ __forceinline__ void advance() {
        --left;
        block = next_block(block, begin, end);
        if (block == first) ++head;
    }
};

// The same for a producer, which has few registers: what does not change is read when it is needed.
struct ProducerWalk {
    int head;
    int block;
    int left;

    __device__ __forceinline__ ProducerWalk(const BackwardArguments& arguments, const volatile BackwardWork& work) {
        head = first_head(arguments, work.head_k);
        block = work.first_block;
        left = work.steps;
    }
    __device__ __forceinline__ void advance(const volatile BackwardWork& work) {
        --left;
        block = next_block(block, work.blocks.begin, work.blocks.end);
        if (block == work.first_block) ++head;
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
