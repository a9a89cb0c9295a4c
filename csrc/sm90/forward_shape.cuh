// The shape of the sm90 forward for one tile: sizes, shared memory, registers, barriers.
#pragma once

#include <stdint.h>

#include "params.h"
#include "sm90/forward_plan.cuh"
#include "sm90/panel.cuh"
#include "sm90/pipeline.cuh"

namespace flash_ext::sm90 {

// The tile's keys in csrc/kernels.toml.
struct ForwardTile {
    int block_m;         // query rows, 64 per consumer warpgroup
    int block_n;         // key rows
    int stages;          // buffers of K and of V
    int warps;           // per CTA: 4 producer warps, 4 per consumer warpgroup
    int q_buffers = 1;   // 2: Q of the next tile is loaded under this one
    int overlap = 1;     // 1: the softmax runs while the product before it does
    int cross_tile = 0;  // 1: the first S of the next tile is computed while O of this one is written
    int search = 0;      // 1: every block is searched for its maximum, which takes fewer registers
    int cluster = 1;     // 2: where all tiles of a head walk the same keys, a pair of CTAs loads them once for both
};

// What follows from the template parameters, for producers, consumers and launcher alike.
template <DataType kType, int kHeadDim, int kHeadDimV, ForwardTile kTile, bool kRich>
struct ForwardShape {
    static constexpr DataType kDataType = kType;
    static constexpr int kQkSteps = kHeadDim / 16;
    static constexpr int kOutColumns = kHeadDimV;
    static constexpr bool kIsRich = kRich;
    static constexpr bool kCrossTile = kTile.cross_tile;
    static constexpr int kBlockM = kTile.block_m;
    static constexpr int kBlockN = kTile.block_n;
    static constexpr int kStages = kTile.stages;
    static constexpr int kVStages = kStages;
    static constexpr int kQBuffers = kTile.q_buffers;
    static constexpr int kThreads = kTile.warps * 32;
    static constexpr int kWarpgroups = kTile.warps / 4 - 1;
    static constexpr int kConsumerWarps = 4 * kWarpgroups;
    static constexpr int kRows = 64;  // of a warpgroup
    // Of a tile's blocks, those before a warpgroup's first, or behind its last, if it has any: bounds rise with the
    // rows.
    static constexpr int kMostSkipped = (kBlockM - kRows + kBlockN - 1) / kBlockN;
    static constexpr int kPlans = 2;
    // With as many buffers of Q as plans, a plan that has gone back says that its Q has been read.
    static constexpr bool kHandsQBack = kQBuffers < kPlans;
    static constexpr int kCluster = kTile.cluster;
    static constexpr int kCtasOfTile = 1;
    using Transfer = LocalTransfer;
    static constexpr int kKRows = kBlockN;                  // of a block, in this CTA
    static constexpr int kQBoxRows = kBlockM;               // of a TMA box of Q
    static constexpr int kKeyBoxRows = kBlockN / kCluster;  // of K
    static constexpr int kVBoxRows = kKeyBoxRows;
    static constexpr int kKParts = 1, kVParts = 1;  // of a block of keys, each in a buffer
    static constexpr bool kSearches = kTile.search || kRich;
    static constexpr bool kOverlap = kTile.overlap;
    static constexpr bool kPingPong = kWarpgroups > 1;  // they take turns to issue their products
    static_assert(kTile.warps % 4 == 0);
    static_assert(kBlockM == kRows * kWarpgroups && kWarpgroups <= ForwardPlan::kMaxWarpgroups);
    static_assert(kCluster == 1 || kCluster == 2);
    static_assert(kKeyBoxRows % kSwizzleRows == 0, "a box starts where the swizzle does");
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
};

}  // namespace flash_ext::sm90
