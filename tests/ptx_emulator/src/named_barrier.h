// bar.sync and bar.arrive (PTX ISA 9.7.13.1): 16 barriers per CTA, counted in whole warps.
//
// A warp that waits is on the barrier's list; the arrival that completes the phase releases all of them at once, and
// hands each the clocks of those that arrived. The protocol for any instruction that waits: the handler registers the
// warp on first execution, returns Step::kBlock until it is released, and then clears its mark and returns kNext.
#pragma once

#include <cstdint>
#include <vector>

#include "types.h"
#include "vector_clock.h"

namespace ptx_emulator {

struct NamedBarrier {
    uint32_t arrived = 0;    // threads, a multiple of 32
    uint32_t expected = 0;   // threads of the phase that runs; 0: none has arrived
    bool whole_cta = false;  // the phase was opened without a count: as many as are alive
    uint32_t reduction = 0;  // bar.red: so far (popc, or the lanes that voted true)
    bool reduction_and = true, reduction_or = false;
    std::vector<Warp*> waiting;
    SyncClock clock;
};

// What a warp remembers of the barrier it waits at.
struct BarrierWait {
    enum class State : uint8_t { kNone, kWaiting, kReleased } state = State::kNone;
    uint32_t id = 0;
    uint32_t reduction = 0;  // result of bar.red
    bool reduction_and = true, reduction_or = false;
};

}  // namespace ptx_emulator
