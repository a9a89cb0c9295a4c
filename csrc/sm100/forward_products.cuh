// The warp that issues the products of the sm100 forward: one elected lane does, the others keep it company so that the
// compiler knows descriptors and branches to be the same in all lanes.
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
    using Shape::kQkSteps, Shape::kOutColumns, Shape::kQBytes, Shape::kKBytes, Shape::kVBytes;
    using typename Shape::Control;

    static constexpr uint32_t kQkShape = instruction_descriptor<kDataType, kRows, kBlockN, false>();
    static constexpr uint32_t kPvShape = instruction_descriptor<kDataType, kRows, kOutColumns, true>();

    // Which key blocks a query tile walks, and where it is.
    struct TileWalk {
        int begin, end;  // of the current plan
        bool has_p;      // a product P V is due before anything else
        bool is_first;   // it is the first that goes into O
        bool is_last;    // after it O is complete
        uint32_t q_phase, p_phase, o_phase;
    };

    // One warp.
    __device__ __forceinline__ static void run(unsigned char* smem, Control& control) {
        const uint32_t smem_address = cute::cast_smem_ptr_to_uint(smem);
        const uint32_t q_base = panel_descriptor(smem_address, 16);
        const uint32_t k_base = panel_descriptor(smem_address + kKOffset, 16);
        const uint32_t v_base = panel_descriptor(smem_address + kVOffset, kBlockN * kPanelRowBytes);
        Ring<kPlans> plans;
        Ring<kStages> k;
        Ring<kVStages> v;
        TileWalk walks[kTiles] = {};

        const auto commit = [](uint64_t* barrier) { ptx::tcgen05_commit(cute::cast_smem_ptr_to_uint(barrier)); };
        // O += P V for the block before.
        const auto issue_pv = [&](int tile) {
            TileWalk& walk = walks[tile];
            constexpr int kHeadSteps = kPHead / 16;
            const uint32_t o_tmem = kOColumn + tile * kOutColumns, p_tmem = kSColumn + tile * kSPitch;
            const uint32_t v_descriptor = v_base + uniform(v.index) * (kVBytes >> 4);
            const auto multiply = [&](int step) {
                ptx::tcgen05_mma_f16_ts<1>(o_tmem, p_tmem + step * 8,
                                           whole_descriptor(v_descriptor + sm90::row_step(step)), kPvShape,
                                           step > 0 || !walk.is_first);
            };
            Barrier::wait(&control.v_full[v.index], v.phase);
            Barrier::wait(&control.o_ready[tile], walk.o_phase);
            Barrier::wait(&control.p_full[tile], walk.p_phase);
            ptx::tcgen05_fence_after_thread_sync();
            if (cute::elect_one_sync()) {
#pragma unroll
                for (int step = 0; step < kHeadSteps; ++step) multiply(step);
            }
            __syncwarp();
            Barrier::wait(&control.p_tail[tile], walk.p_phase);
            ptx::tcgen05_fence_after_thread_sync();
            if (cute::elect_one_sync()) {
#pragma unroll
                for (int step = kHeadSteps; step < kBlockN / 16; ++step) multiply(step);
                if (walk.is_last) commit(&control.o_full[tile]);
            }
            __syncwarp();
            walk.o_phase ^= 1;
            walk.p_phase ^= 1;
            walk.has_p = false;
        };
        // S = Q K^T. It goes where P of the block before was, which the product just issued reads first.
        const auto issue_qk = [&](int tile, int block) {
            TileWalk& walk = walks[tile];
            walk.is_first = block == walk.end - 1;
            walk.is_last = block == walk.begin;
            walk.has_p = true;
            if (walk.is_first) {
                Barrier::wait(&control.q_full[tile], walk.q_phase);
                walk.q_phase ^= 1;
            }
            Barrier::wait(&control.k_full[k.index], k.phase);
            ptx::tcgen05_fence_after_thread_sync();
            const uint32_t q_descriptor = q_base + tile * (kQBytes >> 4);
            const uint32_t k_descriptor = k_base + uniform(k.index) * (kKBytes >> 4);
            if (cute::elect_one_sync()) {
#pragma unroll
                for (int step = 0; step < kQkSteps; ++step) {
                    ptx::tcgen05_mma_f16_ss<1>(
                        kSColumn + tile * kBlockN, whole_descriptor(q_descriptor + sm90::column_step(step, kRows)),
                        whole_descriptor(k_descriptor + sm90::column_step(step, kBlockN)), kQkShape, step > 0);
                }
                commit(&control.s_full[tile]);
                if (walk.is_last) commit(&control.q_empty[tile]);
            }
            __syncwarp();
        };
        const auto release = [&]<int kSize>(uint64_t* empty, Ring<kSize>& ring) {
            if (cute::elect_one_sync()) commit(&empty[ring.index]);
            __syncwarp();
            ring.advance();
        };
        bool v_is_due = false;  // the block before has a V
        const auto flush = [&] {
            if (!v_is_due) return;
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                if (walks[tile].has_p) issue_pv(tile);
            }
            release(control.v_empty, v);
            v_is_due = false;
        };

        for (;; plans.advance()) {
            Barrier::wait(&control.plan_full[plans.index], plans.phase);
            const ForwardPlan& plan = control.plans[plans.index];
            if (uniform(plan.output.rows) == 0) break;
            const int begin = uniform(plan.begin), end = uniform(plan.end);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                walks[tile].begin = uniform(plan.blocks[tile].begin);
                walks[tile].end = uniform(plan.blocks[tile].end);
            }
            __syncwarp();  // all lanes have read the plan
            if (cute::elect_one_sync()) Barrier::arrive(&control.plan_empty[plans.index]);
            // The correction hands back plans in their order: what it waits for must not wait for the next plan.
            if (begin >= end) flush();
#pragma unroll 1
            for (int block = end - 1; block >= begin; --block) {
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile) {
                    if (walks[tile].has_p) issue_pv(tile);
                    if (block < walks[tile].end && block >= walks[tile].begin) issue_qk(tile, block);
                }
                if (v_is_due) release(control.v_empty, v);
                release(control.k_empty, k);
                v_is_due = true;
            }
        }
        flush();

        // Every commit has arrived before the CTA ends.
        for (int i = 0; i < kStages; ++i, k.advance()) Barrier::wait(&control.k_empty[k.index], k.phase ^ 1);
        for (int i = 0; i < kVStages; ++i, v.advance()) Barrier::wait(&control.v_empty[v.index], v.phase ^ 1);
        for (int tile = 0; tile < kTiles; ++tile) Barrier::wait(&control.q_empty[tile], walks[tile].q_phase ^ 1);
    }
};

}  // namespace flash_ext::sm100
