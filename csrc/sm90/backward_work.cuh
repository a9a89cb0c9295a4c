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
};

struct BackwardWork : KeyTileWork {
    int32_t first_slot;  // of the sequence's query tiles
};

template <int kBlockM, int kBlockN>
__device__ __forceinline__ BackwardWork find_work(const BackwardArguments& arguments) {
    BackwardWork work{find_key_tile<kBlockM, kBlockN>(arguments), 0};
    if (arguments.params.attention.cu_seqlens_q != nullptr) {
        work.first_slot = work.queries_start / kBlockM + work.batch + 1;
    }
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
