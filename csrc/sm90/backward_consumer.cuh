// A consumer warpgroup of the sm90 backward: the scores of its 64 keys, their gradients, dK, dV, and its part of dQ.
#pragma once

#include <stdint.h>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>

#include "core/numeric.cuh"
#include "ptx/ex2.cuh"
#include "sm90/backward_shape.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/output.cuh"
#include "sm90/scores.cuh"
#include "sm90/wgmma.cuh"

namespace flash_ext::sm90 {

template <class Shape>
struct BackwardConsumer : Shape {
    using Shape::kBlockM, Shape::kBlockN, Shape::kStages, Shape::kRows, Shape::kDataType, Shape::kHeadDim;
    using Shape::kDsBuffers;
    using Shape::kHeadDimV, Shape::kIsRich, Shape::kEarlyDv, Shape::kDqByRows, Shape::kDqColumns, Shape::kDqPartBytes;
    using Shape::kTermsOffset, Shape::kTermsBytes, Shape::kQBytes, Shape::kDoutBytes, Shape::kDsBytes;
    using Shape::kVOffset, Shape::kQOffset, Shape::kDoutOffset, Shape::kDsOffset, Shape::kDqOffset;
    using typename Shape::Control, typename Shape::ScoreFragment, typename Shape::PackedFragment;
    using typename Shape::DkFragment, typename Shape::DvFragment, typename Shape::DqFragment;

    // One warpgroup.
    __device__ __forceinline__ static void consume(const BackwardArguments& arguments, unsigned char* smem,
                                                   Control& control, int warpgroup, int thread) {
        const ForwardParams& attention = arguments.params.attention;
        const volatile BackwardWork& work = control.work;
        const uint32_t smem_address = cute::cast_smem_ptr_to_uint(smem);
        const int lane = thread % 32, row = warpgroup * kRows + thread / 32 * 16 + lane / 4;  // key of half 0
        static_assert((kStages & (kStages - 1)) == 0 && (kDsBuffers & (kDsBuffers - 1)) == 0);
        const uint64_t keys = static_cast<uint64_t>(warpgroup * kRows * kPanelRowBytes) >> 4;
        // A operands of the scores, and B operands.
        const uint64_t k_rows = panel_descriptor(smem_address, 0) + keys;
        const uint64_t v_rows = panel_descriptor(smem_address + kVOffset, 0) + keys;
        const uint64_t q_rows = panel_descriptor(smem_address + kQOffset, kBlockM * kPanelRowBytes);
        const uint64_t dout_rows = panel_descriptor(smem_address + kDoutOffset, kBlockM * kPanelRowBytes);
        // dQ: its part's rows of dS, its part's columns of K.
        const int dq_column = kDqByRows ? 0 : warpgroup * kDqColumns;
        const uint64_t ds_columns =
            panel_descriptor(smem_address + kDsOffset + (kDqByRows ? warpgroup : 0) * kBlockN * kPanelRowBytes, 0);
        const uint64_t k_columns = panel_descriptor(
            smem_address + dq_column / kPanelColumns * kBlockN * kPanelRowBytes + dq_column % kPanelColumns * 2,
            kBlockN * kPanelRowBytes);

        DkFragment dk_frag;
        DvFragment dv_frag;
        ScoreFragment s_frag, dp_frag;
        DqFragment dq_frag;
        PackedFragment p_frag, ds_frag;
        uint32_t number = 0;  // of the step: all rings turn with it, and a counter is what takes fewest registers
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) dk_frag[i] = 0.f;
#pragma unroll
        for (int i = 0; i < kHeadDimV / 2; ++i) dv_frag[i] = 0.f;

        const auto release = [&](uint64_t* barrier) {
            __syncwarp();
            if (lane == 0) Barrier::arrive(barrier);
        };
        const auto stage = [&] { return number % kStages; };
        const auto phase = [&] { return number / kStages & 1; };
        const auto issue_s = [&] {
            Barrier::wait(&control.q_full[stage()], phase());
            const uint64_t q = q_rows + stage() * (kQBytes >> 4);
            fence_operand(s_frag);
            cute::warpgroup_arrive();
#pragma unroll
            for (int step = 0; step < kHeadDim / 16; ++step) {
                multiply_ss<kDataType, kBlockM>(s_frag, k_rows + column_step(step, kBlockN),
                                                q + column_step(step, kBlockM), step > 0);
            }
            cute::warpgroup_commit_batch();
        };
        const auto issue_dp = [&] {
            Barrier::wait(&control.dout_full[stage()], phase());
            const uint64_t dout = dout_rows + stage() * (kDoutBytes >> 4);
            fence_operand(dp_frag);
            cute::warpgroup_arrive();
#pragma unroll
            for (int step = 0; step < kHeadDimV / 16; ++step) {
                multiply_ss<kDataType, kBlockM>(dp_frag, v_rows + column_step(step, kBlockN),
                                                dout + column_step(step, kBlockM), step > 0);
            }
            cute::warpgroup_commit_batch();
        };
        const auto issue_dq = [&] {
            Barrier::wait(&control.ds_full[number % kDsBuffers], number / kDsBuffers & 1);
            const uint64_t ds_buffer = ds_columns + number % kDsBuffers * (kDsBytes >> 4);
            fence_operand(dq_frag);
            cute::warpgroup_arrive();
#pragma unroll
            for (int step = 0; step < kBlockN / 16; ++step) {
                multiply_ss_mn<kDataType, kDqColumns>(dq_frag, ds_buffer + row_step(step), k_columns + row_step(step),
                                                      step > 0);
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
            release(&control.dq_full[warpgroup]);
        };
        const auto queries_mask = [&] {  // the mask seen from the keys
            const Mask mask{arguments.bounds, work.keys_used - work.queries_used, work.keys_used};
            return mask.transposed(work.queries_used);
        };
        const auto is_masked = [&](int block) {
            return block >= work.blocks.full_end || block < work.blocks.full_begin;
        };
        const auto pack_p = [&](int i) {
#pragma unroll
            for (int c = 0; c < 4; c += 2) {
                p_frag[2 * i + c / 2] = pack<kDataType>(s_frag[4 * i + c], s_frag[4 * i + c + 1]);
            }
        };
        // Raw products become P.
        const auto make_p = [&](int block, const float2* lse) {
            if (is_masked(block)) {
                mask_scores(s_frag, queries_mask(), Place{work.begin + row, lane % 4 * 2}, block * kBlockM,
                            work.keys_used);
            }
#pragma unroll
            for (int i = 0; i < kBlockM / 8; ++i) {
                const float2 terms = lse[i * 4];
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    float& s = s_frag[4 * i + c];
                    s = ptx::ex2_approx_ftz(fmaf(s, arguments.scale_log2, c % 2 ? -terms.y : -terms.x));
                }
                if constexpr (kEarlyDv) pack_p(i);
            }
        };
        // The same with all that scores may go through. p_frag gets P as it multiplies dO (dropped scores are 0),
        // s_frag P times the derivative of the softcap, kept a bit for each score that dropout keeps.
        uint32_t kept[(kBlockM / 2 + 31) / 32];
        const auto make_p_rich = [&](int head, int block, const float2* lse) {
            const Place place{work.begin + row, lane % 4 * 2};
            const Mask mask = queries_mask();
            uint32_t visible[2] = {~0u, ~0u};
            static_assert(kBlockM <= 128, "a word holds a row's elements");
            if (is_masked(block)) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    visible[half] =
                        visible_elements(mask, place.row + half * 8, work.keys_used, block * kBlockM + place.column, 0);
                }
            }
            float slope_log2 = 0.f;
            if (attention.alibi_slopes != nullptr) {
                slope_log2 = attention.alibi_slopes[work.batch * attention.alibi_stride_batch + head] * kLog2E;
            }
            const bool drops = attention.rng_state != nullptr && attention.dropout_threshold > 0;
            PhiloxKey philox{};
            if (drops) philox = philox_key(attention.rng_state);
            // From the diagonal to key half 0 and query 0 of this thread.
            const float distance = static_cast<float>(place.row + mask.shift - (block * kBlockM + place.column));
#pragma unroll
            for (uint32_t& word : kept) word = ~0u;
#pragma unroll
            for (int i = 0; i < kBlockM / 8; ++i) {
                const float2 terms = lse[i * 4];
                float multiplied[4];  // P as it multiplies dO
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int query = i * 8 + c;  // from place.column
                    uint4 random{};
                    if (drops) {
                        random = philox4x32_7(philox, place.row / 32 * 4 + place.row % 8 / 2,
                                              block * kBlockM + place.column + query, work.batch, head);
                    }
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int element = 4 * i + 2 * half + c;
                        float score = s_frag[element], chain = 1.f;
                        if (attention.softcap > 0.f) {
                            const float t = tanh_ex2(score * arguments.inner_scale);
                            score = t * arguments.softcap_log2;
                            chain = fmaf(-t, t, 1.f);
                        } else {
                            score *= arguments.scale_log2;
                        }
                        if (slope_log2 != 0.f) {
                            score -= slope_log2 * fabsf(distance + static_cast<float>(half * 8 - query));
                        }
                        float p = ptx::ex2_approx_ftz(score - (c == 0 ? terms.x : terms.y));
                        if ((visible[half] >> (2 * i + c) & 1) == 0) p = 0.f;
                        s_frag[element] = p * chain;
                        if (drops) {
                            const int key = place.row + half * 8;
                            if (!dropout_keeps(random, key / 8 % 4 * 2 + key % 2, attention.dropout_threshold)) {
                                p = 0.f;
                                kept[element / 32] &= ~(1u << element % 32);
                            }
                        }
                        multiplied[2 * half + c] = p;
                    }
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    p_frag[2 * i + half] = pack<kDataType>(multiplied[2 * half], multiplied[2 * half + 1]);
                }
            }
        };
        const auto make_ds = [&](const float2* delta) {
#pragma unroll
            for (int i = 0; i < kBlockM / 8; ++i) {
                const float2 terms = delta[i * 4];
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    float& dp = dp_frag[4 * i + c];
                    if constexpr (kIsRich) {
                        dp = kept[(4 * i + c) / 32] >> (4 * i + c) % 32 & 1 ? dp * arguments.dropout_scale : 0.f;
                    }
                    dp = s_frag[4 * i + c] * (dp - (c % 2 ? terms.y : terms.x));
                }
                if constexpr (!kEarlyDv && !kIsRich) pack_p(i);
#pragma unroll
                for (int c = 0; c < 4; c += 2) {
                    ds_frag[2 * i + c / 2] = pack<kDataType>(dp_frag[4 * i + c], dp_frag[4 * i + c + 1]);
                }
            }
        };
        // Keys are the rows of dS in shared memory, in the swizzle that TMA would write.
        const auto store_ds = [&] {
            const int swizzled = lane / 16 ^ lane % 8;
            unsigned char* row_smem = smem + kDsOffset + number % kDsBuffers * kDsBytes +
                                      (warpgroup * kRows + thread / 32 * 16 + lane % 16) * kPanelRowBytes;
#pragma unroll
            for (int i = 0; i < kBlockM / 16; ++i) {
                unsigned char* chunk_smem = row_smem + i / 4 * kBlockN * kPanelRowBytes + ((i % 4 * 2) ^ swizzled) * 16;
                cute::SM90_U32x4_STSM_N::copy(ds_frag[4 * i], ds_frag[4 * i + 1], ds_frag[4 * i + 2],
                                              ds_frag[4 * i + 3], *reinterpret_cast<cute::uint128_t*>(chunk_smem));
            }
            cutlass::arch::fence_view_async_shared();  // wgmma reads through the async proxy
            release(&control.ds_full[number % kDsBuffers]);
        };
        const auto issue_dv = [&] {
            const uint64_t dout = dout_rows + stage() * (kDoutBytes >> 4);
            fence_operand(dv_frag);
            fence_operand(p_frag);
            cute::warpgroup_arrive();
#pragma unroll
            for (int step = 0; step < kBlockM / 16; ++step) {
                multiply_rs<kDataType, kHeadDimV>(dv_frag, p_frag + 4 * step, dout + row_step(step));
            }
            cute::warpgroup_commit_batch();
        };
        const auto issue_dk = [&] {
            const uint64_t q = q_rows + stage() * (kQBytes >> 4);
            fence_operand(dk_frag);
            fence_operand(ds_frag);
            cute::warpgroup_arrive();
#pragma unroll
            for (int step = 0; step < kBlockM / 16; ++step) {
                multiply_rs<kDataType, kHeadDim>(dk_frag, ds_frag + 4 * step, q + row_step(step));
            }
            cute::warpgroup_commit_batch();
        };

        // One query block whose S is there. kHasNext: computes that of the next under the writing of dQ.
        const auto step = [&]<bool kHasNext>(int head, int block) {
            const float2* terms =
                reinterpret_cast<const float2*>(smem + kTermsOffset + stage() * kTermsBytes) + lane % 4;
            issue_dp();
            if constexpr (kIsRich) {
                make_p_rich(head, block, terms);
            } else {
                make_p(block, terms);
            }
            if constexpr (kEarlyDv) {
                issue_dv();
                cute::warpgroup_wait<1>();
            } else {
                cute::warpgroup_wait<0>();
            }
            fence_operand(dp_frag);
            make_ds(terms + kBlockM / 2);
            store_ds();
            if constexpr (!kEarlyDv) issue_dv();
            issue_dk();
            issue_dq();
            cute::warpgroup_wait<2>();
            fence_operand(dv_frag);
            fence_operand(p_frag);
            release(&control.dout_empty[stage()]);
            cute::warpgroup_wait<1>();
            fence_operand(dk_frag);
            fence_operand(ds_frag);
            release(&control.q_empty[stage()]);
            cute::warpgroup_wait<0>();
            fence_operand(dq_frag);
            ++number;
            if constexpr (kHasNext) issue_s();
            write_dq(number - 1);
            if constexpr (kHasNext) {
                cute::warpgroup_wait<0>();
                fence_operand(s_frag);
            }
        };

        QueryWalk walk(attention, work);
        if (walk.left > 0) {
            Barrier::wait(&control.k_full, 0);
            issue_s();
            Barrier::wait(&control.v_full, 0);
            cute::warpgroup_wait<0>();
            fence_operand(s_frag);
#pragma unroll 1
            for (; walk.left > 1; walk.advance()) step.template operator()<true>(walk.head, walk.block);
            step.template operator()<false>(walk.head, walk.block);
        }
        const BackwardParams& params = arguments.params;
        const int batch = attention.cu_seqlens_k != nullptr ? 0 : work.batch;
        const int first = work.keys_start + work.begin;
        write_gradient(dk_frag, attention.softmax_scale, params.dk, batch, first, work, row, lane, attention.head_dim);
        write_gradient(dv_frag, kIsRich ? arguments.dropout_scale : 1.f, params.dv, batch, first, work, row, lane,
                       attention.head_dim_v);
    }

  private:
    // Rows `row` and `row + 8` of the tile to global memory, those behind the sequence's keys as 0.
    template <int kCount>
    __device__ __forceinline__ static void write_gradient(const float (&gradient)[kCount], float scale,
                                                          const TensorView& tensor, int batch, int first,
                                                          const volatile BackwardWork& work, int row, int lane,
                                                          int columns) {
        char* tile = static_cast<char*>(tensor.data) + row_offset(tensor, batch, first, work.head_k) * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int here = row + half * 8;
            const bool counts = here < work.rows_used;
            char* row_data = tile + here * tensor.stride_row * 2 + lane % 4 * 16;
            const int columns_here = here < work.rows ? columns - lane % 4 * 8 : 0;
#pragma unroll
            for (int group = 0; group < kCount / 16; ++group) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* pair = &gradient[(group * 4 + i) * 4 + 2 * half];
                    words[i] = counts ? pack<kDataType>(pair[0] * scale, pair[1] * scale) : 0u;
                }
                transpose_quad(words, lane);
                if (group * 32 < columns_here) {
                    *reinterpret_cast<uint4*>(row_data + group * 64) = uint4{words[0], words[1], words[2], words[3]};
                }
            }
        }
    }
};

}  // namespace flash_ext::sm90
