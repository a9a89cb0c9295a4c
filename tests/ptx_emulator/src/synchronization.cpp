#include "synchronization.h"

#include <algorithm>

#include "errors.h"
#include "machine.h"

namespace ptx_emulator {

static void complete(Machine& machine, NamedBarrier& barrier) {
    for (Warp* warp : barrier.waiting) {
        machine.checker.leave_barrier(*warp, barrier.clock);
        warp->barrier_wait.state = BarrierWait::State::kReleased;
        warp->barrier_wait.reduction = barrier.reduction;
        warp->barrier_wait.reduction_and = barrier.reduction_and;
        warp->barrier_wait.reduction_or = barrier.reduction_or;
    }
    barrier = NamedBarrier{};
    machine.progressed();
}

void arrive_at_barrier(Warp& warp, uint32_t id, uint32_t count, bool waits) {
    Cta& cta = warp.cta;
    if (id >= kNamedBarriers) raise(Fault::kIllegalInstruction, "barrier %u: there are 16 per CTA", id);
    if (count % kWarpSize || count > cta.warps.size() * kWarpSize) {
        raise(Fault::kIllegalInstruction, "barrier %u: a count of %u threads, in a CTA of %zu", id, count,
              cta.warps.size() * kWarpSize);
    }
    NamedBarrier& barrier = cta.barriers[id];
    const bool whole_cta = count == 0;
    if (whole_cta) count = static_cast<uint32_t>(cta.warps.size()) * kWarpSize;
    if (barrier.arrived == 0) {
        barrier.whole_cta = whole_cta;
        barrier.expected = count;
    } else if (barrier.expected != count) {
        raise(Fault::kIllegalInstruction, "barrier %u: warp %u comes with a count of %u, the phase was opened with %u",
              id, warp.index, count, barrier.expected);
    }
    cta.machine.checker.release(warp, barrier.clock);
    barrier.arrived += kWarpSize;
    if (waits) {
        barrier.waiting.push_back(&warp);
        warp.barrier_wait.state = BarrierWait::State::kWaiting;
        warp.barrier_wait.id = id;
    }
    cta.machine.progressed();
    recheck_barrier(cta, barrier);
}

void recheck_barrier(Cta& cta, NamedBarrier& barrier) {
    if (barrier.arrived == 0) return;
    const uint32_t expected = barrier.whole_cta ? cta.live_threads() : barrier.expected;
    if (barrier.arrived >= expected) complete(cta.machine, barrier);
}

}  // namespace ptx_emulator
