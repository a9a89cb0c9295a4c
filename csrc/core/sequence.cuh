// Where a tile's rows and keys lie: dense, packed (cu_seqlens) and partly used (seqused) sequences alike.
//
// Packed sequences are cut into tiles without a prefix sum and without reading a length on the host. The rows form
// batch + 2 segments: those before cu_seqlens[0] (segment -1), the sequences 0 .. batch - 1, and those from
// cu_seqlens[batch] on (segment batch). A segment that starts at row r owns the tile slots from r / block + segment + 1
// on: at least as many as it has tiles, so slots = total / block + batch + 2 serve all, and a slot finds its segment by
// binary search. Segments -1 and batch are slack: they belong to no sequence, and only outputs are written there.
//
// Values from device memory are clamped, so a bad one gives wrong rows but no access outside the tensors.
#pragma once

#include <stdint.h>

#include "params.h"

namespace flash_ext {

constexpr int64_t varlen_slots(int64_t total, int64_t batch, int block) {
    return total / block + batch + 2;
}

__device__ __forceinline__ int32_t clamp(int32_t value, int32_t low, int32_t high) {
    return min(max(value, low), high);
}

// The rows of one sequence (or of slack) in its tensor.
struct SequenceRows {
    int32_t start;   // row of the tensor, from the start of the batch entry (dense) or of the buffer (packed)
    int32_t length;  // rows it owns
    int32_t used;    // of these, how many count: the rest is slack
};

// One tile of one sequence's rows.
struct TileRows {
    SequenceRows sequence;
    int32_t batch;  // -1 or batch: slack outside all sequences
    int32_t begin;  // first row of the tile, from the start of the sequence; beyond length if the slot is empty
};

// The rows of sequence `batch`, dense or packed.
__device__ __forceinline__ SequenceRows sequence_rows(const int32_t* cu_seqlens, const int32_t* seqused, int32_t rows,
                                                      int32_t batch) {
    SequenceRows sequence{0, rows, rows};
    if (cu_seqlens != nullptr) {
        sequence.start = clamp(cu_seqlens[batch], 0, rows);
        sequence.length = max(clamp(cu_seqlens[batch + 1], 0, rows) - sequence.start, 0);
        sequence.used = sequence.length;
    }
    if (seqused != nullptr) sequence.used = clamp(seqused[batch], 0, sequence.length);
    return sequence;
}

// Tile `slot` of packed rows.
__device__ __forceinline__ TileRows find_packed_tile(const int32_t* cu_seqlens, const int32_t* seqused, int32_t total,
                                                     int32_t batch, int32_t slot, int block) {
    // The last segment whose first slot is not after this one.
    int32_t low = -1, high = batch;
    while (low < high) {
        const int32_t middle = low + (high - low + 1) / 2;
        const int32_t first_slot = clamp(cu_seqlens[middle], 0, total) / block + middle + 1;
        if (first_slot <= slot) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    TileRows tile{};
    tile.batch = low;
    if (low >= 0 && low < batch) {
        tile.sequence = sequence_rows(cu_seqlens, seqused, total, low);
    } else {
        tile.sequence.start = low < 0 ? 0 : clamp(cu_seqlens[batch], 0, total);
        tile.sequence.length = low < 0 ? clamp(cu_seqlens[0], 0, total) : total - tile.sequence.start;
        tile.sequence.used = 0;
    }
    const int32_t first_slot = low < 0 ? 0 : tile.sequence.start / block + low + 1;
    tile.begin = static_cast<int32_t>(min(static_cast<int64_t>(slot - first_slot) * block, int64_t{INT32_MAX}));
    return tile;
}

__device__ __forceinline__ TileRows find_tile(const int32_t* cu_seqlens, const int32_t* seqused, int32_t rows,
                                              int32_t batch_size, int32_t batch, int32_t slot, int block) {
    if (cu_seqlens != nullptr) return find_packed_tile(cu_seqlens, seqused, rows, batch_size, slot, block);
    return {sequence_rows(nullptr, seqused, rows, batch), batch, slot * block};
}

// Element offset of a row of one head. Packed tensors have stride_batch 0.
__device__ __forceinline__ int64_t row_offset(const TensorView& tensor, int32_t batch, int32_t row, int32_t head) {
    return batch * tensor.stride_batch + row * tensor.stride_row + head * tensor.stride_head;
}

}  // namespace flash_ext
