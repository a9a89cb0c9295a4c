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
    int block_m;             // query rows
    int block_n;             // key rows
    int stages;              // buffers of Q and, without dout_stages, of dO
    int warps;               // per CTA: 4 producer warps, 4 per consumer warpgroup
    int roles = 0;           // 1: a warpgroup each for dV, dK and dQ (backward_roles.cuh), else 64 keys each
    int dout_stages = 0;     // roles: buffers of dO
    int dq_slice = 0;        // roles: columns of dQ that are computed at once
    int dq_buffers = 0;      // roles: of 64 columns of dQ on their way to the scratch, 2 or more
    int v_in_registers = 0;  // not roles; 1: dP has V from registers
    int polynomials = 0;     // of every 16 groups of 4 scores, how many are raised by a polynomial, not MUFU.EX2; plain
};

// What both designs have.
template <DataType kType, int kHeadDim_, int kHeadDimV_, BackwardTile kTile, bool kRich>
struct BackwardTiles {
    static constexpr DataType kDataType = kType;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr bool kIsRich = kRich;
    static constexpr int kBlockM = kTile.block_m;
    static constexpr int kBlockN = kTile.block_n;
    static constexpr int kStages = kTile.stages;
    static constexpr int kDoutStages = kTile.dout_stages > 0 ? kTile.dout_stages : kStages;
    static constexpr int kRows = 64;  // of a warpgroup's product
    static constexpr int kPolynomials = kTile.polynomials;
    static_assert(!kRich || kPolynomials == 0);
    static constexpr int kWarpgroups = kTile.warps / 4 - 1;
    static constexpr int kConsumerWarps = 4 * kWarpgroups;
    static constexpr int kThreads = kTile.warps * 32;
    static constexpr int kDsBuffers = 2;
    static_assert(kTile.warps % 4 == 0 && kWarpgroups <= 3);
    static_assert(kBlockM % 64 == 0 && kHeadDim % 32 == 0 && kHeadDimV % 32 == 0);
    // Buffers are found by a counter's low bits.
    static_assert((kStages & (kStages - 1)) == 0 && (kDoutStages & (kDoutStages - 1)) == 0);
    static_assert((kDsBuffers & (kDsBuffers - 1)) == 0);

    static constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kPanelsV = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kKBytes = kPanels * kBlockN * kPanelRowBytes;
    static constexpr int kVBytes = kPanelsV * kBlockN * kPanelRowBytes;
    static constexpr int kQBytes = kPanels * kBlockM * kPanelRowBytes;
    static constexpr int kDoutBytes = kPanelsV * kBlockM * kPanelRowBytes;
    static constexpr int kTermsBytes = kBlockM * 8;  // lse of a query block's rows, then delta
    static constexpr int kDsBytes = kBlockM / kPanelColumns * kBlockN * kPanelRowBytes;
    static constexpr int kVOffset = kKBytes;
    static constexpr int kQOffset = kVOffset + kVBytes;
    static constexpr int kDoutOffset = kQOffset + kStages * kQBytes;
    static constexpr int kDsOffset = kDoutOffset + kDoutStages * kDoutBytes;
    static constexpr int kDsEnd = kDsOffset + kDsBuffers * kDsBytes;

    using ScoreFragment = float[kBlockM / 2];      // 64 keys x kBlockM queries
    using PackedFragment = uint32_t[kBlockM / 4];  // the same as an A operand
    using DkFragment = float[kHeadDim / 2];
    using DvFragment = float[kHeadDimV / 2];
};

// Those between the loader and the consumers; the number of warps that hand Q back.
template <class Control>
__device__ __forceinline__ void init_load_barriers(Control& control, int q_warps) {
    Barrier::init(&control.landed, 1);
    for (uint64_t& barrier : control.q_full) Barrier::init(&barrier, 1);
    for (uint64_t& barrier : control.q_empty) Barrier::init(&barrier, q_warps);
    for (uint64_t& barrier : control.dout_full) Barrier::init(&barrier, 1);
}

// Every warpgroup has 64 keys (backward_keys.cuh).
template <DataType kType, int kHeadDim_, int kHeadDimV_, BackwardTile kTile, bool kRich>
struct BackwardShape : BackwardTiles<kType, kHeadDim_, kHeadDimV_, kTile, kRich> {
    using Tiles = BackwardTiles<kType, kHeadDim_, kHeadDimV_, kTile, kRich>;
    using Tiles::kBlockM, Tiles::kBlockN, Tiles::kHeadDim, Tiles::kRows, Tiles::kWarpgroups, Tiles::kThreads;
    using Tiles::kStages, Tiles::kDoutStages, Tiles::kTermsBytes, Tiles::kConsumerWarps;
    static_assert(kBlockN == kRows * kWarpgroups && kDoutStages == kStages);
    static constexpr bool kHandsDoutBack = false;  // Q's buffer of the same step is the last to be free
    static constexpr bool kVInRegisters = kTile.v_in_registers != 0;

    // dQ of a block is shared out among the warpgroups: by rows where there are 64 for each, else by columns.
    static constexpr bool kDqByRows = kBlockM == kRows * kWarpgroups;
    static constexpr int kDqColumns = kDqByRows ? kHeadDim : kHeadDim / kWarpgroups;
    static_assert(kDqByRows || kBlockM == kRows);
    // Columns from a panel of K to the next. A product that begins inside a panel cannot go on into the next one: where
    // parts of dQ would, a panel begins with each part, and panels overlap.
    static constexpr int kKeyPanelStep =
        kDqByRows || kDqColumns % kPanelColumns == 0 || kPanelColumns % kDqColumns == 0 ? kPanelColumns : kDqColumns;
    static_assert(kKeyPanelStep % 16 == 0 && kKeyPanelStep <= kPanelColumns);
    static constexpr int kDqPartBytes = kRows * kDqColumns * 4;  // of one warpgroup
    static constexpr int kTurns = kWarpgroups;                   // a key tile's additions to a query tile
    // Queries, of packed sequences on average, up to which whoever first comes to a part of dQ stores it. In longer
    // sequences a kernel that clears dQ takes less time than the looks at the parts' states.
    static constexpr int kStoresFirstRows = 2048;
    static constexpr bool kProgrammatic = true;  // starts under the end of the preprocessing
    static constexpr int kTermsAhead =
        kBlockM > 64 ? 4 : 8;  // pairs of lse or delta; with 128 queries 8 are 1 % slower
    static constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;

    static constexpr int kDqOffset = Tiles::kDsEnd;
    static constexpr int kTermsOffset = kDqOffset + kWarpgroups * kDqPartBytes;
    static constexpr int kControlOffset = kTermsOffset + kStages * kTermsBytes;

    // setmaxnreg shares out what the launch has: threads times the cap that the compiler derives from their number.
    static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : 24;
    static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : kWarpgroups == 2 ? 240 : 248;
    static_assert(128 * (kProducerRegisters + kWarpgroups * kConsumerRegisters) <= 65536 / kThreads / 8 * 8 * kThreads);

    struct Control {
        uint64_t landed;
        uint64_t q_full[kStages], q_empty[kStages];
        uint64_t dout_full[kDoutStages];
        uint64_t dq_full[kWarpgroups], dq_empty[kWarpgroups];
        BackwardWork work;
    };
    static constexpr int64_t kSharedMemory = kControlOffset + sizeof(Control);

    using DqFragment = float[kDqColumns / 2];
    using VFragment = uint32_t[kVInRegisters ? kHeadDimV_ / 4 : 1];  // 64 keys as an A operand

    __device__ __forceinline__ static void init_barriers(Control& control) {
        init_load_barriers(control, kConsumerWarps);
        for (int i = 0; i < kWarpgroups; ++i) {
            Barrier::init(&control.dq_full[i], 4);
            Barrier::init(&control.dq_empty[i], 1);
        }
    }
};

// A warpgroup each for dV, dK and dQ (backward_roles.cuh).
template <DataType kType, int kHeadDim_, int kHeadDimV_, BackwardTile kTile, bool kRich>
struct BackwardRolesShape : BackwardTiles<kType, kHeadDim_, kHeadDimV_, kTile, kRich> {
    using Tiles = BackwardTiles<kType, kHeadDim_, kHeadDimV_, kTile, kRich>;
    using Tiles::kBlockM, Tiles::kBlockN, Tiles::kHeadDim, Tiles::kHeadDimV, Tiles::kRows, Tiles::kWarpgroups;
    using Tiles::kStages, Tiles::kDoutStages, Tiles::kDsBuffers, Tiles::kTermsBytes;
    static_assert(kWarpgroups == 3 && kBlockM == kRows && kBlockN == kRows && kStages > 1);
    static_assert(kTile.v_in_registers == 0);

    static constexpr bool kHandsDoutBack = true;
    static constexpr bool kVInRegisters = false;
    static constexpr int kDqColumns = kHeadDim;  // in one part of the scratch
    static constexpr int kKeyPanelStep = kPanelColumns;
    static constexpr int kDqSlice = kTile.dq_slice;  // of a product
    static constexpr int kDqBuffers = kTile.dq_buffers;
    static constexpr int kDqBufferColumns = 64;
    static constexpr int kDqBufferBytes = kRows * kDqBufferColumns * 4;
    static constexpr int kDqChunks = kHeadDim / kDqBufferColumns;  // of a block
    static constexpr int kReducers = 2;                            // take turns, a block each
    static_assert(kHeadDim % kDqSlice == 0 && kDqSlice % kDqBufferColumns == 0 && kDqBuffers > 1);
    // The first chunk of a block is written only when that of the block before has been handed back: so the reducer of
    // the block before is past its claim, and none claims a block whose other chunks wait for one that waits itself.
    static_assert(kDqBuffers <= kDqChunks);
    static constexpr int kTurns = 1;                    // a key tile's additions to a query tile
    static constexpr int kTermsAhead = 0;               // registers allow none
    static constexpr bool kProgrammatic = false;        // d 256 is 1 to 2 % slower with it
    static constexpr int kStoresFirstRows = INT32_MAX;  // L2 bounds these, at any length
    static constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;

    static constexpr int kPOffset = Tiles::kDsEnd;
    static constexpr int kDqOffset = kPOffset + kRows * kBlockM * 4;
    static constexpr int kTermsOffset = kDqOffset + kDqBuffers * kDqBufferBytes;
    static constexpr int kControlOffset = kTermsOffset + kStages * kTermsBytes;

    // setmaxnreg shares out the 512 registers that a launch of 512 threads leaves four of them: accumulators, operands
    // and what else a role keeps.
    static constexpr int kProducerRegisters = 24;
    static constexpr int kScoresRegisters = kHeadDimV / 2 + 88;
    static constexpr int kGradientsRegisters = kHeadDim / 2 + 80;
    static constexpr int kQueriesRegisters = 512 - kProducerRegisters - kScoresRegisters - kGradientsRegisters;

    struct Control {
        uint64_t landed;
        uint64_t q_full[kStages], q_empty[kStages];
        uint64_t dout_full[kDoutStages], dout_empty[kDoutStages];
        uint64_t p_full, p_empty;
        uint64_t ds_full[kDsBuffers], ds_empty[kDsBuffers];
        uint64_t dq_full[kReducers][kDqChunks], dq_empty[kDqBuffers];
        BackwardWork work;
    };
    static constexpr int64_t kSharedMemory = kControlOffset + sizeof(Control);

    using DqFragment = float[kDqSlice / 2];

    __device__ __forceinline__ static void init_barriers(Control& control) {
        init_load_barriers(control, 4);
        for (uint64_t& barrier : control.dout_empty) Barrier::init(&barrier, 8);
        Barrier::init(&control.p_full, 4);
        Barrier::init(&control.p_empty, 4);
        for (int i = 0; i < kDsBuffers; ++i) {
            Barrier::init(&control.ds_full[i], 4);
            Barrier::init(&control.ds_empty[i], 4);
        }
        for (int i = 0; i < kReducers * kDqChunks; ++i) Barrier::init(&control.dq_full[0][i], 4);
        for (int i = 0; i < kDqBuffers; ++i) Barrier::init(&control.dq_empty[i], 1);
    }
};

}  // namespace flash_ext::sm90
