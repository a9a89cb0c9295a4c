// Backward attention on sm80: what a warp computes of one slice of queries, in registers. S^T, dP^T, P^T and dS^T are
// fragments of a warp's keys (16 kMTiles rows) by the slice's queries (8 kNTiles columns); rounded to the type they are
// the A operands of dV and dK. Shared memory is read by ldmatrix (sm80/tile.cuh) and ordered by the caller's barriers.
#pragma once

#include <stdint.h>

#include "core/mask.cuh"
#include "core/mma.cuh"
#include "core/numeric.cuh"
#include "core/philox.cuh"
#include "core/tanh.cuh"
#include "params.h"
#include "ptx/ex2.cuh"
#include "ptx/memory.cuh"
#include "sm80/backward_work.cuh"
#include "sm80/tile.cuh"

namespace flash_ext::sm80 {

template <int kM, int kN>
__device__ __forceinline__ void clear(float (&fragment)[kM][kN][4]) {
#pragma unroll
    for (int i = 0; i < kM * kN * 4; ++i) fragment[i / 4 / kN][i / 4 % kN][i % 4] = 0.f;
}

// scores = rows B^T over kSteps x 16 columns: rows are this warp's keys (K or V), B the slice's queries (Q or dO).
template <DataType kType, class Tile, int kSteps, int kMTiles, int kNTiles>
__device__ __forceinline__ void multiply_scores(float (&scores)[kMTiles][kNTiles][4], uint32_t keys_offset,
                                                uint32_t queries_offset, uint32_t keys_smem, uint32_t queries_smem) {
    clear(scores);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        uint32_t a_frag[kMTiles][4];
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            ptx::ldmatrix_x4(a_frag[m], Tile::columns_right(keys_offset, step) + keys_smem + m * 16 * Tile::kRowBytes);
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
template <DataType kType, class Tile, int kSplit, int kMTiles, int kTiles>
__device__ __forceinline__ void multiply_gradient(float (&gradient)[kMTiles][kTiles][4],
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
template <DataType kType, bool kRich, bool kMasked, int kMTiles, int kNTiles>
__device__ __forceinline__ void differentiate_softmax(float (&s)[kMTiles][kNTiles][4], float (&dp)[kMTiles][kNTiles][4],
                                                      uint32_t (&p_frag)[kMTiles][kNTiles / 2][4],
                                                      uint32_t (&ds_frag)[kMTiles][kNTiles / 2][4],
                                                      const BackwardArguments& arguments, const Mask& queries_mask,
                                                      int keys_used, Place place, int first_query, float slope_log2,
                                                      uint32_t rows_lane, const Dropout& dropout) {
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
                            const float t = tanh_ex2(score * arguments.inner_scale);
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
        for (int k = 0; k < kNTiles / 2; ++k) {
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
template <class STile, int kMTiles, int kChunks>
__device__ __forceinline__ void store_scores(const uint32_t (&frag)[kMTiles][kChunks][4], uint32_t s_smem,
                                             int first_key_row, int first_chunk, int lane) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int row = first_key_row + m * 16 + c % 2 * 8 + lane / 4;
                ptx::st_shared_b32(s_smem + STile::offset(row, first_chunk + 2 * k + c / 2) + lane % 4 * 4,
                                   frag[m][k][c]);
            }
        }
    }
}

// The A operand of 16 queries.
template <int kMTiles, int kChunks>
__device__ __forceinline__ void take(uint32_t (&a_frag)[kMTiles][4], const uint32_t (&frag)[kMTiles][kChunks][4],
                                     int k) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int c = 0; c < 4; ++c) a_frag[m][c] = frag[m][k][c];
    }
}

// The same from shared memory.
template <class STile, int kMTiles>
__device__ __forceinline__ void load_rows(uint32_t (&a_frag)[kMTiles][4], uint32_t lane_offset, uint32_t rows_smem,
                                          int k) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
        ptx::ldmatrix_x4(a_frag[m], STile::columns_right(lane_offset, k) + rows_smem + m * 16 * STile::kRowBytes);
    }
}
// dK or dV: this warp's keys and columns to global memory, through its own part of the K or V tile.
template <DataType kType, class Tile, int kSplit, int kMTiles, int kTiles>
__device__ __forceinline__ void write_gradient(const float (&gradient)[kMTiles][kTiles][4], float scale,
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
    static_assert(kMTiles * 16 * kTiles % 32 == 0);
#pragma unroll
    for (int i = 0; i < kMTiles * 16 * kTiles / 32; ++i) {
        const int row = first_row + (i * 32 + lane) / kTiles, chunk = chunk_of((i * 32 + lane) % kTiles);
        if (row < rows && chunk * 8 < columns) {
            *reinterpret_cast<uint4*>(destination + row * stride + chunk * 16) =
                *reinterpret_cast<const uint4*>(tile_smem + Tile::offset(row, chunk));
        }
    }
}

}  // namespace flash_ext::sm80
