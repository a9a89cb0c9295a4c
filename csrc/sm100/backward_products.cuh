// The warp that issues the products of the sm100 backward: one elected lane does, the others keep it company so that
// the compiler knows descriptors and branches to be the same in all lanes. It is the same lane each time, and the
// election itself (elect.sync) waits for all of them.
#pragma once

#include <stdint.h>

#include <cute/arch/cluster_sm90.hpp>

#include "ptx/tcgen05.cuh"
#include "sm100/backward_shape.cuh"
#include "sm100/product.cuh"

namespace flash_ext::sm100 {

template <class Shape>
struct BackwardProducts : Shape {
    using Shape::kBlockM, Shape::kBlockN, Shape::kHalf, Shape::kDataType, Shape::kHeadDim, Shape::kHeadDimV;
    using Shape::kCtasOfTile, Shape::kIsPair, Shape::kKeys, Shape::kQRows;
    using Shape::kDpIsOverS, Shape::kDqIsApart, Shape::kDqIsOverS;
    using Shape::kKColumnsOffset, Shape::kQColumnsOffset, Shape::kDoutColumnsOffset;
    using Shape::kSColumn, Shape::kDvColumn, Shape::kDkColumn, Shape::kDqColumn;
    using Shape::kStages, Shape::kDoutStages, Shape::kQBytes, Shape::kDoutBytes, Shape::kDsPanelBytes;
    using Shape::kVOffset, Shape::kQOffset, Shape::kDoutOffset, Shape::kDsOffset;
    using typename Shape::Control;

    static constexpr uint32_t kSShape = instruction_descriptor<kDataType, kBlockN, kBlockM, false>();
    static constexpr uint32_t kHalfShape = instruction_descriptor<kDataType, kBlockN, kHalf, false>();
    static constexpr uint32_t kDvShape = instruction_descriptor<kDataType, kBlockN, Shape::kProductColumnsV, true>();
    static constexpr uint32_t kDkShape = instruction_descriptor<kDataType, kBlockN, Shape::kProductColumns, true>();
    static constexpr uint32_t kAIsMnMajor = 1u << 15;  // PTX ISA 9.7.16.4.2
    static constexpr uint32_t kDqShape =
        instruction_descriptor<kDataType, kBlockM, Shape::kProductColumns, true>() | kAIsMnMajor;

    // One warp; of a pair, the leader's.
    __device__ __forceinline__ static void run(unsigned char* smem, Control& control) {
        const uint32_t smem_address = cute::cast_smem_ptr_to_uint(smem);
        // K-major, as A and B of the scores.
        const uint32_t k_rows = panel_descriptor(smem_address, 16);
        const uint32_t v_rows = panel_descriptor(smem_address + kVOffset, 16);
        const uint32_t q_rows = panel_descriptor(smem_address + kQOffset, 16);
        const uint32_t dout_rows = panel_descriptor(smem_address + kDoutOffset, 16);
        // MN-major, as B of dK, dV and dQ, and as A of dQ.
        const uint32_t q_columns =
            panel_descriptor(smem_address + (kIsPair ? kQColumnsOffset : kQOffset), kBlockM * kPanelRowBytes);
        const uint32_t dout_columns =
            panel_descriptor(smem_address + (kIsPair ? kDoutColumnsOffset : kDoutOffset), kBlockM * kPanelRowBytes);
        const uint32_t k_columns =
            panel_descriptor(smem_address + (kIsPair ? kKColumnsOffset : 0), kBlockN * kPanelRowBytes);
        const uint32_t ds_columns = panel_descriptor(smem_address + kDsOffset, kDsPanelBytes);

        const uint32_t steps = uniform(control.work.steps);
        if (steps == 0) return;

        const auto commit = [](uint64_t* barrier) {
            if constexpr (kIsPair) {
                ptx::tcgen05_commit_multicast(cute::cast_smem_ptr_to_uint(barrier), 0b11);
            } else {
                ptx::tcgen05_commit(cute::cast_smem_ptr_to_uint(barrier));
            }
        };
        const auto wait = [](uint64_t* barrier, uint32_t phase) { Barrier::wait(barrier, phase & 1); };
        const auto stage_of = [](uint32_t number) { return number % kStages; };
        const auto dout_stage_of = [](uint32_t number) { return number % kDoutStages; };

        // S^T = K Q^T
        const auto issue_s = [&](uint32_t number) {
            wait(&control.q_full[stage_of(number)], number / kStages);
            ptx::tcgen05_fence_after_thread_sync();
            const uint32_t q = q_rows + stage_of(number) * (kQBytes >> 4);
            if (cute::elect_one_sync()) {
#pragma unroll
                for (int step = 0; step < kHeadDim / 16; ++step) {
                    ptx::tcgen05_mma_f16_ss<kCtasOfTile>(
                        kSColumn, whole_descriptor(k_rows + sm90::column_step(step, kKeys)),
                        whole_descriptor(q + sm90::column_step(step, kQRows)), kSShape, step > 0);
                }
                commit(&control.s_full);
            }
        };
        // dP^T = V dO^T, for the queries from first on.
        const auto multiply_dp = [&](uint32_t number, uint32_t column, int first, uint32_t shape) {
            const uint32_t dout = dout_rows + dout_stage_of(number) * (kDoutBytes >> 4) + (first * kPanelRowBytes >> 4);
#pragma unroll
            for (int step = 0; step < kHeadDimV / 16; ++step) {
                ptx::tcgen05_mma_f16_ss<kCtasOfTile>(column, whole_descriptor(v_rows + sm90::column_step(step, kKeys)),
                                                     whole_descriptor(dout + sm90::column_step(step, kQRows)), shape,
                                                     step > 0);
            }
        };
        // What of dP does not have to wait for P.
        const auto issue_dp = [&](uint32_t number) {
            wait(&control.dout_full[dout_stage_of(number)], number / kDoutStages);
            ptx::tcgen05_fence_after_thread_sync();
            if (cute::elect_one_sync()) {
                if constexpr (kDpIsOverS) {
                    multiply_dp(number, Shape::dp_column(0), 0, kHalfShape);
                } else {
                    multiply_dp(number, Shape::dp_column(0), 0, kSShape);
                    if (kIsPair) commit(&control.dout_empty[dout_stage_of(number)]);
                    commit(&control.dp_full);
                }
            }
        };
        // dV += P^T dO
        const auto issue_dv = [&](uint32_t number) {
            if (kIsPair) wait(&control.dout_columns_full, number);
            wait(&control.p_full, number);
            ptx::tcgen05_fence_after_thread_sync();
            const uint32_t dout = dout_columns + (kIsPair ? 0 : dout_stage_of(number) * (kDoutBytes >> 4));
            if (cute::elect_one_sync()) {
                if constexpr (kDpIsOverS) {
                    multiply_dp(number, Shape::dp_column(1), kHalf, kHalfShape);
                    commit(&control.dp_full);
                }
#pragma unroll
                for (int step = 0; step < kBlockM / 16; ++step) {
                    ptx::tcgen05_mma_f16_ts<kCtasOfTile>(kDvColumn, Shape::p_column(step / 4) + step % 4 * 8,
                                                         whole_descriptor(dout + sm90::row_step(step)), kDvShape,
                                                         number > 0 || step > 0);
                }
                commit(kIsPair ? &control.dout_columns_empty : &control.dout_empty[dout_stage_of(number)]);
            }
        };
        // dK += dS^T Q, dQ = dS K
        const auto issue_dk_dq = [&](uint32_t number) {
            if (kIsPair) wait(&control.q_columns_full, number);
            wait(&control.ds_full, number);
            ptx::tcgen05_fence_after_thread_sync();
            const uint32_t q = q_columns + (kIsPair ? 0 : stage_of(number) * (kQBytes >> 4));
            if (cute::elect_one_sync()) {
#pragma unroll
                for (int step = 0; step < kBlockM / 16; ++step) {
                    ptx::tcgen05_mma_f16_ts<kCtasOfTile>(kDkColumn, Shape::ds_column(step / 4) + step % 4 * 8,
                                                         whole_descriptor(q + sm90::row_step(step)), kDkShape,
                                                         number > 0 || step > 0);
                }
                commit(kIsPair ? &control.q_columns_empty : &control.q_empty[stage_of(number)]);
            }
            if (kDqIsApart && number > 0) wait(&control.dq_empty, number - 1);
            if (kIsPair && number == 0) wait(&control.k_columns_full, 0);
            if (kIsPair) wait(&control.ds_exchanged, number);  // behind dK, which does without
            if (kDqIsApart || kIsPair) ptx::tcgen05_fence_after_thread_sync();
            if (cute::elect_one_sync()) {
#pragma unroll
                for (int step = 0; step < kBlockN / 16; ++step) {
                    ptx::tcgen05_mma_f16_ss<kCtasOfTile>(kDqColumn, whole_descriptor(ds_columns + sm90::row_step(step)),
                                                         whole_descriptor(k_columns + sm90::row_step(step)), kDqShape,
                                                         step > 0);
                }
                commit(&control.dq_full);
            }
        };

        wait(&control.k_full, 0);
        issue_s(0);
        wait(&control.v_full, 0);
        issue_dp(0);
#pragma unroll 1
        for (uint32_t number = 0;; ++number) {
            const bool is_last = number + 1 == steps;
            issue_dv(number);
            if (!kDqIsOverS && !is_last) issue_s(number + 1);
            issue_dk_dq(number);
            if (is_last) break;
            if (!kDqIsApart) wait(&control.dq_empty, number);
            if (kDqIsOverS) issue_s(number + 1);
            issue_dp(number + 1);
        }
        if (cute::elect_one_sync()) commit(&control.sums_full);
    }
};

}  // namespace flash_ext::sm100
