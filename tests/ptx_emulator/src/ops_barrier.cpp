// bar / barrier of a CTA, and memory fences (PTX ISA 9.7.13.1, 9.7.13.4). Proxy fences and barrier.cluster have their
// own files.
#include "errors.h"
#include "lanes.h"
#include "machine.h"
#include "opcode_table.h"
#include "synchronization.h"

namespace ptx_emulator {

namespace {

enum class Reduce : uint32_t { kNone, kCount, kAnd, kOr };

uint32_t barrier_id(const Warp& warp, const Instruction& i, LaneMask mask) {
    return warp.lanes<uint32_t>(i.a)[first_lane(mask)];
}

// The count operand, 0: the whole CTA.
uint32_t barrier_count(const Warp& warp, const Instruction& i, LaneMask mask) {
    return i.b == kNoRegister ? 0 : warp.lanes<uint32_t>(i.b)[first_lane(mask)];
}

// Every lane of a warp comes to a barrier together: .aligned demands it, and without it the GPU counts per warp too.
Step barrier_arrive(Warp& warp, const Instruction& i, LaneMask mask) {
    if (!warp.converged()) return Step::kBlock;
    arrive_at_barrier(warp, barrier_id(warp, i, mask), barrier_count(warp, i, mask), false);
    return Step::kNext;
}

// x: Reduce
Step barrier_sync(Warp& warp, const Instruction& i, LaneMask mask) {
    if (!warp.converged()) return Step::kBlock;
    BarrierWait& wait = warp.barrier_wait;
    if (wait.state == BarrierWait::State::kNone) {
        const uint32_t id = barrier_id(warp, i, mask);
        if (i.x && id < kNamedBarriers) {
            const LaneMask p = (i.negate_predicate ? ~warp.predicate(i.c) : warp.predicate(i.c)) & mask;
            NamedBarrier& barrier = warp.cta.barriers[id];
            barrier.reduction += static_cast<uint32_t>(__builtin_popcount(p));
            barrier.reduction_and &= p == mask;
            barrier.reduction_or |= p != 0;
        }
        arrive_at_barrier(warp, id, barrier_count(warp, i, mask), true);
    }
    if (wait.state == BarrierWait::State::kWaiting) return Step::kBlock;
    wait.state = BarrierWait::State::kNone;
    if (i.x == static_cast<uint32_t>(Reduce::kCount)) {
        for_lanes(mask, [&](uint32_t lane) { warp.lanes<uint32_t>(i.dst)[lane] = wait.reduction; });
    } else if (i.x) {
        const bool result = i.x == static_cast<uint32_t>(Reduce::kAnd) ? wait.reduction_and : wait.reduction_or;
        warp.set_predicate(i.dst, result ? kAllLanes : 0, mask);
    }
    return Step::kNext;
}

std::string describe_barrier(const Warp& warp, const Instruction&) {
    if (!warp.converged() && warp.groups.size() > 1) {
        return format("waits for its own lanes to come together; it stands in %zu places", warp.groups.size());
    }
    const NamedBarrier& barrier = warp.cta.barriers[warp.barrier_wait.id % kNamedBarriers];
    const uint32_t expected = barrier.whole_cta ? warp.cta.live_threads() : barrier.expected;
    return format("waits at barrier %u: %u of %u threads have arrived", warp.barrier_wait.id, barrier.arrived,
                  expected);
}

void decode_barrier(DecodeContext& c) {
    c.allow(1, "cta sync arrive red aligned popc and or u32 pred");
    c.set_role(kRoleSynchronization);
    c.info.describe_wait = describe_barrier;
    c.out.b = kNoRegister;
    if (c.has("red")) {
        c.out.x = static_cast<uint32_t>(c.has("popc") ? Reduce::kCount : c.has("and") ? Reduce::kAnd : Reduce::kOr);
        c.out.dst = c.has("popc") ? c.write(0, 4) : c.write_predicate(c.operand(0));
        c.out.a = c.read(1, 4);
        if (c.operand_count() > 3) c.out.b = c.read(2, 4);
        c.out.c = c.read_predicate(c.operand(c.operand_count() - 1), &c.out.negate_predicate);
        if (!c.has("popc")) c.set_role(kRoleReducesPredicate);
        c.out.handler = barrier_sync;
        return;
    }
    c.out.a = c.read(0, 4);
    if (c.operand_count() > 1) c.out.b = c.read(1, 4);
    if (c.has("arrive") && c.operand_count() < 2) c.fail("bar.arrive needs a thread count");
    c.out.handler = c.has("arrive") ? barrier_arrive : barrier_sync;
}

Step memory_fence(Warp& warp, const Instruction&, LaneMask) {
    warp.machine.checker.fence(warp);
    return Step::kNext;
}

void decode_fence(DecodeContext& c) {
    c.allow(1, "sc acq_rel acquire release cta cluster gpu sys gl");
    c.set_role(kRoleSynchronization);
    c.out.handler = memory_fence;
}

}  // namespace

void register_barrier(OpcodeTable& table) {
    table.add("bar", decode_barrier);
    table.add("barrier", decode_barrier);
    table.add("fence", decode_fence);
    table.add("membar", decode_fence);
}

}  // namespace ptx_emulator
