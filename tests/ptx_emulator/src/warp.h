// One warp: its registers, its groups of lanes that run together, and what it waits for.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "async_engine.h"
#include "bulk_copy.h"
#include "checker.h"
#include "cluster_barrier.h"
#include "instruction.h"
#include "mbarrier.h"
#include "named_barrier.h"
#include "program.h"
#include "tensor_memory.h"
#include "types.h"
#include "warpgroup.h"

namespace ptx_emulator {

// Lanes that stand at the same instruction (independent thread scheduling, simplified: the group with the lowest pc
// runs first, and groups that meet join).
struct LaneGroup {
    LaneMask mask = 0;
    uint32_t pc = 0;
    bool blocked = false;
};

// The cp.async copies of a warp and their groups.
struct CopyState {
    CopyState() : queue(AsyncQueue::Order::kAny, AsyncQueue::Trigger::kWait) {}
    AsyncQueue queue;
    std::vector<uint64_t> groups;        // per committed group: the ticket of its last copy
    std::vector<uint32_t> group_epochs;  // and its epoch in the warp's stream of copies
    uint32_t epoch = 1;                  // of copies that are issued now
    uint64_t groups_waited = 0;          // groups[0..groups_waited) are complete
    uint64_t tickets_waited = 0;
    void close_group() {
        groups.push_back(queue.issued());
        group_epochs.push_back(epoch++);
    }
};

class Warp {
  public:
    Warp(Machine& machine, Cta& cta, uint32_t index, LaneMask lanes);
    ~Warp();
    Warp(const Warp&) = delete;

    enum class Outcome { kBlocked, kBudget, kDone };
    // Interprets until every group is blocked, the budget of instructions is used up, or all lanes have ended.
    Outcome run(uint32_t budget);

    // ---- registers
    template <class T>
    T* lanes(uint32_t offset) {
        return reinterpret_cast<T*>(registers_ + offset);
    }
    template <class T>
    const T* lanes(uint32_t offset) const {
        return reinterpret_cast<const T*>(registers_ + offset);
    }
    LaneMask& predicate(uint32_t offset) { return *reinterpret_cast<LaneMask*>(registers_ + offset); }
    LaneMask predicate(uint32_t offset) const { return *reinterpret_cast<const LaneMask*>(registers_ + offset); }
    void set_predicate(uint32_t offset, LaneMask values, LaneMask mask) {
        LaneMask& p = predicate(offset);
        p = (p & ~mask) | (values & mask);
    }

    // ---- lanes
    LaneMask active() const { return active_; }        // of the group that runs, before the guard
    LaneMask executing() const { return executing_; }  // of that group, those that the guard lets through
    LaneMask live() const;                             // lanes that have not ended
    bool converged() const { return active_ == live(); }
    bool done() const { return groups.empty(); }
    uint32_t pc() const { return pc_; }
    // For ExecutionCounts::add_size, of the instruction that runs.
    void count_size(uint32_t a, uint32_t b);
    // Replaces lanes of the running group by groups that stand elsewhere; the handler then returns Step::kExit for
    // them.
    void split(const std::vector<LaneGroup>& parts) { added_.insert(added_.end(), parts.begin(), parts.end()); }
    // ---- for the check of wgmma.fence: which registers were read or written since, but by products. Copies of the
    // front end (mov) carry the age of what they copy.
    void next_fence() { ++fences_; }
    bool accessed_since_fence(uint32_t offset) const {
        return !access_ages_.empty() && access_ages_[program.register_number(offset)] == fences_;
    }
    uint8_t* local(uint32_t lane, uint64_t offset, uint32_t bytes);  // checks bounds

    Machine& machine;
    Cta& cta;
    const Program& program;
    const uint32_t index;  // in the CTA
    std::vector<LaneGroup> groups;
    uint64_t instructions = 0;
    uint64_t blocked_at = ~uint64_t{0};  // Machine::progress when it last could not go on

    // ---- state of instruction families; a new family adds its struct here
    BarrierWait barrier_wait;
    CopyState copies;
    WarpClock clock;
    uint32_t registers_in_flight = 0;         // how many entries of in_flight are set
    std::vector<RegisterInFlight> in_flight;  // by register number; empty: none yet
    LaneMask carry = 0;                       // CC.CF of add.cc and its kin
    ClusterBarrierWait cluster_barrier;
    MemoryBarrierWait memory_barrier_wait;
    BulkState bulk;
    WarpgroupMultiply multiply;
    TensorMemoryAccess tensor_memory;
    uint32_t registers_per_thread = 0;  // setmaxnreg; 0: not limited

  private:
    void initialize_registers();
    int pick_group();
    void note_accesses(uint32_t pc);

    std::unique_ptr<uint8_t[]> register_storage_;
    std::vector<uint8_t> local_storage_;
    uint8_t* registers_ = nullptr;
    std::vector<LaneGroup> added_;
    std::vector<uint32_t> access_ages_;  // by register number: fences_ at its latest access
    uint32_t fences_ = 1;
    LaneMask active_ = 0, executing_ = 0;
    uint32_t pc_ = 0;
    bool starve_lowest_ = false;  // the lowest pc spun through a whole budget: let another group go once
};

}  // namespace ptx_emulator
