// A warpgroup of the sm100 backward that makes P and dS of 64 of a block's queries, a key to a thread; and at the end
// writes dV (the first) or dK (the second).
#pragma once

#include <stdint.h>

#include <cutlass/arch/barrier.h>

#include "core/mask.cuh"
#include "core/numeric.cuh"
#include "core/sequence.cuh"
#include "ptx/tcgen05.cuh"
#include "sm100/backward_exchange.cuh"
#include "sm100/backward_scores.cuh"
#include "sm100/backward_shape.cuh"
#include "sm100/scores.cuh"
#include "sm100/tensor_memory.cuh"

namespace flash_ext::sm100 {

template <class Shape>
struct BackwardCompute : Shape {
    using Shape::kBlockM, Shape::kBlockN, Shape::kHalf, Shape::kDataType, Shape::kIsRich;
    using Shape::kDsOffset, Shape::kDsPartBytes, Shape::kDsStagingOffset;
    using Shape::kHeadDim, Shape::kHeadDimV, Shape::kSColumn, Shape::kDvColumn, Shape::kDkColumn;
    using Shape::kIsPair, Shape::kKeys;
    using Shape::kTermsOffset, Shape::kTermsBytes, Shape::kTermsStages;
    using typename Shape::Control, typename Shape::Transfer;

    static constexpr int kChunk = kScoresAtOnce;

    // All threads of the warpgroup; half: which queries of a block are theirs; thread: 0..127.
    __device__ __forceinline__ static void run(const BackwardArguments& arguments, unsigned char* smem,
                                               Control& control, int half, int thread) {
        const ForwardParams& attention = arguments.params.attention;
        const volatile BackwardWork& work = control.work;
        const int lane = thread % 32, warp = thread / 32;
        const int key = Transfer::rank() * kKeys + thread;  // the row of the tile that is this thread's
        const uint32_t s_tmem = own_lanes(kSColumn + half * kHalf, warp);
        const uint32_t p_tmem = own_lanes(Shape::p_column(half), warp);
        const uint32_t dp_tmem = own_lanes(Shape::dp_column(half), warp);
        const uint32_t ds_tmem = own_lanes(Shape::ds_column(half), warp);
        // dS of queries 64 h to 64 h + 63 goes into panel h. In a pair that is CTA h's panel, which holds the keys of
        // both (so `half` is a panel of one CTA, and of a pair the rank whose keys these are): what belongs into the
        // other CTA is staged here.
        const bool is_exchanged = kIsPair && half != Transfer::rank();
        unsigned char* const ds_smem = smem + (is_exchanged ? kDsStagingOffset : kDsOffset + half * kDsPartBytes);
        const Mask mask =
            Mask{arguments.bounds, work.keys_used - work.queries_used, work.keys_used}.transposed(work.queries_used);
        KeyRange queries = mask.visible(work.begin + key);  // that see this thread's key
        if (key >= work.rows_used) queries.end = 0;
        const int full_begin = uniform(work.blocks.full_begin), full_end = uniform(work.blocks.full_end);

        // What this thread alone has done becomes visible with its warp's arrival.
        const auto arrive = [&](uint64_t* barrier) {
            __syncwarp();
            if (lane == 0) Transfer::arrive(barrier);
        };

        uint32_t number = 0;
        QueryWalk walk(arguments, work);
        const bool has_blocks = walk.left > 0;
#pragma unroll 1
        for (; walk.left > 0; walk.advance(), ++number) {
            const uint32_t stage = number % kTermsStages;
            const int first = walk.block * kBlockM + half * kHalf;  // query of column 0
            const float4* const lse =
                reinterpret_cast<const float4*>(smem + kTermsOffset + stage * kTermsBytes + half * kHalf * 4);
            const float4* const delta = lse + kBlockM / 4;
            float s[kHalf];
            Barrier::wait(&control.terms_full[stage], number / kTermsStages & 1);
            Barrier::wait(&control.s_full, number & 1);
            ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
            for (int column = 0; column < kHalf; column += kChunk) {
                load_columns<kChunk>(reinterpret_cast<uint32_t*>(s + column), s_tmem + column);
            }
            wait_loads();
            const bool is_masked = walk.block >= full_end || walk.block < full_begin;
            const KeyRange columns{queries.begin - first, queries.end - first};
            RichKey rich;
            if constexpr (kIsRich) {
                rich = make_rich(arguments, work, walk.head, first, key, is_masked ? columns : KeyRange{0, kHalf},
                                 mask.shift);
            } else {
                if (is_masked) mask_row(s, columns);
            }
#pragma unroll
            for (int column = 0; column < kHalf; column += kChunk) {
                uint32_t p[kChunk / 2];
                if constexpr (kIsRich) {
                    make_p_rich<kDataType>(s + column, p, arguments, rich, column, lse + column / 4);
                } else {
                    make_p<kDataType>(s + column, p, lse + column / 4, arguments.scale_log2);
                }
                store_columns<kChunk / 2>(p_tmem + column / 2, p);
            }
            wait_stores();
            ptx::tcgen05_fence_before_thread_sync();
            arrive(&control.p_full);

            Barrier::wait(&control.dp_full, number & 1);
            ptx::tcgen05_fence_after_thread_sync();
            // In a pair dS lies over dP that is loaded last, and is stored in one go.
            constexpr int kStored = kIsPair ? kHalf / 2 : kChunk / 2;
            uint32_t ds[kStored];
#pragma unroll
            for (int column = 0; column < kHalf; column += kChunk) {
                float dp[kChunk];
                load_columns<kChunk>(reinterpret_cast<uint32_t*>(dp), dp_tmem + column);
                // Values are there when they are needed (PTX ISA 9.7.16.6.4.5); the wait is for dS over them.
                if ((column + kChunk) / 2 % kStored == 0) wait_loads();
                if constexpr (kIsRich) {
#pragma unroll
                    for (int i = 0; i < kChunk; ++i) {
                        dp[i] = rich.kept[column / 32] >> i & 1 ? dp[i] * arguments.dropout_scale : 0.f;
                    }
                }
                uint32_t* const chunk = ds + column / 2 % kStored;
                make_ds<kDataType>(s + column, dp, chunk, delta + column / 4);
#pragma unroll
                for (int i = 0; i < kChunk / 2; i += 4) {
                    const uint4 words{chunk[i], chunk[i + 1], chunk[i + 2], chunk[i + 3]};
                    *reinterpret_cast<uint4*>(ds_smem + sm90::swizzled_chunk(thread, column / 8 + i / 4)) = words;
                }
                if ((column + kChunk) / 2 % kStored == 0) {
                    store_columns<kStored>(ds_tmem + (column + kChunk) / 2 - kStored, ds);
                }
            }
            wait_stores();
            cutlass::arch::fence_view_async_shared();  // dQ, or the copy, reads dS through the async proxy
            ptx::tcgen05_fence_before_thread_sync();
            __syncwarp();
            if (lane == 0) {
                if constexpr (kIsPair) {
                    if (is_exchanged) BackwardExchange<Shape>::send(smem, control, warp);
                }
                Transfer::arrive(&control.ds_full);
            }
        }

        if (has_blocks) {
            Barrier::wait(&control.sums_full, 0);
            ptx::tcgen05_fence_after_thread_sync();
        }
        const BackwardParams& params = arguments.params;
        if (half == 0) {
            write_gradient<kHeadDimV>(params.dv, own_lanes(kDvColumn, warp), attention, work, key,
                                      kIsRich ? arguments.dropout_scale : 1.f, attention.head_dim_v, has_blocks);
        } else {
            write_gradient<kHeadDim>(params.dk, own_lanes(kDkColumn, warp), attention, work, key,
                                     attention.softmax_scale, attention.head_dim, has_blocks);
        }
        wait_loads();
        ptx::tcgen05_fence_before_thread_sync();  // the columns may be freed behind the CTA's last barrier
    }

  private:
    // The thread's row of dK or dV: whole sectors of 32 bytes, so lanes need not exchange anything. Rows behind the
    // sequence's keys that count are 0. What has been loaded from tensor memory is there when it is needed (PTX ISA
    // 9.7.16.6.4.5).
    template <int kColumns>
    __device__ __forceinline__ static void write_gradient(const TensorView& tensor, uint32_t tmem,
                                                          const ForwardParams& attention,
                                                          const volatile BackwardWork& work, int key, float scale,
                                                          int columns, bool has_blocks) {
        constexpr int kStep = 32;
        const int batch = attention.cu_seqlens_k != nullptr ? 0 : work.batch;
        char* const row =
            static_cast<char*>(tensor.data) +
            (row_offset(tensor, batch, work.keys_start + work.begin, work.head_k) + key * tensor.stride_row) * 2;
        const bool counts = key < work.rows_used;
        if (key >= work.rows) columns = 0;
#pragma unroll
        for (int column = 0; column < kColumns; column += kStep) {
            uint32_t sums[kStep] = {};
            if (has_blocks) load_columns<kStep>(sums, tmem + column);
#pragma unroll
            for (int i = 0; i < kStep; i += 8) {
                uint32_t words[4];
#pragma unroll
                for (int pair = 0; pair < 4; ++pair) {
                    const float low = __uint_as_float(sums[i + 2 * pair]);
                    const float high = __uint_as_float(sums[i + 2 * pair + 1]);
                    words[pair] = counts ? pack<kDataType>(low * scale, high * scale) : 0u;
                }
                if (column + i < columns) {
                    *reinterpret_cast<uint4*>(row + (column + i) * 2) = uint4{words[0], words[1], words[2], words[3]};
                }
            }
        }
    }
};

}  // namespace flash_ext::sm100
