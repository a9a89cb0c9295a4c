// The shape of the sm100 forward for one tile: sizes, shared and tensor memory, registers, barriers.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "core/mask.cuh"
#include "params.h"
#include "sm100/exponential.cuh"
#include "sm100/pair.cuh"
#include "sm100/tensor_memory.cuh"
#include "sm90/forward_plan.cuh"
#include "sm90/panel.cuh"
#include "sm90/pipeline.cuh"

namespace flash_ext::sm100 {

using sm90::Barrier;
using sm90::ForwardArguments;
using sm90::ForwardPlan;
using sm90::kPanelColumns;
using sm90::kPanelRowBytes;
using sm90::Ring;
using sm90::uniform;

// The tile's keys in csrc/kernels.toml.
struct ForwardTile {
    int block_m;          // query rows: 128 for each of one or two query tiles of each CTA
    int block_n;          // key rows
    int stages;           // buffers of K
    int warps;            // per CTA: 4 per query tile for the softmax, 4 for the correction, 4 for products and loads
    int v_stages = 2;     // buffers of V
    int polynomials = 0;  // of every 16 pairs of scores, how many are raised by a polynomial instead of MUFU.EX2
    int cluster = 1;      // 2: a pair of CTAs works on one tile
    int parts = 1;        // a buffer holds one of so many parts of a block: of K in columns, of V in rows
};

// What follows from the template parameters, for all roles and the launcher alike.
template <DataType kType, int kHeadDim, int kHeadDimV, ForwardTile kTile, bool kRich>
struct ForwardShape {
    static constexpr DataType kDataType = kType;
    static constexpr bool kIsRich = kRich;
    static constexpr int kQkSteps = kHeadDim / 16;
    static constexpr int kPvSteps = kTile.block_n / 16;
    static constexpr int kOutColumns = kHeadDimV;
    static constexpr int kBlockM = kTile.block_m;
    static constexpr int kBlockN = kTile.block_n;
    static constexpr int kRows = 128;  // of a query tile, one to a lane of tensor memory and to a thread of the softmax
    static constexpr int kCtasOfTile = kTile.cluster;
    static constexpr bool kIsPair = kCtasOfTile == 2;
    static constexpr int kTileRows = kRows * kCtasOfTile;  // of a query tile in both CTAs
    static constexpr int kTiles = kBlockM / kTileRows;
    static constexpr int kStages = kTile.stages;
    static constexpr int kVStages = kTile.v_stages;
    static constexpr int kPolynomials = kTile.polynomials;
    static constexpr int kThreads = kTile.warps * 32;
    static constexpr int kQBuffers = 1;
    static constexpr int kPlans = 2;
    static constexpr int kCluster = 1;
    static constexpr int kQBoxRows = kRows;  // of a TMA box of Q
    static constexpr int kKParts = kTile.parts;
    static constexpr int kVParts = kTile.parts;
    static constexpr int kKRows = kBlockN / kCtasOfTile;  // of a block of K in this CTA
    static constexpr int kKeyBoxRows = kKRows;            // of K
    static constexpr int kVPartRows = kBlockN / kVParts;
    static constexpr int kVBoxRows = kVPartRows;
    static_assert((kTiles == 1 || kTiles == 2) && kTile.warps == 4 * kTiles + 8);
    static_assert(kTiles == 1 || kTile.parts == 1, "two tiles use a block of keys twice, so it stays whole");
    static_assert(kCtasOfTile == 1 || (kIsPair && kTiles == 2 && kHeadDimV % (2 * kPanelColumns) == 0));
    using Transfer = std::conditional_t<kIsPair, PairTransfer, sm90::LocalTransfer>;
    static_assert(kBlockN % 32 == 0 && kHeadDim % 16 == 0 && kHeadDimV % 32 == 0);

    // Roles, in groups of four warps.
    static constexpr int kCorrectionGroup = kTiles;
    static constexpr int kSupplyGroup = kTiles + 1;  // its warps: products, plans and Q, K, V
    // Who reads a plan and hands it back: one thread each for products, Q, K and V; softmax and correction by warps.
    static constexpr int kPlanReaders = 4 + 4 * kTiles + 4;

    // Shared memory.
    static constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kPanelsV = (kHeadDimV / kCtasOfTile + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kQBytes = kPanels * kRows * kPanelRowBytes;             // of one query tile
    static constexpr int kKBytes = kPanels / kKParts * kKRows * kPanelRowBytes;  // of a part
    static constexpr int kVBytes = kPanelsV * kVPartRows * kPanelRowBytes;
    static_assert(kPanels % kKParts == 0 && kVPartRows % 16 == 0);
    // N of P V: whole panels, for no public kernel is known to end an MN-major operand inside the swizzle's pattern. V
    // is zero behind its columns.
    static constexpr int kPvColumns = kPanelsV * kPanelColumns * kCtasOfTile;
    static constexpr int kKOffset = kTiles * kQBytes;
    static constexpr int kVOffset = kKOffset + kStages * kKBytes;
    static constexpr int kControlOffset = kVOffset + kVStages * kVBytes;

    // S has two buffers: one for each query tile, or both in turn for one.
    static constexpr int kSBuffers = 2;
    static constexpr int kSRing = kSBuffers / kTiles;

    struct Control {
        uint64_t plan_full[kPlans], plan_empty[kPlans];
        uint64_t q_full[kTiles], q_empty[kTiles];
        uint64_t k_full[kStages], k_empty[kStages];
        uint64_t v_full[kVStages], v_empty[kVStages];
        uint64_t v_landed;
        uint64_t s_full[kSBuffers];                        // S is in tensor memory
        uint64_t p_full[kSBuffers], p_tail[kSBuffers];     // so are the first 3/4 of P, the rest of P
        uint64_t rescale_full[kSBuffers];                  // `rescale` holds a factor for each row
        uint64_t o_ready[kSBuffers];                       // O may be added to
        uint64_t o_full[kTiles];                           // a product has been added to O
        uint64_t scale_full[kTiles], scale_empty[kTiles];  // `out_scale`
        float rescale[kSBuffers][kRows];
        float out_scale[kTiles][kRows];
        ForwardPlan plans[kPlans];
        uint32_t tmem;  // where tcgen05.alloc says what it allocated
    };
    static constexpr int64_t kSharedMemory = kControlOffset + sizeof(Control);

    // Tensor memory, columns.
    static constexpr int kSColumn = 0;   // of buffer 0; P, packed in pairs, lies over the first half of S
    static constexpr int kSPitch = 128;  // from buffer to buffer
    static constexpr int kOColumn = kSBuffers * kSPitch;
    static_assert(kBlockN <= kSPitch && kOColumn + kTiles * kPvColumns <= kTensorMemoryColumns);

    // P is handed over in two parts, so that its product begins under the last exponentials.
    static constexpr int kPHead = kBlockN / 4 * 3 / 32 * 32;

    // setmaxnreg shares out what the launch has: threads times the cap that the compiler derives from their number.
    static constexpr int kSoftmaxRegisters = kBlockN > 96 ? 192 : 168;  // S and what becomes of a quarter of it
    static constexpr int kCorrectionRegisters = kTiles == 1 ? 144 : 64;
    static constexpr int kSupplyRegisters = kTiles == 1 ? 144 : kBlockN > 96 ? 64 : 96;
    static_assert(128 * (kTiles * kSoftmaxRegisters + kCorrectionRegisters + kSupplyRegisters) <=
                  65536 / kThreads / 8 * 8 * kThreads);
};

}  // namespace flash_ext::sm100
