// Forward attention for sm90 (FlashAttention-3, arXiv 2407.08608, algorithm 2).
//
// Persistent CTAs. Each: a producer warpgroup, whose warps have a job each, and kWarpgroups consumer warpgroups of 64
// query rows. The keys are walked from the last block to the first, so that the blocks cut by the diagonal or the end
// of the keys come first.
//
//   scheduler   plan of tile t+1                        under tile t
//   Q warp      Q of tile t+1                           likewise, with two buffers; else after the last S of tile t
//   K warp      K[j-1], K[j-2] ...                      as stages of its ring fall free
//   V warp      V[j], V[j-1] ...
//   consumer 0  S = Q K[j-1] | softmax of S under O += P V[j] | ...
//   consumer 1               | the same, half a step later: while one is in its softmax the other has the tensor cores
//
// | barrier       | arrives                             | waits            | a phase ends when                       |
// | plan_full[i]  | scheduler                           | everyone else    | plan i is written                       |
// | plan_empty[i] | Q, K, V and each consumer warp      | scheduler        | no one needs plan i any more            |
// | q_full[i]     | Q warp and TMA                      | consumers        | Q has landed                            |
// | q_empty[i]    | each consumer warp                  | Q warp           | the last S of the tile is there         |
// | k_full[s]     | K warp and TMA                      | consumers        | K has landed                            |
// | k_empty[s]    | each consumer warp                  | K warp           | S is there, so K has been read          |
// | v_full[s]     | V warp, and TMA unless V ends here  | consumers        | V has landed, zero behind the last key  |
// | v_empty[s]    | each consumer warp                  | V warp           | O += P V is done                        |
// | v_landed      | V warp and TMA                      | V warp           | V has landed with whatever is behind it |
// | turn w        | warpgroup before w, then w (named)  | warpgroup w      | it may issue its products               |
//
// TMA brings a box of rows whatever it is. Rows of Q beyond the sequence give results that are not written; keys beyond
// it get the score -inf; but 0 * NaN is NaN, so rows of V beyond it are overwritten with zeros (generic stores, then
// fence.proxy.async) unless they lie outside the tensor, where TMA itself writes zeros.
//
// Registers of a consumer thread: S (64 x kBlockN) becomes P, packed in pairs, the A operand of P V; O (64 x d_v) stays
// to the end and leaves straight to global memory, 16 bytes a lane.
// Shared memory: kQBuffers of Q, kStages of K, kStages of V, in panels of 64 columns (wgmma.cuh), plans and barriers.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/launch.cuh"
#include "core/numeric.cuh"
#include "params.h"
#include "sm90/forward_plan.cuh"
#include "sm90/output.cuh"
#include "sm90/scores.cuh"
#include "sm90/softmax.cuh"
#include "sm90/tensor_map.cuh"
#include "sm90/wgmma.cuh"

namespace flash_ext::sm90 {

// The tile's keys in csrc/kernels.toml.
struct ForwardTile {
    int block_m;         // query rows, 64 per consumer warpgroup
    int block_n;         // key rows
    int stages;          // buffers of K and of V
    int warps;           // per CTA: 4 producer warps, 4 per consumer warpgroup
    int q_buffers = 1;   // 2: Q of the next tile is loaded under this one
    int ping_pong = 1;   // 1: the warpgroups take turns to issue their products
    int overlap = 1;     // 1: the softmax runs while the product before it does
    int cross_tile = 0;  // 1: the first S of the next tile is computed while O of this one is written
};

using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

// A position in a ring of kSize buffers. Who fills waits for phase ^ 1, who reads for phase.
template <int kSize>
struct Ring {
    uint32_t index = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        if constexpr (kSize == 1) {
            phase ^= 1;
        } else {
            ++index;
            if (index == kSize) {
                index = 0;
                phase ^= 1;
            }
        }
    }
};

// A value that is the same in all lanes, in a uniform register: what wgmma's descriptors and branches are best made of.
__device__ __forceinline__ int uniform(int value) {
    return __reduce_max_sync(kAllLanes, value);
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArguments arguments);

template <DataType kType, int kHeadDim, int kHeadDimV, ForwardTile kTile, bool kRich>
struct Forward {
    static constexpr int kBlockM = kTile.block_m;
    static constexpr int kBlockN = kTile.block_n;
    static constexpr int kStages = kTile.stages;
    static constexpr int kQBuffers = kTile.q_buffers;
    static constexpr int kThreads = kTile.warps * 32;
    static constexpr int kWarpgroups = kTile.warps / 4 - 1;
    static constexpr int kConsumerWarps = 4 * kWarpgroups;
    static constexpr int kRows = 64;  // of a warpgroup
    static constexpr int kPlans = 2;
    static constexpr bool kOverlap = kTile.overlap;
    static constexpr bool kPingPong = kTile.ping_pong && kWarpgroups > 1;
    static_assert(kBlockM == kRows * kWarpgroups && kWarpgroups <= ForwardPlan::kMaxWarpgroups);
    static_assert(kBlockN % 16 == 0 && kHeadDim % 16 == 0 && kHeadDimV % 32 == 0);

    static constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kPanelsV = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kQBytes = kPanels * kBlockM * kPanelRowBytes;
    static constexpr int kKBytes = kPanels * kBlockN * kPanelRowBytes;
    static constexpr int kVBytes = kPanelsV * kBlockN * kPanelRowBytes;
    static constexpr int kKOffset = kQBuffers * kQBytes;
    static constexpr int kVOffset = kKOffset + kStages * kKBytes;
    static constexpr int kControlOffset = kVOffset + kStages * kVBytes;

    // setmaxnreg shares out what the launch has: threads times the cap that the compiler derives from their number.
    static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : 40;
    static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : kWarpgroups == 2 ? 232 : 248;
    static_assert(128 * (kProducerRegisters + kWarpgroups * kConsumerRegisters) <= 65536 / kThreads / 8 * 8 * kThreads);

    struct Control {
        uint64_t plan_full[kPlans], plan_empty[kPlans];
        uint64_t q_full[kQBuffers], q_empty[kQBuffers];
        uint64_t k_full[kStages], k_empty[kStages];
        uint64_t v_full[kStages], v_empty[kStages];
        uint64_t v_landed;
        ForwardPlan plans[kPlans];
    };
    static constexpr int64_t kSharedMemory = kControlOffset + sizeof(Control);

    using SFragment = float[kBlockN / 2];
    using PFragment = uint32_t[kBlockN / 4];
    using OFragment = float[kHeadDimV / 2];

    // One thread: starts the copies of kTileRows rows into shared memory; their bytes arrive at the barrier.
    template <int kTileRows, int kTilePanels>
    __device__ __forceinline__ static void load(const TensorMap& tensor, uint64_t* barrier, unsigned char* tile_smem,
                                                int row, int head, int batch) {
        constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
        TransactionBarrier::arrive_and_expect_tx(barrier, kTilePanels * kTileRows * kPanelRowBytes);
        const int head_coordinate = head * tensor.head_step, batch_coordinate = batch * tensor.batch_step;
#pragma unroll
        for (int panel = 0; panel < kTilePanels; ++panel) {
            unsigned char* panel_smem = tile_smem + panel * kTileRows * kPanelRowBytes;
            if (tensor.row_step != 0) {
                cute::SM90_TMA_LOAD_4D::copy(&tensor.map, barrier, kHint, panel_smem, panel * kPanelColumns, row,
                                             head_coordinate, batch_coordinate);
            } else {
#pragma unroll 1
                for (int i = 0; i < kTileRows; ++i) {
                    cute::SM90_TMA_LOAD_4D::copy(&tensor.map, barrier, kHint, panel_smem + i * kPanelRowBytes,
                                                 panel * kPanelColumns, 0, head_coordinate, batch_coordinate);
                }
            }
        }
    }

    // One thread: hands out tiles, a little ahead of their use.
    __device__ __forceinline__ static void schedule(const ForwardArguments& arguments, Control& control) {
        const uint64_t positions = static_cast<uint64_t>(arguments.order.heads) * arguments.order.tiles;
        uint64_t position = blockIdx.x;
        const auto take_position = [&] {
            position = arguments.positions != nullptr ? gridDim.x + atomicAdd(arguments.positions, 1ull)
                                                      : position + gridDim.x;
        };
        Ring<kPlans> plans;
        for (bool is_first = true;; is_first = false) {
            Barrier::wait(&control.plan_empty[plans.index], plans.phase ^ 1);
            if (!is_first) take_position();  // as late as possible: the better balanced
            ForwardPlan& plan = control.plans[plans.index];
            while (position < positions && !make_plan<kBlockM, kBlockN>(plan, arguments, position)) take_position();
            const bool is_last = position >= positions;
            if (is_last) plan.output.rows = 0;
            Barrier::arrive(&control.plan_full[plans.index]);
            if (is_last) break;
            plans.advance();
        }
    }

    // One thread.
    __device__ __forceinline__ static void load_queries(const ForwardArguments& arguments, unsigned char* smem,
                                                        Control& control) {
        Ring<kPlans> plans;
        Ring<kQBuffers> q;
        for (;;) {
            Barrier::wait(&control.plan_full[plans.index], plans.phase);
            const ForwardPlan& plan = control.plans[plans.index];
            if (plan.output.rows == 0) break;
            if (plan.end > plan.begin) {
                Barrier::wait(&control.q_empty[q.index], q.phase ^ 1);
                load<kBlockM, kPanels>(arguments.q, &control.q_full[q.index], smem + q.index * kQBytes,
                                       plan.output.tensor_row, plan.output.head, plan.output.batch);
                q.advance();
            }
            Barrier::arrive(&control.plan_empty[plans.index]);
            plans.advance();
        }
    }

    // One thread.
    __device__ __forceinline__ static void load_keys(const ForwardArguments& arguments, unsigned char* smem,
                                                     Control& control) {
        Ring<kPlans> plans;
        Ring<kStages> k;
        for (;;) {
            Barrier::wait(&control.plan_full[plans.index], plans.phase);
            const ForwardPlan& plan = control.plans[plans.index];
            if (plan.output.rows == 0) break;
#pragma unroll 1
            for (int block = plan.end - 1; block >= plan.begin; --block) {
                Barrier::wait(&control.k_empty[k.index], k.phase ^ 1);
                load<kBlockN, kPanels>(arguments.k, &control.k_full[k.index], smem + kKOffset + k.index * kKBytes,
                                       plan.key_row + block * kBlockN, plan.head_k, plan.output.batch);
                k.advance();
            }
            Barrier::arrive(&control.plan_empty[plans.index]);
            plans.advance();
        }
    }

    // One warp.
    __device__ __forceinline__ static void load_values(const ForwardArguments& arguments, unsigned char* smem,
                                                       Control& control, int lane) {
        Ring<kPlans> plans;
        Ring<kStages> v;
        uint32_t landed_phase = 0;
        for (;;) {
            Barrier::wait(&control.plan_full[plans.index], plans.phase);
            const ForwardPlan& plan = control.plans[plans.index];
            if (plan.output.rows == 0) break;
#pragma unroll 1
            for (int block = plan.end - 1; block >= plan.begin; --block) {
                Barrier::wait(&control.v_empty[v.index], v.phase ^ 1);
                unsigned char* v_smem = smem + kVOffset + v.index * kVBytes;
                const int rows = plan.mask.seqlen_k - block * kBlockN;
                const bool has_garbage = arguments.v_tail_is_garbage && rows < kBlockN;
                if (lane == 0) {
                    load<kBlockN, kPanelsV>(arguments.v, has_garbage ? &control.v_landed : &control.v_full[v.index],
                                            v_smem, plan.key_row + block * kBlockN, plan.head_k, plan.output.batch);
                }
                if (has_garbage) {
                    Barrier::wait(&control.v_landed, landed_phase);
                    landed_phase ^= 1;
                    for (int panel = 0; panel < kPanelsV; ++panel) {
                        unsigned char* panel_smem = v_smem + panel * kBlockN * kPanelRowBytes;
#pragma unroll 1
                        for (int i = rows * kPanelRowBytes + lane * 16; i < kBlockN * kPanelRowBytes; i += 32 * 16) {
                            *reinterpret_cast<uint4*>(panel_smem + i) = uint4{};
                        }
                    }
                    cutlass::arch::fence_view_async_shared();  // wgmma reads through the async proxy
                    __syncwarp();
                    if (lane == 0) Barrier::arrive(&control.v_full[v.index]);
                }
                v.advance();
            }
            __syncwarp();  // all lanes have read the plan
            if (lane == 0) Barrier::arrive(&control.plan_empty[plans.index]);
            plans.advance();
        }
    }

    // One warpgroup.
    __device__ __forceinline__ static void consume(const ForwardArguments& arguments, unsigned char* smem,
                                                   Control& control, int warpgroup, int thread) {
        const ForwardParams& params = arguments.params;
        const uint32_t smem_address = cute::cast_smem_ptr_to_uint(smem);
        const uint64_t q_base = panel_descriptor(smem_address + warpgroup * kRows * kPanelRowBytes, 0);
        const uint64_t k_base = panel_descriptor(smem_address + kKOffset, 0);
        const uint64_t v_base = panel_descriptor(smem_address + kVOffset, kBlockN * kPanelRowBytes);
        const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;  // row of half 0 in the warpgroup's rows

        SFragment s_frag;
        PFragment p_frag;
        OFragment o_frag;
        WarpgroupSoftmax softmax;
        Ring<kPlans> plans;
        Ring<kQBuffers> q;
        Ring<kStages> k, v;

        // What is asked of the plan inside the loops, the same in all lanes.
        struct Walk {
            const ForwardPlan* plan;
            uint32_t plan_index;
            KeyBlocks blocks;
            int skipped;  // blocks of the tile before this warpgroup's first
        } tile{};

        const auto wait_turn = [&] {
            if constexpr (kPingPong) cutlass::arch::NamedBarrier::sync(256, warpgroup);
        };
        const auto pass_turn = [&] {
            if constexpr (kPingPong) cutlass::arch::NamedBarrier::arrive(256, (warpgroup + 1) % kWarpgroups);
        };
        const auto release = [&](uint64_t* empty) {
            if (lane == 0) Barrier::arrive(empty);
        };
        // Blocks that another warpgroup of the tile needs and this one does not: hand them back, keep the order of
        // turns. K and V of a block together, where there may be more of them than stages: the other warpgroup's next K
        // waits for its V, and its V for this one.
        const auto skip_keys = [&](int count) {
#pragma unroll 1
            for (; count > 0; --count) {
                Barrier::wait(&control.k_full[k.index], k.phase);
                release(&control.k_empty[k.index]);
                k.advance();
                wait_turn();
                pass_turn();
            }
        };
        const auto skip_values = [&](int count) {
#pragma unroll 1
            for (; count > 0; --count) {
                Barrier::wait(&control.v_full[v.index], v.phase);
                release(&control.v_empty[v.index]);
                v.advance();
            }
        };
        const auto skip_blocks = [&](int count) {
#pragma unroll 1
            for (; count > 0; --count) {
                skip_keys(1);
                skip_values(1);
            }
        };
        const auto issue_qk = [&](uint64_t q_descriptor) {
            Barrier::wait(&control.k_full[k.index], k.phase);
            const uint64_t k_descriptor = k_base + uniform(k.index) * (kKBytes >> 4);
            wait_turn();
            fence_operand(s_frag);
            cute::warpgroup_arrive();
#pragma unroll
            for (int step = 0; step < kHeadDim / 16; ++step) {
                multiply_ss<kType, kBlockN>(s_frag, q_descriptor + column_step(step, kBlockM),
                                            k_descriptor + column_step(step, kBlockN), step > 0);
            }
            cute::warpgroup_commit_batch();
        };
        const auto issue_pv = [&] {
            Barrier::wait(&control.v_full[v.index], v.phase);
            const uint64_t v_descriptor = v_base + uniform(v.index) * (kVBytes >> 4);
            fence_operand(o_frag);
            fence_operand(p_frag);
            cute::warpgroup_arrive();
#pragma unroll
            for (int step = 0; step < kBlockN / 16; ++step) {
                multiply_rs<kType, kHeadDimV>(o_frag, p_frag + 4 * step, v_descriptor + row_step(step));
            }
            cute::warpgroup_commit_batch();
        };
        const auto s_is_done = [&] {
            fence_operand(s_frag);
            release(&control.k_empty[k.index]);
            k.advance();
        };
        const auto o_is_done = [&] {
            fence_operand(o_frag);
            fence_operand(p_frag);
            release(&control.v_empty[v.index]);
            v.advance();
        };
        const auto place_of = [&](const ForwardPlan& plan) {
            return Place{plan.row_begin + warpgroup * kRows + row, lane % 4 * 2};
        };
        const float scale_log2 = kRich ? 1.f : arguments.scale_log2;
        float slope_log2 = 0.f;
        PhiloxKey philox{};
        const bool drops = kRich && params.rng_state != nullptr && params.dropout_threshold > 0;
        if (drops) philox = philox_key(params.rng_state);

        const auto to_scores = [&](int block) {
            if constexpr (kRich) {
                transform_scores(s_frag, arguments.scale_log2, arguments.inner_scale, arguments.softcap_log2,
                                 slope_log2, place_of(*tile.plan), tile.plan->mask.shift, block * kBlockN);
            }
        };
        const auto mask = [&](int block) {
            mask_scores(s_frag, tile.plan->mask, place_of(*tile.plan), block * kBlockN);
        };
        const auto to_p = [&](int block) {
            if (drops) {
                drop_scores(s_frag, philox, params.dropout_threshold, place_of(*tile.plan), block * kBlockN,
                            tile.plan->output.batch, tile.plan->output.head);
            }
#pragma unroll
            for (int i = 0; i < kBlockN / 4; ++i) p_frag[i] = pack<kType>(s_frag[2 * i], s_frag[2 * i + 1]);
        };
        const auto write = [&](const TileOutput& output, bool has_blocks) {
            write_rows<kType, kHeadDimV>(o_frag, softmax, arguments, output, warpgroup * kRows + row, lane, has_blocks,
                                         scale_log2, kRich ? arguments.dropout_scale : 1.f);
        };
        const auto release_plan = [&](uint32_t index) {
            __syncwarp();  // all lanes have read it
            release(&control.plan_empty[index]);
        };

        // The next tile in which this warpgroup has blocks to walk; false: there is none. Tiles without are done here.
        const auto next_tile = [&]() -> bool {
            for (;;) {
                const uint32_t index = plans.index;
                Barrier::wait(&control.plan_full[index], plans.phase);
                const ForwardPlan& plan = control.plans[index];
                if (uniform(plan.output.rows) == 0) return false;
                plans.advance();
                const KeyBlocks blocks{uniform(plan.blocks[warpgroup].begin),
                                       uniform(plan.blocks[warpgroup].full_begin),
                                       uniform(plan.blocks[warpgroup].full_end), uniform(plan.blocks[warpgroup].end)};
                const int count = uniform(plan.end - plan.begin);
                if (blocks.end > blocks.begin) {
                    tile = {&plan, index, blocks, uniform(plan.end) - blocks.end};
                    if constexpr (kRich) {
                        if (params.alibi_slopes != nullptr) {
                            slope_log2 =
                                params.alibi_slopes[plan.output.batch * params.alibi_stride_batch + plan.output.head] *
                                kLog2E;
                        }
                    }
                    return true;
                }
                if (count > 0) {
                    Barrier::wait(&control.q_full[q.index], q.phase);
                    release(&control.q_empty[q.index]);
                    q.advance();
                    skip_blocks(count);
                }
                write(plan.output, false);
                release_plan(index);
            }
        };
        const auto issue_first_qk = [&]() -> uint64_t {
            skip_keys(tile.skipped);
            Barrier::wait(&control.q_full[q.index], q.phase);
            const uint64_t q_descriptor = q_base + uniform(q.index) * (kQBytes >> 4);
            issue_qk(q_descriptor);
            pass_turn();
            return q_descriptor;
        };

        if constexpr (kPingPong) {
            if (warpgroup == kWarpgroups - 1) pass_turn();  // the first turn is warpgroup 0's
        }
        if (!next_tile()) return;
        uint64_t q_descriptor = issue_first_qk();
        for (;;) {
            int block = tile.blocks.end - 1;
            float rescale[2];
            cute::warpgroup_wait<0>();
            s_is_done();
            softmax.reset();
            to_scores(block);
            if (block >= tile.blocks.full_end || block < tile.blocks.full_begin) mask(block);
            softmax.template update<true>(s_frag, scale_log2, rescale);
            to_p(block);
            skip_values(tile.skipped);
#pragma unroll
            for (int i = 0; i < kHeadDimV / 2; ++i) o_frag[i] = 0.f;
            --block;

            // From here on P of block + 1 and O wait for their product.
            const auto step = [&]<bool kMasked>() {
                issue_qk(q_descriptor);
                issue_pv();
                pass_turn();
                cute::warpgroup_wait<kOverlap ? 1 : 0>();
                s_is_done();
                to_scores(block);
                if constexpr (kMasked) mask(block);
                const bool grows = softmax.template update<kMasked>(s_frag, scale_log2, rescale);
                if constexpr (kOverlap) cute::warpgroup_wait<0>();
                fence_operand(s_frag);
                o_is_done();
                if (grows) {
#pragma unroll
                    for (int i = 0; i < kHeadDimV / 2; ++i) o_frag[i] *= rescale[i % 4 / 2];
                }
                to_p(block);
            };
            // Two rounds of one pair of loops, not three loops: the masked step is instantiated once.
            int masked_end = tile.blocks.full_end;
#pragma unroll 1
            for (int round = 0; round < 2; ++round) {
#pragma unroll 1
                for (; block >= masked_end; --block) step.template operator()<true>();
#pragma unroll 1
                for (; block >= tile.blocks.full_begin; --block) step.template operator()<false>();
                masked_end = tile.blocks.begin;
            }
            release(&control.q_empty[q.index]);
            q.advance();

            issue_pv();
            cute::warpgroup_wait<0>();
            o_is_done();
            skip_blocks(tile.blocks.begin - uniform(tile.plan->begin));

            // The plan goes back before another is waited for: next_tile may need more than there are slots.
            const TileOutput done = tile.plan->output;
            release_plan(tile.plan_index);
            if constexpr (kTile.cross_tile) {
                const bool is_last = !next_tile();
                if (is_last) {
                    write(done, true);
                    return;
                }
                q_descriptor = issue_first_qk();
                write(done, true);
            } else {
                write(done, true);
                if (!next_tile()) return;
                q_descriptor = issue_first_qk();
            }
        }
    }

    __device__ __forceinline__ static void run(const ForwardArguments& arguments) {
        extern __shared__ __align__(1024) unsigned char smem[];
        Control& control = *reinterpret_cast<Control*>(smem + kControlOffset);
        // The same in all lanes, and the compiler shall know it: descriptors then stay in uniform registers.
        const int warpgroup = uniform(threadIdx.x / 128);
        if (threadIdx.x == 0) {
            cute::prefetch_tma_descriptor(&arguments.q.map);
            cute::prefetch_tma_descriptor(&arguments.k.map);
            cute::prefetch_tma_descriptor(&arguments.v.map);
            for (int i = 0; i < kPlans; ++i) {
                Barrier::init(&control.plan_full[i], 1);
                Barrier::init(&control.plan_empty[i], 3 + kConsumerWarps);
            }
            for (int i = 0; i < kQBuffers; ++i) {
                Barrier::init(&control.q_full[i], 1);
                Barrier::init(&control.q_empty[i], kConsumerWarps);
            }
            for (int i = 0; i < kStages; ++i) {
                Barrier::init(&control.k_full[i], 1);
                Barrier::init(&control.k_empty[i], kConsumerWarps);
                Barrier::init(&control.v_full[i], 1);
                Barrier::init(&control.v_empty[i], kConsumerWarps);
            }
            Barrier::init(&control.v_landed, 1);
            cutlass::arch::fence_barrier_init();
        }
        __syncthreads();
        if (warpgroup == 0) {
            cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
            const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
            if (warp == 0) {
                if (lane == 0) schedule(arguments, control);
            } else if (warp == 1) {
                if (lane == 0) load_queries(arguments, smem, control);
            } else if (warp == 2) {
                if (lane == 0) load_keys(arguments, smem, control);
            } else {
                load_values(arguments, smem, control, lane);
            }
        } else {
            cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
            consume(arguments, smem, control, warpgroup - 1, threadIdx.x % 128);
        }
    }

    // The grid, and what it is made of.
    struct Grid {
        int64_t heads, tiles;
        int64_t blocks;
        bool is_dynamic;  // tiles differ in work and are handed out one by one
    };
    static Grid make_grid(const ForwardParams& params, const LaunchContext& context, const MaskBounds& bounds) {
        const bool packed = params.cu_seqlens_q != nullptr;
        Grid grid;
        grid.heads = packed ? params.heads_q : static_cast<int64_t>(params.batch) * params.heads_q;
        grid.tiles = packed ? varlen_slots(params.seqlen_q, params.batch, kBlockM)
                            : (static_cast<int64_t>(params.seqlen_q) + kBlockM - 1) / kBlockM;
        if (params.seqlen_q == 0) grid.tiles = 0;
        const int64_t sms = context.sm_count - params.sm_margin > 1 ? context.sm_count - params.sm_margin : 1;
        grid.blocks = grid.heads * grid.tiles < sms ? grid.heads * grid.tiles : sms;
        const bool is_uneven = bounds.left >= 0 || bounds.right >= 0 || packed || params.cu_seqlens_k != nullptr ||
                               params.seqused_q != nullptr || params.seqused_k != nullptr;
        grid.is_dynamic = is_uneven && grid.heads * grid.tiles > grid.blocks;
        return grid;
    }

    static int64_t workspace(const void* forward_params, const LaunchContext* context) {
        const ForwardParams& params = *static_cast<const ForwardParams*>(forward_params);
        return make_grid(params, *context, mask_bounds(params)).is_dynamic ? sizeof(unsigned long long) : 0;
    }

    static int32_t launch(const void* forward_params, const LaunchContext* context) {
        const ForwardParams& params = *static_cast<const ForwardParams*>(forward_params);
        ForwardArguments arguments;
        arguments.params = params;
        arguments.bounds = mask_bounds(params);
        const Grid grid = make_grid(params, *context, arguments.bounds);
        if (grid.blocks == 0) return cudaSuccess;

        const int32_t q_batch = params.cu_seqlens_q != nullptr ? 1 : params.batch;
        const int32_t k_batch = params.cu_seqlens_k != nullptr ? 1 : params.batch;
        cudaError_t error = encode(&arguments.q, params.q, params.dtype, q_batch, params.seqlen_q, params.heads_q,
                                   params.head_dim, kBlockM);
        if (error == cudaSuccess && params.seqlen_k > 0) {
            error = encode(&arguments.k, params.k, params.dtype, k_batch, params.seqlen_k, params.heads_k,
                           params.head_dim, kBlockN);
            if (error == cudaSuccess) {
                error = encode(&arguments.v, params.v, params.dtype, k_batch, params.seqlen_k, params.heads_k,
                               params.head_dim_v, kBlockN);
            }
            if (error != cudaSuccess) return error;
        } else {
            if (error != cudaSuccess) return error;
            arguments.k = arguments.v = arguments.q;  // no key is ever loaded
        }
        arguments.v_tail_is_garbage =
            params.cu_seqlens_k != nullptr || params.seqused_k != nullptr || arguments.v.row_step == 0;
        const int64_t key_bytes = static_cast<int64_t>(params.seqlen_k) * (params.head_dim + params.head_dim_v) * 2 *
                                  params.heads_k / params.heads_q;
        arguments.order = make_tile_order(grid.heads, grid.tiles, arguments.bounds.right == 0, key_bytes);
        arguments.heads = make_fast_divisor(params.heads_q);
        arguments.group = make_fast_divisor(params.heads_q / params.heads_k);
        arguments.scale_log2 = params.softmax_scale * kLog2E;
        arguments.inner_scale = params.softcap > 0.f ? params.softmax_scale / params.softcap : 0.f;
        arguments.softcap_log2 = params.softcap * kLog2E;
        arguments.dropout_scale = 65536.f / static_cast<float>(65536u - params.dropout_threshold);

        const auto stream = static_cast<cudaStream_t>(context->stream);
        arguments.positions = nullptr;
        if (grid.is_dynamic) {
            arguments.positions = static_cast<unsigned long long*>(context->workspace);
            error = cudaMemsetAsync(arguments.positions, 0, sizeof(unsigned long long), stream);
            if (error != cudaSuccess) return error;
        }
        const void* kernel = reinterpret_cast<const void*>(&forward_kernel<Forward>);
        static SharedMemoryOptIn opt_in;
        error = opt_in.ensure(kernel, context->device, kSharedMemory);
        if (error != cudaSuccess) return error;
        void* kernel_arguments[] = {&arguments};
        return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(grid.blocks)), dim3(kThreads), kernel_arguments,
                                kSharedMemory, stream);
    }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArguments arguments) {
    Kernel::run(arguments);
}

}  // namespace flash_ext::sm90
