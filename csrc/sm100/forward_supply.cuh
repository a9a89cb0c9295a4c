// The thread of the sm100 forward that plans tiles and loads their Q. K and V come from sm90/forward_producer.cuh.
#pragma once

#include <stdint.h>

#include "sm100/forward_shape.cuh"
#include "sm90/forward_producer.cuh"

namespace flash_ext::sm100 {

template <class Shape>
struct ForwardSupply : Shape {
    using Shape::kBlockM, Shape::kBlockN, Shape::kRows, Shape::kTiles, Shape::kPlans, Shape::kPanels, Shape::kQBytes;
    using Shape::kTileRows, Shape::kCtasOfTile;
    using typename Shape::Control, typename Shape::Transfer;

    // One thread.
    __device__ __forceinline__ static void plan_and_load_queries(const ForwardArguments& arguments, unsigned char* smem,
                                                                 Control& control) {
        sm90::TileWalk walk(kCtasOfTile);
        Ring<kPlans> plans;
        uint32_t q_phase[kTiles] = {};
        for (;; plans.advance()) {
            Barrier::wait(&control.plan_empty[plans.index], plans.phase ^ 1);
            ForwardPlan& plan = control.plans[plans.index];
            const bool is_last = !walk.next<kBlockM, kBlockN, kTileRows>(plan, arguments);
            Barrier::arrive(&control.plan_full[plans.index]);
            if (is_last) return;
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                if (plan.blocks[tile].end <= plan.blocks[tile].begin) continue;
                Barrier::wait(&control.q_empty[tile], q_phase[tile] ^ 1);
                q_phase[tile] ^= 1;
                sm90::ForwardProducer<Shape>::template load<kRows, kRows, kPanels>(
                    arguments.q, &control.q_full[tile], smem + tile * kQBytes,
                    plan.output.tensor_row + tile * kTileRows + Transfer::rank() * kRows, plan.output.head,
                    plan.output.batch, false);
            }
            Barrier::arrive(&control.plan_empty[plans.index]);
        }
    }
};

}  // namespace flash_ext::sm100
