// The sm90 backward (backward.cuh) with 64 keys for each consumer warpgroup: it computes their scores, dS, dK and dV.
// dQ is shared out by rows or by columns; the parts go through shared memory to bulk reductions.
//
// A step of a consumer, FlashAttention-3's; what stands on the right runs in the tensor cores meanwhile:
//   issue S, dP; wait S; P                                     dP
//   wait dP; dS -> shared memory
//   issue dV; all warpgroups' dS is stored; issue dQ, dK       dV, dQ, dK
//   wait dV, dQ; dQ -> shared memory                           dK
//   wait dK: Q and dO are free
//
// | barrier       | arrives                              | waits         | a phase ends when                         |
// | q_full[s]     | loader and TMA                       | consumers     | Q and the terms of its rows have landed;  |
// |               |                                      |               | at first K, too, zero behind the last key |
// | dout_full[s]  | loader and TMA                       | consumers     | dO has landed, at first V, too            |
// | q_empty[s]    | each consumer warp                   | loader        | dK has read Q, and before it dV dO        |
// | landed        | loader and TMA                       | loader        | a tile with a tail of garbage has landed  |
// | kDsStored     | each consumer thread, which waits    |               | dS is written (a named barrier)           |
// | dq_full[w]    | each warp of warpgroup w             | reducer w     | its part of dQ is written                 |
// | dq_empty[w]   | reducer w                            | warpgroup w   | the bulk copy or reduction has read it    |
//
// kDsStored orders the reuse of dS's buffers as well: a warpgroup comes to it at step m only after its dQ[m-1] is done,
// and writes at step m + 1 the buffer of m - 1 only after all have come to it at step m.
//
// Shared memory: K, V, kStages x (Q, dO), 2 x dS (rows are queries), dQ (fp32), kStages x (lse, delta), barriers; tiles
// in panels of 64 columns (panel.cuh). At d 96 the panels of K hold columns 0 to 63 and 48 to 111: 48 for each part of
// dQ. There V goes on to registers, which halves what dP reads of shared memory.
#pragma once

#include <stdint.h>

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>

#include "ptx/cp_async_bulk.cuh"
#include "ptx/ldmatrix.cuh"
#include "sm90/backward_producer.cuh"
#include "sm90/backward_scores.cuh"
#include "sm90/backward_shape.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/wgmma.cuh"

namespace flash_ext::sm90 {

template <class Shape>
struct BackwardKeys : BackwardScores<Shape> {
    using Scores = BackwardScores<Shape>;
    using Producer = BackwardProducer<Shape>;
    using Shape::kBlockM, Shape::kBlockN, Shape::kStages, Shape::kRows, Shape::kDataType, Shape::kHeadDim;
    using Shape::kDsBuffers, Shape::kWarpgroups, Shape::kProducerRegisters, Shape::kConsumerRegisters;
    using Shape::kHeadDimV, Shape::kIsRich, Shape::kDqByRows, Shape::kDqColumns, Shape::kDqPartBytes;
    using Shape::kKeyPanelStep, Shape::kVInRegisters;
    using Shape::kTermsOffset, Shape::kTermsBytes, Shape::kQBytes, Shape::kDoutBytes, Shape::kDsBytes;
    using Shape::kVOffset, Shape::kQOffset, Shape::kDoutOffset, Shape::kDsOffset, Shape::kDqOffset;
    using typename Shape::Control, typename Shape::ScoreFragment, typename Shape::PackedFragment;
    using typename Shape::DkFragment, typename Shape::DvFragment, typename Shape::DqFragment, typename Shape::VFragment;

    __device__ __forceinline__ static void run_warpgroup(const BackwardArguments& arguments, unsigned char* smem,
                                                         Control& control, int warpgroup, int thread) {
        if (warpgroup == 0) {
            cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
            const int warp = thread / 32, lane = thread % 32;
            if (warp == 0) {
                Producer::load_all(arguments, smem, control);
            } else if (warp <= kWarpgroups && lane == 0) {
                reduce_dq(arguments, smem, control, warp - 1);
            }
        } else {
            cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
            consume(arguments, smem, control, warpgroup - 1, thread);
        }
    }

  private:
    static constexpr uint32_t kDsStored = 1;  // counted behind those that CUTLASS reserves

    // One warpgroup.
    __device__ __forceinline__ static void consume(const BackwardArguments& arguments, unsigned char* smem,
                                                   Control& control, int warpgroup, int thread) {
        const ForwardParams& attention = arguments.params.attention;
        const volatile BackwardWork& work = control.work;
        const uint32_t smem_address = cute::cast_smem_ptr_to_uint(smem);
        const int lane = thread % 32, row = warpgroup * kRows + thread / 32 * 16 + lane / 4;  // key of half 0
        const uint64_t keys = static_cast<uint64_t>(warpgroup * kRows * kPanelRowBytes) >> 4;
        // A operands of the scores, and B operands.
        const uint64_t k_rows = panel_descriptor(smem_address, 0) + keys;
        const uint64_t v_rows = panel_descriptor(smem_address + kVOffset, 0) + keys;
        const uint64_t q_rows = panel_descriptor(smem_address + kQOffset, kBlockM * kPanelRowBytes);
        const uint64_t dout_rows = panel_descriptor(smem_address + kDoutOffset, kBlockM * kPanelRowBytes);
        // dQ: its part's rows of dS, its part's columns of K.
        const int dq_column = kDqByRows ? 0 : warpgroup * kDqColumns;
        const uint64_t ds_rows =
            panel_descriptor(smem_address + kDsOffset + (kDqByRows ? warpgroup * kRows * kPanelRowBytes : 0), 0);
        const uint64_t k_columns = panel_descriptor(
            smem_address + dq_column / kKeyPanelStep * kBlockN * kPanelRowBytes + dq_column % kKeyPanelStep * 2,
            kBlockN * kPanelRowBytes);

        DkFragment dk_frag;
        DvFragment dv_frag;
        ScoreFragment s_frag, dp_frag;
        DqFragment dq_frag;
        PackedFragment p_frag, ds_frag;
        VFragment v_frag;
        uint32_t number = 0;  // of the step: all rings turn with it, and a counter is what takes fewest registers
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) dk_frag[i] = 0.f;
#pragma unroll
        for (int i = 0; i < kHeadDimV / 2; ++i) dv_frag[i] = 0.f;

        const auto stage = [&] { return number % kStages; };
        const auto phase = [&] { return number / kStages & 1; };
        const auto issue_s = [&] {
            Barrier::wait(&control.q_full[stage()], phase());
            Scores::template issue_scores<kHeadDim, false, kKeyPanelStep>(s_frag, k_rows,
                                                                          q_rows + stage() * (kQBytes >> 4));
        };
        const auto issue_dp = [&] {
            Barrier::wait(&control.dout_full[stage()], phase());
            const uint64_t dout_stage = dout_rows + stage() * (kDoutBytes >> 4);
            if constexpr (kVInRegisters) {
                Scores::template issue_scores<kHeadDimV, true>(dp_frag, v_frag, dout_stage);
            } else {
                Scores::template issue_scores<kHeadDimV, true>(dp_frag, v_rows, dout_stage);
            }
        };
        const auto issue_dq = [&] {
            const uint64_t ds_buffer = ds_rows + number % kDsBuffers * (kDsBytes >> 4);
            fence_operand(dq_frag);  // the wgmma.fence before dV is behind all accesses to it
#pragma unroll
            for (int step = 0; step < kBlockN / 16; ++step) {
                multiply_ss_k_mn<kDataType, kDqColumns>(dq_frag, ds_buffer + column_step(step, kBlockM),
                                                        k_columns + row_step(step), step > 0);
            }
            cute::warpgroup_commit_batch();
        };
        const auto write_dq = [&](uint32_t of) {
            Barrier::wait(&control.dq_empty[warpgroup], (of & 1) ^ 1);
            float4* part_smem = reinterpret_cast<float4*>(smem + kDqOffset + warpgroup * kDqPartBytes) + thread;
#pragma unroll
            for (int i = 0; i < kDqColumns / 8; ++i) {
                part_smem[i * 128] = {dq_frag[4 * i], dq_frag[4 * i + 1], dq_frag[4 * i + 2], dq_frag[4 * i + 3]};
            }
            cutlass::arch::fence_view_async_shared();  // the bulk reduction reads through the async proxy
            Scores::release(&control.dq_full[warpgroup], lane);
        };
        const typename Scores::Thread place{arguments, work, row, lane};
        const auto make_ds = [&](const typename Scores::RowTerms& delta) {
#pragma unroll
            for (int i = 0; i < kBlockM / 8; ++i) {
                const float2 terms = delta[i];
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    float& dp = dp_frag[4 * i + c];
                    dp = Scores::gradient(arguments, s_frag[4 * i + c], dp, c % 2 ? terms.y : terms.x);
                }
                if constexpr (!kIsRich) Scores::pack_group(p_frag, s_frag, i);
                Scores::pack_group(ds_frag, dp_frag, i);
            }
        };
        const auto issue_dv = [&] {  // of one group with dQ
            Scores::template issue_gradient<kHeadDimV>(dv_frag, p_frag, dout_rows + stage() * (kDoutBytes >> 4));
        };
        const auto issue_dk = [&] {
            Scores::template issue_gradient<kHeadDim, true>(dk_frag, ds_frag, q_rows + stage() * (kQBytes >> 4));
            cute::warpgroup_commit_batch();
        };

        // One query block.
        const auto step = [&](int head, int block, bool is_masked) {
            const float2* terms =
                reinterpret_cast<const float2*>(smem + kTermsOffset + stage() * kTermsBytes) + lane % 4;
            issue_s();
            issue_dp();
            const typename Scores::RowTerms lse(terms);
            cute::warpgroup_wait<1>();
            fence_operand(s_frag);
            if constexpr (kIsRich) {
                Scores::make_p_rich(place, s_frag, p_frag, head, block, is_masked, lse, [](int) {});
            } else {
                Scores::make_p(place, s_frag, block, is_masked, lse, [](int) {});
            }
            const typename Scores::RowTerms delta(terms + kBlockM / 2);
            cute::warpgroup_wait<0>();
            fence_operand(dp_frag);
            make_ds(delta);
            Scores::store_ds(smem + kDsOffset + number % kDsBuffers * kDsBytes + warpgroup * kBlockM * kPanelRowBytes,
                             thread / 32 * 2, ds_frag, lane);
            issue_dv();
            cutlass::arch::fence_view_async_shared();  // wgmma reads dS through the async proxy
            cutlass::arch::NamedBarrier::sync(128 * kWarpgroups, kDsStored);
            issue_dq();
            issue_dk();
            cute::warpgroup_wait<1>();
            fence_operand(dv_frag);
            fence_operand(p_frag);
            fence_operand(dq_frag);
            write_dq(number);
            cute::warpgroup_wait<0>();
            fence_operand(dk_frag);
            fence_operand(ds_frag);
            Scores::release_read(&control.q_empty[stage()], lane);
            ++number;
        };

        QueryWalk walk(arguments, work);
        if (walk.left > 0) {
            if constexpr (kVInRegisters) {
                Barrier::wait(&control.dout_full[0], 0);
                load_v(v_frag, smem_address, row - lane / 4, lane);
            }
#pragma unroll 1
            for (; walk.left > 0; walk.advance()) step(walk.head, walk.block, walk.is_masked());
        }
        Scores::write_gradient(place, dk_frag, attention.softmax_scale, arguments.params.dk, attention.head_dim);
        Scores::write_gradient(place, dv_frag, kIsRich ? arguments.dropout_scale : 1.f, arguments.params.dv,
                               attention.head_dim_v);
    }

    // One warp: its 16 rows of V to registers.
    __device__ __forceinline__ static void load_v(VFragment& v_frag, uint32_t smem_address, int first_row, int lane) {
        constexpr int kPanelSteps = kPanelColumns / 16;
#pragma unroll
        for (int step = 0; step < kHeadDimV / 16; ++step) {
            ptx::ldmatrix_x4(reinterpret_cast<uint32_t (&)[4]>(v_frag[4 * step]),
                             smem_address + kVOffset + step / kPanelSteps * kBlockN * kPanelRowBytes +
                                 swizzled_chunk(first_row + lane % 16, step % kPanelSteps * 2 + lane / 16));
        }
    }

    // One thread: adds a warpgroup's part of every dQ to the scratch; the first to come to a part stores it.
    __device__ __forceinline__ static void reduce_dq(const BackwardArguments& arguments, unsigned char* smem,
                                                     Control& control, int warpgroup) {
        const volatile BackwardWork& work = control.work;
        const bool deterministic = arguments.scratch.turns != nullptr;
        const uint32_t part_smem = cute::cast_smem_ptr_to_uint(smem) + kDqOffset + warpgroup * kDqPartBytes;
        uint32_t phase = 0;
        int32_t added = -1;  // the query tile before this one, if its turn is still to be handed on
#pragma unroll 1
        for (ProducerWalk walk(arguments, work); walk.left > 0; walk.advance(work)) {
            const int64_t tile = scratch_tile(arguments, work, walk.head, walk.block);
            const auto state = [&] { return arguments.scratch.states + (tile * kWarpgroups + warpgroup); };
            const bool is_stored = arguments.scratch.states == nullptr || Producer::is_stored(state());
            Barrier::wait(&control.dq_full[warpgroup], phase);
            phase ^= 1;
            bool is_first = false;
            if (deterministic) {
                if (added >= 0) Producer::end_turn(arguments, added);
                is_first = Producer::wait_turn(arguments, work, tile, walk.block);
                added = static_cast<int32_t>(tile);
            } else if (!is_stored) {
                is_first = Producer::claim(state());
            }
            float* part = arguments.scratch.dq + (tile * kWarpgroups + warpgroup) * (kDqPartBytes / 4);
            Producer::add(part, part_smem, kDqPartBytes, is_first);
            cute::tma_store_wait<0>();
            Barrier::arrive(&control.dq_empty[warpgroup]);
            if (is_first && !deterministic) Producer::publish(state());
        }
        if (added >= 0) Producer::end_turn(arguments, added);
    }
};

}  // namespace flash_ext::sm90
