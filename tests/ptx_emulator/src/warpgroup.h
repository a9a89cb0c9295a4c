// wgmma's state (PTX ISA 9.7.15): the products of four warps, and each warp's groups.
//
// A product runs once all four warps have issued it; each warp waits for its own groups.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "async_engine.h"
#include "types.h"
#include "vector_clock.h"

namespace ptx_emulator {

constexpr uint32_t kWarpgroupWarps = 4;

// A product that some of the four warps have issued.
struct WarpgroupProduct {
    const Instruction* instruction = nullptr;
    uint64_t a = 0, b = 0;  // descriptors; a unused if A is in registers
    bool accumulate = false;
    uint32_t warps = 0;  // that have issued it
};

// A fence, commit or wait that some of the four warps have executed.
struct AlignedInstruction {
    const Instruction* instruction = nullptr;
    uint32_t warps = 0;  // that have executed it
};

struct Warpgroup {
    Warpgroup() : queue(AsyncQueue::Order::kFifo, AsyncQueue::Trigger::kWait) {}
    AsyncQueue queue;                      // products that all four have issued; ticket n + 1 is product n
    std::deque<WarpgroupProduct> partial;  // the rest, from product `complete` on
    uint64_t complete = 0;
    std::deque<AlignedInstruction> aligned;  // from number `aligned_first` on
    uint64_t aligned_first = 0;
};

// Of one warp.
struct WarpgroupMultiply {
    struct InFlight {
        uint64_t product;
        const Instruction* instruction;
        uint32_t pc;
    };
    uint64_t issued = 0;
    std::vector<uint64_t> groups;  // products issued when the group was committed
    size_t groups_waited = 0;
    std::deque<InFlight> in_flight;
    Component stream = 0;
    bool has_stream = false;
    bool fenced = false;   // wgmma.fence has been executed at all
    uint64_t aligned = 0;  // fences, commits and waits executed
    bool settled() const { return issued == 0 || (groups_waited > 0 && groups[groups_waited - 1] == issued); }
};

}  // namespace ptx_emulator
