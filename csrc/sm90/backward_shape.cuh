// The shape of the sm90 backward for one tile: sizes, shared memory, registers, barriers.
#pragma once

#include <stdint.h>

#include "params.h"
#include "sm90/backward_work.cuh"
#include "sm90/forward_shape.cuh"
#include "sm90/wgmma.cuh"

namespace flash_ext::sm90 {

// The tile's keys in csrc/kernels.toml.
struct BackwardTile {
    int block_m;       // query rows
    int block_n;       // key rows, 64 per consumer warpgroup
    int stages;        // buffers of Q and of dO
    int warps;         // per CTA: 4 producer warps, 4 per consumer warpgroup
    int early_dv = 1;  // 1: the product of dV runs under the making of dS, for which P has to be packed before
};

// What follows from the template parameters, for producers, consumers and launcher alike.
template <DataType kType, int kHeadDim_, int kHeadDimV_, BackwardTile kTile, bool kRich>
struct BackwardShape {
    static constexpr DataType kDataType = kType;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr bool kIsRich = kRich;
    static constexpr int kBlockM = kTile.block_m;
    static constexpr int kBlockN = kTile.block_n;
    static constexpr int kStages = kTile.stages;
    static constexpr bool kEarlyDv = kTile.early_dv;
    static constexpr int kRows = 64;  // keys of a warpgroup
    static constexpr int kWarpgroups = kTile.warps / 4 - 1;
    static constexpr int kThreads = kTile.warps * 32;
    static_assert(kTile.warps % 4 == 0 && kBlockN == kRows * kWarpgroups && kWarpgroups <= 3);
    static_assert(kBlockM % 64 == 0 && kHeadDim % 32 == 0 && kHeadDimV % 32 == 0);

    // dQ of a block is shared out among the warpgroups: by rows where there are 64 for each, else by columns.
    static constexpr bool kDqByRows = kBlockM == kRows * kWarpgroups;
    static constexpr int kDqColumns = kDqByRows ? kHeadDim : kHeadDim / kWarpgroups;
    static_assert(kDqByRows ||
                  (kBlockM == kRows && (kDqColumns % kPanelColumns == 0 || kPanelColumns % kDqColumns == 0)));
    static constexpr int kDqPartBytes = kRows * kDqColumns * 4;  // of one warpgroup

    static constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kPanelsV = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kKBytes = kPanels * kBlockN * kPanelRowBytes;
    static constexpr int kVBytes = kPanelsV * kBlockN * kPanelRowBytes;
    static constexpr int kQBytes = kPanels * kBlockM * kPanelRowBytes;
    static constexpr int kDoutBytes = kPanelsV * kBlockM * kPanelRowBytes;
    static constexpr int kTermsBytes = kBlockM * 8;  // lse of a query block's rows, then delta
    static constexpr int kDsBytes = kBlockM / kPanelColumns * kBlockN * kPanelRowBytes;
    static constexpr int kDsBuffers = 2;
    static constexpr int kVOffset = kKBytes;
    static constexpr int kQOffset = kVOffset + kVBytes;
    static constexpr int kDoutOffset = kQOffset + kStages * kQBytes;
    static constexpr int kDsOffset = kDoutOffset + kStages * kDoutBytes;
    static constexpr int kDqOffset = kDsOffset + kDsBuffers * kDsBytes;
    static constexpr int kTermsOffset = kDqOffset + kWarpgroups * kDqPartBytes;
    static constexpr int kControlOffset = kTermsOffset + kStages * kTermsBytes;

    // setmaxnreg shares out what the launch has: threads times the cap that the compiler derives from their number.
    static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : 24;
    static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : kWarpgroups == 2 ? 240 : 248;
    static_assert(128 * (kProducerRegisters + kWarpgroups * kConsumerRegisters) <= 65536 / kThreads / 8 * 8 * kThreads);

    struct Control {
        uint64_t k_full, v_full, landed;
        uint64_t q_full[kStages], q_empty[kStages];
        uint64_t dout_full[kStages], dout_empty[kStages];
        uint64_t ds_full[kDsBuffers];
        uint64_t dq_full[kWarpgroups], dq_empty[kWarpgroups];
        BackwardWork work;
    };
    static constexpr int64_t kSharedMemory = kControlOffset + sizeof(Control);

    using ScoreFragment = float[kBlockM / 2];      // 64 keys x kBlockM queries
    using PackedFragment = uint32_t[kBlockM / 4];  // the same as an A operand
    using DkFragment = float[kHeadDim / 2];
    using DvFragment = float[kHeadDimV / 2];
    using DqFragment = float[kDqColumns / 2];
};

}  // namespace flash_ext::sm90
