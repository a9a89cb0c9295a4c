// The sm90 backward (backward.cuh) with a consumer warpgroup each for dV, for dK and for dQ: a tile of 64 keys, whose
// dK and dV one warpgroup could not hold at head dims beyond 128.
//
//   scores      S = K Q^T;  P -> shared memory (fp32);          dV += P^T dO
//   gradients   dP = V dO^T; dS of P and dP -> shared memory;   dK += dS^T Q
//   queries     dQ = dS K, by kDqSlice columns, to the scratch
//
// The three are a pipeline, each a step or less behind the one before, and every one of them always has a product to
// issue while the others compute. Nothing is computed twice. Of query block m:
//
//   scores:     P; issue dV; issue S[m+1]; wait both
//   gradients:  dP is there: wait P; dS; issue dK; issue dP[m+1]; wait both
//   queries:    wait dS; for each slice: issue dQ; wait; 64 columns at a time -> shared memory
//   reducers:   bulk reductions of these into the scratch, a block each in turn
//
// | barrier       | arrives                      | waits               | a phase ends when                           |
// | q_full[s]     | loader and TMA               | scores; gradients   | Q and the terms of its rows have landed; at |
// |               |                              | and queries by what | first K, too, zero behind the last key      |
// |               |                              | comes of S          |                                             |
// | q_empty[s]    | each warp of gradients       | loader              | dK has read Q (S has: dS was made from it)  |
// | dout_full[s]  | loader and TMA               | scores, gradients   | dO has landed, at first V, too              |
// | dout_empty[s] | each warp of scores and      | loader              | dV and dP have read dO                      |
// |               | gradients                    |                     |                                             |
// | landed        | loader and TMA               | loader              | a tile with a tail of garbage has landed    |
// | p_full        | each warp of scores          | gradients           | P is written                                |
// | p_empty       | each warp of gradients       | scores              | P is in registers                           |
// | ds_full[i]    | each warp of gradients       | queries             | dS is written                               |
// | ds_empty[i]   | each warp of queries         | gradients           | dQ has read it                              |
// | dq_full[r][c] | each warp of queries         | reducer r           | 64 columns of dQ, chunk c, are written      |
// | dq_empty[i]   | reducer                      | queries             | the bulk copy or reduction has read them    |
//
// Shared memory: K, V, kStages x Q, kDoutStages x dO, 2 x dS^T (rows are keys), P (fp32), kDqBuffers x 64 columns of dQ
// (fp32), kStages x (lse, delta), barriers; tiles in panels of 64 columns (panel.cuh).
#pragma once

#include <stdint.h>

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>

#include "ptx/cp_async_bulk.cuh"
#include "ptx/special_registers.cuh"
#include "sm90/backward_producer.cuh"
#include "sm90/backward_scores.cuh"
#include "sm90/backward_shape.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/wgmma.cuh"

namespace flash_ext::sm90 {

template <class Shape>
struct BackwardRoles : BackwardScores<Shape> {
    using Scores = BackwardScores<Shape>;
    using Producer = BackwardProducer<Shape>;
    using Shape::kBlockM, Shape::kBlockN, Shape::kStages, Shape::kDoutStages, Shape::kDsBuffers, Shape::kRows;
    using Shape::kDataType, Shape::kHeadDim, Shape::kHeadDimV, Shape::kIsRich;
    using Shape::kDqSlice, Shape::kDqBuffers, Shape::kDqBufferColumns, Shape::kDqBufferBytes;
    using Shape::kQBytes, Shape::kDoutBytes, Shape::kDsBytes, Shape::kTermsBytes;
    using Shape::kTermsOffset, Shape::kDqChunks, Shape::kReducers;
    using Shape::kVOffset, Shape::kQOffset, Shape::kDoutOffset, Shape::kDsOffset, Shape::kPOffset, Shape::kDqOffset;
    using typename Shape::Control, typename Shape::ScoreFragment, typename Shape::PackedFragment;
    using typename Shape::DkFragment, typename Shape::DvFragment, typename Shape::DqFragment;

    __device__ __forceinline__ static void run_warpgroup(const BackwardArguments& arguments, unsigned char* smem,
                                                         Control& control, int warpgroup, int thread) {
        if (warpgroup == 0) {
            cutlass::arch::warpgroup_reg_dealloc<Shape::kProducerRegisters>();
            const int warp = thread / 32, lane = thread % 32;
            if (warp == 0) {
                Producer::load_all(arguments, smem, control);
            } else if (warp <= kReducers && lane == 0) {
                reduce_dq(arguments, smem, control, warp - 1);
            }
        } else if (warpgroup == 1) {
            cutlass::arch::warpgroup_reg_alloc<Shape::kScoresRegisters>();
            scores(arguments, smem, control, thread);
        } else if (warpgroup == 2) {
            cutlass::arch::warpgroup_reg_alloc<Shape::kGradientsRegisters>();
            gradients(arguments, smem, control, thread);
        } else {
            if constexpr (Shape::kQueriesRegisters < 128) {
                cutlass::arch::warpgroup_reg_dealloc<Shape::kQueriesRegisters>();
            } else {
                cutlass::arch::warpgroup_reg_alloc<Shape::kQueriesRegisters>();
            }
            queries(arguments, smem, control, thread);
        }
    }

  private:
    // The step's buffers, found by its number alone: a counter is what takes fewest registers.
    static constexpr __device__ __forceinline__ uint32_t stage(uint32_t number) { return number % kStages; }
    static constexpr __device__ __forceinline__ uint32_t phase(uint32_t number) { return number / kStages & 1; }
    static constexpr __device__ __forceinline__ uint32_t dout_stage(uint32_t number) { return number % kDoutStages; }
    static constexpr __device__ __forceinline__ uint32_t dout_phase(uint32_t number) {
        return number / kDoutStages & 1;
    }

    // Lse of the thread's first two queries; kBlockM further on, delta.
    __device__ __forceinline__ static const float2* row_terms(const unsigned char* smem, uint32_t number, int lane) {
        return reinterpret_cast<const float2*>(smem + kTermsOffset + stage(number) * kTermsBytes) + lane % 4;
    }
    // Elements 0 to 3 of the thread in P; the next 4 are kRows * 2 threads on.
    __device__ __forceinline__ static float4* p_elements(unsigned char* smem, int thread) {
        return reinterpret_cast<float4*>(smem + kPOffset) + thread;
    }

    // The thread's place, not kept in registers.
    __device__ __forceinline__ static typename Scores::Thread place_now(const BackwardArguments& arguments,
                                                                        const Control& control) {
        const int thread = ptx::tid_x() % 128, lane = thread % 32;
        return {arguments, control.work, thread / 32 * 16 + lane / 4, lane};
    }

    // One warpgroup: S, P, dV.
    __device__ __forceinline__ static void scores(const BackwardArguments& arguments, unsigned char* smem,
                                                  Control& control, int thread) {
        const ForwardParams& attention = arguments.params.attention;
        const uint32_t smem_address = cute::cast_smem_ptr_to_uint(smem);
        const int lane = thread % 32;
        const uint64_t k_rows = panel_descriptor(smem_address, 0);
        const uint64_t q_rows = panel_descriptor(smem_address + kQOffset, 0);
        const uint64_t dout_rows = panel_descriptor(smem_address + kDoutOffset, kBlockM * kPanelRowBytes);
        float4* const p_smem = p_elements(smem, thread);

        DvFragment dv_frag;
        ScoreFragment s_frag;
        PackedFragment p_frag;
        uint32_t number = 0;
#pragma unroll
        for (int i = 0; i < kHeadDimV / 2; ++i) dv_frag[i] = 0.f;

        const auto issue_s = [&]<bool kFenced> {
            Barrier::wait(&control.q_full[stage(number)], phase(number));
            Scores::template issue_scores<kHeadDim, kFenced>(s_frag, k_rows, q_rows + stage(number) * (kQBytes >> 4));
        };
        // One query block whose S is there. kHasNext: computes that of the next.
        const auto step = [&]<bool kHasNext>(int head, int block, bool is_masked) {
            const typename Scores::RowTerms lse(row_terms(smem, number, lane));
            Barrier::wait(&control.p_empty, number & 1 ^ 1);
            const auto hand_on = [&](int i) {
                p_smem[i * 128] = {s_frag[4 * i], s_frag[4 * i + 1], s_frag[4 * i + 2], s_frag[4 * i + 3]};
            };
            if constexpr (kIsRich) {
                Scores::make_p_rich(place_now(arguments, control), s_frag, p_frag, head, block, is_masked, lse,
                                    hand_on);
            } else {
                Scores::make_p(place_now(arguments, control), s_frag, block, is_masked, lse, [&](int i) {
                    hand_on(i);
                    Scores::pack_group(p_frag, s_frag, i);
                });
            }
            Scores::release(&control.p_full, lane);
            const uint32_t buffer = dout_stage(number);
            Barrier::wait(&control.dout_full[buffer], dout_phase(number));
            Scores::template issue_gradient<kHeadDimV>(dv_frag, p_frag, dout_rows + buffer * (kDoutBytes >> 4));
            cute::warpgroup_commit_batch();
            ++number;
            if constexpr (kHasNext) {
                issue_s.template operator()<true>();
                cute::warpgroup_wait<1>();
            } else {
                cute::warpgroup_wait<0>();
            }
            fence_operand(dv_frag);
            fence_operand(p_frag);
            if constexpr (kHasNext) {
                Scores::release_read(&control.dout_empty[buffer], lane);
                cute::warpgroup_wait<0>();
                fence_operand(s_frag);
            }
        };

        QueryWalk walk(arguments, control.work);
        if (walk.left > 0) {
            issue_s.template operator()<false>();
            cute::warpgroup_wait<0>();
            fence_operand(s_frag);
#pragma unroll 1
            for (; walk.left > 1; walk.advance())
                step.template operator()<true>(walk.head, walk.block, walk.is_masked());
            step.template operator()<false>(walk.head, walk.block, walk.is_masked());
        }
        Scores::write_gradient(place_now(arguments, control), dv_frag, kIsRich ? arguments.dropout_scale : 1.f,
                               arguments.params.dv, attention.head_dim_v);
    }

    // One warpgroup: dP, dS, dK.
    __device__ __forceinline__ static void gradients(const BackwardArguments& arguments, unsigned char* smem,
                                                     Control& control, int thread) {
        const ForwardParams& attention = arguments.params.attention;
        const uint32_t smem_address = cute::cast_smem_ptr_to_uint(smem);
        const int lane = thread % 32;
        const uint64_t v_rows = panel_descriptor(smem_address + kVOffset, 0);
        const uint64_t dout_rows = panel_descriptor(smem_address + kDoutOffset, 0);
        const uint64_t q_rows = panel_descriptor(smem_address + kQOffset, kBlockM * kPanelRowBytes);
        const float4* const p_smem = p_elements(smem, thread);
        unsigned char* const ds_smem = smem + kDsOffset + thread / 32 * 16 * kPanelRowBytes;

        DkFragment dk_frag;
        ScoreFragment dp_frag;
        PackedFragment ds_frag;
        uint32_t number = 0;
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) dk_frag[i] = 0.f;

        const auto issue_dp = [&]<bool kFenced> {
            Barrier::wait(&control.dout_full[dout_stage(number)], dout_phase(number));
            Scores::template issue_scores<kHeadDimV, kFenced>(dp_frag, v_rows,
                                                              dout_rows + dout_stage(number) * (kDoutBytes >> 4));
        };
        const auto wait_dp = [&] {
            cute::warpgroup_wait<0>();
            fence_operand(dp_frag);
            Scores::release_read(&control.dout_empty[dout_stage(number)], lane);
        };
        const auto make_ds = [&](const typename Scores::RowTerms& delta) {
#pragma unroll
            for (int i = 0; i < kBlockM / 8; ++i) {
                const float2 terms = delta[i];
                const float4 p = p_smem[i * 128];
                const float ps[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    float& dp = dp_frag[4 * i + c];
                    dp = Scores::gradient(arguments, ps[c], dp, c % 2 ? terms.y : terms.x);
                }
                Scores::pack_group(ds_frag, dp_frag, i);
            }
        };
        // One query block whose dP is there. kHasNext: computes that of the next.
        const auto step = [&]<bool kHasNext> {
            const uint32_t buffer = number % kDsBuffers, q_stage = stage(number);
            Barrier::wait(&control.p_full, number & 1);  // P was made of Q, which so is there, too
            make_ds(typename Scores::RowTerms(row_terms(smem, number, lane) + kBlockM / 2));
            if constexpr (kHasNext) Scores::release(&control.p_empty, lane);
            Barrier::wait(&control.ds_empty[buffer], number / kDsBuffers & 1 ^ 1);
            Scores::store_ds_by_keys(ds_smem + buffer * kDsBytes, ds_frag, lane);
            cutlass::arch::fence_view_async_shared();  // wgmma reads through the async proxy
            Scores::release(&control.ds_full[buffer], lane);
            Scores::template issue_gradient<kHeadDim>(dk_frag, ds_frag, q_rows + q_stage * (kQBytes >> 4));
            cute::warpgroup_commit_batch();
            ++number;
            // One buffer of dO: the next is not there yet.
            if constexpr (kHasNext && kDoutStages > 1) {
                issue_dp.template operator()<true>();
                cute::warpgroup_wait<1>();
            } else {
                cute::warpgroup_wait<0>();
            }
            fence_operand(dk_frag);
            fence_operand(ds_frag);
            if constexpr (kHasNext) {
                Scores::release_read(&control.q_empty[q_stage], lane);
                if constexpr (kDoutStages == 1) issue_dp.template operator()<true>();
                wait_dp();
            }
        };

        QueryWalk walk(arguments, control.work);
        if (walk.left > 0) {
            issue_dp.template operator()<false>();
            wait_dp();
#pragma unroll 1
            for (int left = walk.left; left > 1; --left) step.template operator()<true>();
            step.template operator()<false>();
        }
        Scores::write_gradient(place_now(arguments, control), dk_frag, attention.softmax_scale, arguments.params.dk,
                               attention.head_dim);
    }

    // One warpgroup: dQ.
    __device__ __forceinline__ static void queries(const BackwardArguments& arguments, unsigned char* smem,
                                                   Control& control, int thread) {
        const volatile BackwardWork& work = control.work;
        const uint32_t smem_address = cute::cast_smem_ptr_to_uint(smem);
        const int lane = thread % 32;
        const uint64_t ds_columns = panel_descriptor(smem_address + kDsOffset, 0);
        const uint64_t k_columns = panel_descriptor(smem_address, kBlockN * kPanelRowBytes);

        DqFragment dq_frag;
        uint32_t number = 0, written = 0;  // steps; buffers
        QueryWalk walk(arguments, work);
#pragma unroll 1
        for (; walk.left > 0; walk.advance()) {
            const uint32_t buffer = number % kDsBuffers;
            Barrier::wait(&control.ds_full[buffer], number / kDsBuffers & 1);
#pragma unroll
            for (int column = 0; column < kHeadDim; column += kDqSlice) {
                const uint64_t ds_buffer = ds_columns + buffer * (kDsBytes >> 4);
                const uint64_t k_slice = k_columns + column_offset(column, kBlockN);
                fence_operand(dq_frag);
                cute::warpgroup_arrive();
#pragma unroll
                for (int step = 0; step < kBlockN / 16; ++step) {
                    multiply_ss_mn<kDataType, kDqSlice>(dq_frag, ds_buffer + row_step(step), k_slice + row_step(step),
                                                        step > 0);
                }
                cute::warpgroup_commit_batch();
                cute::warpgroup_wait<0>();
                fence_operand(dq_frag);
                if (column + kDqSlice == kHeadDim) Scores::release_read(&control.ds_empty[buffer], lane);
#pragma unroll
                for (int part = 0; part < kDqSlice / kDqBufferColumns; ++part) {
                    const uint32_t place = written % kDqBuffers;
                    Barrier::wait(&control.dq_empty[place], written / kDqBuffers & 1 ^ 1);
                    float4* part_smem = reinterpret_cast<float4*>(smem + kDqOffset + place * kDqBufferBytes) + thread;
#pragma unroll
                    for (int i = 0; i < kDqBufferColumns / 8; ++i) {
                        const float* d = dq_frag + part * (kDqBufferColumns / 2) + 4 * i;
                        part_smem[i * 128] = {d[0], d[1], d[2], d[3]};
                    }
                    cutlass::arch::fence_view_async_shared();  // the bulk reduction reads through the async proxy
                    Scores::release(&control.dq_full[number % kReducers][column / kDqBufferColumns + part], lane);
                    ++written;
                }
            }
            ++number;
        }
    }

    // One thread: adds to the scratch what the queries' warpgroup writes of every kReducers-th block. The others take
    // those between, so that a deterministic call waits for its turn, for its additions to be made and for the turn to
    // be seen by others while they add.
    __device__ __forceinline__ static void reduce_dq(const BackwardArguments& arguments, unsigned char* smem,
                                                     Control& control, uint32_t reducer) {
        const volatile BackwardWork& work = control.work;
        const bool deterministic = arguments.scratch.turns != nullptr;
        const uint32_t buffers_smem = cute::cast_smem_ptr_to_uint(smem) + kDqOffset;
        uint32_t number = 0;  // of the step
#pragma unroll 1
        for (ProducerWalk walk(arguments, work); walk.left > 0; walk.advance(work), ++number) {
            if (number % kReducers != reducer) continue;
            const int64_t tile = scratch_tile(arguments, work, walk.head, walk.block);
            const auto state = [&] { return arguments.scratch.states + tile; };
            const bool is_stored = arguments.scratch.states == nullptr || Producer::is_stored(state());
            bool is_first = false;
            if (deterministic) is_first = Producer::wait_turn(arguments, work, tile, walk.block);
            float* sums = arguments.scratch.dq + tile * (kBlockM * kHeadDim);
#pragma unroll 1
            for (uint32_t chunk = 0; chunk < kDqChunks; ++chunk) {
                const uint32_t taken = number * kDqChunks + chunk;
                Barrier::wait(&control.dq_full[reducer][chunk], number / kReducers & 1);
                if (chunk == 0 && !is_stored) is_first = Producer::claim(state());
                Producer::add(sums + chunk * (kDqBufferBytes / 4), buffers_smem + taken % kDqBuffers * kDqBufferBytes,
                              kDqBufferBytes, is_first);
                if (chunk > 0) {  // the one before has been read
                    cute::tma_store_wait<1>();
                    Barrier::arrive(&control.dq_empty[(taken - 1) % kDqBuffers]);
                }
            }
            cute::tma_store_wait<0>();
            Barrier::arrive(&control.dq_empty[(number * kDqChunks + kDqChunks - 1) % kDqBuffers]);
            if (deterministic) {
                Producer::end_turn(arguments, tile);
            } else if (is_first) {
                Producer::publish(state());
            }
        }
    }
};

}  // namespace flash_ext::sm90
