// The warp of the sm100 backward that loads: K, V, then Q, dO and the terms of their rows.
#pragma once

#include <stdint.h>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm100/backward_shape.cuh"
#include "sm90/tensor_map.cuh"

namespace flash_ext::sm100 {

template <class Shape>
struct BackwardSupply : Shape {
    using Shape::kBlockM, Shape::kBlockN, Shape::kStages, Shape::kDoutStages;
    using Shape::kPanels, Shape::kPanelsV, Shape::kQBytes, Shape::kDoutBytes, Shape::kTermsBytes;
    using Shape::kVOffset, Shape::kQOffset, Shape::kDoutOffset, Shape::kTermsOffset;
    using typename Shape::Control;

    // One warp.
    __device__ __forceinline__ static void load_all(const BackwardArguments& arguments, unsigned char* smem,
                                                    Control& control, int lane) {
        const ForwardParams& attention = arguments.params.attention;
        const volatile BackwardWork& work = control.work;
        uint32_t landed_phase = 0;
        QueryWalk walk(attention, work);
        if (walk.left <= 0) return;

        // A tile of kRows rows, of which `rows` count. With a tail of garbage it lands at a barrier of its own and is
        // handed on with zeros there.
        const auto load = [&]<int kRows, int kTilePanels>(const sm90::TensorMap& tensor, uint64_t* full,
                                                          unsigned char* tile_smem, int row, int head, int rows,
                                                          bool tail_is_garbage) {
            const bool has_garbage = tail_is_garbage && rows < kRows;
            uint64_t* const barrier = has_garbage ? &control.landed : full;
            if (lane == 0) {
                TransactionBarrier::arrive_and_expect_tx(barrier, kTilePanels * kRows * kPanelRowBytes);
                copy_tile<kRows, kTilePanels>(tensor, barrier, tile_smem, row, head, work.batch);
            }
            if (!has_garbage) return;
            Barrier::wait(&control.landed, landed_phase);
            landed_phase ^= 1;
            clear_tail<kRows, kTilePanels>(tile_smem, rows, lane);
            cutlass::arch::fence_view_async_shared();  // the products read through the async proxy
            __syncwarp();
            if (lane == 0) Barrier::arrive(full);
        };

        load.template operator()<kBlockN, kPanels>(arguments.k, &control.k_full, smem, work.keys_start + work.begin,
                                                   work.head_k, work.rows_used, arguments.key_tail_is_garbage);
        uint32_t number = 0;  // of the step
#pragma unroll 1
        for (; walk.left > 0; walk.advance()) {
            const int first = walk.block * kBlockM, rows = work.queries_used - first;
            const int row = work.queries_start + first;
            const uint32_t stage = number % kStages, phase = number / kStages & 1;
            Barrier::wait(&control.q_empty[stage], phase ^ 1);
            if (lane == 0) {
                TransactionBarrier::expect_transaction(&control.q_full[stage], kTermsBytes);
                cute::SM90_BULK_COPY_G2S::copy(
                    arguments.scratch.row_terms + sm90::scratch_tile(arguments, work, walk.head, walk.block) * kBlockM,
                    &control.q_full[stage], smem + kTermsOffset + stage * kTermsBytes, kTermsBytes);
            }
            load.template operator()<kBlockM, kPanels>(arguments.q, &control.q_full[stage],
                                                       smem + kQOffset + stage * kQBytes, row, walk.head, rows,
                                                       arguments.query_tail_is_garbage);
            if (number == 0) {
                load.template operator()<kBlockN, kPanelsV>(arguments.v, &control.v_full, smem + kVOffset,
                                                            work.keys_start + work.begin, work.head_k, work.rows_used,
                                                            arguments.key_tail_is_garbage);
            }
            const uint32_t dout_stage = number % kDoutStages, dout_phase = number / kDoutStages & 1;
            Barrier::wait(&control.dout_empty[dout_stage], dout_phase ^ 1);
            load.template operator()<kBlockM, kPanelsV>(arguments.dout, &control.dout_full[dout_stage],
                                                        smem + kDoutOffset + dout_stage * kDoutBytes, row, walk.head,
                                                        rows, arguments.query_tail_is_garbage);
            ++number;
        }
    }

  private:
    // One thread: starts the copies of kRows rows into shared memory.
    template <int kRows, int kTilePanels>
    __device__ __forceinline__ static void copy_tile(const sm90::TensorMap& tensor, uint64_t* barrier,
                                                     unsigned char* tile_smem, int row, int head, int batch) {
        constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
        const int head_coordinate = head * tensor.head_step, batch_coordinate = batch * tensor.batch_step;
        const bool has_rows = tensor.row_step != 0;  // else all rows are one, and a box has one row
        const int boxes = has_rows ? 1 : kRows;
        if (!has_rows) row = 0;
#pragma unroll 1
        for (int i = 0; i < boxes; ++i) {
#pragma unroll
            for (int panel = 0; panel < kTilePanels; ++panel) {
                cute::SM90_TMA_LOAD_4D::copy(&tensor.map, barrier, kHint,
                                             tile_smem + (panel * kRows + i) * kPanelRowBytes, panel * kPanelColumns,
                                             row, head_coordinate, batch_coordinate);
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
