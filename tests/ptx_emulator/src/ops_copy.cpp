// cp.async, 4 to 16 bytes from global to shared memory, and its groups (PTX ISA 9.7.9.25.3). Bulk copies have their own
// files.
//
// The checker learns of a copy when it is issued: the copy reads and writes at any time until a wait covers its group.
#include <cstring>

#include "errors.h"
#include "lanes.h"
#include "machine.h"
#include "memory.h"
#include "opcode_table.h"

namespace ptx_emulator {

namespace {

struct CopyData : InstructionData {
    uint32_t bytes = 16;
    uint32_t source = 0;  // register of the global address
    bool source_is_64 = true;
    int32_t source_displacement = 0;
    uint32_t source_size = kNoRegister;    // register of src-size; the rest is filled with zeros
    uint32_t ignore_source = kNoRegister;  // predicate: copy zeros
};

struct LaneCopy {
    uint8_t* destination;
    const uint8_t* source;
    SharedMemory* shared;
    uint32_t offset;
    uint32_t bytes;  // from the source
};

Step copy_async(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto& data = static_cast<const CopyData&>(*i.data);
    Checker& checker = warp.machine.checker;
    const AsyncAgent agent = checker.agent(warp, warp.clock.copies, warp.copies.epoch, false);
    const bool check = checker.enabled();
    Checker::Actor reader{}, writer{};
    if (check) {
        reader = Checker::actor(agent, 0, AccessKind::kRead);
        writer = Checker::actor(agent, 0, AccessKind::kWrite);
    }
    auto destination = [&](uint32_t lane) {
        return resolve(warp, i.space, lane_address(warp, i, i.a, lane), lane, data.bytes, data.bytes);
    };
    if (check) for_lanes(mask, [&](uint32_t lane) { prefetch_records(destination(lane)); });
    std::vector<LaneCopy> lanes;
    lanes.reserve(kWarpSize);
    for_lanes(mask, [&](uint32_t lane) {
        const MemoryReference to = destination(lane);
        if (!to.owner) raise(Fault::kIllegalAddress, "the destination of cp.async is not shared memory");
        uint32_t size = data.bytes;
        if (data.source_size != kNoRegister) {
            size = warp.lanes<uint32_t>(data.source_size)[lane];
            if (size > data.bytes)
                raise(Fault::kIllegalInstruction, "cp.async of %u bytes with src-size %u", data.bytes, size);
        }
        if (data.ignore_source != kNoRegister && warp.predicate(data.ignore_source) >> lane & 1) size = 0;
        const uint64_t address =
            warp.lanes<uint64_t>(data.source)[lane] + static_cast<int64_t>(data.source_displacement);
        const uint8_t* from = nullptr;
        if (size) {
            from = resolve(warp, Space::kGlobal, address, lane, data.bytes, data.bytes).data;
            if (check) {
                reader.lane = lane;
                checker.global_access(reader, address, size);
            }
        }
        if (check) {
            writer.lane = lane;
            checker.shared_access(writer, *to.owner, to.offset, data.bytes);
        }
        lanes.push_back({to.data, from, &to.owner->shared, to.offset, size});
    });
    const uint32_t bytes = data.bytes;
    Machine& machine = warp.machine;
    machine.async.submit(warp.copies.queue, [lanes = std::move(lanes), bytes, &machine] {
        for (const LaneCopy& lane : lanes) {
            if (lane.bytes) std::memcpy(lane.destination, lane.source, lane.bytes);
            std::memset(lane.destination + lane.bytes, 0, bytes - lane.bytes);
            lane.shared->written_by_generic(lane.offset, bytes);
        }
        machine.progressed();
    });
    return Step::kNext;
}

void decode_copy_async(DecodeContext& c) {
    c.allow(1,
            "async ca cg shared shared::cta global L2::64B L2::128B L2::256B L2::cache_hint L1::no_allocate "
            "L2::evict_first L2::evict_last");
    auto data = std::make_shared<CopyData>();
    c.out.a = c.address(c.operand(0), Space::kShared);
    const SyntaxOperand& source = c.operand(1);
    if (source.kind != SyntaxOperand::Kind::kAddress || source.parts.empty()) c.fail("expected a source address");
    data->source = c.read(source.parts[0], 8);
    data->source_displacement = static_cast<int32_t>(source.displacement);
    data->bytes = static_cast<uint32_t>(c.immediate(2));
    if (data->bytes != 4 && data->bytes != 8 && data->bytes != 16) c.fail("cp-size must be 4, 8 or 16");
    if (c.has("cg") && data->bytes != 16) c.fail(".cg copies 16 bytes");
    const size_t next = 3, last = c.operand_count() - (c.has("L2::cache_hint") ? 1 : 0);
    if (next < last) {
        const SyntaxOperand& extra = c.operand(next);
        if (c.is_predicate(extra)) {
            data->ignore_source = c.read_predicate(extra, nullptr);
        } else {
            data->source_size = c.read(extra, 4);
        }
    }
    c.out.data = std::move(data);
    c.out.handler = copy_async;
}

// Groups are kept per warp: lanes that commit apart from others close the group of all. The ISA keeps them per thread;
// code that commits on some lanes only is refused.
Step commit_group(Warp& warp, const Instruction&, LaneMask mask) {
    if (mask != warp.live()) {
        if (!warp.converged()) return Step::kBlock;
        raise(Fault::kUnsupported, "cp.async.commit_group on lanes %08x of %08x", mask, warp.live());
    }
    warp.copies.close_group();
    return Step::kNext;
}

// x: how many of the latest groups may stay pending; y: wait_all, copies of no group included
Step wait_group(Warp& warp, const Instruction& i, LaneMask) {
    if (!warp.converged()) return Step::kBlock;
    CopyState& copies = warp.copies;
    if (i.y && copies.queue.issued() > (copies.groups.empty() ? 0 : copies.groups.back())) {
        copies.close_group();
    }
    if (copies.groups.size() <= i.x) return Step::kNext;
    const size_t complete = copies.groups.size() - i.x;
    if (complete <= copies.groups_waited) return Step::kNext;
    copies.groups_waited = complete;
    copies.tickets_waited = copies.groups[complete - 1];
    copies.queue.run_through(copies.tickets_waited);
    warp.machine.checker.copies_waited(warp, copies.group_epochs[complete - 1]);
    warp.machine.progressed();
    return Step::kNext;
}

void decode_commit_group(DecodeContext& c) {
    c.set_role(kRoleSynchronization);
    c.out.handler = commit_group;
}

void decode_wait_group(DecodeContext& c) {
    c.set_role(kRoleSynchronization);
    c.out.y = c.syntax.modifiers[2] == "wait_all";
    c.out.x = c.out.y ? 0 : static_cast<uint32_t>(c.immediate(0));
    c.out.handler = wait_group;
}

}  // namespace

void register_copy(OpcodeTable& table) {
    table.add("cp.async", decode_copy_async);
    table.add("cp.async.commit_group", decode_commit_group);
    table.add("cp.async.wait_group", decode_wait_group);
    table.add("cp.async.wait_all", decode_wait_group);
}

}  // namespace ptx_emulator
