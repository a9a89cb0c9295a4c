// A softmax warpgroup of the sm100 forward: a thread has a row of a query tile.
#pragma once

#include <stdint.h>

#include "core/mask.cuh"
#include "core/numeric.cuh"
#include "core/sequence.cuh"
#include "core/softmax.cuh"
#include "ptx/tcgen05.cuh"
#include "sm100/exponential.cuh"
#include "sm100/forward_shape.cuh"
#include "sm100/scores.cuh"
#include "sm100/tensor_memory.cuh"

namespace flash_ext::sm100 {

template <class Shape>
struct ForwardSoftmax : Shape {
    using Shape::kBlockN, Shape::kRows, Shape::kPlans, Shape::kDataType, Shape::kPolynomials, Shape::kPHead;
    using Shape::kSColumn, Shape::kSPitch, Shape::kSRing, Shape::kTiles, Shape::kIsRich;
    using Shape::kTileRows;
    using typename Shape::Control, typename Shape::Transfer;

    struct Row {
        float maximum;  // of the scores before scaling; lags behind by up to kLag
        float sum;      // of 2^(scale_log2 (score - maximum))
    };

    // All threads of the warpgroup; tile: which query tile is theirs; thread: 0..127, their row.
    __device__ __forceinline__ static void run(const ForwardArguments& arguments, Control& control, int tile,
                                               int thread) {
        const ForwardParams& params = arguments.params;
        const int lane = thread % 32;
        const uint32_t s_base = own_lanes(kSColumn + (kTiles == 1 ? 0 : tile * kSPitch), thread / 32);
        const float scale_log2 = kIsRich ? 1.f : arguments.scale_log2;
        PhiloxKey philox{};
        const bool drops = kIsRich && params.rng_state != nullptr && params.dropout_threshold > 0;
        if (drops) philox = philox_key(params.rng_state);
        Ring<kPlans> plans;
        Ring<kSRing> s_ring;
        uint32_t scale_phase = 0;

        // What this thread alone has done becomes visible with its warp's arrival.
        const auto arrive = [&](uint64_t* barrier) {
            __syncwarp();
            if (lane == 0) Barrier::arrive(barrier);
        };

        for (;; plans.advance()) {
            Barrier::wait(&control.plan_full[plans.index], plans.phase);
            const ForwardPlan& plan = control.plans[plans.index];
            if (uniform(plan.output.rows) == 0) return;
            const KeyBlocks blocks{uniform(plan.blocks[tile].begin), uniform(plan.blocks[tile].full_begin),
                                   uniform(plan.blocks[tile].full_end), uniform(plan.blocks[tile].end)};
            const int row = tile * kTileRows + Transfer::rank() * kRows + thread;
            const KeyRange keys = plan.mask.visible(plan.row_begin + row);
            Row state{minus_infinity(), 0.f};
            int block = blocks.end - 1;
            float slope_log2 = 0.f;
            if (kIsRich && params.alibi_slopes != nullptr && blocks.end > blocks.begin) {
                slope_log2 =
                    params.alibi_slopes[plan.output.batch * params.alibi_stride_batch + plan.output.head] * kLog2E;
            }

            const auto step = [&]<bool kMasked>() {
                float s[kBlockN];
                const int buffer = kTiles == 1 ? uniform(s_ring.index) : tile;
                const uint32_t s_tmem = s_base + (kTiles == 1 ? buffer * kSPitch : 0);
                Barrier::wait(&control.s_full[buffer], s_ring.phase);
                s_ring.advance();
                ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
                for (int column = 0; column < kBlockN; column += 32) {
                    load_columns<32>(reinterpret_cast<uint32_t*>(s + column), s_tmem + column);
                }
                wait_loads();
                if constexpr (kIsRich) {
                    transform_row(s, arguments.scale_log2, arguments.inner_scale, arguments.softcap_log2, slope_log2,
                                  plan.row_begin + row + plan.mask.shift - block * kBlockN);
                }
                if constexpr (kMasked) {
                    mask_row(s, {keys.begin - block * kBlockN, keys.end - block * kBlockN});
                }
                const float rescale = update_maximum(s, state, scale_log2);
                if (block != blocks.end - 1) {
                    control.rescale[buffer][thread] = rescale;
                    arrive(&control.rescale_full[buffer]);
                }
                float scaled_max = state.maximum * scale_log2;
                if (kMasked && state.maximum == minus_infinity()) scaled_max = 0.f;
                const float2 scale2 = both(scale_log2), offset2 = both(-scaled_max);
                float2 sums[2] = {make_float2(state.sum * rescale, 0.f), both(0.f)};
#pragma unroll
                for (int column = 0; column < kBlockN; column += 32) {
                    uint32_t p[16], kept = ~0u;
                    if (drops) {
                        kept = kept_keys(philox, params.dropout_threshold, block * kBlockN + column,
                                         plan.row_begin + row, plan.output.batch, plan.output.head);
                    }
#pragma unroll
                    for (int pair = 0; pair < 16; ++pair) {
                        const int i = column + 2 * pair;
                        const float2 x = __ffma2_rn(make_float2(s[i], s[i + 1]), scale2, offset2);
                        float2 y = is_polynomial(pair, kPolynomials) ? exp2_polynomial(x) : exp2_unit(x);
                        sums[pair % 2] = __fadd2_rn(sums[pair % 2], y);
                        if (kIsRich) {
                            if ((kept >> (2 * pair) & 1) == 0) y.x = 0.f;
                            if ((kept >> (2 * pair + 1) & 1) == 0) y.y = 0.f;
                        }
                        p[pair] = pack<kDataType>(y.x, y.y);
                    }
                    store_columns<16>(s_tmem + column / 2, p);
                    if (column + 32 == kPHead || column + 32 == kBlockN) {
                        wait_stores();
                        ptx::tcgen05_fence_before_thread_sync();
                        __syncwarp();
                        if (lane == 0) {
                            Transfer::arrive(column + 32 == kPHead ? &control.p_full[buffer] : &control.p_tail[buffer]);
                        }
                    }
                }
                const float2 sum = __fadd2_rn(sums[0], sums[1]);
                state.sum = sum.x + sum.y;
            };
            // Two rounds of one pair of loops, not three loops: the masked step is instantiated once.
            int masked_end = blocks.full_end;
#pragma unroll 1
            for (int round = 0; round < 2; ++round) {
#pragma unroll 1
                for (; block >= masked_end; --block) step.template operator()<true>();
#pragma unroll 1
                for (; block >= blocks.full_begin; --block) step.template operator()<false>();
                masked_end = blocks.begin;
            }

            const TileOutputRow output(params, plan, row);
            RowResult result = finish_row(state.maximum, state.sum, scale_log2, output.has_sink, output.sink);
            if (kIsRich) result.out_scale *= arguments.dropout_scale;
            if (blocks.end > blocks.begin) {
                Barrier::wait(&control.scale_empty[tile], scale_phase ^ 1);
                scale_phase ^= 1;
                // Below 0: the row is 0 whatever was accumulated.
                control.out_scale[tile][thread] = result.has_keys ? result.out_scale : -1.f;
                arrive(&control.scale_full[tile]);
            }
            if (output.is_written) *output.lse = output.is_used ? result.lse : minus_infinity();
            arrive(&control.plan_empty[plans.index]);
        }
    }

  private:
    // Raises the row's maximum to that of s if it has grown by more than 2^kLag in the result, as in core/softmax.cuh.
    // Returns what everything accumulated so far is to be multiplied by.
    __device__ __forceinline__ static float update_maximum(const float (&s)[kBlockN], Row& state, float scale_log2) {
        constexpr float kLag = 8.f;
        constexpr int kChains = 4;  // independent of each other: one would show its latency
        float maxima[kChains];
        maxima[0] = state.maximum;
#pragma unroll
        for (int chain = 1; chain < kChains; ++chain) maxima[chain] = minus_infinity();
#pragma unroll
        for (int i = 0; i < kBlockN; i += 2) {
            float& chain = maxima[i / 2 % kChains];
            chain = fmaxf(chain, fmaxf(s[i], s[i + 1]));
        }
        const float maximum = fmaxf(fmaxf(maxima[0], maxima[1]), fmaxf(maxima[2], maxima[3]));
        float rescale = 1.f;
        if ((maximum - state.maximum) * scale_log2 > kLag) {
            rescale = ptx::ex2_approx_ftz((state.maximum - maximum) * scale_log2);
            state.maximum = maximum;
        }
        return rescale;
    }

    // Where a row's lse goes, and its sink.
    struct TileOutputRow {
        float* lse;
        float sink;
        bool has_sink, is_written, is_used;
        __device__ __forceinline__ TileOutputRow(const ForwardParams& params, const ForwardPlan& plan, int row) {
            const int batch = params.cu_seqlens_q != nullptr ? 0 : plan.output.batch;
            lse = params.lse + plan.output.tensor_row + row +
                  (static_cast<int64_t>(batch) * params.heads_q + plan.output.head) * params.seqlen_q;
            has_sink = params.sinks != nullptr;
            sink = has_sink ? load_as_float(params.sinks, params.sinks_dtype, plan.output.head) : 0.f;
            is_written = row < plan.output.rows;
            is_used = row < plan.output.rows_used;
        }
    };
};

}  // namespace flash_ext::sm100
