// Bulk copies between global and shared memory, their reductions and groups (PTX ISA 9.7.9.25.4, 9.7.9.27.2).
//
// The checker learns of a copy when it is issued: it reads and writes at any time until its mbarrier's phase or its
// group has been waited for, a group by the lane whose copies they are.
#include <cstring>

#include "address_operand.h"
#include "bulk_transfer.h"
#include "errors.h"
#include "lanes.h"
#include "opcode_table.h"

namespace ptx_emulator {

BulkGroups& BulkState::of_lane(Warp& warp, uint32_t lane) {
    std::unique_ptr<BulkGroups>& groups = lanes[lane];
    if (!groups) {
        groups = std::make_unique<BulkGroups>();
        Checker& checker = warp.machine.checker;
        if (checker.enabled()) {
            const std::string name =
                format("bulk copies of CTA rank %u warp %u lane %u", warp.cta.rank, warp.index, lane);
            groups->reads = checker.new_component(warp.cta.cluster, "reads by " + name);
            groups->writes = checker.new_component(warp.cta.cluster, "writes by " + name);
        }
    }
    return *groups;
}

MemoryReference bulk_barrier(Warp& warp, uint32_t lane, uint32_t address) {
    const MemoryReference memory = resolve_shared(warp, address, 8, 8);
    MemoryBarrier& barrier = memory.owner->memory_barriers.at(*memory.owner, memory.offset);
    Checker& checker = warp.machine.checker;
    checker.shared_access(warp, lane, *memory.owner, memory.offset, 8, AccessKind::kAtomic);
    if (!barrier.visible_to_async_proxy && checker.enabled()) {
        barrier.visible_to_async_proxy = true;
        checker.report_once(
            warp.pc(), warp.pc(),
            format("hazard: no fence.mbarrier_init or fence.proxy.async has made the initialisation of the "
                   "mbarrier at shared offset 0x%x visible to the async proxy\n  by CTA rank %u warp %u at %s",
                   memory.offset, warp.cta.rank, warp.index, warp.program.where(warp.pc()).c_str()));
    }
    return memory;
}

void load_pieces(Warp& warp, uint32_t lane, Cta& to, std::vector<BulkPiece> pieces, uint32_t bytes,
                 const MemoryReference& at, uint32_t fill, uint32_t fill_bytes) {
    Checker& checker = warp.machine.checker;
    Cta* signalled = at.owner;
    const uint32_t offset = at.offset;
    const MemoryBarrier& barrier = signalled->memory_barriers.at(*signalled, offset);
    const uint64_t phase = barrier.phase;
    const AsyncAgent agent = checker.agent(warp, barrier.stream, static_cast<uint32_t>(phase) + 1, true);
    if (checker.enabled()) {
        const Checker::Actor reader = Checker::actor(agent, lane, AccessKind::kRead);
        const Checker::Actor writer = Checker::actor(agent, lane, AccessKind::kWrite);
        Repetition reads(checker.global_records()), writes(to.cluster.records);
        for (const BulkPiece& piece : pieces) {
            if (piece.address) checker.global_access(reader, piece.address, piece.bytes, &reads);
            checker.shared_access(writer, to, piece.offset, piece.bytes, &writes);
        }
    }
    Cta* destination = &to;
    const uint32_t pc = warp.pc();
    warp.machine.async.submit(
        warp.cta.cluster.bulk_copies,
        [=, pieces = std::move(pieces), past = checker.past(agent)] {
            Machine& machine = destination->machine;
            for (const Cta* cta : {destination, signalled}) {
                if (cta->live_threads()) continue;
                if (!machine.checker.enabled()) return;
                raise(Fault::kIllegalInstruction, "CTA rank %u ended before a bulk copy into its shared memory: %s",
                      cta->rank, machine.program.where(pc).c_str());
            }
            alignas(16) uint8_t zeros[1024];
            for (uint32_t b = 0; b < sizeof zeros; ++b) {
                zeros[b] = static_cast<uint8_t>(fill >> (8 * (b % (fill_bytes ? fill_bytes : 4))));
            }
            for (const BulkPiece& piece : pieces) {
                const auto* data = piece.address ? reinterpret_cast<const uint8_t*>(piece.address) : zeros;
                destination->shared.write_by_async(piece.offset, data, piece.bytes);
            }
            MemoryBarriers& barriers = signalled->memory_barriers;
            if (barriers.at(*signalled, offset).phase != phase && machine.checker.enabled()) {
                machine.checker.report_once(
                    pc, pc,
                    format("hazard: a bulk copy was issued in phase %llu of its mbarrier and "
                           "completed in phase %llu\n  %s",
                           static_cast<unsigned long long>(phase),
                           static_cast<unsigned long long>(barriers.at(*signalled, offset).phase),
                           machine.program.where(pc).c_str()));
            }
            barriers.complete_bytes(*signalled, offset, bytes, past);
        },
        {}, "bulk copy into shared memory: " + warp.program.where(pc));
}

void store_pieces(Warp& warp, uint32_t lane, Cta& from, std::vector<BulkPiece> pieces, Reduction reduction,
                  bool repeated) {
    Checker& checker = warp.machine.checker;
    BulkGroups& groups = warp.bulk.of_lane(warp, lane);
    const AsyncAgent reader = checker.agent(warp, groups.reads, groups.next_group(), true);
    const AsyncAgent writer = checker.agent(warp, groups.writes, groups.next_group(), true);
    const AccessKind kind = reduction.rounds ? AccessKind::kFloatAdd
                            : reduction      ? AccessKind::kAtomic
                                             : AccessKind::kWrite;
    if (checker.enabled()) {
        const Checker::Actor from_shared = Checker::actor(reader, lane, AccessKind::kRead);
        const Checker::Actor to_global = Checker::actor(writer, lane, kind);
        Repetition reads(from.cluster.records), writes(checker.global_records());
        for (const BulkPiece& piece : pieces) {
            checker.shared_access(from_shared, from, piece.offset, piece.bytes, &reads);
            if (!repeated) checker.global_access(to_global, piece.address, piece.bytes, &writes);
        }
    }
    Cta* source = &from;
    groups.issued = warp.machine.async.submit(
        warp.bulk.queue,
        [source, pieces = std::move(pieces), reduction] {
            for (const BulkPiece& piece : pieces) {
                auto* to = reinterpret_cast<uint8_t*>(piece.address);
                const uint8_t* data = source->shared.async(piece.offset);
                source->machine.before_global_write(to, piece.bytes, reduction.rounds);
                if (reduction) {
                    reduction.apply(to, data, piece.bytes);
                } else {
                    std::memcpy(to, data, piece.bytes);
                }
            }
            source->machine.progressed();
        },
        {}, "bulk copy out of shared memory: " + warp.program.where(warp.pc()));
}

namespace {

struct BulkData : InstructionData {
    AddressOperand to, from, barrier;
    uint32_t bytes = 0;           // register
    uint32_t ctas = kNoRegister;  // multicast mask
    Reduction reduction;
};

uint32_t bulk_bytes(const Warp& warp, const BulkData& data, uint32_t lane) {
    const uint32_t bytes = warp.lanes<uint32_t>(data.bytes)[lane];
    if (bytes % 16) raise(Fault::kIllegalInstruction, "a bulk copy of %u bytes: not a multiple of 16", bytes);
    return bytes;
}

void require_one_cta(const MemoryReference& destination, const MemoryReference& barrier) {
    if (destination.owner == barrier.owner) return;
    raise(Fault::kIllegalInstruction, "the destination and the mbarrier of a bulk copy are in two CTAs");
}

Step bulk_load(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto& data = static_cast<const BulkData&>(*i.data);
    for_lanes(mask, [&](uint32_t lane) {
        const uint32_t bytes = bulk_bytes(warp, data, lane);
        const uint64_t source = data.from.at(warp, lane);
        resolve(warp, Space::kGlobal, source, lane, bytes, 16);
        const MemoryReference to = resolve_shared(warp, data.to.shared_at(warp, lane), bytes, 16);
        const MemoryReference barrier = bulk_barrier(warp, lane, data.barrier.shared_at(warp, lane));
        const uint32_t ctas = data.ctas == kNoRegister ? 1 : warp.lanes<uint16_t>(data.ctas)[lane];
        warp.count_size(bytes, static_cast<uint32_t>(__builtin_popcount(ctas)));
        if (data.ctas == kNoRegister) {
            require_one_cta(to, barrier);
            load_pieces(warp, lane, *to.owner, {{source, to.offset, bytes}}, bytes, barrier, 0, 0);
            return;
        }
        for (auto& cta : warp.cta.cluster.ctas) {
            if (!(ctas >> cta->rank & 1)) continue;
            const uint32_t rank_bits = cta->rank << kSharedRankShift;
            const MemoryReference at = bulk_barrier(warp, lane, barrier.offset | rank_bits);
            load_pieces(warp, lane, *cta, {{source, to.offset, bytes}}, bytes, at, 0, 0);
        }
    });
    return Step::kNext;
}

// From the own shared memory into that of another CTA of the cluster (PTX ISA 9.7.9.25.4.1).
Step bulk_move(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto& data = static_cast<const BulkData&>(*i.data);
    Checker& checker = warp.machine.checker;
    for_lanes(mask, [&](uint32_t lane) {
        const uint32_t bytes = bulk_bytes(warp, data, lane);
        const MemoryReference to = resolve_shared(warp, data.to.shared_at(warp, lane), bytes, 16);
        const MemoryReference from = resolve_shared(warp, data.from.shared_at(warp, lane), bytes, 16);
        const MemoryReference at = bulk_barrier(warp, lane, data.barrier.shared_at(warp, lane));
        if (to.owner == from.owner) {
            raise(Fault::kIllegalInstruction, "a bulk copy from shared memory into the own CTA's");
        }
        require_one_cta(to, at);
        warp.count_size(bytes, 1);
        const MemoryBarrier& barrier = at.owner->memory_barriers.at(*at.owner, at.offset);
        const AsyncAgent agent = checker.agent(warp, barrier.stream, static_cast<uint32_t>(barrier.phase) + 1, true);
        checker.shared_access(agent, lane, *from.owner, from.offset, bytes, AccessKind::kRead);
        checker.shared_access(agent, lane, *to.owner, to.offset, bytes, AccessKind::kWrite);
        warp.machine.async.submit(
            warp.cta.cluster.bulk_copies,
            [to, from, at, bytes, past = checker.past(agent)] {
                to.owner->shared.write_by_async(to.offset, from.owner->shared.async(from.offset), bytes);
                at.owner->memory_barriers.complete_bytes(*at.owner, at.offset, bytes, past);
            },
            {}, "bulk copy between CTAs: " + warp.program.where(warp.pc()));
    });
    return Step::kNext;
}

Step bulk_store(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto& data = static_cast<const BulkData&>(*i.data);
    for_lanes(mask, [&](uint32_t lane) {
        const uint32_t bytes = bulk_bytes(warp, data, lane);
        const uint64_t to = data.to.at(warp, lane);
        resolve(warp, Space::kGlobal, to, lane, bytes, 16);
        const MemoryReference from = resolve_shared(warp, data.from.shared_at(warp, lane), bytes, 16);
        warp.count_size(bytes, 1);
        store_pieces(warp, lane, *from.owner, {{to, from.offset, bytes}}, data.reduction);
    });
    return Step::kNext;
}

void decode_bulk(DecodeContext& c) {
    c.allow(1,
            "async bulk shared::cluster shared::cta global mbarrier::complete_tx::bytes bulk_group multicast::cluster "
            "L2::cache_hint");
    c.set_role(kRoleAsyncProxy);
    auto data = std::make_shared<BulkData>();
    const bool loads = c.has("mbarrier::complete_tx::bytes");
    const bool moves = loads && !c.has("global");
    data->to = decode_address(c, c.operand(0), loads ? 4 : 8);
    data->from = decode_address(c, c.operand(1), loads && !moves ? 8 : 4);
    data->bytes = c.read(2, 4);
    if (loads) data->barrier = decode_address(c, c.operand(3), 4);
    if (c.has("multicast::cluster")) data->ctas = c.read(4, 2);
    if (!loads && !c.has("bulk_group")) c.fail("expected .bulk_group or .mbarrier::complete_tx::bytes");
    c.out.handler = moves ? bulk_move : loads ? bulk_load : bulk_store;
    c.out.data = std::move(data);
}

void decode_bulk_reduce(DecodeContext& c) {
    c.allow(1,
            "reduce async bulk global shared::cta bulk_group L2::cache_hint noftz add min max and or xor f16 bf16 b32 "
            "u32 s32 b64 u64 s64 f32 f64");
    c.set_role(kRoleAsyncProxy);
    auto data = std::make_shared<BulkData>();
    for (const char* operation : {"add", "min", "max", "and", "or", "xor"}) {
        if (c.has(operation)) data->reduction = reduction_of(operation, c.type().c_str());
    }
    if (!data->reduction || !c.has("bulk_group")) c.fail("unknown form of the opcode");
    data->to = decode_address(c, c.operand(0), 8);
    data->from = decode_address(c, c.operand(1), 4);
    data->bytes = c.read(2, 4);
    c.out.data = std::move(data);
    c.out.handler = bulk_store;
}

Step commit_group(Warp& warp, const Instruction&, LaneMask mask) {
    for_lanes(mask, [&](uint32_t lane) {
        if (BulkGroups* groups = warp.bulk.lanes[lane].get()) groups->tickets.push_back(groups->issued);
    });
    return Step::kNext;
}

// x: groups that may stay pending, y: .read
Step wait_group(Warp& warp, const Instruction& i, LaneMask mask) {
    Checker& checker = warp.machine.checker;
    for_lanes(mask, [&](uint32_t lane) {
        BulkGroups* groups = warp.bulk.lanes[lane].get();
        if (!groups || groups->tickets.size() <= i.x) return;
        const size_t complete = groups->tickets.size() - i.x;
        warp.bulk.queue.run_through(groups->tickets[complete - 1]);
        groups->read_through = std::max(groups->read_through, complete);
        checker.complete(warp, lane_bit(lane), groups->reads, static_cast<uint32_t>(complete));
        if (!i.y) checker.complete(warp, lane_bit(lane), groups->writes, static_cast<uint32_t>(complete));
    });
    return Step::kNext;
}

void decode_commit_group(DecodeContext& c) {
    c.set_role(kRoleSynchronization);
    c.out.handler = commit_group;
}

void decode_wait_group(DecodeContext& c) {
    c.set_role(kRoleSynchronization);
    c.out.x = static_cast<uint32_t>(c.immediate(0));
    c.out.y = c.has("read");
    c.out.handler = wait_group;
}

Step nothing(Warp&, const Instruction&, LaneMask) {
    return Step::kNext;
}

void decode_prefetch(DecodeContext& c) {
    c.out.handler = nothing;
}

}  // namespace

void register_bulk(OpcodeTable& table) {
    table.add("cp.async.bulk", decode_bulk);
    table.add("cp.reduce.async.bulk", decode_bulk_reduce);
    table.add("cp.async.bulk.commit_group", decode_commit_group);
    table.add("cp.async.bulk.wait_group", decode_wait_group);
    table.add("cp.async.bulk.prefetch", decode_prefetch);
}

}  // namespace ptx_emulator
