// The correction warpgroup of the sm100 forward: keeps O at the scale of the row maximum, and writes it when it is
// done.
#pragma once

#include <stdint.h>

#include "core/numeric.cuh"
#include "core/sequence.cuh"
#include "core/softmax.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tcgen05.cuh"
#include "sm100/forward_shape.cuh"
#include "sm100/tensor_memory.cuh"

namespace flash_ext::sm100 {

template <class Shape>
struct ForwardCorrection : Shape {
    using Shape::kRows, Shape::kTiles, Shape::kPlans, Shape::kDataType, Shape::kOutColumns, Shape::kOColumn;
    using Shape::kSBuffers, Shape::kPvColumns;
    using Shape::kTileRows;
    using typename Shape::Control, typename Shape::Transfer;
    static constexpr int kColumns = 32;  // at a time

    // All threads of the warpgroup.
    __device__ __forceinline__ static void run(const ForwardArguments& arguments, Control& control) {
        const auto thread = [] { return ptx::tid_x() % 128; };  // its row of either query tile
        const uint32_t o_tmem = own_lanes(kOColumn, thread() / 32);
        Ring<kPlans> plans;
        uint32_t phases = 0;  // a bit for each barrier that is waited for here and that not every block ends a phase of
        uint32_t blocks = 0;  // walked so far, modulo 4, two bits for each tile
        const auto arrive = [&](uint64_t* barrier) {
            __syncwarp();
            if (ptx::tid_x() % 32 == 0) Barrier::arrive(barrier);
        };
        const auto arrive_ready = [&](int buffer) {
            __syncwarp();
            if (ptx::tid_x() % 32 == 0) Transfer::arrive(&control.o_ready[buffer]);
        };
        const auto wait = [&](uint64_t* barrier, int bit) {
            Barrier::wait(barrier, phases >> bit & 1);
            phases ^= 1u << bit;
        };
        const auto count = [&](int tile) { return static_cast<int>(blocks >> (2 * tile) & 3); };
        const auto advance = [&](int tile) {
            blocks = (blocks & ~(3u << (2 * tile))) | (count(tile) + 1 & 3) << (2 * tile);
        };
        const auto buffer_of = [&](int tile) { return kTiles == 1 ? count(tile) % 2 : tile; };
        // All products of the blocks walked so far have been added to O.
        const auto wait_products = [&](int tile) {
            Barrier::wait(&control.o_full[tile], count(tile) + 1 & 1);
            ptx::tcgen05_fence_after_thread_sync();
        };
        // O of the tile may be overwritten.
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            if (ptx::tid_x() % 32 == 0) Transfer::arrive(&control.o_ready[tile]);
        }

        for (;; plans.advance()) {
            Barrier::wait(&control.plan_full[plans.index], plans.phase);
            const ForwardPlan& plan = control.plans[plans.index];
            if (uniform(plan.output.rows) == 0) return;
            const int begin = uniform(plan.begin);
#pragma unroll 1
            for (int block = uniform(plan.end) - 1; block >= begin; --block) {
#pragma unroll 1
                for (int tile = 0; tile < kTiles; ++tile) {
                    if (block >= plan.blocks[tile].end || block < plan.blocks[tile].begin) continue;
                    if (block < plan.blocks[tile].end - 1) {  // the first block of a tile finds nothing to rescale
                        const int buffer = buffer_of(tile);
                        wait(&control.rescale_full[buffer], buffer);
                        wait_products(tile);
                        rescale(o_tmem + tile * kPvColumns, control.rescale[buffer][thread()]);
                        arrive_ready(buffer);
                    }
                    advance(tile);
                }
            }
#pragma unroll 1
            for (int tile = 0; tile < kTiles; ++tile) {
                float scale = -1.f;
                const bool has_blocks = plan.blocks[tile].end > plan.blocks[tile].begin;
                if (has_blocks) {
                    wait(&control.scale_full[tile], kSBuffers + tile);
                    scale = control.out_scale[tile][thread()];
                    arrive(&control.scale_empty[tile]);
                    wait_products(tile);
                }
                const int row = tile * kTileRows + Transfer::rank() * kRows + thread();
                if (row >= plan.output.rows_used) scale = -1.f;
                write_row(arguments.params, plan, row, o_tmem + tile * kPvColumns, scale, has_blocks);
                if (has_blocks) {
                    ptx::tcgen05_fence_before_thread_sync();
                    arrive_ready(buffer_of(tile));
                }
            }
            arrive(&control.plan_empty[plans.index]);
        }
    }

  private:
    // A warp whose rows all keep their maximum has nothing to do: the rule, for maxima may lag (core/softmax.cuh).
    __device__ __forceinline__ static void rescale(uint32_t o_tmem, float factor) {
        constexpr int kStep = 16;  // two are in flight, and this is seldom
        if (!__any_sync(kAllLanes, factor != 1.f)) return;
#pragma unroll
        for (int column = 0; column < kOutColumns; column += kStep) {
            uint32_t o[kStep];
            load_columns<kStep>(o, o_tmem + column);
            wait_loads();
#pragma unroll
            for (int i = 0; i < kStep; i += 2) {
                const float2 scaled = __fmul2_rn(make_float2(__uint_as_float(o[i]), __uint_as_float(o[i + 1])),
                                                 make_float2(factor, factor));
                o[i] = __float_as_uint(scaled.x);
                o[i + 1] = __float_as_uint(scaled.y);
            }
            store_columns<kStep>(o_tmem + column, o);
        }
        wait_stores();
        ptx::tcgen05_fence_before_thread_sync();
    }

    // The thread's row of the result: whole sectors of 32 bytes, so lanes need not exchange anything. scale below 0: 0.
    __device__ __forceinline__ static void write_row(const ForwardParams& params, const ForwardPlan& plan, int row,
                                                     uint32_t o_tmem, float scale, bool has_blocks) {
        const int batch = params.cu_seqlens_q != nullptr ? 0 : plan.output.batch;
        char* out =
            static_cast<char*>(params.out.data) +
            (row_offset(params.out, batch, plan.output.tensor_row, plan.output.head) + row * params.out.stride_row) * 2;
        const int columns = row < plan.output.rows ? params.head_dim_v : 0;
#pragma unroll
        for (int column = 0; column < kOutColumns; column += kColumns) {
            uint32_t o[kColumns];
            if (has_blocks) {
                load_columns<kColumns>(o, o_tmem + column);
                // The values are there when they are needed (PTX ISA 9.7.16.6.4.5). The last wait is for who overwrites
                // O; the others keep ptxas from loading more than there are registers for (140 bytes of spills at d
                // 256).
                wait_loads();
            } else {  // undefined values would keep their registers through the whole loop
#pragma unroll
                for (int i = 0; i < kColumns; ++i) o[i] = 0;
            }
#pragma unroll
            for (int i = 0; i < kColumns; i += 8) {
                uint32_t words[4];
#pragma unroll
                for (int pair = 0; pair < 4; ++pair) {
                    const float low = __uint_as_float(o[i + 2 * pair]), high = __uint_as_float(o[i + 2 * pair + 1]);
                    words[pair] = scale >= 0.f || scale != scale ? pack<kDataType>(low * scale, high * scale) : 0u;
                }
                if (column + i < columns) {
                    *reinterpret_cast<uint4*>(out + (column + i) * 2) = uint4{words[0], words[1], words[2], words[3]};
                }
            }
        }
    }
};

}  // namespace flash_ext::sm100
