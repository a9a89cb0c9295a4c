// The warp that issues the products of the sm100 forward: one elected lane does, the others keep it company so that the
// compiler knows descriptors and branches to be the same in all lanes. It is the same lane each time, and the election
// itself (elect.sync) waits for all of them.
#pragma once

#include <stdint.h>

#include <cute/arch/cluster_sm90.hpp>

#include "ptx/tcgen05.cuh"
#include "sm100/forward_shape.cuh"
#include "sm100/product.cuh"

namespace flash_ext::sm100 {

template <class Shape>
struct ForwardProducts : Shape {
    using Shape::kDataType, Shape::kBlockN, Shape::kRows, Shape::kTiles, Shape::kPlans, Shape::kStages, Shape::kVStages;
    using Shape::kKOffset, Shape::kVOffset, Shape::kSColumn, Shape::kSPitch, Shape::kOColumn, Shape::kPHead;
    using Shape::kKParts, Shape::kVParts, Shape::kVPartRows, Shape::kSRing;
    using Shape::kQkSteps, Shape::kPvSteps, Shape::kPvColumns, Shape::kQBytes, Shape::kKBytes, Shape::kVBytes;
    using Shape::kTileRows, Shape::kKRows, Shape::kCtasOfTile, Shape::kIsPair;
    using typename Shape::Control, typename Shape::Transfer;

    static constexpr uint32_t kQkShape = instruction_descriptor<kDataType, kTileRows, kBlockN, false>();
    static constexpr uint32_t kPvShape = instruction_descriptor<kDataType, kTileRows, kPvColumns, true>();

    // A block whose S has been issued and whose P V has not.
    struct Pending {
        bool is_due;
        bool is_first;  // of the tile: its P V overwrites O
        uint32_t buffer, phase;
    };

    // A query tile and its way through the key blocks.
    struct TileWalk {
        int begin, end;  // of the current plan
        Pending pending;
        Ring<kSRing> s;
        uint32_t q_phase;
    };

    // One warp. In a pair the other CTA's comes along as far as it must to know when all is done.
    __device__ __forceinline__ static void run(unsigned char* smem, Control& control) {
        const uint32_t smem_address = cute::cast_smem_ptr_to_uint(smem);
        const uint32_t q_base = panel_descriptor(smem_address, 16);
        const uint32_t k_base = panel_descriptor(smem_address + kKOffset, 16);
        const uint32_t v_base = panel_descriptor(smem_address + kVOffset, kVPartRows * kPanelRowBytes);
        Ring<kPlans> plans;
        Ring<kStages> k;
        Ring<kVStages> v;
        TileWalk walks[kTiles] = {};

        const bool leads = !kIsPair || Transfer::rank() == 0;

        const auto commit = [](uint64_t* barrier) {
            if constexpr (kIsPair) {
                ptx::tcgen05_commit_multicast(cute::cast_smem_ptr_to_uint(barrier), 0b11);
            } else {
                ptx::tcgen05_commit(cute::cast_smem_ptr_to_uint(barrier));
            }
        };
        const auto wait = [&](uint64_t* barrier, uint32_t phase) {
            if (leads) Barrier::wait(barrier, phase);
        };
        const auto release = [&]<int kSize>(uint64_t* empty, Ring<kSize>& ring) {
            if (leads && cute::elect_one_sync()) commit(&empty[ring.index]);
            ring.advance();
        };
        // O += P V. With one query tile the parts of V go back one by one; with two, when both have used the whole.
        const auto issue_pv = [&](int tile, const Pending& block) {
            constexpr int kPartSteps = kPvSteps / kVParts, kHeadSteps = kPHead / 16;
            constexpr int kSegments = kVParts == 1 ? 2 : kVParts;
            static_assert(kVParts == 1 || kHeadSteps % kPartSteps == 0);
            const uint32_t o_tmem = kOColumn + tile * kPvColumns;
            const uint32_t p_tmem = kSColumn + block.buffer * kSPitch;
            wait(&control.o_ready[block.buffer], block.phase);
#pragma unroll
            for (int segment = 0; segment < kSegments; ++segment) {
                const int begin = kVParts > 1 ? segment * kPartSteps : segment * kHeadSteps;
                const int end = kVParts > 1 ? begin + kPartSteps : segment == 0 ? kHeadSteps : kPvSteps;
                if (begin % kPartSteps == 0) wait(&control.v_full[v.index], v.phase);
                if (begin == 0) wait(&control.p_full[block.buffer], block.phase);
                if (begin == kHeadSteps) wait(&control.p_tail[block.buffer], block.phase);
                ptx::tcgen05_fence_after_thread_sync();
                const uint32_t v_descriptor = v_base + uniform(v.index) * (kVBytes >> 4);
                if (leads && cute::elect_one_sync()) {
#pragma unroll
                    for (int step = begin; step < end; ++step) {
                        ptx::tcgen05_mma_f16_ts<kCtasOfTile>(
                            o_tmem, p_tmem + step * 8,
                            whole_descriptor(v_descriptor + sm90::row_step(step % kPartSteps)), kPvShape,
                            step > 0 || !block.is_first);
                    }
                    if (kTiles == 1) commit(&control.v_empty[v.index]);
                    if (end == kPvSteps) commit(&control.o_full[tile]);
                }
                if (kTiles == 1) v.advance();
            }
        };
        // S = Q K^T, over the P that the product issued before last (one tile) or last (two) reads. K as V above.
        const auto issue_qk = [&](int tile, int block) {
            constexpr int kPartSteps = kQkSteps / kKParts;
            TileWalk& walk = walks[tile];
            const uint32_t buffer = kTiles == 1 ? walk.s.index : tile;
            walk.pending = {true, block == walk.end - 1, buffer, walk.s.phase};
            walk.s.advance();
            if (walk.pending.is_first) {
                wait(&control.q_full[tile], walk.q_phase);
                walk.q_phase ^= 1;
            }
            const uint32_t q_descriptor = q_base + tile * (kQBytes >> 4);
#pragma unroll
            for (int part = 0; part < kKParts; ++part) {
                wait(&control.k_full[k.index], k.phase);
                ptx::tcgen05_fence_after_thread_sync();
                const uint32_t k_descriptor = k_base + uniform(k.index) * (kKBytes >> 4);
                if (leads && cute::elect_one_sync()) {
#pragma unroll
                    for (int step = 0; step < kPartSteps; ++step) {
                        const int q_step = part * kPartSteps + step;
                        ptx::tcgen05_mma_f16_ss<kCtasOfTile>(
                            kSColumn + buffer * kSPitch,
                            whole_descriptor(q_descriptor + sm90::column_step(q_step, kRows)),
                            whole_descriptor(k_descriptor + sm90::column_step(step, kKRows)), kQkShape, q_step > 0);
                    }
                    if (kTiles == 1) commit(&control.k_empty[k.index]);
                    if (part == kKParts - 1) {
                        commit(&control.s_full[buffer]);
                        if (block == walk.begin) commit(&control.q_empty[tile]);
                    }
                }
                if (kTiles == 1) k.advance();
            }
        };
        bool v_is_due = false;  // a block before has a V
        const auto flush = [&] {
            if (!v_is_due) return;
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                if (walks[tile].pending.is_due) issue_pv(tile, walks[tile].pending);
                walks[tile].pending.is_due = false;
            }
            if (kTiles > 1) release(control.v_empty, v);
            v_is_due = false;
        };

        for (;; plans.advance()) {
            Barrier::wait(&control.plan_full[plans.index], plans.phase);
            const ForwardPlan& plan = control.plans[plans.index];
            const bool is_last = uniform(plan.output.rows) == 0;  // it has no blocks, and does not go back
            const int begin = uniform(plan.begin), end = uniform(plan.end);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                walks[tile].begin = uniform(plan.blocks[tile].begin);
                walks[tile].end = uniform(plan.blocks[tile].end);
            }
            __syncwarp();  // all lanes have read the plan
            if (!is_last && cute::elect_one_sync()) Barrier::arrive(&control.plan_empty[plans.index]);
            // The correction hands back plans in their order: what it waits for must not wait for the next plan.
            if (begin >= end) flush();
            if (is_last) break;
#pragma unroll 1
            for (int block = end - 1; block >= begin; --block) {
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile) {
                    TileWalk& walk = walks[tile];
                    const Pending before = walk.pending;
                    walk.pending.is_due = false;
                    // One tile: S goes first, into the other buffer, but must not wait for Q with a product due.
                    const bool s_first = kTiles == 1 && block != walk.end - 1;
                    if (!s_first && before.is_due) issue_pv(tile, before);
                    if (block < walk.end && block >= walk.begin) issue_qk(tile, block);
                    if (s_first && before.is_due) issue_pv(tile, before);
                }
                if (kTiles > 1) {
                    if (v_is_due) release(control.v_empty, v);
                    release(control.k_empty, k);
                }
                v_is_due = true;
            }
        }

        // Every commit has arrived before the CTA ends. The second CTA of a pair has not waited for any: only behind
        // those who have, its loaders among them, no barrier is more than the phase behind that is waited for here.
        __syncthreads();
        for (int i = 0; i < kStages; ++i, k.advance()) Barrier::wait(&control.k_empty[k.index], k.phase ^ 1);
        for (int i = 0; i < kVStages; ++i, v.advance()) Barrier::wait(&control.v_empty[v.index], v.phase ^ 1);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) Barrier::wait(&control.q_empty[tile], walks[tile].q_phase ^ 1);
    }
};

}  // namespace flash_ext::sm100
