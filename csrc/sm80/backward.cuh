// Backward attention for every GPU from sm_80 on (FlashAttention-2, arXiv 2307.08691, algorithm 2, with S transposed).
//
// One CTA: kBlockN keys of one key head, for the whole walk over the query blocks of all its query heads. Scores are
// recomputed transposed, so that a warp owns kWarpKeys keys: P^T and dS^T leave the tensor cores as the A operands of
//
//   S^T = K Q^T      dP^T = V dO^T      P = exp(S - lse)      dS = P * (dP - delta)
//   dV += P^T dO     dK += dS^T Q       dQ += dS K
//
// and dK, dV stay in the warp's registers to the end, summed over the query heads of the group in fp32. Only dS passes
// through shared memory, for dQ, which is added to an fp32 scratch in global memory.
//
//   kSplit = 1    a warp computes its keys against all queries; P^T and dS^T stay in registers for dV and dK
//   kSplit = 2    wide heads: two warps share kWarpKeys keys, each computes them against half of the queries, both read
//                 P^T and dS^T of all queries back from shared memory, and each owns half of the columns of dK and dV
//
// One step (query block m of one head), kStages buffers of Q and dO:
//   wait Q[m], dO[m]; barrier           all copies have landed; no warp still reads what is filled next
//   kStages = 2: copy Q, dO of the next step
//   for each slice of queries: S^T, dP^T, P, dS -> shared memory; kSplit = 1: dV, dK
//   barrier                             dS (and P) is there
//   kSplit = 2: dV, dK
//   kStages = 1: barrier; copy Q, dO of the next step
//   dQ = dS K, added to the scratch
//
// Deterministic: the additions into one query tile are made in ascending order of the key block. A CTA takes its place
// from a ticket counter, so it only ever waits for CTAs that have started; query blocks are walked from the last to the
// first, so that with a causal mask all key blocks of a head start at the same query block and follow one another at
// the distance of one addition.
//
// Shared memory: K kBlockN x d, V kBlockN x d_v, kStages x (Q kBlockM x d, dO kBlockM x d_v), dS^T (kSplit = 2: and
// P^T) kBlockN x kBlockM, kStages x 2 kBlockM fp32 (lse, delta). dK and dV leave through the rows of K and V.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "common/backward_helpers.h"
#include "common/dq_scratch.cuh"
#include "core/launch.cuh"
#include "core/mask.cuh"
#include "core/numeric.cuh"
#include "core/philox.cuh"
#include "core/sequence.cuh"
#include "core/tile_order.cuh"
#include "params.h"
#include "ptx/ex2.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "sm80/mma.cuh"
#include "sm80/tile.cuh"

namespace flash_ext::sm80 {

// The tile's keys in csrc/kernels.toml.
struct BackwardTile {
    int block_m;        // query rows
    int block_n;        // key rows
    int stages;         // buffers of Q and of dO
    int warps;          // per CTA
    int split = 1;      // warps that share a group of keys
    int slice = 0;      // queries whose scores are in registers at once; 0: all that a warp computes
    int dq_passes = 1;  // over the columns of dQ, of which a warp holds this fraction at once
    int ctas = 1;       // CTAs per SM that the register budget leaves room for
};

// What the host works out once for all CTAs of a launch.
struct BackwardArguments {
    BackwardParams params;
    BackwardScratch scratch;
    MaskBounds bounds;
    TileOrder order;      // over (batch, key head) and key tiles
    int32_t query_slots;  // query tiles per head
    float scale_log2;     // softmax_scale * log2(e)
    float inner_scale;    // softmax_scale / softcap
    float softcap_log2;   // softcap * log2(e)
    float dropout_scale;  // 1 / the probability to keep
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtas)
    backward_kernel(const __grid_constant__ BackwardArguments arguments);

template <DataType kType, int kHeadDim, int kHeadDimV, BackwardTile kTile, bool kRich>
struct Backward {
    static constexpr int kBlockM = kTile.block_m;
    static constexpr int kBlockN = kTile.block_n;
    static constexpr int kStages = kTile.stages;
    static constexpr int kSplit = kTile.split;
    static constexpr int kThreads = kTile.warps * 32;
    static constexpr int kCtas = kTile.ctas;
    static constexpr int kKeyGroups = kTile.warps / kSplit;
    static constexpr int kWarpKeys = kBlockN / kKeyGroups;
    static constexpr int kMTiles = kWarpKeys / 16;         // 16-key tiles of a warp
    static constexpr int kWarpQueries = kBlockM / kSplit;  // whose scores a warp computes
    static constexpr int kSlice = kTile.slice ? kTile.slice : kWarpQueries;
    static constexpr int kNTiles = kSlice / 8;              // 8-query tiles of a slice
    static constexpr int kDkTiles = kHeadDim / 8 / kSplit;  // 8-column tiles of dK and dV that a warp owns
    static constexpr int kDvTiles = kHeadDimV / 8 / kSplit;
    using QTile = SharedTile<kHeadDim>;   // also K
    using VTile = SharedTile<kHeadDimV>;  // also dO
    using STile = SharedTile<kBlockM>;    // dS^T and P^T: a row per key
    // dQ: 32 rows a warp where its columns then come out even (a fragment read from shared memory serves more
    // products).
    static constexpr int kDqWarpsM = kHeadDim / 16 % (kTile.warps * 32 / kBlockM) == 0 &&
                                             kTile.warps * 32 / kBlockM <= QTile::kStepsPerGroup &&
                                             kTile.warps * 32 >= kBlockM
                                         ? kBlockM / 32
                                         : (kBlockM / 16 < kTile.warps ? kBlockM / 16 : kTile.warps);
    static constexpr int kDqWarpsD = kTile.warps / kDqWarpsM;
    static constexpr int kDqMTiles = kBlockM / 16 / kDqWarpsM;  // 16-row tiles of dQ that a warp computes
    static constexpr int kDqTiles = kHeadDim / 8 / kDqWarpsD;   // and 8-column tiles
    static constexpr int kDqPasses = kTile.dq_passes;
    static constexpr int kDqPassTiles = kDqTiles / kDqPasses;
    static_assert(kWarpKeys == 16 || kWarpKeys == 32);
    static_assert(kBlockM <= kThreads, "a thread copies the terms of a row");
    static_assert(kSplit == 1 || kSplit == 2 || kSplit == 4);
    static_assert(kBlockN % 32 == 0, "a dropout call covers 32 keys");
    static_assert(kBlockM % 32 == 0 && kSlice % 16 == 0 && kWarpQueries % kSlice == 0);
    static_assert(kDkTiles % 2 == 0 && kDvTiles % 2 == 0 && kDqPassTiles % 2 == 0 &&
                  kDqPassTiles * kDqPasses == kDqTiles);
    static_assert((kDqWarpsD & (kDqWarpsD - 1)) == 0 && kDqWarpsD <= QTile::kStepsPerGroup);
    static_assert(kDqWarpsM * kDqWarpsD == kTile.warps && kDqMTiles * kDqWarpsM * 16 == kBlockM);

    static constexpr int kKBytes = QTile::bytes(kBlockN);
    static constexpr int kVBytes = VTile::bytes(kBlockN);
    static constexpr int kQBytes = QTile::bytes(kBlockM);
    static constexpr int kDoutBytes = VTile::bytes(kBlockM);
    static constexpr int kSBytes = STile::bytes(kBlockN);
    static constexpr int kTermsBytes = kBlockM * 8;  // lse and delta of a query block
    static constexpr int kQOffset = kKBytes + kVBytes;
    static constexpr int kDoutOffset = kQOffset + kStages * kQBytes;
    static constexpr int kSOffset = kDoutOffset + kStages * kDoutBytes;
    static constexpr int kTermsOffset = kSOffset + (kSplit > 1 ? 2 : 1) * kSBytes;
    static constexpr int kWorkOffset = kTermsOffset + kStages * kTermsBytes;
    static constexpr int64_t kSharedMemory = kWorkOffset + 64;  // Work

    using SFragment = float[kMTiles][kNTiles][4];
    using DkFragment = float[kMTiles][kDkTiles][4];
    using DvFragment = float[kMTiles][kDvTiles][4];
    using PFragment = uint32_t[kMTiles][kSlice / 16][4];  // an A operand
    using DqFragment = float[kDqMTiles][kDqPassTiles][4];

    template <int kM, int kN>
    __device__ __forceinline__ static void clear(float (&fragment)[kM][kN][4]) {
#pragma unroll
        for (int i = 0; i < kM * kN * 4; ++i) fragment[i / 4 / kN][i / 4 % kN][i % 4] = 0.f;
    }

    // scores = rows B^T over kSteps x 16 columns: rows are this warp's keys (K or V), B the slice's queries (Q or dO).
    template <class Tile, int kSteps>
    __device__ __forceinline__ static void multiply_scores(SFragment& scores, uint32_t keys_offset,
                                                           uint32_t queries_offset, uint32_t keys_smem,
                                                           uint32_t queries_smem) {
        clear(scores);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t a_frag[kMTiles][4];
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
                ptx::ldmatrix_x4(a_frag[m],
                                 Tile::columns_right(keys_offset, step) + keys_smem + m * 16 * Tile::kRowBytes);
            }
#pragma unroll
            for (int n = 0; n < kNTiles; n += 2) {
                uint32_t b_frag[4];
                ptx::ldmatrix_x4(b_frag,
                                 Tile::columns_right(queries_offset, step) + queries_smem + n * 8 * Tile::kRowBytes);
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
                    mma<kType>(scores[m][n], a_frag[m], b_frag[0], b_frag[1]);
                    mma<kType>(scores[m][n + 1], a_frag[m], b_frag[2], b_frag[3]);
                }
            }
        }
    }

    // gradient += A B for 16 queries: A (keys x queries) in registers, B this warp's columns of the queries' dO or Q:
    // every kSplit-th step of 16.
    template <class Tile, int kTiles>
    __device__ __forceinline__ static void multiply_gradient(float (&gradient)[kMTiles][kTiles][4],
                                                             const uint32_t (&a_frag)[kMTiles][4], uint32_t lane_offset,
                                                             uint32_t queries_smem) {
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            uint32_t b_frag[4];
            ptx::ldmatrix_x4_trans(b_frag, Tile::columns_right(lane_offset, n / 2 * kSplit) + queries_smem);
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
                mma<kType>(gradient[m][n], a_frag[m], b_frag[0], b_frag[1]);
                mma<kType>(gradient[m][n + 1], a_frag[m], b_frag[2], b_frag[3]);
            }
        }
    }

    // This thread's place in its warp's tile of transposed scores.
    struct Place {
        int key;    // of half 0 of m-tile 0, from the start of the sequence
        int query;  // of element 0 of n-tile 0, within the slice
    };

    struct Dropout {
        bool active;
        PhiloxKey key;
        int batch;
        int head;
    };

    // Raw products s and dp of one slice become P and dS, rounded to the type: p_frag as it multiplies dO (dropped
    // scores are 0), ds_frag with the derivative of the softcap. queries_mask is the mask seen from the keys.
    template <bool kMasked>
    __device__ __forceinline__ static void differentiate_softmax(SFragment& s, SFragment& dp, PFragment& p_frag,
                                                                 PFragment& ds_frag, const BackwardArguments& arguments,
                                                                 const Mask& queries_mask, int keys_used, Place place,
                                                                 int first_query, float slope_log2, uint32_t rows_lane,
                                                                 const Dropout& dropout) {
        const ForwardParams& attention = arguments.params.attention;
        // Rows that see this thread's keys, from this thread's first query.
        int begin[kMTiles][2], end[kMTiles][2];
        if constexpr (kMasked) {
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int key = place.key + m * 16 + half * 8;
                    const KeyRange rows = queries_mask.visible(key);
                    begin[m][half] = rows.begin - first_query - place.query;
                    end[m][half] = key < keys_used ? rows.end - first_query - place.query : 0;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
            float terms[4];  // lse and delta of this thread's two queries
            ptx::ld_shared_v4_f32(terms, rows_lane + n * 64);
            const float lse[2] = {terms[0], terms[2]}, delta[2] = {terms[1], terms[3]};
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int query = n * 8 + c;  // from place.query
                uint4 random{};
                if constexpr (kRich) {
                    // One call serves all keys of this thread: they differ only in key / 8 % 4.
                    if (dropout.active) {
                        random = philox4x32_7(dropout.key, place.key / 32 * 4 + place.key % 8 / 2,
                                              first_query + place.query + query, dropout.batch, dropout.head);
                    }
                }
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int i = half * 2 + c;
                        const int key = place.key + m * 16 + half * 8;
                        float score = s[m][n][i], chain = 1.f;
                        if constexpr (kRich) {
                            if (attention.softcap > 0.f) {
                                const float t = tanhf(score * arguments.inner_scale);
                                score = t * arguments.softcap_log2;
                                chain = 1.f - t * t;
                            } else {
                                score *= arguments.scale_log2;
                            }
                            if (slope_log2 != 0.f) {
                                const int distance = first_query + place.query + query - queries_mask.shift - key;
                                score -= slope_log2 * fabsf(static_cast<float>(distance));
                            }
                            score -= lse[c];
                        } else {
                            score = fmaf(score, arguments.scale_log2, -lse[c]);
                        }
                        if constexpr (kMasked) {
                            if (query < begin[m][half] || query >= end[m][half]) score = minus_infinity();
                        }
                        const float p = ptx::ex2_approx_ftz(score);
                        float kept = p, dp_kept = dp[m][n][i];
                        if constexpr (kRich) {
                            if (dropout.active) {
                                const bool keep =
                                    dropout_keeps(random, key / 8 % 4 * 2 + key % 2, attention.dropout_threshold);
                                kept = keep ? p : 0.f;
                                dp_kept = keep ? dp_kept * arguments.dropout_scale : 0.f;
                            }
                        }
                        s[m][n][i] = kept;
                        dp[m][n][i] = p * (dp_kept - delta[c]);
                        if constexpr (kRich) dp[m][n][i] *= chain;
                    }
                }
            }
        }
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
            for (int k = 0; k < kSlice / 16; ++k) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int n = 2 * k + c / 2, i = 2 * (c % 2);
                    p_frag[m][k][c] = pack<kType>(s[m][n][i], s[m][n][i + 1]);
                    ds_frag[m][k][c] = pack<kType>(dp[m][n][i], dp[m][n][i + 1]);
                }
            }
        }
    }

    // A slice of P^T or dS^T to shared memory, from query chunk first_chunk on.
    __device__ __forceinline__ static void store_scores(const PFragment& frag, uint32_t s_smem, int first_key_row,
                                                        int first_chunk, int lane) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
            for (int k = 0; k < kSlice / 16; ++k) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int row = first_key_row + m * 16 + c % 2 * 8 + lane / 4;
                    ptx::st_shared_b32(s_smem + STile::offset(row, first_chunk + 2 * k + c / 2) + lane % 4 * 4,
                                       frag[m][k][c]);
                }
            }
        }
    }

    // dK or dV: this warp's keys and columns to global memory, through its own part of the K or V tile.
    template <class Tile, int kTiles>
    __device__ __forceinline__ static void write_gradient(const float (&gradient)[kMTiles][kTiles][4], float scale,
                                                          unsigned char* tile_smem, char* destination, int64_t stride,
                                                          int first_row, int part, int rows, int rows_used, int columns,
                                                          int lane) {
        // A warp owns every kSplit-th step of 16 columns.
        const auto chunk_of = [&](int own) { return own / 2 * 2 * kSplit + part * 2 + own % 2; };
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = first_row + m * 16 + half * 8 + lane / 4;
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                    const float low = gradient[m][n][2 * half] * scale, high = gradient[m][n][2 * half + 1] * scale;
                    *reinterpret_cast<uint32_t*>(tile_smem + Tile::offset(row, chunk_of(n)) + lane % 4 * 4) =
                        row < rows_used ? pack<kType>(low, high) : 0u;
                }
            }
        }
        __syncwarp();
        static_assert(kWarpKeys * kTiles % 32 == 0);
#pragma unroll
        for (int i = 0; i < kWarpKeys * kTiles / 32; ++i) {
            const int row = first_row + (i * 32 + lane) / kTiles, chunk = chunk_of((i * 32 + lane) % kTiles);
            if (row < rows && chunk * 8 < columns) {
                *reinterpret_cast<uint4*>(destination + row * stride + chunk * 16) =
                    *reinterpret_cast<const uint4*>(tile_smem + Tile::offset(row, chunk));
            }
        }
    }

    // What a CTA works on: found by one thread, kept in shared memory. Read where it is used (volatile), not kept in
    // registers, of which dK, dV and the scores leave none to spare.
    struct Work {
        int32_t is_empty;    // nothing to do
        int32_t batch;       // sequence; -1 or batch: slack
        int32_t head_k;      // key head
        int32_t begin;       // first key, from the start of the sequence
        int32_t rows;        // keys of the tile
        int32_t rows_used;   // of these, how many count
        int32_t keys_start;  // first key of the sequence in its tensor
        int32_t keys_used;   // keys of the sequence that count
        int32_t queries_start;
        int32_t queries_used;
        KeyBlocks blocks;  // query blocks that see any of the keys
    };

    __device__ __forceinline__ static Work find_work(const BackwardArguments& arguments) {
        const ForwardParams& attention = arguments.params.attention;
        Work work{};
        uint64_t position = static_cast<uint64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
        if (arguments.scratch.ticket != nullptr) position = atomicAdd(arguments.scratch.ticket, 1ull);
        work.is_empty = position >= static_cast<uint64_t>(arguments.order.heads) * arguments.order.tiles;
        if (work.is_empty) return work;
        const TileIndex index = tile_at(arguments.order, position);
        const int dense_batch =
            attention.cu_seqlens_k != nullptr ? 0 : static_cast<int>(index.head / attention.heads_k);
        work.head_k = static_cast<int>(index.head - static_cast<int64_t>(dense_batch) * attention.heads_k);
        const TileRows tile = find_tile(attention.cu_seqlens_k, attention.seqused_k, attention.seqlen_k,
                                        attention.batch, dense_batch, index.tile, kBlockN);
        work.batch = tile.batch;
        work.begin = tile.begin;
        work.rows = min(tile.sequence.length - tile.begin, kBlockN);
        work.is_empty = work.rows <= 0;  // an unused slot
        work.rows_used = min(max(tile.sequence.used - tile.begin, 0), kBlockN);
        work.keys_start = tile.sequence.start;
        work.keys_used = tile.sequence.used;
        if (work.is_empty || work.rows_used <= 0) return work;
        const SequenceRows queries =
            sequence_rows(attention.cu_seqlens_q, attention.seqused_q, attention.seqlen_q, tile.batch);
        work.queries_start = queries.start;
        work.queries_used = queries.used;
        const Mask mask{arguments.bounds, work.keys_used - work.queries_used, work.keys_used};
        work.blocks = key_blocks(mask.transposed(work.queries_used), work.begin, work.begin + work.rows_used, kBlockM);
        // Keys past the end of the sequence are masked in every step: exp(0 - lse) may overflow.
        if (work.rows_used < kBlockN) work.blocks.full_begin = work.blocks.full_end = work.blocks.begin;
        return work;
    }

    // Row of (batch, query head, query) in row_terms and, times head_dim, in dq.
    __device__ __forceinline__ static int64_t scratch_row(const ForwardParams& attention, const volatile Work& work,
                                                          int head, int query) {
        const int64_t sequence_head =
            attention.cu_seqlens_q != nullptr ? head : static_cast<int64_t>(work.batch) * attention.heads_q + head;
        return sequence_head * attention.seqlen_q + work.queries_start + query;
    }

    // Starts to copy a query block: Q, dO and the terms of its rows. Rows past the end of the sequence become zeros
    // (their scores are masked).
    __device__ __forceinline__ static void copy_queries(const BackwardArguments& arguments, const volatile Work& work,
                                                        uint32_t smem_base, int head, int block, int stage) {
        const ForwardParams& attention = arguments.params.attention;
        const TensorView& dout = arguments.params.dout;
        const int first = block * kBlockM, count = work.queries_used - first, row = work.queries_start + first;
        copy_tile<kBlockM, kHeadDim>(
            smem_base + kQOffset + stage * kQBytes,
            static_cast<const char*>(attention.q.data) + row_offset(attention.q, work.batch, row, head) * 2,
            attention.q.stride_row * 2, count, attention.head_dim);
        copy_tile<kBlockM, kHeadDimV>(smem_base + kDoutOffset + stage * kDoutBytes,
                                      static_cast<const char*>(dout.data) + row_offset(dout, work.batch, row, head) * 2,
                                      dout.stride_row * 2, count, attention.head_dim_v);
        const int thread = ptx::tid_x();
        if (thread < kBlockM) {
            ptx::cp_async_ca_8(smem_base + kTermsOffset + stage * kTermsBytes + thread * 8,
                               arguments.scratch.row_terms + scratch_row(attention, work, head, first) + thread,
                               thread < count ? 8 : 0);
        }
    }

    // The same for the step after (head, block), if there is one. Always makes a group.
    __device__ __forceinline__ static void copy_next(const BackwardArguments& arguments, const volatile Work& work,
                                                     uint32_t smem_base, int head, int block, int stage) {
        const ForwardParams& attention = arguments.params.attention;
        const bool is_last_block = block == work.blocks.begin;  // of this head
        const int next_head = is_last_block ? head + 1 : head;
        if (next_head < (work.head_k + 1) * (attention.heads_q / attention.heads_k)) {
            copy_queries(arguments, work, smem_base, next_head, is_last_block ? work.blocks.end - 1 : block - 1, stage);
        }
        ptx::cp_async_commit_group();
    }

    // dq_frag = dS K for this warp's part of the query block and one pass of its columns.
    __device__ __forceinline__ static void multiply_dq(DqFragment& dq_frag, uint32_t smem_base, int pass) {
        clear(dq_frag);
        const int thread = ptx::tid_x(), lane = thread % 32, warp = thread / 32;
        const uint32_t ds_lane =
            STile::columns_right(STile::column_block_offset(0, lane), warp % kDqWarpsM) + smem_base + kSOffset;
        const uint32_t k_lane = QTile::columns_right(QTile::block_offset(0, lane), warp / kDqWarpsM);
        static_assert(kDqPasses == 1 || kDqPassTiles / 2 * kDqWarpsD % QTile::kStepsPerGroup == 0);
        const uint32_t k_smem = smem_base + QTile::columns_right(0, kDqPassTiles / 2 * kDqWarpsD) * pass;
#pragma unroll
        for (int k = 0; k < kBlockN / 16; ++k) {
            uint32_t a_frag[kDqMTiles][4];
#pragma unroll
            for (int m = 0; m < kDqMTiles; ++m) {
                // The 16-row tiles of a warp lie kDqWarpsM apart.
                ptx::ldmatrix_x4_trans(a_frag[m],
                                       STile::columns_right(ds_lane, m * kDqWarpsM) + k * 16 * STile::kRowBytes);
            }
#pragma unroll
            for (int n = 0; n < kDqPassTiles; n += 2) {
                uint32_t b_frag[4];
                ptx::ldmatrix_x4_trans(
                    b_frag, QTile::columns_right(k_lane, n / 2 * kDqWarpsD) + k_smem + k * 16 * QTile::kRowBytes);
#pragma unroll
                for (int m = 0; m < kDqMTiles; ++m) {
                    mma<kType>(dq_frag[m][n], a_frag[m], b_frag[0], b_frag[1]);
                    mma<kType>(dq_frag[m][n + 1], a_frag[m], b_frag[2], b_frag[3]);
                }
            }
        }
    }

    // Adds dq_frag to the scratch. kWhole: all rows and columns of the tile count.
    template <bool kWhole>
    __device__ __forceinline__ static void add_dq(const DqFragment& dq_frag, const BackwardArguments& arguments,
                                                  const volatile Work& work, int head, int block, int pass) {
        const ForwardParams& attention = arguments.params.attention;
        const int thread = ptx::tid_x(), lane = thread % 32, warp = thread / 32;
        const int part = warp / kDqWarpsM, first = block * kBlockM, count = work.queries_used - first;
        const int64_t first_row = scratch_row(attention, work, head, first);
#pragma unroll
        for (int m = 0; m < kDqMTiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = (m * kDqWarpsM + warp % kDqWarpsM) * 16 + half * 8 + lane / 4;
                float* dq = arguments.scratch.dq + dq_scratch_offset(first_row + row, attention.head_dim) +
                            part * (4 * kDqChunk) + pass * (kDqPassTiles * kDqWarpsD * 2 * kDqChunk) + lane % 4;
#pragma unroll
                for (int n = 0; n < kDqPassTiles; ++n) {
                    const int tile =
                        n / 2 * (2 * kDqWarpsD) + n % 2;  // of 8 columns, from this warp's first of the pass
                    const bool counts =
                        kWhole ||
                        (row < count && (tile + part * 2 + pass * kDqPassTiles * kDqWarpsD) * 8 < attention.head_dim);
                    // A warp adds to 32 neighbours at once.
                    ptx::red_add_f32(dq + tile * 2 * kDqChunk, dq_frag[m][n][2 * half], counts);
                    ptx::red_add_f32(dq + (tile * 2 + 1) * kDqChunk, dq_frag[m][n][2 * half + 1], counts);
                }
            }
        }
    }

    // How many key blocks have added to the query block so far (the counter), and how many must have before this one.
    struct Turn {
        int32_t* counter;
        int32_t mine;
    };

    __device__ __forceinline__ static Turn find_turn(const BackwardArguments& arguments, const volatile Work& work,
                                                     int head, int block) {
        const ForwardParams& attention = arguments.params.attention;
        const bool packed = attention.cu_seqlens_q != nullptr;
        const int64_t sequence_head = packed ? head : static_cast<int64_t>(work.batch) * attention.heads_q + head;
        const int first_slot = packed ? work.queries_start / kBlockM + work.batch + 1 : 0;
        const Mask mask{arguments.bounds, work.keys_used - work.queries_used, work.keys_used};
        const int begin = block * kBlockM, end = min(begin + kBlockM, work.queries_used);
        return {arguments.scratch.turns + sequence_head * arguments.query_slots + first_slot + block,
                work.begin / kBlockN - key_blocks(mask, begin, end, kBlockN).begin};
    }

    // The scores of one query block and what they give to dK and dV; dS to shared memory.
    __device__ __forceinline__ static void accumulate(DkFragment& dk_frag, DvFragment& dv_frag,
                                                      const BackwardArguments& arguments, const volatile Work& work,
                                                      uint32_t smem_base, int head, int block, int stage) {
        const ForwardParams& attention = arguments.params.attention;
        const int thread = ptx::tid_x(), lane = thread % 32, group = thread / 32 / kSplit, part = thread / 32 % kSplit;
        // Where this lane's rows for ldmatrix lie in any tile (sm80/tile.cuh); each use adds the base of its tile.
        const uint32_t q_lane = QTile::block_offset(0, lane), v_lane = VTile::block_offset(0, lane);
        const uint32_t q_column_lane = QTile::column_block_offset(0, lane),
                       v_column_lane = VTile::column_block_offset(0, lane);
        // Columns of dK and dV that this warp owns: every kSplit-th step of 16.
        const uint32_t q_columns = QTile::columns_right(q_lane, part), v_columns = VTile::columns_right(v_lane, part);
        const uint32_t q_smem = smem_base + kQOffset + stage * kQBytes;
        const uint32_t dout_smem = smem_base + kDoutOffset + stage * kDoutBytes;
        const uint32_t ds_smem = smem_base + kSOffset, p_smem = ds_smem + kSBytes;
        const uint32_t terms_lane = smem_base + kTermsOffset + stage * kTermsBytes + lane % 4 * 16;
        const Place place{work.begin + group * kWarpKeys + lane / 4, lane % 4 * 2};
        float slope_log2 = 0.f;
        Dropout dropout{};
        if constexpr (kRich) {
            const int batch = work.batch;
            if (attention.alibi_slopes != nullptr) {
                slope_log2 = attention.alibi_slopes[batch * attention.alibi_stride_batch + head] * kLog2E;
            }
            dropout.active = attention.rng_state != nullptr && attention.dropout_threshold > 0;
            dropout.batch = batch;
            dropout.head = head;
            if (dropout.active) dropout.key = philox_key(attention.rng_state);
        }
        const bool is_masked = block >= work.blocks.full_end || block < work.blocks.full_begin;

#pragma unroll 1
        for (int slice = 0; slice < kWarpQueries / kSlice; ++slice) {
            const int first = part * kWarpQueries + slice * kSlice;  // of the block's queries
            SFragment s_frag, dp_frag;
            multiply_scores<QTile, kHeadDim / 16>(s_frag, q_lane, q_column_lane,
                                                  smem_base + group * kWarpKeys * QTile::kRowBytes,
                                                  q_smem + first * QTile::kRowBytes);
            multiply_scores<VTile, kHeadDimV / 16>(dp_frag, v_lane, v_column_lane,
                                                   smem_base + kKBytes + group * kWarpKeys * VTile::kRowBytes,
                                                   dout_smem + first * VTile::kRowBytes);
            PFragment p_frag, ds_frag;
            const auto differentiate = [&]<bool kMasked>() {
                const Mask mask{arguments.bounds, work.keys_used - work.queries_used, work.keys_used};
                differentiate_softmax<kMasked>(s_frag, dp_frag, p_frag, ds_frag, arguments,
                                               mask.transposed(work.queries_used), mask.seqlen_k, place,
                                               block * kBlockM + first, slope_log2, terms_lane + first * 8, dropout);
            };
            if (is_masked) {
                differentiate.template operator()<true>();
            } else {
                differentiate.template operator()<false>();
            }
            store_scores(ds_frag, ds_smem, group * kWarpKeys, first / 8, lane);
            if constexpr (kSplit > 1) {
                store_scores(p_frag, p_smem, group * kWarpKeys, first / 8, lane);
            } else {
#pragma unroll
                for (int k = 0; k < kSlice / 16; ++k) {
                    const int row = slice * kSlice + k * 16;
                    uint32_t a_frag[kMTiles][4];
                    take(a_frag, p_frag, k);
                    multiply_gradient<VTile>(dv_frag, a_frag, v_columns, dout_smem + row * VTile::kRowBytes);
                    take(a_frag, ds_frag, k);
                    multiply_gradient<QTile>(dk_frag, a_frag, q_columns, q_smem + row * QTile::kRowBytes);
                }
            }
        }
        __syncthreads();  // dS (and P) of all warps is there
        if constexpr (kSplit > 1) {
            const uint32_t s_lane = STile::block_offset(0, lane), first_row = group * kWarpKeys * STile::kRowBytes;
#pragma unroll
            for (int k = 0; k < kBlockM / 16; ++k) {
                uint32_t a_frag[kMTiles][4];
                load_rows(a_frag, s_lane, p_smem + first_row, k);
                multiply_gradient<VTile>(dv_frag, a_frag, v_columns, dout_smem + k * 16 * VTile::kRowBytes);
                load_rows(a_frag, s_lane, ds_smem + first_row, k);
                multiply_gradient<QTile>(dk_frag, a_frag, q_columns, q_smem + k * 16 * QTile::kRowBytes);
            }
        }
    }

    __device__ __forceinline__ static void run(const BackwardArguments& arguments) {
        extern __shared__ __align__(1024) unsigned char smem[];
        const BackwardParams& params = arguments.params;
        const ForwardParams& attention = params.attention;
        const uint32_t smem_base = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
        const bool deterministic = arguments.scratch.turns != nullptr;

        Work* const shared_work = reinterpret_cast<Work*>(smem + kWorkOffset);
        if (threadIdx.x == 0) *shared_work = find_work(arguments);
        __syncthreads();  // the work is there
        const volatile Work& work = *shared_work;
        if (work.is_empty) return;

        DkFragment dk_frag;
        DvFragment dv_frag;
        clear(dk_frag);
        clear(dv_frag);
        const int group_size = attention.heads_q / attention.heads_k;
        if (work.blocks.begin < work.blocks.end) {
            const int first = work.keys_start + work.begin;
            copy_tile<kBlockN, kHeadDim>(smem_base,
                                         static_cast<const char*>(attention.k.data) +
                                             row_offset(attention.k, work.batch, first, work.head_k) * 2,
                                         attention.k.stride_row * 2, work.rows_used, attention.head_dim);
            copy_tile<kBlockN, kHeadDimV>(smem_base + kKBytes,
                                          static_cast<const char*>(attention.v.data) +
                                              row_offset(attention.v, work.batch, first, work.head_k) * 2,
                                          attention.v.stride_row * 2, work.rows_used, attention.head_dim_v);
            copy_queries(arguments, work, smem_base, work.head_k * group_size, work.blocks.end - 1, 0);
            ptx::cp_async_commit_group();
        }

        int stage = 0;
#pragma unroll 1
        for (int head = work.head_k * group_size; head < (work.head_k + 1) * group_size; ++head) {
#pragma unroll 1
            for (int block = work.blocks.end - 1; block >= work.blocks.begin; --block) {
                ptx::cp_async_wait_group<0>();
                __syncthreads();  // Q[m], dO[m] are there; no warp still reads dS or what is filled next
                if constexpr (kStages == 2) copy_next(arguments, work, smem_base, head, block, stage ^ 1);
                accumulate(dk_frag, dv_frag, arguments, work, smem_base, head, block, stage);
                if constexpr (kStages == 1) {
                    __syncthreads();  // all warps are done with Q and dO
                    copy_next(arguments, work, smem_base, head, block, 0);
                }
                Turn turn{};
                const bool is_whole = attention.head_dim == kHeadDim && (block + 1) * kBlockM <= work.queries_used;
#pragma unroll 1
                for (int pass = 0; pass < kDqPasses; ++pass) {
                    DqFragment dq_frag;
                    multiply_dq(dq_frag, smem_base, pass);
                    if (deterministic && pass == 0) {
                        turn = find_turn(arguments, work, head, block);
                        if (threadIdx.x == 0) {
                            while (ptx::ld_acquire_gpu(turn.counter) != turn.mine) {
                            }
                        }
                        __syncthreads();  // the key blocks before this one have added theirs
                    }
                    if (is_whole) {
                        add_dq<true>(dq_frag, arguments, work, head, block, pass);
                    } else {
                        add_dq<false>(dq_frag, arguments, work, head, block, pass);
                    }
                }
                if (deterministic) {
                    __threadfence();
                    __syncthreads();  // all warps have added theirs
                    if (threadIdx.x == 0) ptx::red_release_gpu_add(turn.counter, 1);
                }
                if constexpr (kStages == 2) stage ^= 1;
            }
        }

        __syncthreads();  // all warps are done with K and V, whose rows the gradients leave through
        const int lane = threadIdx.x % 32, group = threadIdx.x / 32 / kSplit, part = threadIdx.x / 32 % kSplit;
        const int first = work.keys_start + work.begin;
        const int batch = attention.cu_seqlens_k != nullptr ? 0 : work.batch;
        write_gradient<QTile>(dk_frag, attention.softmax_scale, smem,
                              static_cast<char*>(params.dk.data) + row_offset(params.dk, batch, first, work.head_k) * 2,
                              params.dk.stride_row * 2, group * kWarpKeys, part, work.rows, work.rows_used,
                              attention.head_dim, lane);
        write_gradient<VTile>(dv_frag, kRich ? arguments.dropout_scale : 1.f, smem + kKBytes,
                              static_cast<char*>(params.dv.data) + row_offset(params.dv, batch, first, work.head_k) * 2,
                              params.dv.stride_row * 2, group * kWarpKeys, part, work.rows, work.rows_used,
                              attention.head_dim_v, lane);
    }

    static int64_t workspace(const void* backward_params, const LaunchContext*) {
        return backward_scratch_size(*static_cast<const BackwardParams*>(backward_params), kBlockM);
    }

    static int32_t launch(const void* backward_params, const LaunchContext* context) {
        const BackwardParams& params = *static_cast<const BackwardParams*>(backward_params);
        const ForwardParams& attention = params.attention;
        const cudaStream_t stream = static_cast<cudaStream_t>(context->stream);
        BackwardArguments arguments;
        arguments.params = params;
        arguments.scratch = backward_scratch(params, kBlockM, context->workspace);
        cudaError_t error = launch_backward_preprocess(params, arguments.scratch, kBlockM, stream);
        if (error != cudaSuccess) return error;

        const bool packed = attention.cu_seqlens_k != nullptr;
        const int64_t heads = packed ? attention.heads_k : static_cast<int64_t>(attention.batch) * attention.heads_k;
        const int64_t tiles = packed ? varlen_slots(attention.seqlen_k, attention.batch, kBlockN)
                                     : (static_cast<int64_t>(attention.seqlen_k) + kBlockN - 1) / kBlockN;
        if (heads * tiles > 0 && attention.seqlen_k > 0) {
            arguments.bounds = mask_bounds(attention);
            // Head by head, key tiles in order: with a causal mask the first are the heaviest, and the CTAs of a head
            // share its Q and dO through the L2 cache.
            arguments.order = make_tile_order(heads, tiles, false, 0);
            arguments.query_slots = static_cast<int32_t>(backward_query_slots(attention, kBlockM));
            arguments.scale_log2 = attention.softmax_scale * kLog2E;
            arguments.inner_scale = attention.softcap > 0.f ? attention.softmax_scale / attention.softcap : 0.f;
            arguments.softcap_log2 = attention.softcap * kLog2E;
            arguments.dropout_scale = 65536.f / static_cast<float>(65536u - attention.dropout_threshold);

            const void* kernel = reinterpret_cast<const void*>(&backward_kernel<Backward>);
            static SharedMemoryOptIn opt_in;
            error = opt_in.ensure(kernel, context->device, kSharedMemory);
            if (error != cudaSuccess) return error;
            void* kernel_arguments[] = {&arguments};
            error = cudaLaunchKernel(kernel, linear_grid(heads * tiles), dim3(kThreads), kernel_arguments,
                                     kSharedMemory, stream);
            if (error != cudaSuccess) return error;
        }
        return launch_backward_postprocess(params, arguments.scratch, kBlockM, stream);
    }

  private:
    // Rows of a tile, `stride` bytes apart, to shared memory; rows from `rows` and columns from `columns` on become
    // zeros.
    template <int kRows, int kColumns>
    __device__ __forceinline__ static void copy_tile(uint32_t tile_smem, const char* source, int64_t stride, int rows,
                                                     int columns) {
        using Loader = TileLoader<kRows, kColumns, kThreads>;
        const int thread = ptx::tid_x();
        Loader::load(tile_smem + Loader::smem_offset(thread), source + Loader::source_offset(thread, stride),
                     Loader::kRowsPerPass * stride, rows - Loader::row(thread), columns, thread);
    }

    __device__ __forceinline__ static void take(uint32_t (&a_frag)[kMTiles][4], const PFragment& frag, int k) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
            for (int c = 0; c < 4; ++c) a_frag[m][c] = frag[m][k][c];
        }
    }

    __device__ __forceinline__ static void load_rows(uint32_t (&a_frag)[kMTiles][4], uint32_t lane_offset,
                                                     uint32_t rows_smem, int k) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            ptx::ldmatrix_x4(a_frag[m], STile::columns_right(lane_offset, k) + rows_smem + m * 16 * STile::kRowBytes);
        }
    }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtas)
    backward_kernel(const __grid_constant__ BackwardArguments arguments) {
    Kernel::run(arguments);
}

}  // namespace flash_ext::sm80
