// mbarrier objects (PTX ISA 9.7.13.15): phases that complete when all expected arrivals have come and all announced
// bytes have been written.
//
// The object's state lives here, beside shared memory; the 64 bits in shared memory are a picture of it, so that a
// kernel that overwrites or forgets to initialise a barrier is found out.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "checker.h"
#include "types.h"
#include "vector_clock.h"

namespace ptx_emulator {

struct MemoryBarrier {
    uint32_t expected = 0;  // arrivals of the next phase
    uint32_t pending = 0;   // arrivals that the current phase still needs
    int64_t bytes = 0;      // announced by expect_tx and not yet written; negative: written before they were announced
    uint64_t phase = 0;     // phases completed
    bool visible_to_async_proxy = false;  // a fence has followed the initialisation
    const Warp* initialiser = nullptr;
    bool is_committed_to = false;  // by tcgen05.commit
    bool is_remote = false;        // threads of another CTA arrive
    // ---- checker
    SyncClock arriving;    // of the current phase
    SyncClock latest;      // of the latest completed phase
    SyncClock completed;   // of all completed phases
    Component stream = 0;  // of asynchronous writes that complete on this barrier: epoch n + 1 belongs to phase n
};

// The barriers of a CTA, by offset in its shared memory.
class MemoryBarriers {
  public:
    void initialise(Warp& by, Cta& owner, uint32_t offset, uint32_t count);
    void invalidate(Cta& owner, uint32_t offset);
    // Raises when there is no barrier, or its 64 bits were overwritten.
    MemoryBarrier& at(Cta& owner, uint32_t offset);

    // past: what happened before the arrival and is known to whoever waits for the phase.
    void arrive(Cta& owner, uint32_t offset, uint32_t count, const SyncClock& past);
    void drop(Cta& owner, uint32_t offset, uint32_t count);  // expect fewer arrivals from the next phase on
    void expect_bytes(Cta& owner, uint32_t offset, uint32_t bytes);
    void complete_bytes(Cta& owner, uint32_t offset, uint32_t bytes, const SyncClock& past);
    // cp.async.mbarrier.arrive without .noinc: the phase waits for one arrival more.
    void add_pending(Cta& owner, uint32_t offset, uint32_t count);

    // fence.mbarrier_init, fence.proxy.async: the async proxy sees what `by` initialised.
    void publish(const Warp& by);
    std::string describe(uint32_t offset) const;
    const std::unordered_map<uint32_t, MemoryBarrier>& all() const { return barriers_; }

    // What mbarrier.arrive returns, and the picture in shared memory.
    static uint64_t token(const MemoryBarrier& barrier);
    static bool phase_done(const MemoryBarrier& barrier, bool parity) {
        return (barrier.phase & 1) != (parity ? 1 : 0);
    }

  private:
    void settle(Cta& owner, uint32_t offset, MemoryBarrier& barrier);

    std::unordered_map<uint32_t, MemoryBarrier> barriers_;
};

// What a warp last waited for in vain, for the deadlock report.
struct MemoryBarrierWait {
    Cta* owner = nullptr;
    uint32_t offset = 0;
    bool parity = false;
};

}  // namespace ptx_emulator
