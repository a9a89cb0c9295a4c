#include "checker.h"

#include <algorithm>

#include "errors.h"
#include "lanes.h"
#include "machine.h"

namespace ptx_emulator {

constexpr size_t kMaxReports = 10;
constexpr uint32_t kEpochMask = (1u << 28) - 1;  // more releases than that no warp lives to make

Component Checker::new_component(Cluster& cluster, std::string name) {
    cluster.component_names.push_back(std::move(name));
    return static_cast<Component>(cluster.component_names.size() - 1);
}

void Checker::start_warp(Warp& warp) {
    if (!enabled_) return;
    const std::string name = format("CTA rank %u warp %u", warp.cta.rank, warp.index);
    warp.clock.component = new_component(warp.cta.cluster, name);
    warp.clock.singles = new_component(warp.cta.cluster, "single lanes of " + name);
    warp.clock.copies = new_component(warp.cta.cluster, "cp.async of " + name);
}

// ---------------------------------------------------------------------------------------------------------- order

void Checker::advance(Warp& warp) {
    ++warp.clock.single_epoch;
    if (!alone(warp)) ++warp.clock.epoch;
}

bool Checker::alone(const Warp& warp) {
    const LaneMask lanes = warp.executing();
    return (lanes & (lanes - 1)) == 0 && warp.live() != lanes;
}

static Knowledge* own_knowledge(const WarpClock& clock, uint32_t lane) {
    for (const WarpClock::LaneKnowledge& own : clock.lane_knowledge) {
        if (own.lane == lane) return own.knowledge.get();
    }
    return nullptr;
}

const Knowledge& Checker::known(const Warp& warp, uint32_t lane) {
    const Knowledge* own = own_knowledge(warp.clock, lane);
    return own ? *own : warp.clock.knowledge;
}

static bool is_one(LaneMask lanes) {
    return lanes && (lanes & (lanes - 1)) == 0;
}

const Knowledge& Checker::known(const Warp& warp) {
    const LaneMask lanes = warp.executing();
    return is_one(lanes) ? known(warp, first_lane(lanes)) : warp.clock.knowledge;
}

// Several lanes stand for the warp, even if not all are there: the emulator may have run the others apart from them.
template <class F>
void Checker::learn(Warp& warp, LaneMask lanes, const F& change) {
    WarpClock& clock = warp.clock;
    if (is_one(lanes)) {
        const uint32_t lane = first_lane(lanes);
        if (!own_knowledge(clock, lane) && warp.live() != lanes) {
            clock.lane_knowledge.push_back({lane, std::make_unique<Knowledge>(clock.knowledge)});
        }
        if (Knowledge* own = own_knowledge(clock, lane)) return change(*own);
    }
    change(clock.knowledge);
    for (const WarpClock::LaneKnowledge& own : clock.lane_knowledge) change(*own.knowledge);
}

Knowledge Checker::known_at_issue(const Warp& warp) const {
    Knowledge knowledge = known(warp);
    if (alone(warp)) {
        for (const WarpClock::LaneStream& stream : warp.clock.lane_streams) {
            knowledge.generic.set(stream.component, stream.waited);
            knowledge.tensor.set(stream.component, stream.waited);
            knowledge.tensor_released.set(stream.component, stream.fenced);
        }
    }
    return knowledge;
}

// A single lane's clock: without what the others have done since the lanes met. What single lanes have done, all of
// them hand over.
static void raise_own(VectorClock& generic, const WarpClock& clock, bool alone) {
    if (!alone) generic.raise_to(clock.component, clock.epoch);
    generic.raise_to(clock.singles, clock.single_epoch);
    generic.raise_to(clock.copies, clock.copies_waited);
}

Knowledge Checker::handed_over(const Warp& warp) const {
    Knowledge knowledge = known_at_issue(warp);
    raise_own(knowledge.generic, warp.clock, alone(warp));
    return knowledge;
}

// All of these lanes know of what each of them knows.
void Checker::synchronise_lanes(Warp& warp, LaneMask lanes) {
    WarpClock& clock = warp.clock;
    auto& own = clock.lane_knowledge;
    const uint32_t cluster = warp.cta.cluster.index;
    for (size_t i = 0; i < own.size();) {
        if (!(lanes >> own[i].lane & 1)) {
            ++i;
            continue;
        }
        const std::unique_ptr<Knowledge> from = std::move(own[i].knowledge);
        own.erase(own.begin() + static_cast<std::ptrdiff_t>(i));
        learn(warp, lanes, [&](Knowledge& knowledge) {
            knowledge.join(*from, true, cluster, cluster);
            knowledge.tensor.join(from->tensor);
            knowledge.operands.join(from->operands);
        });
    }
    for (WarpClock::LaneStream& stream : clock.lane_streams) {
        stream.waited = clock.knowledge.generic.get(stream.component);
        stream.fenced = clock.knowledge.tensor_released.get(stream.component);
    }
}

void Checker::warp_sync(Warp& warp) {
    if (!enabled_ || alone(warp)) return;
    synchronise_lanes(warp, warp.executing());
    learn(warp, warp.executing(), [&](Knowledge& knowledge) { raise_own(knowledge.generic, warp.clock, false); });
    advance(warp);
}

void Checker::release(Warp& warp, SyncClock& sync) {
    if (!enabled_) return;
    const uint32_t cluster = warp.cta.cluster.index;
    if (!sync.used) {
        sync.used = true;
        sync.cluster = cluster;
    }
    const bool same = sync.cluster == cluster;
    if (alone(warp)) {
        sync.knowledge.join(known_at_issue(warp), same, cluster, sync.cluster);
    } else {
        sync.knowledge.join(warp.clock.knowledge, same, cluster, sync.cluster);
        for (const WarpClock::LaneKnowledge& own : warp.clock.lane_knowledge) {
            if (warp.executing() >> own.lane & 1) sync.knowledge.join(*own.knowledge, same, cluster, sync.cluster);
        }
    }
    raise_own(same ? sync.knowledge.generic : sync.knowledge.foreign[cluster], warp.clock, alone(warp));
    advance(warp);
}

void Checker::acquire(Warp& warp, const SyncClock& sync) {
    acquire(warp, warp.executing(), sync);
}

void Checker::acquire(Warp& warp, LaneMask lanes, const SyncClock& sync) {
    if (!enabled_ || !sync.used) return;
    const uint32_t cluster = warp.cta.cluster.index;
    learn(warp, lanes, [&](Knowledge& knowledge) {
        knowledge.join(sync.knowledge, sync.cluster == cluster, sync.cluster, cluster);
    });
}

void Checker::leave_barrier(Warp& warp, const SyncClock& sync) {
    if (!enabled_) return;
    synchronise_lanes(warp, kAllLanes);
    acquire(warp, kAllLanes, sync);
}

void Checker::join(SyncClock& into, const SyncClock& from) {
    if (!enabled_ || !from.used) return;
    if (!into.used) {
        into = from;
        return;
    }
    into.knowledge.join(from.knowledge, into.cluster == from.cluster, from.cluster, into.cluster);
}

void Checker::complete(Warp& warp, LaneMask lanes, Component stream, uint32_t epoch) {
    if (!enabled_) return;
    learn(warp, lanes, [&](Knowledge& knowledge) { knowledge.generic.raise_to(stream, epoch); });
}

void Checker::tensor_complete(Warp& warp, Component stream, uint32_t epoch) {
    if (!enabled_) return;
    learn(warp, warp.executing(), [&](Knowledge& knowledge) {
        knowledge.generic.raise_to(stream, epoch);
        knowledge.tensor.raise_to(stream, epoch);
    });
}

void Checker::tensor_fence_before(Warp& warp) {
    if (!enabled_) return;
    if (alone(warp)) {
        const VectorClock before = known_at_issue(warp).tensor;
        learn(warp, warp.executing(), [&](Knowledge& knowledge) { knowledge.tensor_released.join(before); });
    } else {
        learn(warp, warp.executing(), [](Knowledge& knowledge) { knowledge.tensor_released.join(knowledge.tensor); });
    }
}

void Checker::tensor_fence_after(Warp& warp) {
    if (!enabled_) return;
    learn(warp, warp.executing(), [](Knowledge& knowledge) {
        knowledge.tensor.join(knowledge.tensor_released);
        knowledge.operands.join(knowledge.generic);
    });
}

SyncClock Checker::fenced(const Warp& warp) const {
    SyncClock sync;
    if (!enabled_ || !warp.clock.has_fence_release) return sync;
    sync.used = true;
    sync.cluster = warp.cta.cluster.index;
    sync.knowledge = warp.clock.fence_release;
    return sync;
}

SyncClock Checker::past(const AsyncAgent& agent) const {
    SyncClock sync;
    if (!enabled_) return sync;
    sync.used = true;
    sync.cluster = agent.issuer->cta.cluster.index;
    sync.knowledge = agent.knowledge;
    sync.knowledge.generic.raise_to(agent.component, agent.epoch);
    const WarpClock& issuer = agent.issuer->clock;
    sync.knowledge.generic.raise_to(issuer.component, agent.issuer_epoch);
    sync.knowledge.generic.raise_to(issuer.singles, agent.issuer_singles);
    return sync;
}

SyncClock Checker::products_done(const AsyncAgent& agent) const {
    SyncClock sync = past(agent);
    if (!enabled_) return sync;
    sync.knowledge.tensor_released.join(agent.knowledge.tensor);
    sync.knowledge.tensor_released.raise_to(agent.component, agent.epoch);
    return sync;
}

SyncClock Checker::copies_done(Warp& warp, uint32_t epoch) const {
    return past(agent(warp, warp.clock.copies, epoch, false));
}

void Checker::copies_waited(Warp& warp, uint32_t groups) {
    if (enabled_) warp.clock.copies_waited = std::max(warp.clock.copies_waited, groups);
}

void Checker::proxy_fence(Warp& warp) {
    if (!enabled_) return;
    learn(warp, warp.executing(), [&](Knowledge& knowledge) {
        knowledge.published.join(knowledge.generic);
        raise_own(knowledge.published, warp.clock, alone(warp));
    });
    // Writes after the fence are not covered by it.
    advance(warp);
}

void Checker::global_proxy_fence(Warp& warp) {
    if (!enabled_) return;
    learn(warp, warp.executing(), [](Knowledge& knowledge) {
        for (const auto& [cluster, clock] : knowledge.foreign) knowledge.foreign_published[cluster].join(clock);
    });
}

void Checker::fence(Warp& warp) {
    if (!enabled_) return;
    acquire(warp, warp.clock.pending_acquire);
    warp.clock.pending_acquire = SyncClock{};
    warp.clock.fence_release = handed_over(warp);
    warp.clock.has_fence_release = true;
    advance(warp);
}

void Checker::ordered_access(Warp& warp, uint64_t location, MemoryOrder order, bool reads, bool writes) {
    if (!enabled_) return;
    const bool acquires = order == MemoryOrder::kAcquire || order == MemoryOrder::kAcquireRelease;
    const bool releases = order == MemoryOrder::kRelease || order == MemoryOrder::kAcquireRelease;
    if (!releases && !warp.clock.has_fence_release && !locations_.count(location)) return;  // nothing to hand over
    SyncClock& sync = locations_[location];
    if (reads) {
        if (acquires) {
            acquire(warp, sync);
        } else {
            join(warp.clock.pending_acquire, sync);
        }
    }
    if (!writes) return;
    if (!reads) sync = SyncClock{};  // a plain store ends the release sequence of the value it replaces
    if (releases) {
        release(warp, sync);
    } else if (warp.clock.has_fence_release) {
        join(sync, fenced(warp));
    }
}

void Checker::check_arrival(const Warp& warp, uint32_t lane, const MemoryBarrier& barrier, uint32_t offset) {
    if (!enabled_) return;
    const Knowledge& knowledge = known(warp, lane);
    if (knowledge.generic.get(barrier.stream) >= barrier.phase) return;
    Knowledge past = knowledge;
    raise_own(past.generic, warp.clock, alone(warp));
    check_arrival(warp, past, warp.pc(), barrier, offset);
}

void Checker::check_arrival(const Warp& by, const Knowledge& knowledge, uint32_t pc, const MemoryBarrier& barrier,
                            uint32_t offset) {
    if (!enabled_ || knowledge.generic.get(barrier.stream) >= barrier.phase) return;
    if (knowledge.generic.covers(barrier.latest.knowledge.generic)) return;
    report_once(pc, pc,
                format("hazard: nothing orders an arrival at the mbarrier at shared offset 0x%x after the end of its "
                       "phase %llu, which may count it in another schedule\n  by CTA rank %u warp %u at %s",
                       offset, static_cast<unsigned long long>(barrier.phase - 1), by.cta.rank, by.index,
                       machine_.program.where(pc).c_str()));
}

void Checker::check_end(const Cta& cta) {
    if (!enabled_ || !machine_.options.strict) return;
    VectorClock known;
    for (const auto& warp : cta.warps) {
        const WarpClock& clock = warp->clock;
        known.join(clock.knowledge.generic);
        for (const WarpClock::LaneKnowledge& own : clock.lane_knowledge) known.join(own.knowledge->generic);
        raise_own(known, clock, false);
    }
    for (const auto& [offset, barrier] : cta.memory_barriers.all()) {
        const bool waited = known.get(barrier.stream) >= barrier.phase;
        const char* what = nullptr;
        if (barrier.is_committed_to && !waited) what = "tcgen05.commit";
        if (barrier.is_remote && !((waited || known.covers(barrier.latest.knowledge.generic)) &&
                                   known.covers(barrier.arriving.knowledge.generic))) {
            what = "another CTA";
        }
        if (!what) continue;
        report_once(
            offset, offset,
            format("hazard: CTA rank %u of cluster %u may end before an arrival of %s at its mbarrier at shared "
                   "offset 0x%x: nothing waits for it",
                   cta.rank, cta.cluster.index, what, offset));
    }
}

// -------------------------------------------------------------------------------------------------------- accesses

// Whether `earlier` happens before the actor's access; *missing says what would have ordered them.
bool Checker::ordered(const Actor& actor, const AccessRecord& earlier, const char** missing) const {
    if (ordered(actor, *actor.knowledge, earlier, missing)) return true;
    // A lane that has waited alone, and makes the access together with others.
    const Knowledge* own = own_knowledge(actor.warp->clock, actor.lane);
    return own && own != actor.knowledge && ordered(actor, *own, earlier, missing);
}

bool Checker::ordered(const Actor& actor, const Knowledge& knowledge, const AccessRecord& earlier,
                      const char** missing) const {
    if (earlier.cluster != actor.record.cluster) {
        const auto knows = [&](const std::map<uint32_t, VectorClock>& clocks) {
            const auto it = clocks.find(earlier.cluster);
            return it != clocks.end() && it->second.get(earlier.component) >= earlier.epoch;
        };
        if (!knows(knowledge.foreign)) {
            *missing = "nothing orders them: a release and an acquire through global memory are missing";
            return false;
        }
        // PTX ISA 8.9.5 (proxy-preserved base causality order): even one proxy orders accesses of one CTA only.
        if (actor.through_async_proxy && writes(earlier.kind()) && !knows(knowledge.foreign_published)) {
            *missing = "no fence.proxy.async of global memory stands between the acquire and the asynchronous access";
            return false;
        }
        return true;
    }
    const WarpClock& clock = actor.warp->clock;
    const bool own = earlier.component == clock.component || earlier.component == clock.singles;
    if (own) {
        // The same warp: program order for a lane, a warp-level synchronisation between lanes. ldmatrix reads for all
        // lanes, so that no lane may write there afterwards without one (compute-sanitizer's racecheck says the same).
        const bool same_lane = earlier.lane == actor.lane && earlier.lane != kManyLanes;
        if (!same_lane && knowledge.generic.get(earlier.component) < earlier.epoch) {
            *missing = "different lanes of one warp without bar.warp.sync between them";
            return false;
        }
    } else if (knowledge.generic.get(earlier.component) < earlier.epoch) {
        const bool own_copy = earlier.component == clock.copies && earlier.lane == actor.lane;
        if (!(own_copy && earlier.epoch <= clock.copies_waited)) {
            *missing = "nothing orders them: a barrier, or the wait for an asynchronous operation, is missing";
            return false;
        }
    }
    if (machine_.options.strict && !own) {
        if (actor.on_tensor_memory && knowledge.tensor.get(earlier.component) < earlier.epoch &&
            knowledge.tensor_released.get(earlier.component) < earlier.epoch) {
            *missing = "a tcgen05.fence::before_thread_sync is missing behind the earlier one";
            return false;
        }
        if ((actor.on_tensor_memory && knowledge.tensor.get(earlier.component) < earlier.epoch) ||
            (actor.reads_operand && knowledge.operands.get(earlier.component) < earlier.epoch)) {
            *missing = "a tcgen05.fence::after_thread_sync is missing before the later one";
            return false;
        }
    }
    if (actor.through_async_proxy && !earlier.async_proxy && writes(earlier.kind()) &&
        knowledge.published.get(earlier.component) < earlier.epoch) {
        *missing = "no fence.proxy.async makes the generic write visible to the async proxy";
        return false;
    }
    return true;
}

void Checker::access(Granule& granule, const Actor& actor, uint16_t bytes, const char* space, uint64_t address,
                     Cta* owner, Repetition* repetition) {
    if (repetition) {
        if (repetition->matches(granule, bytes)) {
            repetition->repeat(granule);
            return;
        }
        repetition->begin(granule, bytes);
    }
    granule.make_own(records_of(owner));
    if (writes(actor.record.kind())) {
        write_access(granule, actor, bytes, space, address, owner);
    } else {
        read_access(granule, actor, bytes, space, address, owner);
    }
    if (repetition) repetition->end(granule);
}

void Checker::read_access(Granule& granule, const Actor& actor, uint16_t bytes, const char* space, uint64_t address,
                          Cta* owner) {
    const AccessRecord& record = actor.record;
    uint16_t written = 0;
    for (uint32_t i = 0; i < granule.size(); ++i) {
        AccessRecord& earlier = granule[i];
        if (writes(earlier.kind())) {
            written |= earlier.bytes;
        } else if (earlier.component == record.component && earlier.epoch == record.epoch &&
                   earlier.cluster == record.cluster && earlier.kind() == record.kind() && !(bytes & ~earlier.bytes)) {
            // The same agent read it before, and no write since then has removed that record.
            if (earlier.lane != actor.lane) earlier.lane = kManyLanes;
            earlier.pc = record.pc;
            return;
        }
    }
    if (owner && bytes & ~written) unwritten(actor, space, address, *owner);
    for (uint32_t i = 0; i < granule.size();) {
        AccessRecord& earlier = granule[i];
        if (earlier.bytes & bytes) {
            if (writes(earlier.kind())) {
                const char* missing = "";
                if (!ordered(actor, earlier, &missing) && !(is_strong(earlier.kind()) && is_strong(record.kind()))) {
                    race(actor, earlier, space, address, missing, owner);
                }
            } else if (earlier.component == record.component && earlier.epoch < record.epoch &&
                       earlier.cluster == record.cluster && (!is_strong(record.kind()) || is_strong(earlier.kind()))) {
                // Whoever races with the earlier read of this agent races with this one, too.
                earlier.bytes &= static_cast<uint16_t>(~bytes);
                if (earlier.bytes == 0) {
                    granule.remove(i);
                    continue;
                }
            }
        }
        ++i;
    }
    granule.push(record, actor.lane, bytes, records_of(owner));
}

void Checker::write_access(Granule& granule, const Actor& actor, uint16_t bytes, const char* space, uint64_t address,
                           Cta* owner) {
    const AccessRecord& record = actor.record;
    const bool order_matters = record.kind() == AccessKind::kFloatAdd && machine_.options.deterministic;
    bool merged = false;
    for (uint32_t i = 0; i < granule.size();) {
        AccessRecord& earlier = granule[i];
        if (!(earlier.bytes & bytes)) {
            ++i;
            continue;
        }
        // The common case of atomics: the same agent does the same thing again.
        if (earlier.component == record.component && earlier.epoch == record.epoch &&
            earlier.cluster == record.cluster && earlier.kind() == record.kind() &&
            record.kind() != AccessKind::kWrite && !order_matters && earlier.bytes == bytes) {
            if (earlier.lane != actor.lane) earlier.lane = kManyLanes;
            earlier.pc = record.pc;
            merged = true;
            ++i;
            continue;
        }
        const char* missing = "";
        const bool before = ordered(actor, earlier, &missing);
        const bool both_strong = is_strong(earlier.kind()) && is_strong(record.kind());
        const bool unordered_sum = order_matters && earlier.kind() == AccessKind::kFloatAdd;
        const bool conflict = !both_strong || unordered_sum;
        if (conflict && !before) {
            if (both_strong) missing = "floating-point atomics in no fixed order: the sum is not deterministic";
            race(actor, earlier, space, address, missing, owner);
        }
        // The new record covers an earlier one that happens before it, unless others could race with that one alone: a
        // strong access does not cover a weak one.
        if ((conflict || before) && (!is_strong(record.kind()) || is_strong(earlier.kind()))) {
            earlier.bytes &= static_cast<uint16_t>(~bytes);
        }
        if (earlier.bytes == 0) {
            granule.remove(i);
        } else {
            ++i;
        }
    }
    if (!merged) granule.push(record, actor.lane, bytes, records_of(owner));
}

RecordArena& Checker::records_of(const Cta* owner) {
    return owner ? owner->cluster.records : own_->records;
}

static uint16_t byte_mask(uint32_t first, uint32_t count) {
    return static_cast<uint16_t>(((uint32_t{1} << count) - 1) << first);
}

// Calls f(granule index, byte mask, address of the granule's first accessed byte) for each granule of a range.
template <class F>
[[gnu::always_inline]] static inline void for_granules(uint64_t address, uint32_t bytes, const F& f) {
    while (bytes > 0) {
        const auto first = static_cast<uint32_t>(address % kGranuleBytes);
        const uint32_t count = std::min(bytes, kGranuleBytes - first);
        f(address / kGranuleBytes, byte_mask(first, count), address);
        address += count;
        bytes -= count;
    }
}

static uint32_t epoch_of(const WarpClock& clock, Component component) {
    return component == clock.component ? clock.epoch : clock.single_epoch;
}

Checker::Actor Checker::actor(const Warp& warp, uint32_t lane, AccessKind kind) const {
    const WarpClock& clock = warp.clock;
    Actor actor{&known(warp), {}, lane, &warp, false};
    actor.record.cluster = warp.cta.cluster.index;
    actor.record.component = alone(warp) ? clock.singles : clock.component;
    actor.record.epoch = epoch_of(clock, actor.record.component) & kEpochMask;
    actor.record.pc = warp.pc() & (kMaxCheckedInstructions - 1);
    actor.record.warp = (warp.cta.rank * kWarpSize + warp.index) & 511;
    actor.record.kind_bits = static_cast<uint32_t>(kind) & 7;
    return actor;
}

AccessRecord Checker::made_by(const Actor& actor) {
    AccessRecord record = actor.record;
    record.lane = actor.lane & 63;
    return record;
}

void Checker::renew(Actor& actor) const {
    actor.knowledge = &known(*actor.warp);
    actor.record.epoch = epoch_of(actor.warp->clock, actor.record.component) & kEpochMask;
}

void Checker::shared_access(const Actor& actor, Cta& owner, uint32_t offset, uint32_t bytes, Repetition* repetition) {
    for_granules(offset, bytes, [&](uint64_t granule, uint16_t mask, uint64_t address) {
        access(owner.shared_shadow[granule], actor, mask, "shared", address, &owner, repetition);
    });
}

void Checker::shared_reads(const Actor& actor, Cta& owner, const std::vector<uint32_t>& offsets) {
    constexpr size_t kAhead = 8;  // granules; their records half of that
    Granule* const shadow = owner.shared_shadow.data();
    Repetition repetition(owner.cluster.records);
    for (size_t i = 0; i < offsets.size(); ++i) {
        if (i + kAhead < offsets.size()) __builtin_prefetch(&shadow[offsets[i + kAhead] / kGranuleBytes]);
        if (i + kAhead / 2 < offsets.size()) shadow[offsets[i + kAhead / 2] / kGranuleBytes].prefetch();
        access(shadow[offsets[i] / kGranuleBytes], actor, 0xffff, "shared", offsets[i], &owner, &repetition);
    }
}

void Checker::global_access(const Actor& actor, uint64_t address, uint32_t bytes, Repetition* repetition) {
    for_granules(address, bytes, [&](uint64_t, uint16_t mask, uint64_t at) {
        access(global_.at(at), actor, mask, "global", at, nullptr, repetition);
        if (!primaries_.empty()) check_primaries(actor, mask, at);
    });
}

void Checker::shared_access(Warp& warp, uint32_t lane, Cta& owner, uint32_t offset, uint32_t bytes, AccessKind kind) {
    if (enabled_) shared_access(actor(warp, lane, kind), owner, offset, bytes);
}

void Checker::global_access(Warp& warp, uint32_t lane, uint64_t address, uint32_t bytes, AccessKind kind) {
    if (enabled_) global_access(actor(warp, lane, kind), address, bytes);
}

AsyncAgent Checker::agent(Warp& issuer, Component stream, uint32_t epoch, bool async_proxy) const {
    AsyncAgent agent;
    if (!enabled_) return agent;
    agent.issuer = &issuer;
    agent.pc = issuer.pc();
    agent.component = stream;
    agent.epoch = epoch;
    agent.async_proxy = async_proxy;
    agent.knowledge = known_at_issue(issuer);
    if (!alone(issuer)) agent.issuer_epoch = issuer.clock.epoch;
    agent.issuer_singles = issuer.clock.single_epoch;
    return agent;
}

static AccessRecord record_of(const AsyncAgent& agent, AccessKind kind) {
    AccessRecord record{};
    record.cluster = agent.issuer->cta.cluster.index;
    record.epoch = agent.epoch & kEpochMask;
    record.pc = agent.pc & (kMaxCheckedInstructions - 1);
    record.component = agent.component;
    record.warp = (agent.issuer->cta.rank * kWarpSize + agent.issuer->index) & 511;
    record.kind_bits = static_cast<uint32_t>(kind) & 7;
    record.async_proxy = agent.async_proxy;
    return record;
}

Checker::Actor Checker::actor(const AsyncAgent& agent, uint32_t lane, AccessKind kind) {
    return {&agent.knowledge, record_of(agent, kind), lane, agent.issuer, agent.async_proxy, false, agent.product};
}

void Checker::shared_access(const AsyncAgent& agent, uint32_t lane, Cta& owner, uint32_t offset, uint32_t bytes,
                            AccessKind kind) {
    if (enabled_) shared_access(actor(agent, lane, kind), owner, offset, bytes);
}

void Checker::global_access(const AsyncAgent& agent, uint32_t lane, uint64_t address, uint32_t bytes, AccessKind kind) {
    if (enabled_) global_access(actor(agent, lane, kind), address, bytes);
}

void Checker::tensor_access(const AsyncAgent& agent, Cta& owner, uint32_t column, uint32_t columns, uint32_t first_lane,
                            uint32_t lanes, AccessKind kind, bool every_second) {
    if (!enabled_) return;
    const Actor actor{&agent.knowledge, record_of(agent, kind), kManyLanes, agent.issuer, false, true};
    const uint32_t slices = (1u << lanes / kTensorSlice) - 1;
    const uint32_t mask = slices << first_lane / kTensorSlice & (every_second ? 0x55u : 0xffu);
    if (machine_.options.strict) allocated_before(actor, owner, column, columns);
    std::vector<Granule>& shadow = owner.tensor_memory.shadow();
    Repetition repetition(owner.cluster.records);
    for (uint32_t c = column; c < column + columns; ++c) {
        access(shadow[c], actor, static_cast<uint16_t>(mask), "tensor memory", c, &owner, &repetition);
    }
}

// Another warp has to know of the allocation, from the address or from a barrier; of the other CTA of a pair, too,
// whose columns a product writes at the address of its own.
void Checker::allocated_before(Actor user, Cta& owner, uint32_t column, uint32_t columns) {
    user.on_tensor_memory = false;
    const WarpClock& clock = user.warp->clock;
    for (uint32_t unit = column / kTensorAllocationUnit; unit * kTensorAllocationUnit < column + columns; ++unit) {
        const AccessRecord& allocation = owner.tensor_memory.allocations[unit];
        const char* missing = "";
        const bool own = allocation.component == clock.component || allocation.component == clock.singles;
        if (!own && !ordered(user, allocation, &missing)) {
            race(user, allocation, "tensor memory", unit * kTensorAllocationUnit, missing, &owner);
        }
    }
}

void Checker::tensor_allocation(const Warp& warp, uint32_t column, uint32_t columns) {
    if (!enabled_) return;
    const AccessRecord record = made_by(actor(warp, kManyLanes, AccessKind::kWrite));
    for (uint32_t unit = 0; unit < columns / kTensorAllocationUnit; ++unit) {
        warp.cta.tensor_memory.allocations[column / kTensorAllocationUnit + unit] = record;
    }
}

// -------------------------------------------------------------------------------------- programmatic dependent launch

std::shared_ptr<const GridAccesses> Checker::take_accesses() {
    own_->program = &machine_.program;
    return own_;
}

void Checker::primaries_done(Warp& warp) {
    complete(warp, warp.executing(), warp.cta.cluster.primaries, 1);
}

void Checker::check_primaries(const Actor& actor, uint16_t bytes, uint64_t address) {
    const Component component = actor.warp->cta.cluster.primaries;
    if (actor.knowledge->generic.get(component) > 0) return;
    if (known(*actor.warp, actor.lane).generic.get(component) > 0) return;
    for (const auto& grid : primaries_) {
        const Granule* granule = grid->pages.find(address);
        if (!granule) continue;
        for (uint32_t i = 0; i < granule->size(); ++i) {
            const AccessRecord& earlier = (*granule)[i];
            if (!(earlier.bytes & bytes)) continue;
            if (!writes(earlier.kind()) && !writes(actor.record.kind())) continue;
            if (is_strong(earlier.kind()) && is_strong(actor.record.kind())) continue;
            report_once(
                actor.record.pc, earlier.pc,
                format("hazard: race on global address 0x%llx with a grid that may still run\n  %s\n  kernel %s "
                       "at %s\n  griddepcontrol.wait is missing",
                       static_cast<unsigned long long>(address), describe(made_by(actor)).c_str(),
                       grid->program->name.c_str(), grid->program->where(earlier.pc).c_str()));
        }
    }
}

// ---------------------------------------------------------------------------------------------- registers in flight

void Checker::set_in_flight(Warp& warp, uint32_t offset, InFlight state, uint32_t pc) {
    if (!enabled_) return;
    if (warp.in_flight.empty()) warp.in_flight.resize(machine_.program.register_count);
    RegisterInFlight& entry = warp.in_flight[machine_.program.register_number(offset)];
    warp.registers_in_flight += entry.state == InFlight::kNone;
    entry = {state, pc};
}

void Checker::clear_in_flight(Warp& warp, uint32_t offset) {
    if (!enabled_ || warp.in_flight.empty()) return;
    RegisterInFlight& entry = warp.in_flight[machine_.program.register_number(offset)];
    warp.registers_in_flight -= entry.state != InFlight::kNone;
    entry.state = InFlight::kNone;
}

void Checker::check_in_flight(Warp& warp, const Instruction& instruction) {
    const size_t pc = static_cast<size_t>(&instruction - machine_.program.code.data());
    const TouchedRegisters& touched = machine_.program.touched[pc];
    const uint32_t* const registers = machine_.program.touched_registers.data() + touched.first;
    auto check = [&](uint32_t number, bool writes) {
        const auto& [state, issued] = warp.in_flight[number];
        if (state == InFlight::kNone) return;
        if (!writes && state != InFlight::kWrittenByOperation) return;
        if (!reported_.emplace(static_cast<uint32_t>(pc), issued, writes ? "written" : "read").second) return;
        report(
            format("hazard: a register in flight is %s before the wait\n  by CTA rank %u warp %u at %s\n  "
                   "in flight since %s",
                   writes ? "written" : "read", warp.cta.rank, warp.index,
                   machine_.program.where(static_cast<uint32_t>(pc)).c_str(), machine_.program.where(issued).c_str()));
    };
    for (uint32_t r = 0; r < touched.reads + touched.writes; ++r) check(registers[r], r >= touched.reads);
}

// --------------------------------------------------------------------------------------------------------- reports

void Checker::report_once(uint32_t pc, uint32_t earlier_pc, const std::string& text) {
    if (enabled_ && reported_.emplace(pc, earlier_pc, "").second) report(text);
}

void Checker::report(const std::string& text) {
    if (reports_.size() < kMaxReports) reports_.push_back(text);
}

std::string Checker::describe(const AccessRecord& record) const {
    const char* kinds[] = {"read", "write", "strong read", "atomic or strong write", "floating-point add"};
    const std::string lane = record.lane >= kManyLanes ? "" : format(" lane %u", record.lane);
    return format("%s by cluster %u CTA rank %u warp %u%s%s at %s", kinds[static_cast<int>(record.kind())],
                  record.cluster, record.warp / kWarpSize, record.warp % kWarpSize, lane.c_str(),
                  record.async_proxy ? " (async proxy)" : "", machine_.program.where(record.pc).c_str());
}

void Checker::unwritten(const Actor& actor, const char* space, uint64_t address, const Cta& owner) {
    if (reports_.size() >= kMaxReports || !reported_.emplace(actor.record.pc, actor.record.pc, "unwritten").second)
        return;
    report(format("hazard: %s address 0x%llx of CTA rank %u is read, but nothing has written it\n  %s", space,
                  static_cast<unsigned long long>(address), owner.rank, describe(made_by(actor)).c_str()));
}

void Checker::race(const Actor& actor, const AccessRecord& earlier, const char* space, uint64_t address,
                   const char* missing, Cta* owner) {
    if (reports_.size() >= kMaxReports || !reported_.emplace(actor.record.pc, earlier.pc, missing).second) return;
    const std::string where = owner ? format(" of CTA rank %u", owner->rank) : "";
    report(format("hazard: race on %s address 0x%llx%s\n  %s\n  %s\n  %s", space,
                  static_cast<unsigned long long>(address), where.c_str(), describe(made_by(actor)).c_str(),
                  describe(earlier).c_str(), missing));
}

}  // namespace ptx_emulator
