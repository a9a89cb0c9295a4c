// Tiles in shared memory as TMA writes them with the 128-byte swizzle, for the matrix products of sm90 and sm100.
//
// A tile of R rows and D columns is stored as D / 64 panels of 64 columns; a panel is R rows of 128 bytes, 1024-byte
// aligned, the 16-byte chunks of a row permuted by its number modulo 8.
#pragma once

#include <stdint.h>

namespace flash_ext::sm90 {

constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;
constexpr int kSwizzleRows = 8;  // the swizzle repeats after so many rows

// Where chunk `chunk` of 16 bytes of row `row` is, from the start of a panel.
__device__ __forceinline__ int swizzled_chunk(int row, int chunk) {
    return row * kPanelRowBytes + ((chunk ^ row % kSwizzleRows) << 4);
}

// What to add to a K-major operand's descriptor for the `step`-th 16 columns; `rows` is the height of the tile's
// panels, which begin `panel_step` columns apart.
__device__ constexpr uint64_t column_step(int step, int rows, int panel_step = kPanelColumns) {
    const int steps = panel_step / 16;
    return static_cast<uint64_t>(step / steps * rows * kPanelRowBytes + step % steps * 32) >> 4;
}

// What to add to an MN-major operand's descriptor for the `step`-th 16 rows.
__device__ constexpr uint64_t row_step(int step) {
    return static_cast<uint64_t>(step * 16 * kPanelRowBytes) >> 4;
}

// What to add to an MN-major operand's descriptor for its columns from `column` on; `rows` is the height of the tile's
// panels.
__device__ constexpr uint64_t column_offset(int column, int rows) {
    return static_cast<uint64_t>(column / kPanelColumns * rows * kPanelRowBytes + column % kPanelColumns * 2) >> 4;
}

}  // namespace flash_ext::sm90
