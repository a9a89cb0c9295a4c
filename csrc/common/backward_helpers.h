// What surrounds the main kernel of a backward on every path: its scratch in global memory, the kernel that prepares it
// and the one that turns it into results.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "params.h"

namespace flash_ext {

// How a path's kernel wants dQ and the row terms. Rows: as dq_scratch.cuh says, rows of all sequences without a gap.
// Tiles: each query tile of each head by itself, whole even where its sequence ends, parts of part_rows x part_columns
// one behind the other (columns are the faster), a part as its threads hold it, 4 elements of each, then the next 4: 64
// rows as a warpgroup holds the accumulator of an m64nN product; 32 rows as a warp holds lanes of tensor memory.
struct ScratchShape {
    int32_t block_m;       // query rows of a tile
    int32_t tile_columns;  // of dQ that a tile holds, at least head_dim; 0: rows
    int32_t part_columns;
    int32_t part_rows;
    bool can_store_first;  // the main kernel can store what comes first to a part of dq, which nobody then clears;
                           // tiles with parts of 64 rows only

    constexpr ScratchShape(int32_t block_m, int32_t tile_columns = 0, int32_t part_columns = 0, int32_t part_rows = 64,
                           bool can_store_first = false)
        : block_m(block_m),
          tile_columns(tile_columns),
          part_columns(part_columns),
          part_rows(part_rows),
          can_store_first(can_store_first) {}

    constexpr __host__ __device__ int32_t parts() const { return block_m / part_rows * (tile_columns / part_columns); }
};

// What has become of a part of dq that nobody clears.
enum class PartState : int32_t { kUntouched, kClaimed, kStored };

// The turns of a query tile where cu_seqlens_k does not ascend, and more than any tile has: its dq is cleared.
constexpr int32_t kEveryTurn = 1 << 30;

// Global memory of one backward call, cut from the workspace. Nothing is kept between calls.
struct BackwardScratch {
    float* dq;  // rows: (batch, heads_q, seqlen_q, head_dim) or (heads_q, total_q, head_dim); tiles: (batch, heads_q,
                // query slots, block_m x tile_columns) or (heads_q, query slots, ...): sum of dS K, unscaled
    float2* row_terms;  // rows: like lse: (lse * log2(e), or +inf where lse is -inf so that exp2(score - x) is 0;
                        // rowsum(dO * O) - dlse); tiles: block_m of the former, then block_m of the latter, for each
                        // tile, (+inf, 0) behind the sequence's end
    float* dsinks;      // (heads_q, batch * query slots) dense or (heads_q, query slots): sums of a query tile
    int32_t* turns;     // (batch, heads_q, query slots) or (heads_q, query slots): how many key blocks have added to a
                        // query tile's dq, or beyond all of them where cu_seqlens_k does not ascend; nullptr: not
                        // deterministic
    unsigned long long* ticket;  // the next CTA's place in the order; nullptr: not deterministic
    bool stores_first;           // false: dq is cleared; true: but for query tiles of kEveryTurn
    int32_t* states;  // (batch, heads_q, query slots, parts) or (heads_q, ...): PartState; nullptr: deterministic, or
                      // dq is cleared
};

// Tiles of block_m query rows per head and, dense, per sequence.
int64_t backward_query_slots(const ForwardParams& attention, int block_m);

// Bytes of workspace, and its division. stores_first: as in the scratch, if the shape can.
int64_t backward_scratch_size(const BackwardParams& params, const ScratchShape& shape);
BackwardScratch backward_scratch(const BackwardParams& params, const ScratchShape& shape, void* workspace,
                                 bool stores_first = false);

// Clears turns, ticket and states, and dq unless the scratch says that the main kernel stores first; fills row_terms
// and the tiles' sums for dsinks. Lets a programmatic launch behind it start early.
cudaError_t launch_backward_preprocess(const BackwardParams& params, const BackwardScratch& scratch,
                                       const ScratchShape& shape, cudaStream_t stream);

// Scales and rounds dq, writes 0 to rows outside the sequences, adds up dsinks in a fixed order. programmatic: as for
// launch_kernel.
cudaError_t launch_backward_postprocess(const BackwardParams& params, const BackwardScratch& scratch,
                                        const ScratchShape& shape, cudaStream_t stream, bool programmatic = false);

}  // namespace flash_ext
