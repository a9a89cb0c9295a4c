// The shape of the sm100 backward for one tile: sizes, shared and tensor memory, registers, barriers.
#pragma once

#include <stdint.h>

#include "params.h"
#include "sm100/tensor_memory.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/panel.cuh"
#include "sm90/pipeline.cuh"

namespace flash_ext::sm100 {

using sm90::BackwardArguments;
using sm90::BackwardWork;
using sm90::Barrier;
using sm90::kPanelColumns;
using sm90::kPanelRowBytes;
using sm90::QueryWalk;
using sm90::TransactionBarrier;
using sm90::uniform;

// The tile's keys in csrc/kernels.toml.
struct BackwardTile {
    int block_m;          // query rows: 128
    int block_n;          // key rows: 128
    int stages;           // buffers of Q
    int warps;            // per CTA: 4 for dQ, 8 for scores and their gradients, 4 for products and loads
    int dout_stages = 1;  // buffers of dO
};

// What follows from the template parameters, for all roles and the launcher alike.
template <DataType kType, int kHeadDim_, int kHeadDimV_, BackwardTile kTile, bool kRich>
struct BackwardShape {
    static constexpr DataType kDataType = kType;
    static constexpr bool kIsRich = kRich;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr int kBlockM = kTile.block_m;
    static constexpr int kBlockN = kTile.block_n;
    static constexpr int kStages = kTile.stages;
    static constexpr int kDoutStages = kTile.dout_stages;
    static constexpr int kThreads = kTile.warps * 32;
    // Query columns of a warpgroup of the two that make scores.
    static constexpr int kHalf = 64;
    static_assert(kBlockM == 2 * kHalf && kBlockN == 128, "a key to each lane of tensor memory, a query for dQ");
    static_assert(kTile.warps == 16 && kHeadDim % 32 == 0 && kHeadDimV % 32 == 0);

    // Roles, in groups of four warps.
    static constexpr int kReduceGroup = 0;
    static constexpr int kComputeGroup = 1;  // and the next
    static constexpr int kSupplyGroup = 3;   // its warps: products, loads
    static constexpr int kComputeWarps = 8;

    // Shared memory.
    static constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kPanelsV = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kKBytes = kPanels * kBlockN * kPanelRowBytes;
    static constexpr int kVBytes = kPanelsV * kBlockN * kPanelRowBytes;
    static constexpr int kQBytes = kPanels * kBlockM * kPanelRowBytes;
    static constexpr int kDoutBytes = kPanelsV * kBlockM * kPanelRowBytes;
    static constexpr int kDsPanelBytes = kBlockN * kPanelRowBytes;  // dS^T of a warpgroup's queries: rows are keys
    static constexpr int kSliceColumns = 32;                        // of dQ, at a time
    static constexpr int kSlices = kHeadDim / kSliceColumns;
    static constexpr int kSliceBytes = 32 * kSliceColumns * 4;  // of a warp's 32 rows
    static constexpr int kSliceBuffers = 2;                     // per warp
    static constexpr int kTermsBytes = kBlockM * 8;             // lse of a query block's rows, then delta
    static constexpr int kVOffset = kKBytes;
    static constexpr int kQOffset = kVOffset + kVBytes;
    static constexpr int kDoutOffset = kQOffset + kStages * kQBytes;
    static constexpr int kDsOffset = kDoutOffset + kDoutStages * kDoutBytes;
    static constexpr int kDqOffset = kDsOffset + 2 * kDsPanelBytes;
    static constexpr int kTermsOffset = kDqOffset + 4 * kSliceBuffers * kSliceBytes;
    static constexpr int kControlOffset = kTermsOffset + kStages * kTermsBytes;

    struct Control {
        uint64_t k_full, v_full, landed;
        uint64_t q_full[kStages], q_empty[kStages];
        uint64_t dout_full[kDoutStages], dout_empty[kDoutStages];
        uint64_t s_full, p_full, dp_full, ds_full;
        uint64_t dq_full, dq_empty;
        uint64_t sums_full;  // dK and dV are complete
        BackwardWork work;
        uint32_t tmem;  // where tcgen05.alloc says what it allocated
    };
    static constexpr int64_t kSharedMemory = kControlOffset + sizeof(Control);

    // Tensor memory, columns. The map stands in backward.cuh.
    static constexpr int kSumColumns = kHeadDim + kHeadDimV;
    static constexpr int kSColumn = 0;
    // Whether dP has its own 128 columns, or has to take what P leaves of S.
    static constexpr bool kDpIsOverS = kBlockM + kBlockM + kSumColumns > kTensorMemoryColumns;
    static constexpr int kDvColumn = kDpIsOverS ? kBlockM + kHalf : 2 * kBlockM;
    static constexpr int kDkColumn = kDvColumn + kHeadDimV;
    // Where dQ lies: behind everything, over dP, or over dP and S.
    static constexpr bool kDqIsApart = kDkColumn + 2 * kHeadDim <= kTensorMemoryColumns;
    static constexpr bool kDqIsOverS = kDpIsOverS;
    static constexpr int kDqColumn = kDqIsApart ? kDkColumn + kHeadDim : kDqIsOverS ? 0 : kBlockM;
    static_assert(kDkColumn + kHeadDim <= kTensorMemoryColumns);
    static_assert(kDqIsApart || kDqColumn + kHeadDim <= kDvColumn);
    static_assert(kStages > 1 || kDqIsOverS, "S of the next block is issued before dK of this one");
    // Of the columns of a warpgroup (half): P over its own part of S, dP, and dS over dP.
    __device__ static constexpr int p_column(int half) {
        return half == 0 ? 0 : kDpIsOverS ? kBlockM - kHalf / 2 : kHalf;
    }
    __device__ static constexpr int dp_column(int half) {
        return kDpIsOverS ? (half == 0 ? kBlockM : kHalf / 2) : kBlockM + half * kHalf;
    }

    // setmaxnreg shares out what the launch has: threads times the cap that the compiler derives from their number.
    static constexpr int kComputeRegisters = kIsRich ? 168 : 160;
    static constexpr int kReduceRegisters = kIsRich ? 88 : 96;
    static constexpr int kSupplyRegisters = kIsRich ? 88 : 96;
    static_assert(128 * (2 * kComputeRegisters + kReduceRegisters + kSupplyRegisters) <=
                  65536 / kThreads / 8 * 8 * kThreads);
};

}  // namespace flash_ext::sm100
