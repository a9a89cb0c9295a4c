// What a warpgroup of the sm90 backward does to the transposed scores of 64 keys between two products, and how it
// writes what it has summed up for these keys. Accumulators of m64nN: rows are keys, columns are queries.
#pragma once

#include <stdint.h>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>

#include "core/exp2_polynomial.cuh"
#include "core/numeric.cuh"
#include "ptx/ex2.cuh"
#include "sm90/backward_shape.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/output.cuh"
#include "sm90/scores.cuh"
#include "sm90/wgmma.cuh"

namespace flash_ext::sm90 {

template <class Shape>
struct BackwardScores : Shape {
    using Shape::kBlockM, Shape::kBlockN, Shape::kDataType, Shape::kIsRich, Shape::kPolynomials;
    using typename Shape::ScoreFragment, typename Shape::PackedFragment;

    // A thread of the warpgroup.
    struct Thread {
        const BackwardArguments& arguments;
        const volatile BackwardWork& work;
        int row;  // of the tile: its key of half 0
        int lane;
    };

    // S or dP: 64 keys (rows of K or V, whose panels begin kPanelStep columns apart) times all queries of a block (rows
    // of Q or dO), over kColumns. kFenced: a wgmma.fence has been executed since anything but a product last touched
    // the registers (PTX ISA 9.7.15.7.1). Asynchronous.
    template <int kColumns, bool kFenced = false, int kPanelStep = kPanelColumns>
    __device__ __forceinline__ static void issue_scores(ScoreFragment& scores, uint64_t keys, uint64_t queries) {
        fence_operand(scores);
        if constexpr (!kFenced) cute::warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kColumns / 16; ++step) {
            multiply_ss<kDataType, kBlockM>(scores, keys + column_step(step, kBlockN, kPanelStep),
                                            queries + column_step(step, kBlockM), step > 0);
        }
        cute::warpgroup_commit_batch();
    }

    // The same with the 64 keys in registers.
    template <int kColumns, bool kFenced = false>
    __device__ __forceinline__ static void issue_scores(ScoreFragment& scores, uint32_t (&keys)[kColumns / 4],
                                                        uint64_t queries) {
        fence_operand(scores);
        fence_operand(keys);
        if constexpr (!kFenced) cute::warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kColumns / 16; ++step) {
            multiply_rs_k<kDataType, kBlockM>(scores, keys + 4 * step, queries + column_step(step, kBlockM), step > 0);
        }
        cute::warpgroup_commit_batch();
    }

    // gradient += P dO or dS Q, for 64 keys. ptxas gives no instruction more registers than a thread has at the launch:
    // where those are 128, 256 columns take two. kFenced: as above. Asynchronous; the caller commits.
    template <int kColumns, bool kFenced = false>
    __device__ __forceinline__ static void issue_gradient(float (&gradient)[kColumns / 2], PackedFragment& scores,
                                                          uint64_t queries) {
        constexpr int kFirst = kColumns == 256 && Shape::kThreads > 384 ? 128 : kColumns;
        fence_operand(gradient);
        fence_operand(scores);
        if constexpr (!kFenced) cute::warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kBlockM / 16; ++step) {
#pragma unroll
            for (int column = 0; column < kColumns; column += kFirst) {
                multiply_rs<kDataType, kFirst>(reinterpret_cast<float (&)[kFirst / 2]>(gradient[column / 2]),
                                               scores + 4 * step,
                                               queries + row_step(step) + column_offset(column, kBlockM));
            }
        }
    }

    // One warp: its lanes have done what the barrier waits for.
    __device__ __forceinline__ static void release(uint64_t* barrier, int lane) {
        __syncwarp();
        if (lane == 0) Barrier::arrive(barrier);
    }

    // The same right behind a wait for the products that read what the barrier hands back: a warp comes to
    // wgmma.wait_group together (PTX ISA 9.7.15.7.3: .sync). What lanes read of it themselves, lse and delta beside Q,
    // they must have read before a barrier that comes before these products: kDsStored, or release(ds_full).
    __device__ __forceinline__ static void release_read(uint64_t* barrier, int lane) {
        if (lane == 0) Barrier::arrive(barrier);
    }

    // The mask seen from the keys.
    __device__ __forceinline__ static Mask queries_mask(const Thread& thread) {
        const volatile BackwardWork& work = thread.work;
        const Mask mask{thread.arguments.bounds, work.keys_used - work.queries_used, work.keys_used};
        return mask.transposed(work.queries_used);
    }

    // Lse or delta of the thread's queries, two of every 8. The first are loaded at once: before the warpgroup waits
    // for a product, for the tensor cores keep shared memory busy and a load takes long. The others hide behind their
    // use.
    struct RowTerms {
        static constexpr int kAhead = Shape::kTermsAhead;
        const float2* values;
        float2 ahead[kAhead > 0 ? kAhead : 1];

        __device__ __forceinline__ explicit RowTerms(const float2* values) : values(values) {
#pragma unroll
            for (int i = 0; i < kAhead; ++i) ahead[i] = values[i * 4];
        }
        __device__ __forceinline__ float2 operator[](int i) const { return i < kAhead ? ahead[i] : values[i * 4]; }
    };

    __device__ __forceinline__ static void pack_group(PackedFragment& packed, const ScoreFragment& values, int i) {
#pragma unroll
        for (int c = 0; c < 4; c += 2) {
            packed[2 * i + c / 2] = pack<kDataType>(values[4 * i + c], values[4 * i + c + 1]);
        }
    }

    // Raw products become P. finish(i) takes elements 4 * i to 4 * i + 3 on.
    template <class Finish>
    __device__ __forceinline__ static void make_p(const Thread& thread, ScoreFragment& s_frag, int block,
                                                  bool is_masked, const RowTerms& lse, const Finish& finish) {
        if (is_masked) {
            mask_scores(s_frag, queries_mask(thread), Place{thread.work.begin + thread.row, thread.lane % 4 * 2},
                        block * kBlockM, thread.work.keys_used);
        }
#pragma unroll
        for (int i = 0; i < kBlockM / 8; ++i) {
            const float2 terms = lse[i];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                float& s = s_frag[4 * i + c];
                // At most 0 but for rounding, as lse is that of these scores: what the polynomial needs.
                const float power = fmaf(s, thread.arguments.scale_log2, c % 2 ? -terms.y : -terms.x);
                s = is_polynomial(i, kPolynomials) ? exp2_polynomial(power) : ptx::ex2_approx_ftz(power);
            }
            finish(i);
        }
    }

    // The same with all that scores may go through. p_frag gets P as it multiplies dO (dropped scores are 0), s_frag P
    // times the derivative of the softcap, with a minus where dropout drops the score.
    template <class Finish>
    __device__ __forceinline__ static void make_p_rich(const Thread& thread, ScoreFragment& s_frag,
                                                       PackedFragment& p_frag, int head, int block, bool is_masked,
                                                       const RowTerms& lse, const Finish& finish) {
        const BackwardArguments& arguments = thread.arguments;
        const ForwardParams& attention = arguments.params.attention;
        const volatile BackwardWork& work = thread.work;
        const Place place{work.begin + thread.row, thread.lane % 4 * 2};
        const Mask mask = queries_mask(thread);
        uint32_t visible[2] = {~0u, ~0u};
        static_assert(kBlockM <= 128, "a word holds a row's elements");
        if (is_masked) {
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
        for (int i = 0; i < kBlockM / 8; ++i) {
            const float2 terms = lse[i];
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
                            s_frag[element] = -fabsf(s_frag[element]);
                        }
                    }
                    multiplied[2 * half + c] = p;
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                p_frag[2 * i + half] = pack<kDataType>(multiplied[2 * half], multiplied[2 * half + 1]);
            }
            finish(i);
        }
    }

    // dS of one score, from what make_p left of it.
    __device__ __forceinline__ static float gradient(const BackwardArguments& arguments, float p, float dp,
                                                     float delta) {
        if constexpr (kIsRich) {
            dp = __float_as_int(p) < 0 ? 0.f : dp * arguments.dropout_scale;
            p = fabsf(p);
        }
        return p * (dp - delta);
    }

    // dS of 16 keys to shared memory, as a part of the A operand of dQ: queries are its rows, in the swizzle that TMA
    // would write. panel_smem: the panel of 64 keys that holds these; chunk: the first of their two chunks of 8 keys.
    // The caller fences, for wgmma reads through the async proxy.
    __device__ __forceinline__ static void store_ds(unsigned char* panel_smem, int chunk, const PackedFragment& ds_frag,
                                                    int lane) {
        const int row = lane / 16 * 8 + lane % 8;
        unsigned char* chunk_smem = panel_smem + row * kPanelRowBytes + ((chunk + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
        for (int i = 0; i < kBlockM / 16; ++i) {
            cute::SM90_U16x8_STSM_T::copy(ds_frag[4 * i], ds_frag[4 * i + 1], ds_frag[4 * i + 2], ds_frag[4 * i + 3],
                                          *reinterpret_cast<cute::uint128_t*>(chunk_smem + i * 16 * kPanelRowBytes));
        }
    }

    // The same with keys as rows, for where registers are scarcer: at d 128 a call is up to 1.5 % slower. warp_smem:
    // the warp's first row.
    __device__ __forceinline__ static void store_ds_by_keys(unsigned char* warp_smem, const PackedFragment& ds_frag,
                                                            int lane) {
        const int swizzled = lane / 16 ^ lane % 8;
        unsigned char* row_smem = warp_smem + lane % 16 * kPanelRowBytes;
#pragma unroll
        for (int i = 0; i < kBlockM / 16; ++i) {
            unsigned char* chunk_smem = row_smem + i / 4 * kBlockN * kPanelRowBytes + ((i % 4 * 2) ^ swizzled) * 16;
            cute::SM90_U32x4_STSM_N::copy(ds_frag[4 * i], ds_frag[4 * i + 1], ds_frag[4 * i + 2], ds_frag[4 * i + 3],
                                          *reinterpret_cast<cute::uint128_t*>(chunk_smem));
        }
    }

    // dK or dV: keys `row` and `row + 8` of the tile to global memory, those behind the sequence's keys as 0.
    template <int kCount>
    __device__ __forceinline__ static void write_gradient(const Thread& thread, const float (&gradient)[kCount],
                                                          float scale, const TensorView& tensor, int columns) {
        const volatile BackwardWork& work = thread.work;
        const int batch = thread.arguments.params.attention.cu_seqlens_k != nullptr ? 0 : work.batch;
        const int first = work.keys_start + work.begin, lane = thread.lane;
        char* tile = static_cast<char*>(tensor.data) + row_offset(tensor, batch, first, work.head_k) * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int here = thread.row + half * 8;
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
