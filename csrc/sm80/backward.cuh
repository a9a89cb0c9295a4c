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
//   kSplit = 1       a warp computes its keys against all queries; P^T and dS^T stay in registers for dV and dK
//   kSplit = 2, 4    wide heads: kSplit warps share kWarpKeys keys, each computes them against its part of the queries,
//                    all read P^T and dS^T of all queries back from shared memory, each owns a part of the columns of
//                    dK and dV
//
// One step (query block m of one head), kStages buffers of Q and dO:
//   wait Q[m], dO[m]; barrier           all copies have landed; no warp still reads what is filled next
//   kStages = 2: copy Q, dO of the next step
//   for each slice of queries: S^T, dP^T, P, dS -> shared memory; kSplit = 1: dV, dK
//   barrier                             dS (and P) is there; kSplit = 1: all warps are done with Q and dO
//   kSplit > 1: dV, dK
//   kSplit > 1 and kStages = 1: barrier all warps are done with Q and dO
//   kStages = 1: copy Q, dO of the next step
//   dQ = dS K, added to the scratch
//
// Deterministic: the additions into one query tile are made in ascending order of the key block. A CTA takes its place
// from a ticket counter, so it only ever waits for CTAs that have started; query blocks are walked from the last to the
// first, so that with a causal mask all key blocks of a head start at the same query block and follow one another at
// the distance of one addition. Many heads at once (core/tile_order.cuh) keep such a chain short. Each warp waits for
// the turn by itself; thread 0 passes it on behind the next step's first barrier, so neither costs a barrier of its
// own.
//
// Shared memory: K kBlockN x d, V kBlockN x d_v, kStages x (Q kBlockM x d, dO kBlockM x d_v), dS^T (kSplit > 1: and
// P^T) kBlockN x kBlockM, kStages x 2 kBlockM fp32 (lse, delta). dK and dV leave through the rows of K and V.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "common/backward_helpers.h"
#include "common/dq_scratch.cuh"
#include "core/launch.cuh"
#include "core/mask.cuh"
#include "core/sequence.cuh"
#include "core/tile_order.cuh"
#include "params.h"
#include "ptx/special_registers.cuh"
#include "sm80/backward_scores.cuh"
#include "sm80/backward_work.cuh"
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
    static constexpr int64_t kSharedMemory = kWorkOffset + sizeof(BackwardWork);

    using SFragment = float[kMTiles][kNTiles][4];
    using DkFragment = float[kMTiles][kDkTiles][4];
    using DvFragment = float[kMTiles][kDvTiles][4];
    using PFragment = uint32_t[kMTiles][kSlice / 16][4];  // an A operand
    using DqFragment = float[kDqMTiles][kDqPassTiles][4];

    // Starts to copy a query block: Q, dO and the terms of its rows. Rows past the end of the sequence become zeros
    // (their scores are masked).
    __device__ __forceinline__ static void copy_queries(const BackwardArguments& arguments,
                                                        const volatile BackwardWork& work, uint32_t smem_base, int head,
                                                        int block, int stage) {
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
    __device__ __forceinline__ static void copy_next(const BackwardArguments& arguments,
                                                     const volatile BackwardWork& work, uint32_t smem_base, int head,
                                                     int block, int stage) {
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
                                                  const volatile BackwardWork& work, int head, int block, int pass) {
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

    // The scores of one query block and what they give to dK and dV; dS to shared memory.
    __device__ __forceinline__ static void accumulate(DkFragment& dk_frag, DvFragment& dv_frag,
                                                      const BackwardArguments& arguments,
                                                      const volatile BackwardWork& work, uint32_t smem_base, int head,
                                                      int block, int stage) {
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
            multiply_scores<kType, QTile, kHeadDim / 16>(s_frag, q_lane, q_column_lane,
                                                         smem_base + group * kWarpKeys * QTile::kRowBytes,
                                                         q_smem + first * QTile::kRowBytes);
            multiply_scores<kType, VTile, kHeadDimV / 16>(dp_frag, v_lane, v_column_lane,
                                                          smem_base + kKBytes + group * kWarpKeys * VTile::kRowBytes,
                                                          dout_smem + first * VTile::kRowBytes);
            PFragment p_frag, ds_frag;
            const auto differentiate = [&]<bool kMasked>() {
                const Mask mask{arguments.bounds, work.keys_used - work.queries_used, work.keys_used};
                differentiate_softmax<kType, kRich, kMasked>(
                    s_frag, dp_frag, p_frag, ds_frag, arguments, mask.transposed(work.queries_used), mask.seqlen_k,
                    place, block * kBlockM + first, slope_log2, terms_lane + first * 8, dropout);
            };
            if (is_masked) {
                differentiate.template operator()<true>();
            } else {
                differentiate.template operator()<false>();
            }
            store_scores<STile>(ds_frag, ds_smem, group * kWarpKeys, first / 8, lane);
            if constexpr (kSplit > 1) {
                store_scores<STile>(p_frag, p_smem, group * kWarpKeys, first / 8, lane);
            } else {
#pragma unroll
                for (int k = 0; k < kSlice / 16; ++k) {
                    const int row = slice * kSlice + k * 16;
                    uint32_t a_frag[kMTiles][4];
                    take(a_frag, p_frag, k);
                    multiply_gradient<kType, VTile, kSplit>(dv_frag, a_frag, v_columns,
                                                            dout_smem + row * VTile::kRowBytes);
                    take(a_frag, ds_frag, k);
                    multiply_gradient<kType, QTile, kSplit>(dk_frag, a_frag, q_columns,
                                                            q_smem + row * QTile::kRowBytes);
                }
            }
        }
        __syncthreads();  // dS (and P) of all warps is there
        if constexpr (kSplit > 1) {
            const uint32_t s_lane = STile::block_offset(0, lane), first_row = group * kWarpKeys * STile::kRowBytes;
#pragma unroll
            for (int k = 0; k < kBlockM / 16; ++k) {
                uint32_t a_frag[kMTiles][4];
                load_rows<STile>(a_frag, s_lane, p_smem + first_row, k);
                multiply_gradient<kType, VTile, kSplit>(dv_frag, a_frag, v_columns,
                                                        dout_smem + k * 16 * VTile::kRowBytes);
                load_rows<STile>(a_frag, s_lane, ds_smem + first_row, k);
                multiply_gradient<kType, QTile, kSplit>(dk_frag, a_frag, q_columns, q_smem + k * 16 * QTile::kRowBytes);
            }
        }
    }

    __device__ __forceinline__ static void run(const BackwardArguments& arguments) {
        extern __shared__ __align__(1024) unsigned char smem[];
        const BackwardParams& params = arguments.params;
        const ForwardParams& attention = params.attention;
        const uint32_t smem_base = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
        const bool deterministic = arguments.scratch.turns != nullptr;

        BackwardWork* const shared_work = reinterpret_cast<BackwardWork*>(smem + kWorkOffset);
        if (threadIdx.x == 0) *shared_work = {find_key_tile<kBlockM, kBlockN>(arguments), nullptr};
        __syncthreads();  // the work is there
        volatile BackwardWork& work = *shared_work;
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
                if (deterministic) pass_turn_on(work);
                if constexpr (kStages == 2) copy_next(arguments, work, smem_base, head, block, stage ^ 1);
                accumulate(dk_frag, dv_frag, arguments, work, smem_base, head, block, stage);
                if constexpr (kStages == 1) {
                    if constexpr (kSplit > 1) __syncthreads();  // all warps are done with Q and dO
                    copy_next(arguments, work, smem_base, head, block, 0);
                }
                const bool is_whole = attention.head_dim == kHeadDim && (block + 1) * kBlockM <= work.queries_used;
#pragma unroll 1
                for (int pass = 0; pass < kDqPasses; ++pass) {
                    DqFragment dq_frag;
                    multiply_dq(dq_frag, smem_base, pass);
                    if (deterministic && pass == 0) wait_for_turn<kBlockM, kBlockN>(arguments, work, head, block);
                    if (is_whole) {
                        add_dq<true>(dq_frag, arguments, work, head, block, pass);
                    } else {
                        add_dq<false>(dq_frag, arguments, work, head, block, pass);
                    }
                }
                if constexpr (kStages == 2) stage ^= 1;
            }
        }

        __syncthreads();  // all warps are done with K and V, whose rows the gradients leave through
        if (deterministic) pass_turn_on(work);
        const int lane = threadIdx.x % 32, group = threadIdx.x / 32 / kSplit, part = threadIdx.x / 32 % kSplit;
        const int first = work.keys_start + work.begin;
        const int batch = attention.cu_seqlens_k != nullptr ? 0 : work.batch;
        write_gradient<kType, QTile, kSplit>(
            dk_frag, attention.softmax_scale, smem,
            static_cast<char*>(params.dk.data) + row_offset(params.dk, batch, first, work.head_k) * 2,
            params.dk.stride_row * 2, group * kWarpKeys, part, work.rows, work.rows_used, attention.head_dim, lane);
        write_gradient<kType, VTile, kSplit>(
            dv_frag, kRich ? arguments.dropout_scale : 1.f, smem + kKBytes,
            static_cast<char*>(params.dv.data) + row_offset(params.dv, batch, first, work.head_k) * 2,
            params.dv.stride_row * 2, group * kWarpKeys, part, work.rows, work.rows_used, attention.head_dim_v, lane);
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

        const auto [heads, tiles] = key_tiles(attention, kBlockN);
        if (heads * tiles > 0) {
            fill_backward_arguments(arguments, kBlockM);
            arguments.order = launch_order(arguments, heads, tiles, context->sm_count);

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
    // Where all key tiles are equal, head by head: the CTAs of one share its Q and dO through the L2 cache. With a
    // causal mask the first key tiles are the heaviest: the heads of a section take turns, and a section has about
    // twice the CTAs that run at once, so that a launch ends with light tiles. Deterministic: the fewer key tiles of a
    // head run at once, the less they wait for one another.
    static TileOrder launch_order(const BackwardArguments& arguments, int64_t heads, int64_t tiles, int32_t sm_count) {
        const ForwardParams& attention = arguments.params.attention;
        const bool deterministic = attention.deterministic != 0;
        if (arguments.bounds.right != 0 && !deterministic) return make_tile_order(heads, tiles, false, 0);
        int64_t sequence_tiles = tiles;
        if (attention.cu_seqlens_k != nullptr && attention.batch > 0) sequence_tiles = tiles / attention.batch + 1;
        const int64_t section = (int64_t{2} * sm_count * kCtas + sequence_tiles - 1) / sequence_tiles;
        return ascending_order(heads, tiles, deterministic && section < 32 ? 32 : section);
    }

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
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtas)
    backward_kernel(const __grid_constant__ BackwardArguments arguments) {
    Kernel::run(arguments);
}

}  // namespace flash_ext::sm80
