// The loader of the sm90 backward: K, the first Q, V, the first dO, then Q and dO in turn, with the terms of their
// rows; and who stores dQ or adds to it, when.
#pragma once

#include <stdint.h>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "ptx/cp_async_bulk.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "sm90/backward_shape.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/tensor_map.cuh"
#include "sm90/wgmma.cuh"

namespace flash_ext::sm90 {

template <class Shape>
struct BackwardProducer : Shape {
    using Shape::kBlockM, Shape::kBlockN, Shape::kStages, Shape::kDoutStages, Shape::kHandsDoutBack, Shape::kTurns;
    using Shape::kPanels, Shape::kPanelsV, Shape::kQBytes, Shape::kDoutBytes, Shape::kTermsBytes, Shape::kKeyPanelStep;
    using Shape::kVInRegisters;
    using Shape::kVOffset, Shape::kQOffset, Shape::kDoutOffset, Shape::kTermsOffset;
    using typename Shape::Control;

    // Not kept in a register: the producer has few.
    __device__ __forceinline__ static int lane() { return ptx::tid_x() % 32; }

    struct LoadedTile {
        int rows, panels;
        cute::TMA::CacheHintSm90 cache_hint;
        int panel_step = kPanelColumns;
        bool arrives = true;   // else more follows that the barrier waits for, and the lanes meet before it
        bool by_wgmma = true;  // who reads it, through the async proxy
    };

    // One thread: starts the copies of a tile's rows into shared memory, into panels that begin panel_step columns
    // apart. Those of Q and dO shall stay in the L2 cache for the other key tiles; K and V are read once.
    template <LoadedTile kTile>
    __device__ __forceinline__ static void load(const TensorMap& tensor, uint64_t* barrier, unsigned char* tile_smem,
                                                int row, int head, int batch) {
        constexpr auto kHint = static_cast<uint64_t>(kTile.cache_hint);
        const int head_coordinate = head * tensor.head_step, batch_coordinate = batch * tensor.batch_step;
        const bool has_rows = tensor.row_step != 0;  // else all rows are one, and a box has one row
        const int boxes = has_rows ? 1 : kTile.rows;
        if (!has_rows) row = 0;
#pragma unroll 1
        for (int i = 0; i < boxes; ++i) {
#pragma unroll
            for (int panel = 0; panel < kTile.panels; ++panel) {
                cute::SM90_TMA_LOAD_4D::copy(&tensor.map, barrier, kHint,
                                             tile_smem + (panel * kTile.rows + i) * kPanelRowBytes,
                                             panel * kTile.panel_step, row, head_coordinate, batch_coordinate);
            }
        }
    }

    // One warp: zeros to the rows of a tile from `rows` on.
    template <LoadedTile kTile>
    __device__ __forceinline__ static void clear_tail(unsigned char* tile_smem, int rows) {
#pragma unroll 1
        for (int panel = 0; panel < kTile.panels; ++panel) {
            unsigned char* panel_smem = tile_smem + panel * kTile.rows * kPanelRowBytes;
#pragma unroll 1
            for (int i = rows * kPanelRowBytes + lane() * 16; i < kTile.rows * kPanelRowBytes; i += 32 * 16) {
                *reinterpret_cast<uint4*>(panel_smem + i) = uint4{};
            }
        }
    }

    // One warp. A tile with a tail of garbage lands at a barrier of its own and is handed on with zeros there.
    template <LoadedTile kTile>
    __device__ __forceinline__ static void load_clean(const TensorMap& tensor, uint64_t* full, Control& control,
                                                      uint32_t& landed_phase, unsigned char* tile_smem, int row,
                                                      int head, int batch, int rows, bool tail_is_garbage) {
        const bool has_garbage = tail_is_garbage && rows < kTile.rows;
        uint64_t* const barrier = has_garbage ? &control.landed : full;
        if (lane() == 0) {
            constexpr uint32_t kBytes = kTile.panels * kTile.rows * kPanelRowBytes;
            if (kTile.arrives || has_garbage) {
                TransactionBarrier::arrive_and_expect_tx(barrier, kBytes);
            } else {
                TransactionBarrier::expect_transaction(barrier, kBytes);
            }
            load<kTile>(tensor, barrier, tile_smem, row, head, batch);
        }
        if (has_garbage) {
            Barrier::wait(&control.landed, landed_phase);
            landed_phase ^= 1;
            clear_tail<kTile>(tile_smem, rows);
            if constexpr (kTile.by_wgmma) cutlass::arch::fence_view_async_shared();
            if constexpr (kTile.arrives) {
                __syncwarp();
                if (lane() == 0) Barrier::arrive(full);
            }
        }
    }

    // One warp. K comes with the first Q, V with the first dO.
    __device__ __forceinline__ static void load_all(const BackwardArguments& arguments, unsigned char* smem,
                                                    Control& control) {
        constexpr auto kOnce = cute::TMA::CacheHintSm90::EVICT_FIRST, kOften = cute::TMA::CacheHintSm90::EVICT_LAST;
        constexpr LoadedTile kQ{kBlockM, kPanels, kOften}, kDout{kBlockM, kPanelsV, kOften};
        constexpr LoadedTile kK{
            .rows = kBlockN, .panels = kPanels, .cache_hint = kOnce, .panel_step = kKeyPanelStep, .arrives = false};
        constexpr LoadedTile kV{
            .rows = kBlockN, .panels = kPanelsV, .cache_hint = kOnce, .arrives = false, .by_wgmma = !kVInRegisters};
        const volatile BackwardWork& work = control.work;
        uint32_t landed_phase = 0;
        ProducerWalk walk(arguments, work);
        if (walk.left <= 0) return;
        load_clean<kK>(arguments.k, &control.q_full[0], control, landed_phase, smem, work.keys_start + work.begin,
                       work.head_k, work.batch, work.rows_used, arguments.key_tail_is_garbage);
#pragma unroll 1
        for (; walk.left > 0; walk.advance(work)) {
            const uint32_t number = work.steps - walk.left;  // of the step
            const int first = walk.block * kBlockM, rows = work.queries_used - first;
            const int row = work.queries_start + first;
            const uint32_t stage = number % kStages, phase = number / kStages & 1;
            Barrier::wait(&control.q_empty[stage], phase ^ 1);
            __syncwarp();  // no lane still waits when the next phase may begin; K's tail is zero
            if (lane() == 0) {
                TransactionBarrier::expect_transaction(&control.q_full[stage], kTermsBytes);
                cute::SM90_BULK_COPY_G2S::copy(
                    arguments.scratch.row_terms + scratch_tile(arguments, work, walk.head, walk.block) * kBlockM,
                    &control.q_full[stage], smem + kTermsOffset + stage * kTermsBytes, kTermsBytes);
            }
            load_clean<kQ>(arguments.q, &control.q_full[stage], control, landed_phase,
                           smem + kQOffset + stage * kQBytes, row, walk.head, work.batch, rows,
                           arguments.query_tail_is_garbage);
            if (number == 0) {
                load_clean<kV>(arguments.v, &control.dout_full[0], control, landed_phase, smem + kVOffset,
                               work.keys_start + work.begin, work.head_k, work.batch, work.rows_used,
                               arguments.key_tail_is_garbage);
            }
            const uint32_t dout_stage = number % kDoutStages;
            if constexpr (kHandsDoutBack) {
                Barrier::wait(&control.dout_empty[dout_stage], number / kDoutStages & 1 ^ 1);
            }
            __syncwarp();  // no lane still waits, here or for what has landed; V's tail is zero
            load_clean<kDout>(arguments.dout, &control.dout_full[dout_stage], control, landed_phase,
                              smem + kDoutOffset + dout_stage * kDoutBytes, row, walk.head, work.batch, rows,
                              arguments.query_tail_is_garbage);
        }
    }

    // One thread: adds to the scratch, which shall stay in the L2 cache for the other key tiles, or stores there.
    __device__ __forceinline__ static void add(float* sums, uint32_t source_smem, uint32_t bytes, bool is_first) {
        constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
        if (is_first) {
            ptx::cp_async_bulk_store(sums, source_smem, bytes, kHint);
        } else {
            ptx::cp_reduce_async_bulk_add_f32(sums, source_smem, bytes, kHint);
        }
        cute::tma_store_arrive();
    }

    // One thread, while dQ is still being computed: whether a part has been stored.
    __device__ __forceinline__ static bool is_stored(const int32_t* state) {
        if (ptx::ld_acquire_gpu(state) != static_cast<int32_t>(PartState::kStored)) return false;
        ptx::fence_proxy_async_global();  // this thread's reductions come behind that store
        return true;
    }

    // One thread that has something to add to a part: whether it is to store it. If another has taken that upon itself,
    // waits until it is done. Who claims a part waits for nobody but its own consumers until it has stored it, and they
    // need nothing from a thread that waits here.
    __device__ __forceinline__ static bool claim(int32_t* state) {
        constexpr auto kUntouched = static_cast<int32_t>(PartState::kUntouched);
        if (atomicCAS(state, kUntouched, static_cast<int32_t>(PartState::kClaimed)) == kUntouched) return true;
        while (!is_stored(state)) {
        }
        return false;
    }

    // Waits until this thread's bulk copies are in place, not only their source read, then lets others add.
    __device__ __forceinline__ static void publish(int32_t* state) {
        ptx::cp_async_bulk_wait_group<0>();
        ptx::st_release_gpu(state, static_cast<int32_t>(PartState::kStored));
    }

    // Until the key blocks before this one have made all their additions to the query tile. Whether
    // this one is to store: none is before it, and nobody has cleared the tile.
    __device__ __forceinline__ static bool wait_turn(const BackwardArguments& arguments,
                                                     const volatile BackwardWork& work, int64_t tile, int block) {
        const Mask mask{arguments.bounds, work.keys_used - work.queries_used, work.keys_used};
        const int begin = block * kBlockM, end = min(begin + kBlockM, static_cast<int>(work.queries_used));
        const int mine = (work.begin / kBlockN - key_blocks(mask, begin, end, kBlockN).begin) * kTurns;
        int32_t turns = 0;
        while ((turns = ptx::ld_acquire_gpu(arguments.scratch.turns + tile)) < mine) {
        }
        ptx::fence_proxy_async_global();  // this thread's reductions come behind theirs
        return mine == 0 && turns < kEveryTurn;
    }

    // Hands on the turn of a query tile once this thread's bulk copies and reductions have been made, not only their
    // source read.
    __device__ __forceinline__ static void end_turn(const BackwardArguments& arguments, int64_t tile) {
        ptx::cp_async_bulk_wait_group<0>();
        ptx::red_release_gpu_add(arguments.scratch.turns + tile, 1);
    }
};

}  // namespace flash_ext::sm90
