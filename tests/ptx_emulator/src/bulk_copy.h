// State of bulk copies: the groups of each thread's copies out of shared memory (PTX ISA 9.7.9.25.4).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "async_engine.h"
#include "types.h"
#include "vector_clock.h"

namespace ptx_emulator {

// Of one thread. Its copies are two streams to the checker: what they read from shared memory is done when
// wait_group.read says so, what they write when wait_group does.
struct BulkGroups {
    std::vector<uint64_t> tickets;  // per committed group: its last copy
    size_t read_through = 0;        // groups whose reads have been waited for
    uint64_t issued = 0;            // ticket of the latest copy
    Component reads = 0, writes = 0;
    uint32_t next_group() const { return static_cast<uint32_t>(tickets.size()) + 1; }
    // All copies are in groups that were waited for.
    bool settled() const { return issued == 0 || (read_through > 0 && tickets[read_through - 1] >= issued); }
};

struct BulkState {
    BulkState() : queue(AsyncQueue::Order::kAny, AsyncQueue::Trigger::kWait) {}
    AsyncQueue queue;
    std::array<std::unique_ptr<BulkGroups>, kWarpSize> lanes;  // of threads that have issued copies
    BulkGroups& of_lane(Warp& warp, uint32_t lane);
};

}  // namespace ptx_emulator
