// The warp of the sm100 backward that loads: K, V, then Q, dO and the terms of their rows.
#pragma once

#include <stdint.h>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm100/backward_shape.cuh"
#include "sm100/pair.cuh"
#include "sm90/tensor_map.cuh"

namespace flash_ext::sm100 {

template <class Shape>
struct BackwardSupply : Shape {
    using Shape::kBlockM, Shape::kBlockN, Shape::kStages, Shape::kDoutStages, Shape::kIsPair, Shape::kKeys;
    using Shape::kKColumnsOffset, Shape::kQColumnsOffset, Shape::kDoutColumnsOffset;
    using Shape::kPanels, Shape::kPanelsV, Shape::kHalfPanels, Shape::kHalfPanelsV, Shape::kQRows;
    using Shape::kQBytes, Shape::kDoutBytes, Shape::kTermsBytes, Shape::kTermsStages;
    using Shape::kVOffset, Shape::kQOffset, Shape::kDoutOffset, Shape::kTermsOffset;
    using typename Shape::Control, typename Shape::Transfer;

    // One warp.
    __device__ __forceinline__ static void load_all(const BackwardArguments& arguments, unsigned char* smem,
                                                    Control& control, int lane) {
        const volatile BackwardWork& work = control.work;
        const int rank = Transfer::rank();
        uint32_t landed_phase = 0;
        sm90::ProducerWalk walk(arguments, work);
        if (walk.left <= 0) return;

        // A tile of kRows rows, of which `rows` count. With a tail of garbage it lands at a barrier of its own and is
        // handed on with zeros there.
        const auto load = [&]<int kRows, int kBoxRows, int kTilePanels>(const sm90::TensorMap& tensor, uint64_t* full,
                                                                        int offset, int row, int head, int rows,
                                                                        bool tail_is_garbage, int first_column) {
            unsigned char* const tile_smem = smem + offset;
            if (!tail_is_garbage || rows >= kRows) {
                if (lane == 0) {
                    copy_tile<Transfer, kRows, kBoxRows, kTilePanels>(tensor, full, tile_smem, row, head, work.batch,
                                                                      first_column);
                }
                return;
            }
            if (lane == 0) {
                copy_tile<sm90::LocalTransfer, kRows, kBoxRows, kTilePanels>(tensor, &control.landed, tile_smem, row,
                                                                             head, work.batch, first_column);
            }
            Barrier::wait(&control.landed, landed_phase);
            landed_phase ^= 1;
            clear_tail<kRows, kTilePanels>(tile_smem, max(rows, 0), lane);
            cutlass::arch::fence_view_async_shared();  // the products read through the async proxy
            __syncwarp();
            if (lane == 0) Transfer::arrive(full);
        };
        // Until the products of step `step - buffers` have read what is to be overwritten. For the lane that copies;
        // the others meet it at `landed`, of which no lane can miss a phase.
        const auto wait_empty = [&](uint64_t* empty, uint32_t step, uint32_t buffers) {
            if (lane == 0) Barrier::wait(empty + step % buffers, step / buffers & 1 ^ 1);
        };
        // Keys from `first` on of the tile.
        const auto load_keys = [&]<int kRows, int kTilePanels>(const sm90::TensorMap& tensor, uint64_t* full,
                                                               int offset, int first, int first_column) {
            load.template operator()<kRows, kKeys, kTilePanels>(
                tensor, full, offset, work.keys_start + work.begin + first, work.head_k, work.rows_used - first,
                arguments.key_tail_is_garbage, first_column);
        };

        load_keys.template operator()<kKeys, kPanels>(arguments.k, &control.k_full, 0, rank * kKeys, 0);
        uint32_t number = 0;  // of the step
#pragma unroll 1
        for (; walk.left > 0; walk.advance(work)) {
            // Queries from `first` on of the block.
            const auto load_queries = [&]<int kRows, int kTilePanels>(const sm90::TensorMap& tensor, uint64_t* full,
                                                                      int offset, int first, int first_column) {
                const int row = walk.block * kBlockM + first;
                load.template operator()<kRows, kQRows, kTilePanels>(tensor, full, offset, work.queries_start + row,
                                                                     walk.head, work.queries_used - row,
                                                                     arguments.query_tail_is_garbage, first_column);
            };
            const uint32_t stage = number % kStages;
            if constexpr (kIsPair) {
                if (lane == 0 && number > 0) Barrier::wait(&control.s_full, number - 1 & 1);
            } else {
                wait_empty(control.q_empty, number, kStages);
            }
            load_queries.template operator()<kQRows, kPanels>(arguments.q, &control.q_full[stage],
                                                              kQOffset + stage * kQBytes, rank * kQRows, 0);
            // In a pair q_columns_empty, which was waited for in the step before, says that dK of two steps ago has
            // been made: that step's terms are not needed any more.
            if (lane == 0) {
                const uint32_t terms_stage = number % kTermsStages;
                TransactionBarrier::arrive_and_expect_tx(&control.terms_full[terms_stage], kTermsBytes);
                cute::SM90_BULK_COPY_G2S::copy(
                    arguments.scratch.row_terms + sm90::scratch_tile(arguments, work, walk.head, walk.block) * kBlockM,
                    &control.terms_full[terms_stage], smem + kTermsOffset + terms_stage * kTermsBytes, kTermsBytes);
            }
            if (number == 0) {
                load_keys.template operator()<kKeys, kPanelsV>(arguments.v, &control.v_full, kVOffset, rank * kKeys, 0);
            }
            const uint32_t dout_stage = number % kDoutStages;
            wait_empty(control.dout_empty, number, kDoutStages);
            load_queries.template operator()<kQRows, kPanelsV>(arguments.dout, &control.dout_full[dout_stage],
                                                               kDoutOffset + dout_stage * kDoutBytes, rank * kQRows, 0);
            if constexpr (kIsPair) {
                static_assert(kStages == 1 && kTermsStages == 2);
                wait_empty(&control.dout_columns_empty, number, 1);
                load_queries.template operator()<kBlockM, kHalfPanelsV>(arguments.dout, &control.dout_columns_full,
                                                                        kDoutColumnsOffset, 0,
                                                                        rank * kHalfPanelsV * kPanelColumns);
                wait_empty(&control.q_columns_empty, number, 1);
                load_queries.template operator()<kBlockM, kHalfPanels>(
                    arguments.q, &control.q_columns_full, kQColumnsOffset, 0, rank * kHalfPanels * kPanelColumns);
                if (number == 0) {
                    load_keys.template operator()<kBlockN, kHalfPanels>(
                        arguments.k, &control.k_columns_full, kKColumnsOffset, 0, rank * kHalfPanels * kPanelColumns);
                }
            }
            ++number;
        }

        // Every commit has arrived before the CTA ends.
#pragma unroll 1
        for (int i = 0; i < kDoutStages; ++i) wait_empty(control.dout_empty, number + i, kDoutStages);
        if constexpr (kIsPair) {
            wait_empty(&control.dout_columns_empty, number, 1);
            wait_empty(&control.q_columns_empty, number, 1);
        } else {
#pragma unroll 1
            for (int i = 0; i < kStages; ++i) wait_empty(control.q_empty, number + i, kStages);
        }
    }

  private:
    // One thread: starts the copies of kRows rows into shared memory, in boxes of kBoxRows; their bytes arrive at the
    // barrier.
    template <class Reports, int kRows, int kBoxRows, int kTilePanels>
    __device__ __forceinline__ static void copy_tile(const sm90::TensorMap& tensor, uint64_t* barrier,
                                                     unsigned char* tile_smem, int row, int head, int batch,
                                                     int first_column) {
        constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
        Reports::expect(barrier, kTilePanels * kRows * kPanelRowBytes);
        const int head_coordinate = head * tensor.head_step, batch_coordinate = batch * tensor.batch_step;
        const bool has_rows = tensor.row_step != 0;  // else all rows are one, and a box has one row
        const int box_rows = has_rows ? kBoxRows : 1;
#pragma unroll 1
        for (int i = 0; i < kRows; i += box_rows) {
#pragma unroll
            for (int panel = 0; panel < kTilePanels; ++panel) {
                Reports::Copy::copy(&tensor.map, barrier, kHint, tile_smem + (panel * kRows + i) * kPanelRowBytes,
                                    first_column + panel * kPanelColumns, has_rows ? row + i : 0, head_coordinate,
                                    batch_coordinate);
            }
        }
    }

    // One warp: zeros to the rows of a tile from `rows` on.
    template <int kRows, int kTilePanels>
    __device__ __forceinline__ static void clear_tail(unsigned char* tile_smem, int rows, int lane) {
#pragma unroll 1
        for (int panel = 0; panel < kTilePanels; ++panel) {
            unsigned char* panel_smem = tile_smem + panel * kRows * kPanelRowBytes;
#pragma unroll 1
            for (int i = rows * kPanelRowBytes + lane * 16; i < kRows * kPanelRowBytes; i += 32 * 16) {
                *reinterpret_cast<uint4*>(panel_smem + i) = uint4{};
            }
        }
    }
};

}  // namespace flash_ext::sm100
