// Backward attention on sm90: what its launch adds to what every path has, and how a CTA walks its query blocks.
#pragma once

#include <stdint.h>

#include "common/backward_work.cuh"
#include "params.h"
#include "sm90/forward_shape.cuh"
#include "sm90/tensor_map.cuh"

namespace flash_ext::sm90 {

struct BackwardArguments : flash_ext::BackwardArguments {
    TensorMap q, k, v, dout;
    int32_t key_tail_is_garbage;    // 1: what TMA brings from behind a sequence's keys may be anything
    int32_t query_tail_is_garbage;  // 1: likewise queries
    int32_t spreads;                // 1: key tiles start their walks at different query blocks
};

struct BackwardWork : KeyTileWork {
    int32_t first_slot;   // of the sequence's query tiles
    int32_t first_block;  // of the walk
    int32_t steps;        // query blocks of all query heads
};

template <int kBlockM, int kBlockN>
__device__ __forceinline__ BackwardWork find_work(const BackwardArguments& arguments) {
    BackwardWork work{find_key_tile<kBlockM, kBlockN>(arguments), 0, 0, 0};
    if (arguments.params.attention.cu_seqlens_q != nullptr) {
        work.first_slot = work.queries_start / kBlockM + work.batch + 1;
    }
    const int blocks = work.blocks.end - work.blocks.begin;
    work.steps = blocks * (arguments.params.attention.heads_q / arguments.params.attention.heads_k);
    work.first_block = work.blocks.end - 1;
    if (arguments.spreads && blocks > 1) work.first_block -= work.begin / kBlockM % blocks;
    return work;
}

// A query block of a query head, as a CTA walks them: head by head, blocks from `first` down and then from the last to
// the one behind it. Deterministic calls start at the last: with a causal mask the key tiles of a head then follow one
// another closely. Others start each key tile elsewhere, so that tiles of a head which run at once do not all add to
// one query tile. What a step does not change is read from shared memory when it is needed: registers are scarce.
struct QueryWalk {
    int head;
    int block;
    int left;  // steps, this one included

    __device__ __forceinline__ QueryWalk(const BackwardArguments& arguments, const volatile BackwardWork& work) {
        // Read from shared memory, but the same in all lanes: uniform registers then hold it.
        head = uniform(work.head_k) * (arguments.params.attention.heads_q / arguments.params.attention.heads_k);
        block = uniform(work.first_block);
        left = uniform(work.steps);
    }
    __device__ __forceinline__ void advance(const volatile BackwardWork& work) {
        --left;
        if (--block < uniform(work.blocks.begin)) block = uniform(work.blocks.end) - 1;
        if (block == uniform(work.first_block)) ++head;
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
