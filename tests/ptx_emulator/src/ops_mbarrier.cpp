// mbarrier instructions (PTX ISA 9.7.13.15) and cp.async.mbarrier.arrive. The objects are in mbarrier.h.
#include <cstring>

#include "address_operand.h"
#include "errors.h"
#include "lanes.h"
#include "machine.h"
#include "mbarrier.h"
#include "opcode_table.h"

namespace ptx_emulator {

namespace {

struct BarrierData : InstructionData {
    AddressOperand address;
};

MemoryReference barrier_memory(Warp& warp, const Instruction& i, uint32_t lane, bool own_cta) {
    const AddressOperand& address = static_cast<const BarrierData&>(*i.data).address;
    const MemoryReference memory = resolve_shared(warp, address.shared_at(warp, lane), 8, 8);
    if (own_cta && memory.owner != &warp.cta) {
        raise(Fault::kIllegalAddress,
              "this instruction works on mbarriers of the own CTA only, lane %u names one of CTA rank %u", lane,
              memory.owner->rank);
    }
    require_running(warp, *memory.owner);
    return memory;
}

size_t decode_barrier_address(DecodeContext& c, uint32_t roles) {
    auto data = std::make_shared<BarrierData>();
    size_t at = 0;
    while (at < c.operand_count() && c.operand(at).kind != SyntaxOperand::Kind::kAddress) ++at;
    data->address = decode_address(c, c.operand(at), 4);
    c.out.data = std::move(data);
    c.set_role(roles);
    return at;
}

Step initialise(Warp& warp, const Instruction& i, LaneMask mask) {
    for_lanes(mask, [&](uint32_t lane) {
        const MemoryReference to = barrier_memory(warp, i, lane, true);
        warp.machine.checker.shared_access(warp, lane, *to.owner, to.offset, 8, AccessKind::kWrite);
        to.owner->memory_barriers.initialise(warp, *to.owner, to.offset, warp.lanes<uint32_t>(i.a)[lane]);
    });
    return Step::kNext;
}

void decode_init(DecodeContext& c) {
    c.allow(1, "init shared shared::cta b64");
    decode_barrier_address(c, 0);
    c.out.a = c.read(1, 4);
    c.out.handler = initialise;
}

Step invalidate(Warp& warp, const Instruction& i, LaneMask mask) {
    for_lanes(mask, [&](uint32_t lane) {
        const MemoryReference to = barrier_memory(warp, i, lane, true);
        warp.machine.checker.shared_access(warp, lane, *to.owner, to.offset, 8, AccessKind::kWrite);
        to.owner->memory_barriers.invalidate(*to.owner, to.offset);
    });
    return Step::kNext;
}

void decode_invalidate(DecodeContext& c) {
    c.allow(1, "inval shared shared::cta b64");
    decode_barrier_address(c, 0);
    c.out.handler = invalidate;
}

// a: arrivals or bytes, kNoRegister: one arrival. x: expect_tx, y: relaxed, z: drop
Step arrive(Warp& warp, const Instruction& i, LaneMask mask) {
    Checker& checker = warp.machine.checker;
    for_lanes(mask, [&](uint32_t lane) {
        const MemoryReference to = barrier_memory(warp, i, lane, false);
        MemoryBarriers& barriers = to.owner->memory_barriers;
        checker.shared_access(warp, lane, *to.owner, to.offset, 8, AccessKind::kAtomic);
        const uint32_t operand = i.a == kNoRegister ? 1 : warp.lanes<uint32_t>(i.a)[lane];
        const uint64_t before = MemoryBarriers::token(barriers.at(*to.owner, to.offset));
        if (to.owner != &warp.cta) barriers.at(*to.owner, to.offset).is_remote = true;
        if (i.x) barriers.expect_bytes(*to.owner, to.offset, operand);
        const uint32_t count = i.x ? 1 : operand;
        if (i.z) barriers.drop(*to.owner, to.offset, count);
        SyncClock past;
        if (i.y) {
            past = checker.fenced(warp);
        } else {
            checker.release(warp, past);
        }
        checker.check_arrival(warp, lane, barriers.at(*to.owner, to.offset), to.offset);
        barriers.arrive(*to.owner, to.offset, count, past);
        if (i.dst == kNoRegister) return;
        if (to.owner != &warp.cta) {
            raise(Fault::kIllegalInstruction, "an arrival at the mbarrier of another CTA returns nothing");
        }
        warp.lanes<uint64_t>(i.dst)[lane] = before;
    });
    return Step::kNext;
}

void decode_arrive(DecodeContext& c) {
    c.allow(1, "arrive arrive_drop expect_tx release relaxed cta cluster shared shared::cta shared::cluster b64");
    const size_t at = decode_barrier_address(c, kRoleSynchronization);
    c.out.x = c.has("expect_tx");
    c.out.y = c.has("relaxed");
    c.out.z = c.syntax.modifiers[1] == "arrive_drop";
    if (at == 1 && c.operand(0).kind != SyntaxOperand::Kind::kSink) c.out.dst = c.write(0, 8);
    c.out.a = c.operand_count() > at + 1 ? c.read(at + 1, 4) : kNoRegister;
    if (c.out.x && c.out.a == kNoRegister) c.fail("expect_tx needs a number of bytes");
    c.out.handler = arrive;
}

// a: bytes; x: complete_tx
Step count_bytes(Warp& warp, const Instruction& i, LaneMask mask) {
    for_lanes(mask, [&](uint32_t lane) {
        const MemoryReference to = barrier_memory(warp, i, lane, false);
        warp.machine.checker.shared_access(warp, lane, *to.owner, to.offset, 8, AccessKind::kAtomic);
        const uint32_t bytes = warp.lanes<uint32_t>(i.a)[lane];
        MemoryBarriers& barriers = to.owner->memory_barriers;
        if (i.x) {
            barriers.complete_bytes(*to.owner, to.offset, bytes, SyncClock{});
        } else {
            barriers.expect_bytes(*to.owner, to.offset, bytes);
        }
    });
    return Step::kNext;
}

void decode_bytes(DecodeContext& c) {
    c.allow(1, "expect_tx complete_tx relaxed cta cluster shared shared::cta shared::cluster b64");
    const size_t at = decode_barrier_address(c, kRoleSynchronization);
    c.out.a = c.read(at + 1, 4);
    c.out.x = c.syntax.modifiers[1] == "complete_tx";
    c.out.handler = count_bytes;
}

// a: state or parity; x: parity, y: relaxed
Step try_wait(Warp& warp, const Instruction& i, LaneMask mask) {
    Checker& checker = warp.machine.checker;
    LaneMask done = 0;
    uint32_t offsets[kWarpSize];
    const AddressOperand& operand = static_cast<const BarrierData&>(*i.data).address;
    MemoryReference from;
    const MemoryBarrier* same = nullptr;  // the one of the lane before
    uint32_t latest = 0, lanes = 0;       // its address, and how many lanes in a row have named it
    for_lanes(mask, [&](uint32_t lane) {
        const uint32_t address = operand.shared_at(warp, lane);
        if (!same || address != latest) {
            from = barrier_memory(warp, i, lane, true);
            same = &from.owner->memory_barriers.at(*from.owner, from.offset);
            latest = address;
            lanes = 0;
        }
        const MemoryBarrier& barrier = *same;
        // The second lane makes the access one of several lanes; further ones change nothing.
        if (lanes++ < 2) checker.shared_access(warp, lane, *from.owner, from.offset, 8, AccessKind::kAtomic);
        const bool parity = i.x ? warp.lanes<uint32_t>(i.a)[lane] & 1 : warp.lanes<uint64_t>(i.a)[lane] >> 63;
        if (!MemoryBarriers::phase_done(barrier, parity)) {
            warp.memory_barrier_wait = {from.owner, from.offset, parity};
            return;
        }
        offsets[lane] = from.offset;
        done |= lane_bit(lane);
    });
    for (LaneMask rest = done; rest;) {  // those that have waited for the same, together
        const uint32_t offset = offsets[first_lane(rest)];
        LaneMask lanes = 0;
        for_lanes(rest, [&](uint32_t lane) { lanes |= offsets[lane] == offset ? lane_bit(lane) : 0; });
        const MemoryBarrier& barrier = warp.cta.memory_barriers.at(warp.cta, offset);
        if (!i.y) checker.acquire(warp, lanes, barrier.completed);
        checker.complete(warp, lanes, barrier.stream, static_cast<uint32_t>(barrier.phase));
        rest &= ~lanes;
    }
    warp.set_predicate(i.dst, done, mask);
    return done == mask ? Step::kNext : Step::kYield;
}

std::string describe_try_wait(const Warp& warp, const Instruction&) {
    const MemoryBarrierWait& wait = warp.memory_barrier_wait;
    if (!wait.owner) return "waits for an mbarrier";
    return format("waits for parity %d of the mbarrier at shared offset 0x%x of CTA rank %u: %s", wait.parity ? 1 : 0,
                  wait.offset, wait.owner->rank, wait.owner->memory_barriers.describe(wait.offset).c_str());
}

void decode_wait(DecodeContext& c) {
    c.allow(1, "test_wait try_wait parity acquire relaxed cta cluster shared shared::cta b64");
    const size_t at = decode_barrier_address(c, kRoleSynchronization | kRoleStoresResult);
    if (at != 1) c.fail("expected a predicate and an address");
    c.out.dst = c.write_predicate(c.operand(0));
    c.out.x = c.has("parity");
    c.out.y = c.has("relaxed");
    c.out.a = c.read(2, c.out.x ? 4 : 8);
    c.info.describe_wait = describe_try_wait;
    c.out.handler = try_wait;  // the time limit that try_wait may have means nothing here
}

Step pending_count(Warp& warp, const Instruction& i, LaneMask mask) {
    for_lanes(mask, [&](uint32_t lane) {
        warp.lanes<uint32_t>(i.dst)[lane] = static_cast<uint32_t>(warp.lanes<uint64_t>(i.a)[lane] & 0xfffff);
    });
    return Step::kNext;
}

void decode_pending_count(DecodeContext& c) {
    c.allow(1, "pending_count b64");
    c.out.dst = c.write(0, 4);
    c.out.a = c.read(1, 8);
    c.out.handler = pending_count;
}

// The barrier tracks the cp.async copies so far: arrivals when they have landed. x: noinc
Step copy_arrive(Warp& warp, const Instruction& i, LaneMask mask) {
    Checker& checker = warp.machine.checker;
    std::vector<uint32_t> offsets;
    for_lanes(mask, [&](uint32_t lane) {
        const MemoryReference to = barrier_memory(warp, i, lane, true);
        checker.shared_access(warp, lane, *to.owner, to.offset, 8, AccessKind::kAtomic);
        MemoryBarriers& barriers = to.owner->memory_barriers;
        barriers.at(*to.owner, to.offset);
        if (!i.x) barriers.add_pending(*to.owner, to.offset, 1);
        offsets.push_back(to.offset);
    });
    CopyState* copies = &warp.copies;
    const uint64_t ticket = copies->queue.issued();
    copies->tickets_waited = ticket;  // who waits for the barrier waits for the copies
    const SyncClock past = checker.copies_done(warp, copies->epoch++);
    Cta* cta = &warp.cta;
    warp.machine.async.submit(
        cta->cluster.bulk_copies,
        [cta, copies, ticket, offsets = std::move(offsets), past] {
            copies->queue.run_through(ticket);
            for (uint32_t offset : offsets) cta->memory_barriers.arrive(*cta, offset, 1, past);
        },
        {}, "cp.async.mbarrier.arrive");
    return Step::kNext;
}

void decode_copy_arrive(DecodeContext& c) {
    c.allow(1, "async mbarrier arrive noinc shared shared::cta b64");
    decode_barrier_address(c, kRoleSynchronization);
    c.out.x = c.has("noinc");
    c.out.handler = copy_arrive;
}

}  // namespace

void register_mbarrier(OpcodeTable& table) {
    table.add("mbarrier.init", decode_init);
    table.add("mbarrier.inval", decode_invalidate);
    table.add("mbarrier.arrive", decode_arrive);
    table.add("mbarrier.arrive_drop", decode_arrive);
    table.add("mbarrier.expect_tx", decode_bytes);
    table.add("mbarrier.complete_tx", decode_bytes);
    table.add("mbarrier.test_wait", decode_wait);
    table.add("mbarrier.try_wait", decode_wait);
    table.add("mbarrier.pending_count", decode_pending_count);
    table.add("cp.async.mbarrier.arrive", decode_copy_arrive);
}

}  // namespace ptx_emulator
