// Backward attention on sm80: in which order the CTAs of a deterministic launch add to dQ.
#pragma once

#include <stdint.h>

#include "common/backward_work.cuh"
#include "core/mask.cuh"
#include "params.h"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flash_ext::sm80 {

// Read where it is used (volatile), not kept in registers.
struct BackwardWork : KeyTileWork {
    int32_t* turn;  // deterministic: the counter to raise once all warps have added; nullptr before the first
};

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
        while (ptx::ld_acquire_gpu(turn.counter) < turn.mine) {
        }
    }
    __syncwarp();  // what lane 0 has seen is there for all
}

// Behind a barrier that all warps reach after their additions: lets the next key block add.
__device__ __forceinline__ void pass_turn_on(const volatile BackwardWork& work) {
    if (threadIdx.x == 0 && work.turn != nullptr) ptx::red_release_gpu_add(work.turn, 1);
}

}  // namespace flash_ext::sm80
