// A consumer warpgroup of the sm90 forward: S = Q K^T, softmax, O += P V, and the results.
#pragma once

#include <stdint.h>

#include <cutlass/arch/barrier.h>
#include <cute/arch/mma_sm90_gmma.hpp>

#include "core/numeric.cuh"
#include "ptx/special_registers.cuh"
#include "sm90/forward_plan.cuh"
#include "sm90/forward_shape.cuh"
#include "sm90/output.cuh"
#include "sm90/scores.cuh"
#include "sm90/softmax.cuh"
#include "sm90/wgmma.cuh"

namespace flash_ext::sm90 {

template <class Shape>
struct ForwardConsumer : Shape {
    using Shape::kBlockM, Shape::kBlockN, Shape::kStages, Shape::kQBuffers, Shape::kPlans, Shape::kCluster;
    using Shape::kDataType, Shape::kIsRich, Shape::kQkSteps, Shape::kOutColumns, Shape::kHandsQBack,
        Shape::kMostSkipped;
    using Shape::kQBytes, Shape::kKBytes, Shape::kVBytes, Shape::kKOffset, Shape::kVOffset;
    using Shape::kRows, Shape::kSearches, Shape::kWarpgroups, Shape::kOverlap, Shape::kPingPong, Shape::kCrossTile;
    using typename Shape::Control, typename Shape::SFragment, typename Shape::PFragment, typename Shape::OFragment;

    // One warpgroup.
    __device__ __forceinline__ static void consume(const ForwardArguments& arguments, unsigned char* smem,
                                                   Control& control, int warpgroup, int thread) {
        const ForwardParams& params = arguments.params;
        const uint32_t smem_address = cute::cast_smem_ptr_to_uint(smem);
        const uint64_t q_base = panel_descriptor(smem_address + warpgroup * kRows * kPanelRowBytes, 0);
        const uint64_t k_base = panel_descriptor(smem_address + kKOffset, 0);
        const uint64_t v_base = panel_descriptor(smem_address + kVOffset, kBlockN * kPanelRowBytes);
        const int lane = thread % 32;

        SFragment s_frag;
        PFragment p_frag;
        OFragment o_frag;
        WarpgroupSoftmax softmax;
        Ring<kPlans> plans;
        Ring<kQBuffers> q;
        Ring<kStages> k, v;

        // What is asked of the plan inside the loops, the same in all lanes.
        struct Walk {
            const ForwardPlan* plan;
            uint32_t plan_index;
            KeyBlocks blocks;
            int before, after;  // blocks of the tile before this warpgroup's first, and behind its last
            int rows;           // of the tile; 0: there are no more tiles
        } tile{}, next{};

        const auto wait_turn = [&] {
            if constexpr (kPingPong) cutlass::arch::NamedBarrier::sync(256, warpgroup);
        };
        const auto pass_turn = [&] {
            if constexpr (kPingPong) cutlass::arch::NamedBarrier::arrive(256, (warpgroup + 1) % kWarpgroups);
        };
        const auto release = [&](uint64_t* empty) {
            if (lane == 0) Barrier::arrive(empty);
        };
        // The same for a stage of K or V, which the other CTA of a pair fills as well.
        const auto release_keys = [&](uint64_t* empty) {
            if constexpr (kCluster == 1) {
                release(empty);
            } else {
                Barrier::arrive(empty, /*cta_id=*/lane, /*pred=*/lane <= arguments.shares_keys);
            }
        };
        const auto hand_q_back = [&] {
            if constexpr (kHandsQBack) release(&control.q_empty[q.index]);
            q.advance();
        };
        // Blocks that another warpgroup of the tile needs and this one does not: take their turns and hand them back.
        // That these have landed is not waited for, since the turns say that an arrival comes to the stage's present
        // phase. With its turn of block i (counted over all tiles) a warpgroup knows that the others have had theirs of
        // block i - 1, and before that have handed back K of block i - 2 and V of block i - 3: what was where K of
        // block i and V of block i - 1 are. So these can go back at once, and V of block i after the next turn, of
        // whatever tile. Nor does a later wait for the stage take an earlier phase for its own: a warpgroup that needs
        // block i has seen its K before its turn of block i, and its V before that of block i + 1 is passed on.
        // The turns say nothing of the other CTA of a pair. There the warpgroup that skips is the second of two (only
        // rows past the end make one skip, and its turn of a block comes after the first's), so before its turn of
        // block i the first has seen K of block i and V of block i - 1 land: parts of either come from both CTAs, each
        // of which had its stage back from all warps of the pair.
        static_assert(kStages >= 2 || kWarpgroups == 1);
        static_assert(kCluster == 1 || kWarpgroups == 2);
        bool owes_v = false;  // of the last block skipped
        const auto settle_v = [&] {
            if (!owes_v) return;
            release_keys(&control.v_empty[v.index]);
            v.advance();
            owes_v = false;
        };
        const auto skip_block = [&] {
            wait_turn();
            release_keys(&control.k_empty[k.index]);
            k.advance();
            pass_turn();
            settle_v();
            owes_v = true;
        };
        const auto skip_blocks = [&](int count) {
#pragma unroll 1
            for (; count > 0; --count) skip_block();
        };
        // Before the first of its own blocks, or behind the last.
        const auto skip_few = [&](int count) {
            if constexpr (kMostSkipped == 1) {
                if (count > 0) skip_block();
            } else {
                skip_blocks(count);
            }
        };
        const auto issue_qk = [&](uint64_t q_descriptor) {
            Barrier::wait(&control.k_full[k.index], k.phase);
            const uint64_t k_descriptor = k_base + uniform(k.index) * (kKBytes >> 4);
            wait_turn();
            fence_operand(s_frag);
            cute::warpgroup_arrive();
#pragma unroll
            for (int step = 0; step < kQkSteps; ++step) {
                multiply_ss<kDataType, kBlockN>(s_frag, q_descriptor + column_step(step, kBlockM),
                                                k_descriptor + column_step(step, kBlockN), step > 0);
            }
            cute::warpgroup_commit_batch();
        };
        bool o_is_live = false;  // the tile's first product makes O, the others add to it
        const auto issue_pv = [&] {
            Barrier::wait(&control.v_full[v.index], v.phase);
            const uint64_t v_descriptor = v_base + uniform(v.index) * (kVBytes >> 4);
            fence_operand(o_frag);
            fence_operand(p_frag);
            cute::warpgroup_arrive();
#pragma unroll
            for (int step = 0; step < kBlockN / 16; ++step) {
                multiply_rs<kDataType, kOutColumns>(o_frag, p_frag + 4 * step, v_descriptor + row_step(step),
                                                    step > 0 || o_is_live);
            }
            o_is_live = true;
            cute::warpgroup_commit_batch();
        };
        const auto s_is_done = [&] {
            fence_operand(s_frag);
            release_keys(&control.k_empty[k.index]);
            k.advance();
        };
        const auto o_is_done = [&] {
            fence_operand(o_frag);
            fence_operand(p_frag);
            release_keys(&control.v_empty[v.index]);
            v.advance();
        };
        const auto place_of = [&](const ForwardPlan& plan) {
            const int here = ptx::tid_x() % 128;
            return Place{plan.row_begin + warpgroup * kRows + here / 32 * 16 + here % 32 / 4, here % 4 * 2};
        };
        const float scale_log2 = kIsRich ? 1.f : arguments.scale_log2;
        float slope_log2 = 0.f;
        PhiloxKey philox{};
        const bool drops = kIsRich && params.rng_state != nullptr && params.dropout_threshold > 0;
        if (drops) philox = philox_key(params.rng_state);

        const auto to_scores = [&](int block) {
            if constexpr (kIsRich) {
                transform_scores(s_frag, arguments.scale_log2, arguments.inner_scale, arguments.softcap_log2,
                                 slope_log2, place_of(*tile.plan), tile.plan->mask.shift, block * kBlockN);
            }
        };
        // Raw scores of a block once more, for rows (of half 0, half 1), while Q is still there.
        const auto score_again = [&](int block, const bool (&rows)[2]) {
            const int warp_row = warpgroup * kRows + ptx::tid_x() % 128 / 32 * 16;
            const ForwardPlan& plan = *tile.plan;
            const char* k = static_cast<const char*>(params.k.data) +
                            row_offset(params.k, params.cu_seqlens_k != nullptr ? 0 : plan.output.batch,
                                       plan.key_row + block * kBlockN, plan.head_k) *
                                2;
            multiply_again<kDataType, kQkSteps, kBlockN>(
                s_frag, rows, smem_address + q.index * kQBytes + warp_row * kPanelRowBytes, kBlockM * kPanelRowBytes, k,
                params.k.stride_row * 2, params.head_dim, ptx::tid_x() % 32);
            if constexpr (kHandsQBack) __syncwarp();  // all lanes have read Q before one of them hands it back
        };
        const auto mask = [&](int block) {
            mask_scores(s_frag, tile.plan->mask, place_of(*tile.plan), block * kBlockN);
        };
        const auto to_p = [&](int block) {
            if (drops) {
                drop_scores(s_frag, philox, params.dropout_threshold, place_of(*tile.plan), block * kBlockN,
                            tile.plan->output.batch, tile.plan->output.head);
            }
#pragma unroll
            for (int i = 0; i < kBlockN / 4; ++i) p_frag[i] = pack<kDataType>(s_frag[2 * i], s_frag[2 * i + 1]);
        };
        // The thread's number is read anew where it is seldom needed, lest what follows from it be kept in registers.
        const auto write = [&](const TileOutput& output, bool has_blocks) {
            const int here = ptx::tid_x() % 128;
            write_rows<kDataType, kOutColumns>(o_frag, softmax, arguments, output,
                                               warpgroup * kRows + here / 32 * 16 + here % 32 / 4, here % 32,
                                               has_blocks, scale_log2, kIsRich ? arguments.dropout_scale : 1.f);
        };
        const auto release_plan = [&](uint32_t index) {
            __syncwarp();  // all lanes have read it
            release(&control.plan_empty[index]);
        };

        // Looks at the plan behind the current one. Nothing but this is needed of it while tiles change, and a product
        // may run meanwhile.
        const auto look_ahead = [&] {
            Barrier::wait(&control.plan_full[plans.index], plans.phase);
            const ForwardPlan& plan = control.plans[plans.index];
            const KeyBlocks blocks{uniform(plan.blocks[warpgroup].begin), uniform(plan.blocks[warpgroup].full_begin),
                                   uniform(plan.blocks[warpgroup].full_end), uniform(plan.blocks[warpgroup].end)};
            next = {&plan,
                    plans.index,
                    blocks,
                    uniform(plan.end) - blocks.end,
                    blocks.begin - uniform(plan.begin),
                    uniform(plan.output.rows)};
        };
        // Goes to the next tile in which this warpgroup has blocks to walk, once look_ahead() has been called; false:
        // there is none. Tiles without are done here.
        const auto next_tile = [&]() -> bool {
            for (;;) {
                if (next.rows == 0) return false;
                plans.advance();
                if (next.blocks.end > next.blocks.begin) break;
                const int count = next.before + next.after;
                if (count > 0) {
                    if constexpr (kHandsQBack) Barrier::wait(&control.q_full[q.index], q.phase);
                    hand_q_back();
                    skip_blocks(count);
                }
                write(next.plan->output, false);
                release_plan(next.plan_index);
                look_ahead();
            }
            tile = next;
            o_is_live = false;
            if constexpr (kIsRich) {
                if (params.alibi_slopes != nullptr) {
                    const TileOutput& output = tile.plan->output;
                    slope_log2 = params.alibi_slopes[output.batch * params.alibi_stride_batch + output.head] * kLog2E;
                }
            }
            return true;
        };
        const auto issue_first_qk = [&]() -> uint64_t {
            skip_few(tile.before);
            Barrier::wait(&control.q_full[q.index], q.phase);
            const uint64_t q_descriptor = q_base + uniform(q.index) * (kQBytes >> 4);
            issue_qk(q_descriptor);
            pass_turn();
            settle_v();
            return q_descriptor;
        };

        if constexpr (kPingPong) {
            if (warpgroup == kWarpgroups - 1) pass_turn();  // the first turn is warpgroup 0's
        }
        look_ahead();
        if (!next_tile()) return;
        uint64_t q_descriptor = issue_first_qk();
        for (;;) {
            int block = tile.blocks.end - 1;
            float rescale[2];
            cute::warpgroup_wait<0>();
            s_is_done();
            softmax.reset();
            to_scores(block);
            if (block >= tile.blocks.full_end || block < tile.blocks.full_begin) mask(block);
            softmax.template update<true>(s_frag, scale_log2, rescale);
            to_p(block);
            --block;

            // From here on P of block + 1 and O wait for their product.
            const auto next_s = [&] {
                issue_qk(q_descriptor);
                issue_pv();
                pass_turn();
                cute::warpgroup_wait<kOverlap ? 1 : 0>();
                s_is_done();
            };
            const auto finish_o = [&] {
                if constexpr (kOverlap) cute::warpgroup_wait<0>();
                fence_operand(s_frag);
                o_is_done();
            };
            const auto rescale_o = [&] {
#pragma unroll
                for (int i = 0; i < kOutColumns / 2; ++i) o_frag[i] *= rescale[i % 4 / 2];
            };
            const auto step = [&]<bool kMasked>() {
                next_s();
                to_scores(block);
                if constexpr (kMasked) mask(block);
                const bool grows = softmax.template update<kMasked>(s_frag, scale_log2, rescale);
                finish_o();
                if (grows) rescale_o();
                to_p(block);
            };
            // Two rounds of one pair of loops, not three loops: the masked step is instantiated once.
            int masked_end = tile.blocks.full_end;
#pragma unroll 1
            for (int round = 0; round < 2; ++round) {
#pragma unroll 1
                for (; block >= masked_end; --block) step.template operator()<true>();
                if constexpr (kSearches) {
#pragma unroll 1
                    for (; block >= tile.blocks.full_begin; --block) step.template operator()<false>();
                } else {
#pragma unroll 1
                    for (;;) {
                        // What is seldom needed stands behind this loop, not in it: the way around it would cost 4 %.
                        float block_sum[2];
#pragma unroll 1
                        for (; block >= tile.blocks.full_begin; --block) {
                            next_s();
                            const bool grows = softmax.exponentiate(s_frag, scale_log2, block_sum);
                            // A branch holds back the wait for O, which ptxas would else put in front of the
                            // exponentials that are to run meanwhile. The wait itself must be one instruction for all
                            // warps of the group, whether their rows grow or not (PTX ISA 9.7.15.7.3, wgmma.wait_group:
                            // .aligned).
                            if (grows) __nanosleep(0);
                            finish_o();
                            if (grows) break;
                            softmax.add(block_sum);
                            to_p(block);
                        }
                        if (block < tile.blocks.full_begin) break;
                        softmax.outgrown(s_frag, scale_log2, block_sum, rescale,
                                         [&](const bool (&rows)[2]) { score_again(block, rows); });
                        softmax.add(block_sum);
                        rescale_o();
                        to_p(block);
                        --block;
                    }
                }
                masked_end = tile.blocks.begin;
            }
            hand_q_back();

            issue_pv();
            look_ahead();
            const TileOutput done = tile.plan->output;
            cute::warpgroup_wait<0>();
            o_is_done();
            skip_few(tile.after);
            // The plan goes back before another is waited for: next_tile may need more than there are slots.
            release_plan(tile.plan_index);
            if constexpr (kCrossTile) {
                const bool is_last = !next_tile();
                if (is_last) {
                    write(done, true);
                    return;
                }
                q_descriptor = issue_first_qk();
                write(done, true);
            } else {
                write(done, true);
                if (!next_tile()) return;
                q_descriptor = issue_first_qk();
            }
        }
    }
};

}  // namespace flash_ext::sm90
