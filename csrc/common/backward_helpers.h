// What surrounds the main kernel of a backward on every path: its scratch in global memory, the kernel that prepares it
// and the one that turns it into results.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "params.h"

namespace flash_ext {

// Global memory of one backward call, cut from the workspace. Nothing is kept between calls.
struct BackwardScratch {
    float* dq;  // (batch, heads_q, seqlen_q, head_dim) or (heads_q, total_q, head_dim): sum of dS K, unscaled; within
                // 8 columns in the order 0 2 4 6 1 3 5 7 (what a quad adds at once lies together)
    float2* row_terms;  // like lse: (lse * log2(e), or +inf where lse is -inf so that exp2(score - x) is 0;
                        // rowsum(dO * O) - dlse)
    float* dsinks;      // (heads_q, batch * query slots) dense or (heads_q, query slots): sums of a query tile
    int32_t* turns;     // (batch, heads_q, query slots) or (heads_q, query slots): how many key blocks have added to a
                        // query tile's dq; nullptr: not deterministic
    unsigned long long* ticket;  // the next CTA's place in the order; nullptr: not deterministic
};

// Tiles of block_m query rows per head and, dense, per sequence.
int64_t backward_query_slots(const ForwardParams& attention, int block_m);

// Bytes of workspace, and its division.
int64_t backward_scratch_size(const BackwardParams& params, int block_m);
BackwardScratch backward_scratch(const BackwardParams& params, int block_m, void* workspace);

// Clears dq, turns and ticket; fills row_terms and the tiles' sums for dsinks.
cudaError_t launch_backward_preprocess(const BackwardParams& params, const BackwardScratch& scratch, int block_m,
                                       cudaStream_t stream);

// Scales and rounds dq, writes 0 to rows outside the sequences, adds up dsinks in a fixed order.
cudaError_t launch_backward_postprocess(const BackwardParams& params, const BackwardScratch& scratch, int block_m,
                                        cudaStream_t stream);

}  // namespace flash_ext
