// How the fp32 sum of dQ lies in its scratch: 8 rows at a time, in the order in which a warp holds an 8 x 8 part of an
// m16n8 accumulator (lane l: row l / 4, columns 2 * (l % 4) + {0, 1}), so that what a warp adds at once is one line of
// 128 bytes. Rows are counted through the whole scratch, so sequences need no padding.
//
// Element (row, column): chunk = column / 8 * 2 + column % 2 of the row's group of 8, 32 elements a chunk; in it row %
// 8, then column % 8 / 2.
#pragma once

#include <stdint.h>

namespace flash_ext {

constexpr int kDqChunk = 32;  // elements between two chunks of 4 elements of one row

constexpr int64_t dq_scratch_elements(int64_t rows, int64_t head_dim) {
    return (rows + 7) / 8 * 8 * head_dim;
}

// The first chunk of a row.
__device__ __forceinline__ int64_t dq_scratch_offset(int64_t row, int32_t head_dim) {
    return row / 8 * 8 * head_dim + row % 8 * 4;
}

}  // namespace flash_ext
