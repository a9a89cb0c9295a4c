// Tiles of 16-bit elements in shared memory as ldmatrix wants them, and how cp.async fills them.
//
// A row of kColumns elements is kColumns / 8 chunks of 16 bytes. Chunk c of row r lies at chunk position c ^ phase(r),
// so that the same chunk of 8 consecutive rows (one 8x8 matrix of ldmatrix) falls on 8 different groups of 4 banks, and
// so do the chunks that 8 consecutive threads write.
#pragma once

#include <stdint.h>

#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"

namespace flash_ext::sm80 {

template <int kColumns>
struct SharedTile {
    static_assert(kColumns % 32 == 0);
    static constexpr int kChunks = kColumns / 8;
    static constexpr int kRowBytes = kColumns * 2;
    // Rows of whole 128-byte lines: 8 phases, one a row. Else two rows fill an odd number of lines: 4 phases, one
    // per 2.
    static constexpr bool kWholeLines = kChunks % 8 == 0;
    static constexpr int kPhases = kWholeLines ? 8 : 4;
    static constexpr int kStepsPerGroup = kPhases / 2;  // steps of 16 columns within which only the phase changes

    __host__ __device__ static constexpr int64_t bytes(int rows) { return int64_t{rows} * kRowBytes; }

    __device__ __forceinline__ static uint32_t offset(int row, int chunk) {
        const int phase = kWholeLines ? row % 8 : (row / 2) % 4;
        return row * kRowBytes + (chunk ^ phase) * 16;
    }
    // The address 2 * steps chunks (16 * steps columns) to the right of `address`, whose chunk is 0 or 1.
    __device__ __forceinline__ static uint32_t columns_right(uint32_t address, int steps) {
        return (address ^ ((steps % kStepsPerGroup) * 32)) + (steps / kStepsPerGroup) * (kPhases * 16);
    }
    // Where this lane's row of the 16 x 16 block at (row, column 0) starts, for ldmatrix.x4. Registers 0..3 then hold
    // the 8 x 8 matrices at (0, 0), (8, 0), (0, 8), (8, 8): an A operand; with .trans the B operands (0, 1) and (2, 3)
    // of a tile whose rows are B's rows (V of P V).
    __device__ __forceinline__ static uint32_t block_offset(int row, int lane) {
        return offset(row + lane % 16, lane / 16);
    }
    // The same with the matrices in the order (0, 0), (0, 8), (8, 0), (8, 8): the B operands (0, 1) and (2, 3) of a
    // tile whose rows are B's columns (K of Q K^T). The pair of a B operand must lie in neighbouring registers: taking
    // (0, 2) and (1, 3) of block_offset instead costs two moves per mma.
    __device__ __forceinline__ static uint32_t column_block_offset(int row, int lane) {
        return offset(row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    }
};

// One thread's share in filling a tile of kRows x kColumns from rows `stride` bytes apart.
template <int kRows, int kColumns, int kThreads>
struct TileLoader {
    using Tile = SharedTile<kColumns>;
    static constexpr int kChunksPerPass = Tile::kPhases;            // of a row
    static constexpr int kRowsPerPass = kThreads / kChunksPerPass;  // a multiple of the phases' period
    static constexpr int kColumnPasses = Tile::kChunks / kChunksPerPass;
    static constexpr int kRowPasses = (kRows + kRowsPerPass - 1) / kRowsPerPass;
    static_assert(kRowsPerPass % 8 == 0);

    __device__ __forceinline__ static int row(int thread) { return thread / kChunksPerPass; }
    __device__ __forceinline__ static int chunk(int thread) { return thread % kChunksPerPass; }
    // Where this thread's first chunk lies in the tile in shared memory, and in the rows in global memory.
    __device__ __forceinline__ static uint32_t smem_offset(int thread) {
        return Tile::offset(row(thread), chunk(thread));
    }
    __device__ __forceinline__ static int64_t source_offset(int thread, int64_t stride) {
        return row(thread) * stride + chunk(thread) * 16;
    }

    // smem, source: this thread's first chunk; pass_stride: bytes between rows kRowsPerPass apart. rows: of the tile,
    // from this thread's first row on. Rows from `rows` and columns from `columns` on become zeros and are not read.
    __device__ __forceinline__ static void load(uint32_t smem, const char* source, int64_t pass_stride, int rows,
                                                int columns, int thread) {
#pragma unroll
        for (int pass = 0; pass < kRowPasses; ++pass) {
            if (kRows % kRowsPerPass == 0 || row(thread) + pass * kRowsPerPass < kRows) {
#pragma unroll
                for (int group = 0; group < kColumnPasses; ++group) {
                    const bool is_there =
                        pass * kRowsPerPass < rows && (chunk(thread) + group * kChunksPerPass) * 8 < columns;
                    ptx::cp_async_cg_16(smem + pass * kRowsPerPass * Tile::kRowBytes + group * kChunksPerPass * 16,
                                        source + group * kChunksPerPass * 16, is_there ? 16 : 0);
                }
            }
            source += pass_stride;
        }
    }
};

}  // namespace flash_ext::sm80
