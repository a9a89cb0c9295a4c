// The producer warps of the sm90 forward: what is done next, and its Q, K and V (K and V of the sm100 forward, too).
#pragma once

#include <stdint.h>

#include <cutlass/arch/barrier.h>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/forward_plan.cuh"
#include "sm90/panel.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tensor_map.cuh"

namespace flash_ext::sm90 {

template <class Shape>
struct ForwardProducer : Shape {
    using Shape::kBlockM, Shape::kBlockN, Shape::kStages, Shape::kVStages, Shape::kQBuffers, Shape::kPlans,
        Shape::kCluster;
    using Shape::kKeyBoxRows, Shape::kVBoxRows, Shape::kPanels, Shape::kPanelsV, Shape::kKParts, Shape::kVParts;
    using Shape::kKRows;
    using Shape::kQBytes, Shape::kKBytes, Shape::kVBytes, Shape::kKOffset, Shape::kVOffset;
    using typename Shape::Control, typename Shape::Transfer;

    // One thread: starts the copies of kTileRows rows into shared memory, in boxes of kBoxRows; their bytes arrive at
    // the barrier. shares: this CTA copies only the box of its rank, but into both CTAs of the pair, to the same place
    // and barrier in each; the other CTA does the same with the other box. first_column: a multiple of a panel's.
    template <int kTileRows, int kBoxRows, int kTilePanels, class Transfer = Shape::Transfer>
    __device__ __forceinline__ static void load(const TensorMap& tensor, uint64_t* barrier, unsigned char* tile_smem,
                                                int row, int head, int batch, bool shares, int first_column = 0) {
        constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
        constexpr uint16_t kBoth = 0b11;
        Transfer::expect(barrier, kTilePanels * kTileRows * kPanelRowBytes);
        const int head_coordinate = head * tensor.head_step, batch_coordinate = batch * tensor.batch_step;
        const int rank = shares ? static_cast<int>(cute::block_rank_in_cluster()) : 0;
#pragma unroll
        for (int panel = 0; panel < kTilePanels; ++panel) {
            unsigned char* panel_smem = tile_smem + panel * kTileRows * kPanelRowBytes;
            if (shares) {
                cute::SM90_TMA_LOAD_MULTICAST_4D::copy(
                    &tensor.map, barrier, kBoth, kHint, panel_smem + rank * kBoxRows * kPanelRowBytes,
                    first_column + panel * kPanelColumns, row + rank * kBoxRows, head_coordinate, batch_coordinate);
            } else if (tensor.row_step != 0) {
#pragma unroll
                for (int i = 0; i < kTileRows; i += kBoxRows) {
                    Transfer::Copy::copy(&tensor.map, barrier, kHint, panel_smem + i * kPanelRowBytes,
                                         first_column + panel * kPanelColumns, row + i, head_coordinate,
                                         batch_coordinate);
                }
            } else {
#pragma unroll 1
                for (int i = 0; i < kTileRows; ++i) {
                    Transfer::Copy::copy(&tensor.map, barrier, kHint, panel_smem + i * kPanelRowBytes,
                                         first_column + panel * kPanelColumns, 0, head_coordinate, batch_coordinate);
                }
            }
        }
    }

    // One thread: hands out tiles, a little ahead of their use.
    __device__ __forceinline__ static void schedule(const ForwardArguments& arguments, Control& control) {
        TileWalk walk;
        Ring<kPlans> plans;
        for (;;) {
            Barrier::wait(&control.plan_empty[plans.index], plans.phase ^ 1);
            // A position is taken as late as possible: the better balanced.
            const bool is_last =
                !walk.template next<kBlockM, kBlockN, Shape::kRows>(control.plans[plans.index], arguments);
            Barrier::arrive(&control.plan_full[plans.index]);
            if (is_last) break;
            plans.advance();
        }
    }

    // One thread.
    __device__ __forceinline__ static void load_queries(const ForwardArguments& arguments, unsigned char* smem,
                                                        Control& control) {
        Ring<kPlans> plans;
        Ring<kQBuffers> q;
        for (;;) {
            Barrier::wait(&control.plan_full[plans.index], plans.phase);
            const ForwardPlan& plan = control.plans[plans.index];
            if (plan.output.rows == 0) break;
            if (plan.end > plan.begin) {
                if constexpr (Shape::kHandsQBack) Barrier::wait(&control.q_empty[q.index], q.phase ^ 1);
                load<kBlockM, kBlockM, kPanels>(arguments.q, &control.q_full[q.index], smem + q.index * kQBytes,
                                                plan.output.tensor_row, plan.output.head, plan.output.batch, false);
                q.advance();
            }
            Barrier::arrive(&control.plan_empty[plans.index]);
            plans.advance();
        }
    }

    // One thread.
    __device__ __forceinline__ static void load_keys(const ForwardArguments& arguments, unsigned char* smem,
                                                     Control& control) {
        Ring<kPlans> plans;
        Ring<kStages> k;
        for (;;) {
            Barrier::wait(&control.plan_full[plans.index], plans.phase);
            const ForwardPlan& plan = control.plans[plans.index];
            if (plan.output.rows == 0) break;
#pragma unroll 1
            for (int block = plan.end - 1; block >= plan.begin; --block) {
#pragma unroll
                for (int part = 0; part < kKParts; ++part) {
                    constexpr int kPartPanels = kPanels / kKParts;
                    Barrier::wait(&control.k_empty[k.index], k.phase ^ 1);
                    load<kKRows, kKeyBoxRows, kPartPanels>(
                        arguments.k, &control.k_full[k.index], smem + kKOffset + k.index * kKBytes,
                        plan.key_row + block * kBlockN + Transfer::rank() * kKRows, plan.head_k, plan.output.batch,
                        kCluster > 1 && arguments.shares_keys, part * kPartPanels * kPanelColumns);
                    k.advance();
                }
            }
            Barrier::arrive(&control.plan_empty[plans.index]);
            plans.advance();
        }
    }

    // One warp.
    __device__ __forceinline__ static void load_values(const ForwardArguments& arguments, unsigned char* smem,
                                                       Control& control, int lane) {
        Ring<kPlans> plans;
        constexpr int kPartRows = kBlockN / kVParts;
        Ring<kVStages> v;
        uint32_t landed_phase = 0;
        for (;;) {
            Barrier::wait(&control.plan_full[plans.index], plans.phase);
            const ForwardPlan& plan = control.plans[plans.index];
            if (plan.output.rows == 0) break;
#pragma unroll 1
            for (int part = plan.end * kVParts; part > plan.begin * kVParts;) {
                // Blocks from the last to the first, the parts of a block in their order.
                --part;
                const int in_block = kVParts == 1 ? part : part / kVParts * kVParts + (kVParts - 1 - part % kVParts);
                const int first_key = in_block * kPartRows;
                Barrier::wait(&control.v_empty[v.index], v.phase ^ 1);
                unsigned char* v_smem = smem + kVOffset + v.index * kVBytes;
                const int rows = max(plan.mask.seqlen_k - first_key, 0);
                const bool has_garbage = arguments.v_tail_is_garbage && rows < kPartRows;
                if (lane == 0) {
                    const int row = plan.key_row + first_key, column = Transfer::rank() * kPanelsV * kPanelColumns;
                    if (has_garbage) {
                        load<kPartRows, kVBoxRows, kPanelsV, LocalTransfer>(
                            arguments.v, &control.v_landed, v_smem, row, plan.head_k, plan.output.batch, false, column);
                    } else {
                        load<kPartRows, kVBoxRows, kPanelsV>(arguments.v, &control.v_full[v.index], v_smem, row,
                                                             plan.head_k, plan.output.batch,
                                                             kCluster > 1 && arguments.shares_keys, column);
                    }
                }
                if (has_garbage) {
                    Barrier::wait(&control.v_landed, landed_phase);
                    landed_phase ^= 1;
                    for (int panel = 0; panel < kPanelsV; ++panel) {
                        unsigned char* panel_smem = v_smem + panel * kPartRows * kPanelRowBytes;
#pragma unroll 1
                        for (int i = rows * kPanelRowBytes + lane * 16; i < kPartRows * kPanelRowBytes; i += 32 * 16) {
                            *reinterpret_cast<uint4*>(panel_smem + i) = uint4{};
                        }
                    }
                    cutlass::arch::fence_view_async_shared();  // the products read through the async proxy
                }
                // The zeros of all lanes are there. And where there are none: lane 0 alone starts the copies, so a lane
                // that has not yet looked at this phase of v_empty could be a whole round of the ring behind when it
                // does, and would take the parity of that round for its own.
                __syncwarp();
                if (has_garbage && lane == 0) Transfer::arrive(&control.v_full[v.index]);
                v.advance();
            }
            __syncwarp();  // all lanes have read the plan
            if (lane == 0) Barrier::arrive(&control.plan_empty[plans.index]);
            plans.advance();
        }
    }
};

}  // namespace flash_ext::sm90
