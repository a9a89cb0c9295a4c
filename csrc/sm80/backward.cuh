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
    int block_m;    // query rows
    int block_n;    // key rows
    int stages;     // buffers of Q and of dO
    int warps;      // per CTA
    int split = 1;  // warps that share a group of keys
    int slice = 0;  // queries whose scores are in registers at once; 0: all that a warp computes
    int ctas = 1;   // CTAs per SM that the register budget leaves room for
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
    static constexpr int kDqWarpsM = kBlockM / 16 < kTile.warps ? kBlockM / 16 : kTile.warps;
    static constexpr int kDqWarpsD = kTile.warps / kDqWarpsM;
    static constexpr int kDqMTiles = kBlockM / 16 / kDqWarpsM;  // 16-row tiles of dQ that a warp computes
    static constexpr int kDqTiles = kHeadDim / 8 / kDqWarpsD;   // and 8-column tiles
    static_assert(kWarpKeys == 16 || kWarpKeys == 32);
    static_assert(kSplit == 1 || kSplit == 2);
    static_assert(kBlockN % 32 == 0, "a dropout call covers 32 keys");
    static_assert(kBlockM % 32 == 0 && kSlice % 16 == 0 && kWarpQueries % kSlice == 0);
    static_assert(kDkTiles % 2 == 0 && kDvTiles % 2 == 0 && kDqTiles % 2 == 0);
    static_assert(kDqWarpsM * kDqWarpsD == kTile.warps && kDqMTiles * kDqWarpsM * 16 == kBlockM);

    using QTile = SharedTile<kHeadDim>;   // also K
    using VTile = SharedTile<kHeadDimV>;  // also dO
    using STile = SharedTile<kBlockM>;    // dS^T and P^T: a row per key
    static constexpr int kKBytes = QTile::bytes(kBlockN);
    static constexpr int kVBytes = VTile::bytes(kBlockN);
    static constexpr int kQBytes = QTile::bytes(kBlockM);
    static constexpr int kDoutBytes = VTile::bytes(kBlockM);
    static constexpr int kSBytes = STile::bytes(kBlockN);
    static constexpr int kRowBytes = kBlockM * 8;  // lse and delta of a query block
    static constexpr int kQOffset = kKBytes + kVBytes;
    static constexpr int kDoutOffset = kQOffset + kStages * kQBytes;
    static constexpr int kSOffset = kDoutOffset + kStages * kDoutBytes;
    static constexpr int kRowOffset = kSOffset + kSplit * kSBytes;
    static constexpr int64_t kSharedMemory = kRowOffset + kStages * kRowBytes;

    using SFragment = float[kMTiles][kNTiles][4];
    using DkFragment = float[kMTiles][kDkTiles][4];
    using DvFragment = float[kMTiles][kDvTiles][4];
    using PFragment = uint32_t[kMTiles][kSlice / 16][4];  // an A operand

    template <int kM, int kN>
    __device__ __forceinline__ static void clear(float (&fragment)[kM][kN][4]) {
#pragma unroll
        for (int i = 0; i < kM * kN * 4; ++i) fragment[i / 4 / kN][i / 4 % kN][i % 4] = 0.f;
    }

    // scores = rows B^T over kSteps x 16 columns: rows are this warp's keys (K or V), B the slice's queries (Q or dO).
    template <class Tile, int kSteps>
    __device__ __forceinline__ static void multiply_scores(SFragment& scores, uint32_t lane_offset, uint32_t keys_smem,
                                                           uint32_t queries_smem) {
        clear(scores);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t a_frag[kMTiles][4];
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
                ptx::ldmatrix_x4(a_frag[m],
                                 Tile::columns_right(lane_offset, step) + keys_smem + m * 16 * Tile::kRowBytes);
            }
#pragma unroll
            for (int n = 0; n < kNTiles; n += 2) {
                uint32_t b_frag[4];
                ptx::ldmatrix_x4(b_frag,
                                 Tile::columns_right(lane_offset, step) + queries_smem + n * 8 * Tile::kRowBytes);
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
                    mma<kType>(scores[m][n], a_frag[m], b_frag[0], b_frag[2]);
                    mma<kType>(scores[m][n + 1], a_frag[m], b_frag[1], b_frag[3]);
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
            float lse[2], delta[2];
            ptx::ld_shared_v2_f32(lse, rows_lane + n * 32);
            ptx::ld_shared_v2_f32(delta, rows_lane + kBlockM * 4 + n * 32);
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
        // A warp of a pair owns every other step of 16 columns.
        const auto chunk_of = [&](int own) { return kSplit == 1 ? own : own / 2 * 4 + part * 2 + own % 2; };
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

    __device__ __forceinline__ static void run(const BackwardArguments& arguments) {
        extern __shared__ __align__(1024) unsigned char smem[];
        const BackwardParams& params = arguments.params;
        const ForwardParams& attention = params.attention;
        const bool deterministic = arguments.scratch.turns != nullptr;

        // Which keys of which key head this CTA computes.
        uint64_t position = static_cast<uint64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
        if (deterministic) {
            unsigned long long* ticket = reinterpret_cast<unsigned long long*>(smem);
            if (threadIdx.x == 0) *ticket = atomicAdd(arguments.scratch.ticket, 1ull);
            __syncthreads();  // the ticket is there
            position = *ticket;
            __syncthreads();  // all have read it; its place is filled next
        }
        if (position >= static_cast<uint64_t>(arguments.order.heads) * arguments.order.tiles) return;
        const TileIndex index = tile_at(arguments.order, position);
        const bool packed = attention.cu_seqlens_k != nullptr;
        const int dense_batch = packed ? 0 : static_cast<int>(index.head / attention.heads_k);
        const int head_k = static_cast<int>(index.head - static_cast<int64_t>(dense_batch) * attention.heads_k);
        const TileRows tile = find_tile(attention.cu_seqlens_k, attention.seqused_k, attention.seqlen_k,
                                        attention.batch, dense_batch, index.tile, kBlockN);
        const int rows = min(tile.sequence.length - tile.begin, kBlockN);
        if (rows <= 0) return;  // an empty slot
        const int rows_used = min(max(tile.sequence.used - tile.begin, 0), kBlockN);
        const int batch = tile.batch;
        const int group_size = attention.heads_q / attention.heads_k;

        // Which queries see them.
        SequenceRows queries{};
        if (rows_used > 0) {
            queries = sequence_rows(attention.cu_seqlens_q, attention.seqused_q, attention.seqlen_q, batch);
        }
        const Mask keys_mask{arguments.bounds, tile.sequence.used - queries.used, tile.sequence.used};
        const Mask queries_mask = keys_mask.transposed(queries.used);
        KeyBlocks blocks = key_blocks(queries_mask, tile.begin, tile.begin + rows_used, kBlockM);
        // Keys past the end of the sequence are masked in every step: exp(0 - lse) may overflow.
        if (rows_used < kBlockN) blocks.full_begin = blocks.full_end = blocks.begin;

        const uint32_t smem_base = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
        const uint32_t k_smem = smem_base, v_smem = smem_base + kKBytes, q_smem = smem_base + kQOffset;
        const uint32_t dout_smem = smem_base + kDoutOffset, ds_smem = smem_base + kSOffset, p_smem = ds_smem + kSBytes;
        const uint32_t row_smem = smem_base + kRowOffset;
        const int64_t q_stride = attention.q.stride_row * 2, dout_stride = params.dout.stride_row * 2;
        // Where the rows of (batch, head) start in lse, delta and, times head_dim, in the scratch of dQ.
        const auto scratch_row = [&](int head) {
            return (attention.cu_seqlens_q != nullptr ? int64_t{head}
                                                      : static_cast<int64_t>(batch) * attention.heads_q + head) *
                       attention.seqlen_q +
                   queries.start;
        };
        const auto copy_queries = [&](int head, int block, int stage) {
            const int first = block * kBlockM, count = queries.used - first;
            const char* q = static_cast<const char*>(attention.q.data) +
                            row_offset(attention.q, batch, queries.start + first, head) * 2;
            const char* dout = static_cast<const char*>(params.dout.data) +
                               row_offset(params.dout, batch, queries.start + first, head) * 2;
            copy_tile<kBlockM, kHeadDim>(q_smem + stage * kQBytes, q, q_stride, count, attention.head_dim);
            copy_tile<kBlockM, kHeadDimV>(dout_smem + stage * kDoutBytes, dout, dout_stride, count,
                                          attention.head_dim_v);
            const int64_t scratch = scratch_row(head) + first;
            for (int i = ptx::tid_x(); i < 2 * kBlockM; i += kThreads) {
                const int row = i % kBlockM;
                const uint32_t destination = row_smem + stage * kRowBytes + i * 4;
                if (row < count) {
                    const float* source = i < kBlockM ? arguments.scratch.lse_log2 : arguments.scratch.delta;
                    ptx::cp_async_ca_4(destination, source + scratch + row);
                } else {
                    ptx::st_shared_f32(destination, i < kBlockM ? -minus_infinity() : 0.f);  // P and dS are 0
                }
            }
        };

        DkFragment dk_frag;
        DvFragment dv_frag;
        clear(dk_frag);
        clear(dv_frag);
        Dropout dropout{};
        if constexpr (kRich) {
            dropout.active = attention.rng_state != nullptr && attention.dropout_threshold > 0;
            dropout.batch = batch;
            if (dropout.active) dropout.key = philox_key(attention.rng_state);
        }

        if (blocks.begin < blocks.end) {
            const int first = tile.sequence.start + tile.begin;
            copy_tile<kBlockN, kHeadDim>(
                k_smem, static_cast<const char*>(attention.k.data) + row_offset(attention.k, batch, first, head_k) * 2,
                attention.k.stride_row * 2, rows_used, attention.head_dim);
            copy_tile<kBlockN, kHeadDimV>(
                v_smem, static_cast<const char*>(attention.v.data) + row_offset(attention.v, batch, first, head_k) * 2,
                attention.v.stride_row * 2, rows_used, attention.head_dim_v);
            copy_queries(head_k * group_size, blocks.end - 1, 0);
            ptx::cp_async_commit_group();
        }

        int stage = 0;
        const auto copy_next = [&](int head, int block, int next_stage) {
            if (block > blocks.begin) {
                copy_queries(head, block - 1, next_stage);
            } else if (head + 1 < (head_k + 1) * group_size) {
                copy_queries(head + 1, blocks.end - 1, next_stage);
            }
            ptx::cp_async_commit_group();
        };

        // What a phase derives from the thread's index it derives anew (ptx::tid_x): kept through the loop, the
        // addresses of all phases would not fit the registers beside dK and dV.
        const auto step = [&](int head, int block, bool is_masked) {
            ptx::cp_async_wait_group<0>();
            __syncthreads();  // Q[m], dO[m] are there; no warp still reads dS or what is filled next
            if constexpr (kStages == 2) copy_next(head, block, stage ^ 1);
            const int thread = ptx::tid_x(), lane = thread % 32, group = thread / 32 / kSplit,
                      part = thread / 32 % kSplit;
            const Place place{tile.begin + group * kWarpKeys + lane / 4, lane % 4 * 2};
            // Where this lane's rows for ldmatrix lie in any tile (sm80/tile.cuh); each use adds the base of its tile.
            const uint32_t q_lane = QTile::block_offset(0, lane), v_lane = VTile::block_offset(0, lane);
            const uint32_t s_lane = STile::block_offset(0, lane);
            float slope_log2 = 0.f;
            if constexpr (kRich) {
                if (attention.alibi_slopes != nullptr) {
                    slope_log2 = attention.alibi_slopes[batch * attention.alibi_stride_batch + head] * kLog2E;
                }
                dropout.head = head;
            }
            const uint32_t q_stage = q_smem + stage * kQBytes, dout_stage = dout_smem + stage * kDoutBytes;
            const uint32_t rows_stage = row_smem + stage * kRowBytes + lane % 4 * 8;
            // Columns of dK and dV that this warp owns: every kSplit-th step of 16.
            const uint32_t q_columns = QTile::columns_right(q_lane, part);
            const uint32_t v_columns = VTile::columns_right(v_lane, part);

#pragma unroll 1
            for (int slice = 0; slice < kWarpQueries / kSlice; ++slice) {
                const int first = part * kWarpQueries + slice * kSlice;  // of the block's queries
                SFragment s_frag, dp_frag;
                multiply_scores<QTile, kHeadDim / 16>(s_frag, q_lane, k_smem + group * kWarpKeys * QTile::kRowBytes,
                                                      q_stage + first * QTile::kRowBytes);
                multiply_scores<VTile, kHeadDimV / 16>(dp_frag, v_lane, v_smem + group * kWarpKeys * VTile::kRowBytes,
                                                       dout_stage + first * VTile::kRowBytes);
                PFragment p_frag, ds_frag;
                const auto differentiate = [&]<bool kMasked>() {
                    differentiate_softmax<kMasked>(s_frag, dp_frag, p_frag, ds_frag, arguments, queries_mask,
                                                   tile.sequence.used, place, block * kBlockM + first, slope_log2,
                                                   rows_stage + first * 4, dropout);
                };
                if (is_masked) {
                    differentiate.template operator()<true>();
                } else {
                    differentiate.template operator()<false>();
                }
                store_scores(ds_frag, ds_smem, group * kWarpKeys, first / 8, lane);
                if constexpr (kSplit == 2) {
                    store_scores(p_frag, p_smem, group * kWarpKeys, first / 8, lane);
                } else {
#pragma unroll
                    for (int k = 0; k < kSlice / 16; ++k) {
                        const int row = slice * kSlice + k * 16;
                        uint32_t a_frag[kMTiles][4];
                        take(a_frag, p_frag, k);
                        multiply_gradient<VTile>(dv_frag, a_frag, v_columns, dout_stage + row * VTile::kRowBytes);
                        take(a_frag, ds_frag, k);
                        multiply_gradient<QTile>(dk_frag, a_frag, q_columns, q_stage + row * QTile::kRowBytes);
                    }
                }
            }
            __syncthreads();  // dS (and P) of all warps is there
            if constexpr (kSplit == 2) {
                const uint32_t ds_rows = ds_smem + group * kWarpKeys * STile::kRowBytes;
#pragma unroll
                for (int k = 0; k < kBlockM / 16; ++k) {
                    uint32_t a_frag[kMTiles][4];
                    load_rows(a_frag, s_lane, ds_rows + kSBytes, k);
                    multiply_gradient<VTile>(dv_frag, a_frag, v_columns, dout_stage + k * 16 * VTile::kRowBytes);
                    load_rows(a_frag, s_lane, ds_rows, k);
                    multiply_gradient<QTile>(dk_frag, a_frag, q_columns, q_stage + k * 16 * QTile::kRowBytes);
                }
            }
            if constexpr (kStages == 1) {
                __syncthreads();  // all warps are done with Q and dO
                copy_next(head, block, 0);
            }

            const int dq_thread = ptx::tid_x(), dq_lane = dq_thread % 32, dq_warp = dq_thread / 32;
            const int dq_group = dq_warp % kDqWarpsM, dq_part = dq_warp / kDqWarpsM;
            const uint32_t ds_lane = STile::columns_right(STile::block_offset(0, dq_lane), dq_group);
            const uint32_t k_lane = QTile::columns_right(QTile::block_offset(0, dq_lane), dq_part);
            float dq_frag[kDqMTiles][kDqTiles][4];
            clear(dq_frag);
#pragma unroll
            for (int k = 0; k < kBlockN / 16; ++k) {
                uint32_t a_frag[kDqMTiles][4];
#pragma unroll
                for (int m = 0; m < kDqMTiles; ++m) {
                    // The tiles of a warp lie kDqWarpsM apart; registers 1 and 2 change places because dS^T is stored.
                    uint32_t transposed[4];
                    ptx::ldmatrix_x4_trans(
                        transposed, STile::columns_right(ds_lane, m * kDqWarpsM) + ds_smem + k * 16 * STile::kRowBytes);
                    a_frag[m][0] = transposed[0];
                    a_frag[m][1] = transposed[2];
                    a_frag[m][2] = transposed[1];
                    a_frag[m][3] = transposed[3];
                }
#pragma unroll
                for (int n = 0; n < kDqTiles; n += 2) {
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

            int32_t* turn = nullptr;
            if (deterministic) {
                const int first_slot = attention.cu_seqlens_q != nullptr ? queries.start / kBlockM + batch + 1 : 0;
                const int64_t sequence_head = attention.cu_seqlens_q != nullptr
                                                  ? int64_t{head}
                                                  : static_cast<int64_t>(batch) * attention.heads_q + head;
                turn = arguments.scratch.turns + sequence_head * arguments.query_slots + first_slot + block;
                const int query_begin = block * kBlockM, query_end = min(query_begin + kBlockM, queries.used);
                const int mine = tile.begin / kBlockN - key_blocks(keys_mask, query_begin, query_end, kBlockN).begin;
                if (threadIdx.x == 0) {
                    while (ptx::ld_acquire_gpu(turn) != mine) {
                    }
                }
                __syncthreads();  // the key blocks before this one have added theirs
            }
            const int64_t first_row = scratch_row(head) + block * kBlockM;
#pragma unroll
            for (int m = 0; m < kDqMTiles; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = (m * kDqWarpsM + dq_group) * 16 + half * 8 + dq_lane / 4;
                    if (block * kBlockM + row < queries.used) {
                        float* dq = arguments.scratch.dq + (first_row + row) * attention.head_dim + dq_lane % 4;
#pragma unroll
                        for (int n = 0; n < kDqTiles; ++n) {
                            const int column = (n / 2 * kDqWarpsD + dq_part) * 16 + n % 2 * 8;
                            if (column < attention.head_dim) {
                                // Within 8 columns the even ones come first: the lanes of a quad are then neighbours.
                                atomicAdd(dq + column, dq_frag[m][n][2 * half]);
                                atomicAdd(dq + column + 4, dq_frag[m][n][2 * half + 1]);
                            }
                        }
                    }
                }
            }
            if (deterministic) {
                __threadfence();
                __syncthreads();  // all warps have added theirs
                if (threadIdx.x == 0) ptx::red_release_gpu_add(turn, 1);
            }
            if constexpr (kStages == 2) stage ^= 1;
        };

#pragma unroll 1
        for (int head = head_k * group_size; head < (head_k + 1) * group_size; ++head) {
#pragma unroll 1
            for (int block = blocks.end - 1; block >= blocks.begin; --block) {
                step(head, block, block >= blocks.full_end || block < blocks.full_begin);
            }
        }

        __syncthreads();  // all warps are done with K and V, whose rows the gradients leave through
        const int lane = threadIdx.x % 32, group = threadIdx.x / 32 / kSplit, part = threadIdx.x / 32 % kSplit;
        const int first = tile.sequence.start + tile.begin;
        const int out_batch = packed ? 0 : batch;
        write_gradient<QTile>(dk_frag, attention.softmax_scale, smem,
                              static_cast<char*>(params.dk.data) + row_offset(params.dk, out_batch, first, head_k) * 2,
                              params.dk.stride_row * 2, group * kWarpKeys, part, rows, rows_used, attention.head_dim,
                              lane);
        write_gradient<VTile>(dv_frag, kRich ? arguments.dropout_scale : 1.f, smem + kKBytes,
                              static_cast<char*>(params.dv.data) + row_offset(params.dv, out_batch, first, head_k) * 2,
                              params.dv.stride_row * 2, group * kWarpKeys, part, rows, rows_used, attention.head_dim_v,
                              lane);
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
