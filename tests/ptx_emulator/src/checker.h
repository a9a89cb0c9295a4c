// The happens-before checker: reports two accesses of which one writes and that nothing orders, in any schedule.
//
// After FastTrack (Flanagan and Freund, PLDI 2009), with warps as threads, shadow records per 16 bytes that keep byte
// masks, and one component per stream of asynchronous effects. What an asynchronous operation reads and writes is
// recorded when it is issued: it may happen at any time until its completion is waited for, so the schedule does not
// matter. Within a warp, accesses of different lanes are ordered by bar.warp.sync and barriers alone.
//
// The instruction handlers call the hooks below; every hook returns at once when the checker is off.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "shadow.h"
#include "types.h"
#include "vector_clock.h"

namespace ptx_emulator {

struct MemoryBarrier;

// A warp's part of the checker's state.
//
// Its accesses are in two components. What one lane alone releases (an elected lane that arrives at an mbarrier) is its
// own past and that of the whole warp up to the latest synchronisation of the lanes, but not what other lanes have done
// since then: those accesses are in `component`. `singles` has what single lanes do.
struct WarpClock {
    Component component = 0;
    Component singles = 0;
    uint32_t epoch = 1, single_epoch = 1;  // of the two now; how much of them the lanes know of each other: `knowledge`
    Component copies = 0;                  // the stream of its cp.async groups
    uint32_t copies_waited = 0;            // groups its lanes have waited for, each lane for its own copies
    // Streams that each lane waits for alone (tcgen05.wait): how much of them all lanes have waited for, and fenced
    // (tcgen05.fence::before_thread_sync), as they know of each other.
    struct LaneStream {
        Component component;
        uint32_t waited, fenced;
    };
    std::vector<LaneStream> lane_streams;
    Knowledge knowledge;  // of all lanes
    // What a lane has waited for alone (an mbarrier, its own bulk copies) it alone knows, until the lanes meet. Of the
    // few lanes that have: this, and what all know.
    struct LaneKnowledge {
        uint32_t lane;
        std::unique_ptr<Knowledge> knowledge;
    };
    std::vector<LaneKnowledge> lane_knowledge;
    Knowledge fence_release;  // at the latest fence: what later relaxed stores and atomics release
    bool has_fence_release = false;
    SyncClock pending_acquire;  // of relaxed loads: acquired by the next fence
};

// An asynchronous operation as the checker sees it: made at issue, used for all its accesses.
struct AsyncAgent {
    Warp* issuer = nullptr;
    uint32_t pc = 0;
    Component component = 0;  // the stream that its completion raises
    uint32_t epoch = 0;       // the value of that stream once this operation is known to be complete
    bool async_proxy = true;
    bool product = false;         // tcgen05.mma
    Knowledge knowledge;          // of the issuer at issue
    uint32_t issuer_epoch = 0;    // what its completion hands over of the issuer itself; 0: of a lane that issued
    uint32_t issuer_singles = 0;  // it alone, what the lanes know of each other
};

enum class InFlight : uint8_t { kNone, kReadByOperation, kWrittenByOperation };

// Of a register: what an asynchronous operation does with it, and the pc of its issue.
struct RegisterInFlight {
    InFlight state = InFlight::kNone;
    uint32_t pc = 0;
};

// The global memory that a finished grid has touched.
struct GridAccesses {
    ShadowPages pages;
    RecordArena records;
    const Program* program = nullptr;
};

enum class MemoryOrder : uint8_t { kWeak, kRelaxed, kAcquire, kRelease, kAcquireRelease };

class Checker {
  public:
    Checker(bool enabled, Machine& machine) : enabled_(enabled), machine_(machine) {}

    bool enabled() const { return enabled_; }
    RecordArena& global_records() { return own_->records; }

    // ---- clusters and warps start
    Component new_component(Cluster& cluster, std::string name);
    void start_warp(Warp& warp);

    // Who makes an access: for a handler that makes several, only the lane may differ between them.
    struct Actor {
        const Knowledge* knowledge;
        AccessRecord record;  // as it will be stored, but for bytes and lane
        uint32_t lane;        // apart from it: a load of what a narrower store has just changed in part is slow
        const Warp* warp;
        bool through_async_proxy;
        bool on_tensor_memory = false;
        bool reads_operand = false;  // of tcgen05.mma, in shared memory
    };
    Actor actor(const Warp& warp, uint32_t lane, AccessKind kind) const;
    static Actor actor(const AsyncAgent& agent, uint32_t lane, AccessKind kind);
    void renew(Actor& actor) const;  // after a release or an acquire of its warp
    static AccessRecord made_by(const Actor& actor);
    // repetition: of the same actor's accesses to one kind of memory, if it makes several.
    void shared_access(const Actor& actor, Cta& owner, uint32_t offset, uint32_t bytes,
                       Repetition* repetition = nullptr);
    void global_access(const Actor& actor, uint64_t address, uint32_t bytes, Repetition* repetition = nullptr);
    // Reads of 16 bytes at each of these offsets. The records are more than the caches hold: they are fetched ahead.
    void shared_reads(const Actor& actor, Cta& owner, const std::vector<uint32_t>& offsets);

    // ---- accesses. `lane`: the one that asks, or kCollective for an access of the warp as a whole (ldmatrix).
    void shared_access(Warp& warp, uint32_t lane, Cta& owner, uint32_t offset, uint32_t bytes, AccessKind kind);
    void global_access(Warp& warp, uint32_t lane, uint64_t address, uint32_t bytes, AccessKind kind);
    void shared_access(const AsyncAgent& agent, uint32_t lane, Cta& owner, uint32_t offset, uint32_t bytes,
                       AccessKind kind);
    void global_access(const AsyncAgent& agent, uint32_t lane, uint64_t address, uint32_t bytes, AccessKind kind);
    // Of `lanes` lanes of columns of tensor memory; every_second: a product that leaves every second 16 lanes alone.
    void tensor_access(const AsyncAgent& agent, Cta& owner, uint32_t column, uint32_t columns, uint32_t first_lane,
                       uint32_t lanes, AccessKind kind, bool every_second);
    // Which comes before every access of these columns of the warp's CTA.
    void tensor_allocation(const Warp& warp, uint32_t column, uint32_t columns);
    AsyncAgent agent(Warp& issuer, Component stream, uint32_t epoch, bool async_proxy) const;

    // ---- order
    // Of one lane that executes apart from the others only its own order changes, until warp_sync or a barrier.
    void release(Warp& warp, SyncClock& sync);  // the past of the executing lanes happens before whoever acquires sync
    void acquire(Warp& warp, const SyncClock& sync);
    void acquire(Warp& warp, LaneMask lanes, const SyncClock& sync);  // some of the executing lanes
    void leave_barrier(Warp& warp, const SyncClock& sync);            // all lanes, which have arrived there together
    void join(SyncClock& into, const SyncClock& from);
    void complete(Warp& warp, LaneMask lanes, Component stream, uint32_t epoch);  // they have waited for it up to epoch
    // The same for a warp's loads and stores of tensor memory, which later ones of its own then follow without a fence.
    void tensor_complete(Warp& warp, Component stream, uint32_t epoch);
    void tensor_fence_before(Warp& warp);
    void tensor_fence_after(Warp& warp);
    SyncClock fenced(const Warp& warp) const;                // what relaxed operations release: the latest fence's past
    SyncClock past(const AsyncAgent& agent) const;           // what the completion of an operation makes known
    SyncClock products_done(const AsyncAgent& agent) const;  // the same of tcgen05.commit, which is a fence, too
    SyncClock copies_done(Warp& warp, uint32_t epoch) const;  // the warp's past and its cp.async copies up to epoch
    void warp_sync(Warp& warp);                       // bar.warp.sync: orders the lanes of the warp among each other
    void copies_waited(Warp& warp, uint32_t groups);  // cp.async.wait_group: each lane knows of its own copies
    void proxy_fence(Warp& warp);                     // fence.proxy.async, of shared memory
    void global_proxy_fence(Warp& warp);              // likewise, of global memory
    void fence(Warp& warp);                           // fence.sc / acq_rel, membar
    // An atomic or a load/store with an order, on a global or shared location.
    void ordered_access(Warp& warp, uint64_t location, MemoryOrder order, bool reads, bool writes);

    // An arrival at an mbarrier must know that the phase before has ended: else another schedule counts it there.
    void check_arrival(const Warp& warp, uint32_t lane, const MemoryBarrier& barrier, uint32_t offset);
    void check_arrival(const Warp& by, const Knowledge& knowledge, uint32_t pc, const MemoryBarrier& barrier,
                       uint32_t offset);
    // A CTA has ended: what arrives at its mbarriers from outside must have arrived.
    void check_end(const Cta& cta);

    // ---- registers that an asynchronous operation still reads or writes (wgmma operands, tcgen05.ld results)
    using InFlight = ptx_emulator::InFlight;
    void set_in_flight(Warp& warp, uint32_t register_offset, InFlight state, uint32_t pc);
    void clear_in_flight(Warp& warp, uint32_t register_offset);
    // Called by the interpreter for each instruction while a warp has registers in flight.
    void check_in_flight(Warp& warp, const Instruction& instruction);

    // ---- programmatic dependent launch: the accesses of grids that may still run until griddepcontrol.wait
    void set_primaries(std::vector<std::shared_ptr<const GridAccesses>> grids) { primaries_ = std::move(grids); }
    std::shared_ptr<const GridAccesses> take_accesses();
    void primaries_done(Warp& warp);  // griddepcontrol.wait

    // ---- reports
    void report(const std::string& text);  // one finding; collected, the launch fails at its end
    void report_once(uint32_t pc, uint32_t earlier_pc, const std::string& text);  // once for a pair of instructions
    const std::vector<std::string>& reports() const { return reports_; }

  private:
    void allocated_before(Actor user, Cta& owner, uint32_t column, uint32_t columns);
    void access(Granule& granule, const Actor& actor, uint16_t bytes, const char* space, uint64_t address, Cta* owner,
                Repetition* repetition);
    void read_access(Granule& granule, const Actor& actor, uint16_t bytes, const char* space, uint64_t address,
                     Cta* owner);
    void write_access(Granule& granule, const Actor& actor, uint16_t bytes, const char* space, uint64_t address,
                      Cta* owner);
    RecordArena& records_of(const Cta* owner);  // nullptr: of global memory
    bool ordered(const Actor& actor, const AccessRecord& earlier, const char** missing) const;
    bool ordered(const Actor& actor, const Knowledge& knowledge, const AccessRecord& earlier,
                 const char** missing) const;
    void race(const Actor& actor, const AccessRecord& earlier, const char* space, uint64_t address, const char* missing,
              Cta* owner);
    void unwritten(const Actor& actor, const char* space, uint64_t address, const Cta& owner);
    std::string describe(const AccessRecord& record) const;
    void advance(Warp& warp);
    void synchronise_lanes(Warp& warp, LaneMask lanes);
    static bool alone(const Warp& warp);  // whether one lane of several executes the instruction
    static const Knowledge& known(const Warp& warp, uint32_t lane);
    static const Knowledge& known(const Warp& warp);  // to the executing lanes
    template <class F>
    static void learn(Warp& warp, LaneMask lanes, const F& change);  // changes what these lanes know
    // What asynchronous operations of the executing lanes come after: if one is alone, without what other lanes have
    // not told it.
    Knowledge known_at_issue(const Warp& warp) const;
    // What the executing lanes hand over: this, and their own accesses.
    Knowledge handed_over(const Warp& warp) const;

    bool enabled_;
    Machine& machine_;
    void check_primaries(const Actor& actor, uint16_t bytes, uint64_t address);

    std::shared_ptr<GridAccesses> own_ = std::make_shared<GridAccesses>();
    ShadowPages& global_ = own_->pages;
    std::vector<std::shared_ptr<const GridAccesses>> primaries_;
    std::unordered_map<uint64_t, SyncClock> locations_;               // atomics and ordered accesses, by address
    std::set<std::tuple<uint32_t, uint32_t, std::string>> reported_;  // both pc and what is missing
    std::vector<std::string> reports_;
};

}  // namespace ptx_emulator
