// The shape of the sm100 backward for one tile: sizes, shared and tensor memory, registers, barriers.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "params.h"
#include "sm100/pair.cuh"
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
    int block_m;            // query rows: 128
    int block_n;            // key rows: 128 for each CTA
    int stages;             // buffers of Q
    int warps;              // per CTA: 4 for dQ, 8 for scores and their gradients, 4 for products and loads
    int dout_stages = 1;    // buffers of dO
    int slice_buffers = 2;  // of each of the 4 warps for dQ
    int cluster = 1;        // 2: a pair of CTAs works on one tile
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
    static constexpr int kCtasOfTile = kTile.cluster;
    static constexpr bool kIsPair = kCtasOfTile == 2;
    static constexpr int kKeys = kBlockN / kCtasOfTile;  // of this CTA, one to a lane of tensor memory
    static constexpr int kStages = kTile.stages;
    // Of lse and delta, which the scores read until dS is made; Q of a pair, by rows, only until S is.
    static constexpr int kTermsStages = kIsPair ? 2 : kStages;
    static constexpr int kDoutStages = kTile.dout_stages;
    static constexpr int kThreads = kTile.warps * 32;
    // Query columns of a warpgroup of the two that make scores.
    static constexpr int kHalf = 64;
    static_assert(kBlockM == 2 * kHalf && kKeys == 128);
    static_assert(kTile.warps == 16 && kHeadDim % 32 == 0 && kHeadDimV % 32 == 0);
    static_assert(!kIsPair || (kHeadDim % (2 * kPanelColumns) == 0 && kHeadDimV % (2 * kPanelColumns) == 0));
    using Transfer = std::conditional_t<kIsPair, PairTransfer, sm90::LocalTransfer>;

    // Roles, in groups of four warps.
    static constexpr int kReduceGroup = 0;
    static constexpr int kComputeGroup = 1;  // and the next
    static constexpr int kSupplyGroup = 3;   // its warps: products, loads; in a pair the relay of dS
    static constexpr int kComputeWarps = 8;

    // Shared memory. Of the B operands a CTA of a pair holds half: of Q and dO the rows of half of the queries for S
    // and dP, of Q, dO and K half of the columns for dK, dV and dQ. Else one copy serves both.
    static constexpr int kQRows = kBlockM / kCtasOfTile;
    static constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kPanelsV = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;
    // N of dK and dQ, of dV: whole panels, for no public kernel is known to end an MN-major operand inside the
    // swizzle's pattern. K, Q and dO are zero behind their columns.
    static constexpr int kProductColumns = kPanels * kPanelColumns;
    static constexpr int kProductColumnsV = kPanelsV * kPanelColumns;
    static constexpr int kHalfPanels = kIsPair ? kPanels / 2 : 0;  // of the copies by columns
    static constexpr int kHalfPanelsV = kIsPair ? kPanelsV / 2 : 0;
    static constexpr int kKBytes = kPanels * kKeys * kPanelRowBytes;
    static constexpr int kVBytes = kPanelsV * kKeys * kPanelRowBytes;
    static constexpr int kQBytes = kPanels * kQRows * kPanelRowBytes;
    static constexpr int kDoutBytes = kPanelsV * kQRows * kPanelRowBytes;
    static constexpr int kDsBytes = kKeys * kBlockM * 2;  // dS^T: rows are keys; all keys, but this CTA's queries
    static constexpr int kDsPanelRows = kBlockN;          // 64 queries to a panel
    static constexpr int kDsPanelBytes = kDsPanelRows * kPanelRowBytes;
    static constexpr int kDsPartBytes = kKeys * kPanelRowBytes;  // of a warpgroup: its 64 queries, this CTA's keys
    static constexpr int kSliceColumns = 32;                     // of dQ, at a time
    static constexpr int kDqColumns = kHeadDim / kCtasOfTile;    // of a warp's part of dQ, which has 32 rows
    static constexpr int kSlices = kDqColumns / kSliceColumns;
    static constexpr int kSliceBytes = 32 * kSliceColumns * 4;
    static constexpr int kSliceBuffers = kTile.slice_buffers;
    static constexpr int kTermsBytes = kBlockM * 8;  // lse of a query block's rows, then delta
    static constexpr int kVOffset = kKBytes;
    static constexpr int kQOffset = kVOffset + kVBytes;
    static constexpr int kDoutOffset = kQOffset + kStages * kQBytes;
    static constexpr int kDsOffset = kDoutOffset + kDoutStages * kDoutBytes;
    static constexpr int kDsStagingOffset = kDsOffset + kDsBytes;  // in a pair: dS on its way into the other CTA
    static constexpr int kDqOffset = kDsStagingOffset + (kIsPair ? kDsPartBytes : 0);
    static constexpr int kKColumnsOffset = kDqOffset + 4 * kSliceBuffers * kSliceBytes;
    static constexpr int kQColumnsOffset = kKColumnsOffset + kHalfPanels * kBlockN * kPanelRowBytes;
    static constexpr int kDoutColumnsOffset = kQColumnsOffset + kHalfPanels * kBlockM * kPanelRowBytes;
    static constexpr int kTermsOffset = kDoutColumnsOffset + kHalfPanelsV * kBlockM * kPanelRowBytes;
    static constexpr int kControlOffset = kTermsOffset + kTermsStages * kTermsBytes;

    struct Control {
        uint64_t k_full, v_full, landed;
        uint64_t q_full[kStages], q_empty[kStages];
        uint64_t terms_full[kTermsStages];  // lse and delta
        uint64_t dout_full[kDoutStages], dout_empty[kDoutStages];
        uint64_t k_columns_full;  // these: of a pair
        uint64_t q_columns_full, q_columns_empty;
        uint64_t dout_columns_full, dout_columns_empty;
        uint64_t ds_landed, ds_exchanged;
        uint64_t s_full, p_full, dp_full, ds_full;
        uint64_t dq_full, dq_empty;
        uint64_t sums_full;             // dK and dV are complete
        uint32_t tmem;                  // where tcgen05.alloc says what it allocated
        alignas(16) BackwardWork work;  // the last: a pair's comes in words of 16 bytes
    };
    static constexpr int64_t kSharedMemory = kControlOffset + sizeof(Control);

    // Tensor memory, columns. The map stands in backward.cuh.
    static constexpr int kSColumn = 0;
    // Whether dP has its own 128 columns, or has to take what P leaves of S.
    static constexpr bool kDpIsOverS = 2 * kBlockM + kProductColumns + kProductColumnsV > kTensorMemoryColumns;
    static constexpr int kDvColumn = kDpIsOverS ? kBlockM + kHalf : 2 * kBlockM;
    static constexpr int kDkColumn = kDvColumn + kProductColumnsV;
    // Where dQ lies: behind everything, over dP, or over dP and S.
    static constexpr bool kDqIsApart = !kIsPair && kDkColumn + 2 * kProductColumns <= kTensorMemoryColumns;
    static constexpr bool kDqIsOverS = kDpIsOverS;
    static constexpr int kDqColumn = kDqIsApart   ? kDkColumn + kProductColumns
                                     : kDqIsOverS ? 0
                                     : kIsPair    ? kBlockM + kHalf / 2
                                                  : kBlockM;
    static_assert(kDkColumn + kProductColumns <= kTensorMemoryColumns && !(kIsPair && kDqIsOverS));
    static_assert(kDqIsApart || kDqColumn + kProductColumns / kCtasOfTile <= kDvColumn);
    static_assert(kStages > 1 || kDqIsOverS || kIsPair, "S of the next block is issued before dK of this one");
    // Of the columns of a warpgroup (half): P over its own part of S, dP, and dS over dP; in a pair dQ lies between dS
    // of the one and of the other.
    __device__ static constexpr int p_column(int half) {
        return half == 0 ? 0 : kDpIsOverS ? kBlockM - kHalf / 2 : kHalf;
    }
    __device__ static constexpr int dp_column(int half) {
        return kDpIsOverS ? (half == 0 ? kBlockM : kHalf / 2) : kBlockM + half * kHalf;
    }
    __device__ static constexpr int ds_column(int half) { return dp_column(half) + (kIsPair ? half * kHalf / 2 : 0); }
    static_assert(!kIsPair || kDqColumn + kDqColumns <= kBlockM + kHalf + kHalf / 2);

    // setmaxnreg shares out what the launch has: threads times the cap that the compiler derives from their number.
    static constexpr int kComputeRegisters = kIsRich ? 168 : 160;
    static constexpr int kReduceRegisters = kIsRich ? 88 : 96;
    static constexpr int kSupplyRegisters = kIsRich ? 88 : 96;
    static_assert(128 * (2 * kComputeRegisters + kReduceRegisters + kSupplyRegisters) <=
                  65536 / kThreads / 8 * 8 * kThreads);
};

}  // namespace flash_ext::sm100
