// Forward attention for every GPU from sm_80 on (FlashAttention-2, arXiv 2307.08691, algorithm 1).
//
// One CTA: kWarps warps, each owning kWarpRows = 16 or 32 of the tile's kBlockM query rows for the whole walk over the
// keys ("split Q"): no exchange between warps but the shared K and V tiles. The keys are walked from the last block to
// the first, so that the blocks cut by the diagonal or the end of the keys come first; they and the blocks cut by the
// window's left edge run a masked copy of the step, all others an unmasked one.
//
//   kStages = 1    wait K[j] | copy V[j]   under  S = Q K[j]^T
//                  wait V[j] | copy K[j-1] under  softmax, O += P V[j]
//   kStages = 2    wait K[j], V[j] | copy K[j-1], V[j-1] under the whole step (one barrier a step instead of two)
//
// Each wait is cp.async.wait_group (this thread's copies have landed) and __syncthreads (so have the others', and all
// warps are done with the buffer that is filled next).
//
// Registers of a warp: S (kWarpRows x kBlockN) becomes P in place and, packed in pairs, the A operand of P V; O
// (kWarpRows x d_v) stays in registers to the end. The plain softmax keeps raw scores and scales them in the exponent
// (base 2); in the rich variant they are in base 2 already. Row sums are added up across lanes once, at the end.
//
// Shared memory: Q kBlockM x d, kStages x K (kBlockN x d), kStages x V (kBlockN x d_v), swizzled (tile.cuh), the plan,
// row sums with park_sums. The output leaves through each warp's own rows of Q.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "core/launch.cuh"
#include "core/mask.cuh"
#include "core/mma.cuh"
#include "core/numeric.cuh"
#include "core/philox.cuh"
#include "core/sequence.cuh"
#include "core/softmax.cuh"
#include "core/tile_order.cuh"
#include "params.h"
#include "ptx/special_registers.cuh"
#include "sm80/forward_scores.cuh"
#include "sm80/tile.cuh"

namespace flash_ext::sm80 {

// The tile's keys in csrc/kernels.toml.
struct ForwardTile {
    int block_m;             // query rows
    int block_n;             // key rows
    int stages;              // buffers of K and of V
    int warps;               // per CTA
    int ctas = 1;            // CTAs per SM that the register budget leaves room for
    int q_in_registers = 0;  // 1: Q's fragments are read from shared memory once
    // Ways to save registers where 128 x 64 scores and 128 x d_v outputs leave too few; each costs time in every step.
    int park_sums = 0;         // 1: row sums wait in shared memory while S is made
    int remake_addresses = 0;  // 1: shared-memory addresses are made anew in each step instead of kept
    int remake_pointers = 0;   // 1: the same for the pointers into K and V
};

// What the host works out once for all CTAs of a launch.
struct ForwardArguments {
    ForwardParams params;
    MaskBounds bounds;
    TileOrder order;
    FastDivisor heads;  // heads_q
    FastDivisor group;  // query heads of a key head
    // Bytes that the loops step by; from the constant bank they cost no register.
    int64_t q_pass_stride, k_pass_stride, v_pass_stride;  // rows a loader's pass apart
    int64_t k_block_stride, v_block_stride;               // rows kBlockN apart
    float scale_log2;                                     // softmax_scale * log2(e)
    float inner_scale;                                    // softmax_scale / softcap
    float softcap_log2;                                   // softcap * log2(e)
    float dropout_scale;                                  // 1 / the probability to keep
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtas)
    forward_kernel(const __grid_constant__ ForwardArguments arguments);

template <DataType kType, int kHeadDim, int kHeadDimV, ForwardTile kTile, bool kRich>
struct Forward {
    static constexpr int kBlockM = kTile.block_m;
    static constexpr int kBlockN = kTile.block_n;
    static constexpr int kStages = kTile.stages;
    static constexpr int kThreads = kTile.warps * 32;
    static constexpr int kCtas = kTile.ctas;
    static constexpr int kWarpRows = kBlockM / kTile.warps;
    static constexpr int kMTiles = kWarpRows / 16;  // 16-row tiles of a warp
    static constexpr int kNTiles = kBlockN / 8;     // 8-column tiles of S
    static constexpr int kOTiles = kHeadDimV / 8;   // 8-column tiles of O
    static constexpr int kQkSteps = kHeadDim / 16;  // reduction steps of Q K^T
    static constexpr int kPvSteps = kBlockN / 16;   // and of P V
    static_assert(kWarpRows == 16 || kWarpRows == 32);
    static_assert(kBlockN % 32 == 0, "a dropout call covers 32 keys");
    static_assert(kHeadDimV <= kHeadDim, "the output leaves through the rows of Q");
    static_assert(kStages == 1 || kStages == 2);

    using QTile = SharedTile<kHeadDim>;
    using KTile = SharedTile<kHeadDim>;
    using VTile = SharedTile<kHeadDimV>;
    static constexpr int kQBytes = QTile::bytes(kBlockM);
    static constexpr int kKBytes = KTile::bytes(kBlockN);
    static constexpr int kVBytes = VTile::bytes(kBlockN);
    static constexpr int kPlanOffset = kQBytes + kStages * (kKBytes + kVBytes);

    using QLoader = TileLoader<kBlockM, kHeadDim, kThreads>;
    using KLoader = TileLoader<kBlockN, kHeadDim, kThreads>;
    using VLoader = TileLoader<kBlockN, kHeadDimV, kThreads>;

    using SFragment = float[kMTiles][kNTiles][4];
    using OFragment = float[kMTiles][kOTiles][4];
    using QFragment = uint32_t[kMTiles][4];

    // What this CTA does: worked out once and kept in shared memory, for in the loop every register counts.
    struct alignas(16) Plan {
        Mask mask;
        KeyBlocks blocks;
        int row_begin;   // first row of the tile, from the start of the sequence
        int tensor_row;  // the same from the start of the batch entry (dense) or buffer (packed)
        int rows;        // rows of the tile to write
        int rows_used;   // of these, the first so many are computed, the rest is slack
        int head;
        int batch;         // of the tensors' stride_batch; the sequence's number otherwise
        const char* keys;  // the sequence's first key and value row of the head
        const char* values;
    };
    static constexpr int kSumsOffset = kPlanOffset + sizeof(Plan);  // per thread, where they are parked
    static constexpr int64_t kSharedMemory = kSumsOffset + (kTile.park_sums ? kThreads * kMTiles * 8 : 0);

    // This lane's row of the block at (0, 0) of its warp's rows of Q.
    __device__ __forceinline__ static uint32_t q_row_address(uint32_t q_smem, int thread) {
        return q_smem + thread / 32 * kWarpRows * QTile::kRowBytes + QTile::block_offset(0, thread % 32);
    }

    __device__ __forceinline__ static void load_q(QFragment& q_frag, uint32_t q_lane, int step) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            ptx::ldmatrix_x4(q_frag[m], QTile::columns_right(q_lane, step) + m * 16 * QTile::kRowBytes);
        }
    }

    // The row address `steps` blocks to the right in a buffer of K or V. Where the buffer is always the same, its
    // offset becomes part of the instruction and all operands share the lane's swizzled addresses; where it is not, the
    // order is the other way round, so that those addresses depend on the stage and are not kept.
    template <class Tile>
    __device__ __forceinline__ static uint32_t k_or_v_address(uint32_t lane_smem, uint32_t offset, int steps) {
        return kStages == 1 ? Tile::columns_right(lane_smem, steps) + offset
                            : Tile::columns_right(lane_smem + offset, steps);
    }

    // s_frag = Q K^T. q_resident: Q's fragments, where they stay in registers.
    // q_lane: this lane's row of the block at (0, 0) of the warp's rows of Q; k_lane + k_offset: the same of this
    // step's K.
    template <class QResident>
    __device__ __forceinline__ static void multiply_qk(SFragment& s_frag, const QResident& q_resident, uint32_t q_lane,
                                                       uint32_t k_lane, uint32_t k_offset) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
                for (int c = 0; c < 4; ++c) s_frag[m][n][c] = 0.f;
            }
        }
#pragma unroll
        for (int step = 0; step < kQkSteps; ++step) {
            QFragment q_frag;
            if constexpr (kTile.q_in_registers) {
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
                    for (int c = 0; c < 4; ++c) q_frag[m][c] = q_resident[step][m][c];
                }
            } else {
                load_q(q_frag, q_lane, step);
            }
#pragma unroll
            for (int n = 0; n < kNTiles; n += 2) {
                uint32_t k_frag[4];
                ptx::ldmatrix_x4(k_frag, k_or_v_address<KTile>(k_lane, k_offset, step) + n * 8 * KTile::kRowBytes);
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
                    mma<kType>(s_frag[m][n], q_frag[m], k_frag[0], k_frag[1]);
                    mma<kType>(s_frag[m][n + 1], q_frag[m], k_frag[2], k_frag[3]);
                }
            }
        }
    }

    // o_frag += P V.
    __device__ __forceinline__ static void multiply_pv(OFragment& o_frag, const SFragment& p_frag, uint32_t v_lane,
                                                       uint32_t v_offset) {
#pragma unroll
        for (int step = 0; step < kPvSteps; ++step) {
            uint32_t p_pack[kMTiles][4];
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const float (&pair)[4] = p_frag[m][2 * step + c / 2];
                    p_pack[m][c] = pack<kType>(pair[2 * (c % 2)], pair[2 * (c % 2) + 1]);
                }
            }
#pragma unroll
            for (int n = 0; n < kOTiles; n += 2) {
                uint32_t v_frag[4];
                ptx::ldmatrix_x4_trans(v_frag,
                                       k_or_v_address<VTile>(v_lane, v_offset, n / 2) + step * 16 * VTile::kRowBytes);
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
                    mma<kType>(o_frag[m][n], p_pack[m], v_frag[0], v_frag[1]);
                    mma<kType>(o_frag[m][n + 1], p_pack[m], v_frag[2], v_frag[3]);
                }
            }
        }
    }

    // Writes this warp's rows: those that are used from o_frag, slack as 0 and -inf.
    __device__ __forceinline__ static void write_rows(const OFragment& o_frag, const OnlineSoftmax<kMTiles>& softmax,
                                                      const ForwardArguments& arguments, const Plan& plan,
                                                      unsigned char* smem, int thread) {
        const ForwardParams& params = arguments.params;
        const int warp_row = thread / 32 * kWarpRows, lane = thread % 32;
        const int rows = plan.rows - warp_row, rows_used = plan.rows_used - warp_row;
        const bool packed = params.cu_seqlens_q != nullptr;
        const int first_row = plan.tensor_row + warp_row;
        unsigned char* out_smem = smem + warp_row * QTile::kRowBytes;
        char* out = static_cast<char*>(params.out.data) +
                    row_offset(params.out, packed ? 0 : plan.batch, first_row, plan.head) * 2;
        float* lse = params.lse + first_row +
                     ((packed ? 0 : static_cast<int64_t>(plan.batch) * params.heads_q) + plan.head) * params.seqlen_q;
        const bool has_sink = params.sinks != nullptr;
        const float sink = has_sink ? load_as_float(params.sinks, params.sinks_dtype, plan.head) : 0.f;
        const float scale_log2 = kRich ? 1.f : arguments.scale_log2;
        // O goes where this warp's Q was. Where no barrier of a step stands behind the last ldmatrix of Q, the memory
        // model orders that read and other lanes' writes only here.
        if constexpr (kStages > 1 && !kTile.q_in_registers) __syncwarp();
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = m * 16 + half * 8 + lane / 4;
                RowResult result = softmax.finish(m, half, scale_log2, has_sink, sink);
                if (kRich) result.out_scale *= arguments.dropout_scale;
                if (row >= rows_used) result = {0.f, minus_infinity(), false};
                if (lane % 4 == 0 && row < rows) lse[row] = result.lse;
#pragma unroll
                for (int n = 0; n < kOTiles; ++n) {
                    const float low = o_frag[m][n][2 * half] * result.out_scale;
                    const float high = o_frag[m][n][2 * half + 1] * result.out_scale;
                    *reinterpret_cast<uint32_t*>(out_smem + QTile::offset(row, n) + lane % 4 * 4) =
                        result.has_keys ? pack<kType>(low, high) : 0u;
                }
            }
        }
        __syncwarp();  // the rows of a warp are written and read by that warp alone
        constexpr int kOutChunks = kHeadDimV / 8;
#pragma unroll
        for (int i = 0; i < kWarpRows * kOutChunks / 32; ++i) {
            const int row = (i * 32 + lane) / kOutChunks, chunk = (i * 32 + lane) % kOutChunks;
            if (row < rows && chunk * 8 < params.head_dim_v) {
                *reinterpret_cast<uint4*>(out + row * params.out.stride_row * 2 + chunk * 16) =
                    *reinterpret_cast<const uint4*>(out_smem + QTile::offset(row, chunk));
            }
        }
    }

    // False: nothing to do.
    __device__ __forceinline__ static bool make_plan(Plan& plan, const ForwardArguments& arguments) {
        const ForwardParams& params = arguments.params;
        const uint64_t position = static_cast<uint64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
        if (position >= static_cast<uint64_t>(arguments.order.heads) * arguments.order.tiles) return false;
        const TileIndex index = tile_at(arguments.order, position);
        const Quotient batch_head = divide_any(index.head, arguments.heads);
        const int dense_batch = static_cast<int>(batch_head.quotient);
        plan.head = static_cast<int>(batch_head.remainder);
        const TileRows tile = find_tile(params.cu_seqlens_q, params.seqused_q, params.seqlen_q, params.batch,
                                        dense_batch, index.tile, kBlockM);
        plan.rows = min(tile.sequence.length - tile.begin, kBlockM);
        if (plan.rows <= 0) return false;  // an empty slot
        plan.rows_used = min(max(tile.sequence.used - tile.begin, 0), kBlockM);
        plan.batch = tile.batch;
        plan.row_begin = tile.begin;
        plan.tensor_row = tile.sequence.start + tile.begin;
        SequenceRows keys{};
        if (plan.rows_used > 0) {
            keys = sequence_rows(params.cu_seqlens_k, params.seqused_k, params.seqlen_k, plan.batch);
        }
        const int head_k = static_cast<int>(divide(batch_head.remainder, arguments.group).quotient);
        plan.keys = static_cast<const char*>(params.k.data) + row_offset(params.k, plan.batch, keys.start, head_k) * 2;
        plan.values =
            static_cast<const char*>(params.v.data) + row_offset(params.v, plan.batch, keys.start, head_k) * 2;
        plan.mask = {arguments.bounds, keys.used - tile.sequence.used, keys.used};
        plan.blocks = key_blocks(plan.mask, tile.begin, tile.begin + plan.rows_used, kBlockN);
        return true;
    }

    __device__ __forceinline__ static void run(const ForwardArguments& arguments) {
        extern __shared__ __align__(1024) unsigned char smem[];
        const ForwardParams& params = arguments.params;
        const int thread = threadIdx.x;

        // The start works on own_plan; the rest, behind a barrier, on the copy in shared memory.
        Plan& plan = *reinterpret_cast<Plan*>(smem + kPlanOffset);
        Plan own_plan;
        if (!make_plan(own_plan, arguments)) return;
        if (thread == 0) plan = own_plan;

        const uint32_t q_smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
        constexpr uint32_t kKOffset = kQBytes, kVOffset = kQBytes + kStages * kKBytes;  // from q_smem
        // This thread's first chunk of the block of keys that is copied next, unless worked out for each copy. copier:
        // threadIdx.x, kept or read anew (ForwardTile).
        const char *k_source = nullptr, *v_source = nullptr;
        const auto k_source_at = [&](const char* keys, int copier, int block) {
            return keys + block * arguments.k_block_stride + KLoader::source_offset(copier, params.k.stride_row * 2);
        };
        const auto v_source_at = [&](const char* values, int copier, int block) {
            return values + block * arguments.v_block_stride + VLoader::source_offset(copier, params.v.stride_row * 2);
        };
        const auto copy_k = [&](bool is_first, int copier, int block, int stage, int rows) {
            const char* source = kTile.remake_pointers && !is_first ? k_source_at(plan.keys, copier, block) : k_source;
            KLoader::load(q_smem + KLoader::smem_offset(copier) + kKOffset + stage * kKBytes, source,
                          arguments.k_pass_stride, rows, params.head_dim, copier);
            k_source -= arguments.k_block_stride;
        };
        const auto copy_v = [&](bool is_first, int copier, int block, int stage, int rows) {
            const char* source =
                kTile.remake_pointers && !is_first ? v_source_at(plan.values, copier, block) : v_source;
            VLoader::load(q_smem + VLoader::smem_offset(copier) + kVOffset + stage * kVBytes, source,
                          arguments.v_pass_stride, rows, params.head_dim_v, copier);
            v_source -= arguments.v_block_stride;
        };

        float slope_log2 = 0.f;
        PhiloxKey philox{};
        const bool drops = kRich && params.rng_state != nullptr && params.dropout_threshold > 0;
        if constexpr (kRich) {
            if (params.alibi_slopes != nullptr && own_plan.rows_used > 0) {
                slope_log2 = params.alibi_slopes[own_plan.batch * params.alibi_stride_batch + own_plan.head] * kLog2E;
            }
            if (drops) philox = philox_key(params.rng_state);
        }

        OnlineSoftmax<kMTiles> softmax;
        OFragment o_frag;
#pragma unroll
        for (int i = 0; i < kMTiles * kOTiles * 4; ++i) o_frag[i / 4 / kOTiles][i / 4 % kOTiles][i % 4] = 0.f;
        uint32_t q_resident[kTile.q_in_registers ? kQkSteps : 1][kMTiles][4];

        int block = own_plan.blocks.end - 1;
        if (block >= own_plan.blocks.begin) {
            const char* q_source = static_cast<const char*>(params.q.data) +
                                   row_offset(params.q, own_plan.batch, own_plan.tensor_row, own_plan.head) * 2 +
                                   QLoader::source_offset(thread, params.q.stride_row * 2);
            QLoader::load(q_smem + QLoader::smem_offset(thread), q_source, arguments.q_pass_stride,
                          own_plan.rows_used - QLoader::row(thread), params.head_dim, thread);
            if constexpr (kTile.q_in_registers) ptx::cp_async_commit_group();
            k_source = k_source_at(own_plan.keys, thread, block);
            v_source = v_source_at(own_plan.values, thread, block);
            const int keys_left = own_plan.mask.seqlen_k - block * kBlockN;
            copy_k(true, thread, block, 0, keys_left - KLoader::row(thread));
            if constexpr (kStages > 1) copy_v(true, thread, block, 0, keys_left - VLoader::row(thread));
            ptx::cp_async_commit_group();
            if constexpr (kTile.q_in_registers) {
                ptx::cp_async_wait_group<1>();
                __syncthreads();  // Q has landed for all
#pragma unroll
                for (int step = 0; step < kQkSteps; ++step) {
                    load_q(q_resident[step], q_row_address(q_smem, thread), step);
                }
            }
        }

        __syncthreads();  // the plan is there; its barrier lies under the first copies

        const auto step = [&]<bool kMasked>() {
            const int stage = (plan.blocks.end - 1 - block) % kStages;
            // What comes from %tid read anew cannot be kept across steps; see ForwardTile.
            const int step_thread = kTile.remake_addresses ? ptx::tid_x() : thread;
            const int place_thread = kMasked || kRich ? ptx::tid_x() : 0;
            ptx::cp_async_wait_group<0>();
            __syncthreads();  // K[j] (and Q; kStages 2: V[j]) is there; no warp still reads what is filled next
            if constexpr (kStages == 1) {
                copy_v(false, step_thread, block, 0, plan.mask.seqlen_k - block * kBlockN - VLoader::row(step_thread));
            } else if (block > plan.blocks.begin) {
                // Only the last block, which is behind us, can end before its last key.
                copy_k(false, step_thread, block - 1, stage ^ 1, kBlockN);
                copy_v(false, step_thread, block - 1, stage ^ 1, kBlockN);
            }
            ptx::cp_async_commit_group();

            [[maybe_unused]] float2* parked = reinterpret_cast<float2*>(smem + kSumsOffset) + step_thread * kMTiles;
            if constexpr (kTile.park_sums) {
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) parked[m] = {softmax.row_sum[m][0], softmax.row_sum[m][1]};
            }
            SFragment s_frag;
            multiply_qk(s_frag, q_resident, q_row_address(q_smem, step_thread),
                        q_smem + KTile::column_block_offset(0, step_thread % 32), kKOffset + stage * kKBytes);

            if constexpr (kTile.park_sums) {
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
                    softmax.row_sum[m][0] = parked[m].x;
                    softmax.row_sum[m][1] = parked[m].y;
                }
            }
            if constexpr (kStages == 1) {
                ptx::cp_async_wait_group<0>();
                __syncthreads();  // V[j] is there; all warps are done with K[j]
                if (block > plan.blocks.begin) copy_k(false, step_thread, block - 1, 0, kBlockN);
                ptx::cp_async_commit_group();
            }
            const int first_key = block * kBlockN;
            const RowPlace place{plan.row_begin + place_thread / 32 * kWarpRows + place_thread % 32 / 4,
                                 place_thread % 4 * 2};
            if constexpr (kRich) {
                transform_scores(s_frag, arguments.softcap_log2, arguments.inner_scale, arguments.scale_log2,
                                 slope_log2, place, plan.mask.shift, first_key);
            }
            if constexpr (kMasked) mask_scores(s_frag, plan.mask, place, first_key);
            const float scale_log2 = kRich ? 1.f : arguments.scale_log2;
            float rescale[kMTiles][2];
            if (softmax.template update<kMasked>(s_frag, scale_log2, rescale)) {
#pragma unroll
                for (int i = 0; i < kMTiles * kOTiles * 4; ++i) {
                    o_frag[i / 4 / kOTiles][i / 4 % kOTiles][i % 4] *= rescale[i / 4 / kOTiles][i % 4 / 2];
                }
            }
            if constexpr (kRich) {
                if (drops) {
                    drop_scores(s_frag, philox, params.dropout_threshold, place, first_key, plan.batch, plan.head);
                }
            }
            multiply_pv(o_frag, s_frag, q_smem + VTile::block_offset(0, step_thread % 32), kVOffset + stage * kVBytes);
        };

        // One pair of loops, walked twice where a window cuts blocks on the left: the masked step is instantiated once.
        // Bounds are read from shared memory each time; as values carried around the loops they would be spilled.
        while (block >= plan.blocks.begin) {
#pragma unroll 1
            while (block >= plan.blocks.full_end || (block < plan.blocks.full_begin && block >= plan.blocks.begin)) {
                step.template operator()<true>();
                --block;
            }
#pragma unroll 1
            while (block >= plan.blocks.full_begin) {
                step.template operator()<false>();
                --block;
            }
        }

        write_rows(o_frag, softmax, arguments, plan, smem, ptx::tid_x());
    }

    static int64_t workspace(const void*, const LaunchContext*) { return 0; }

    static int32_t launch(const void* forward_params, const LaunchContext* context) {
        const ForwardParams& params = *static_cast<const ForwardParams*>(forward_params);
        const bool packed = params.cu_seqlens_q != nullptr;
        const int64_t heads = packed ? params.heads_q : static_cast<int64_t>(params.batch) * params.heads_q;
        const int64_t tiles = packed ? varlen_slots(params.seqlen_q, params.batch, kBlockM)
                                     : (static_cast<int64_t>(params.seqlen_q) + kBlockM - 1) / kBlockM;
        if (params.seqlen_q == 0 || heads == 0 || tiles == 0) return cudaSuccess;

        ForwardArguments arguments;
        arguments.params = params;
        arguments.bounds = mask_bounds(params);
        const int64_t key_bytes = static_cast<int64_t>(params.seqlen_k) * (params.head_dim + params.head_dim_v) * 2 *
                                  params.heads_k / params.heads_q;
        arguments.order = make_tile_order(heads, tiles, arguments.bounds.right == 0, key_bytes);
        arguments.heads = make_fast_divisor(params.heads_q);
        arguments.group = make_fast_divisor(params.heads_q / params.heads_k);
        arguments.q_pass_stride = params.q.stride_row * 2 * QLoader::kRowsPerPass;
        arguments.k_pass_stride = params.k.stride_row * 2 * KLoader::kRowsPerPass;
        arguments.v_pass_stride = params.v.stride_row * 2 * VLoader::kRowsPerPass;
        arguments.k_block_stride = params.k.stride_row * 2 * kBlockN;
        arguments.v_block_stride = params.v.stride_row * 2 * kBlockN;
        arguments.scale_log2 = params.softmax_scale * kLog2E;
        arguments.inner_scale = params.softcap > 0.f ? params.softmax_scale / params.softcap : 0.f;
        arguments.softcap_log2 = params.softcap * kLog2E;
        arguments.dropout_scale = 65536.f / static_cast<float>(65536u - params.dropout_threshold);

        const void* kernel = reinterpret_cast<const void*>(&forward_kernel<Forward>);
        static SharedMemoryOptIn opt_in;
        const cudaError_t error = opt_in.ensure(kernel, context->device, kSharedMemory);
        if (error != cudaSuccess) return error;
        void* kernel_arguments[] = {&arguments};
        return cudaLaunchKernel(kernel, linear_grid(heads * tiles), dim3(kThreads), kernel_arguments, kSharedMemory,
                                static_cast<cudaStream_t>(context->stream));
    }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtas)
    forward_kernel(const __grid_constant__ ForwardArguments arguments) {
    Kernel::run(arguments);
}

}  // namespace flash_ext::sm80
