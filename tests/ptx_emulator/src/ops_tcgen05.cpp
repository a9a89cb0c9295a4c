// tcgen05: allocation of tensor memory, its loads and stores, fences (PTX ISA 9.7.16.7, 9.7.16.8, 9.7.16.11).
//
// A load's registers have their values at once (true dependencies hold by the ISA); that the tensor memory may still be
// read until tcgen05.wait::ld is the checker's knowledge. A store takes effect until tcgen05.wait::st. The fences are
// the checker's knowledge alone, too (PTX ISA 9.7.16.6.3): what barriers order is the operations of tensor memory
// before a fence::before_thread_sync and those behind a fence::after_thread_sync. tcgen05.commit is a fence of the
// first kind.
#include <algorithm>
#include <cstring>

#include "address_operand.h"
#include "errors.h"
#include "lanes.h"
#include "machine.h"
#include "opcode_table.h"
#include "tcgen05.h"
#include "tensor_memory.h"

namespace ptx_emulator {

int TensorMemory::first_missing(uint16_t units, uint32_t column, uint32_t count) const {
    if (count == 0 || column + count > kTensorColumns) {
        raise(Fault::kIllegalAddress, "tensor memory columns %u to %u of %u", column, column + count - 1,
              kTensorColumns);
    }
    for (uint32_t unit = column / kTensorAllocationUnit; unit <= (column + count - 1) / kTensorAllocationUnit; ++unit) {
        if (!(units >> unit & 1)) return static_cast<int>(unit);
    }
    return -1;
}

void TensorMemory::require_allocated(uint32_t column, uint32_t count) const {
    const int unit = first_missing(allocated, column, count);
    if (unit < 0) return;
    raise(Fault::kIllegalAddress, "tensor memory columns %u to %u: column %u is not allocated by this CTA", column,
          column + count - 1, unit * kTensorAllocationUnit);
}

void TensorMemory::check_access(Warp& by, uint32_t column, uint32_t count) const {
    if (first_missing(allocated | freed, column, count) >= 0) require_allocated(column, count);
    if (first_missing(allocated, column, count) < 0 || !by.machine.checker.enabled()) return;
    by.machine.checker.report_once(
        by.pc(), by.pc(),
        format("hazard: access of tensor memory columns %u to %u after tcgen05.dealloc\n  by CTA rank %u warp %u at %s",
               column, column + count - 1, by.cta.rank, by.index, by.program.where(by.pc()).c_str()));
}

void TensorMemoryAccess::make_streams(Warp& warp) {
    Checker& checker = warp.machine.checker;
    if (has_streams || !checker.enabled()) return;
    has_streams = true;
    const std::string name = format("CTA rank %u warp %u", warp.cta.rank, warp.index);
    load_stream = checker.new_component(warp.cta.cluster, "tcgen05.ld of " + name);
    store_stream = checker.new_component(warp.cta.cluster, "tcgen05.st of " + name);
    product_stream = checker.new_component(warp.cta.cluster, "tcgen05.mma of " + name);
    // tcgen05.wait blocks a thread until its own are done, whatever the other lanes wait for.
    if (!warp.machine.options.strict) return;
    for (const Component stream : {load_stream, store_stream}) warp.clock.lane_streams.push_back({stream, 0, 0});
}

uint32_t decode_cta_group(DecodeContext& c) {
    const uint32_t group = c.has("cta_group::2") ? 2 : c.has("cta_group::1") ? 1 : 0;
    if (group == 0) c.fail("expected .cta_group");
    uint32_t& of_kernel = c.program().tensor_cta_group;
    if (of_kernel != 0 && of_kernel != group) c.fail("all tcgen05 instructions of a kernel must name one .cta_group");
    of_kernel = group;
    return group;
}

namespace {

uint16_t unit_mask(uint32_t columns) {
    return static_cast<uint16_t>((1u << columns / kTensorAllocationUnit) - 1);
}

// Allocation units that nobody on the SM uses; CTAs of an SM share its columns.
uint16_t used_on_sm(const Cta& cta) {
    uint16_t used = 0;
    for (const auto& cluster : cta.machine.clusters) {
        for (const auto& other : cluster->ctas) {
            if (other->sm == cta.sm) used |= other->tensor_memory.allocated;
        }
    }
    return used;
}

// The lowest free run of units, 0 if there is none.
uint16_t find_free(uint16_t used, uint32_t columns) {
    const uint32_t units = columns / kTensorAllocationUnit;
    for (uint32_t first = 0; first + units <= kTensorColumns / kTensorAllocationUnit; first += units) {
        const auto mask = static_cast<uint16_t>(unit_mask(columns) << first);
        if (!(used & mask)) return mask;
    }
    return 0;
}

Cta* peer_of(Cta& cta) {
    const uint32_t rank = cta.rank ^ 1;
    if (rank >= cta.cluster.ctas.size()) raise(Fault::kIllegalInstruction, ".cta_group::2 without a pair of CTAs");
    return cta.cluster.ctas[rank].get();
}

void check_columns(uint32_t columns) {
    if (columns < 32 || columns > 512 || (columns & (columns - 1))) {
        raise(Fault::kIllegalInstruction, "%u columns of tensor memory: must be a power of two from 32 to 512",
              columns);
    }
}

struct AllocationData : InstructionData {
    AddressOperand destination;
};

// x: cta_group, a: columns
Step allocate(Warp& warp, const Instruction& i, LaneMask mask) {
    if (!warp.converged()) return Step::kBlock;
    Cta& cta = warp.cta;
    TensorMemory& memory = cta.tensor_memory;
    const uint32_t columns = warp.lanes<uint32_t>(i.a)[first_lane(mask)];
    check_columns(columns);
    if (warp.machine.device.tensor_memory_columns == 0) {
        raise(Fault::kIllegalInstruction, "compute capability %d.%d has no tensor memory", warp.machine.device.major,
              warp.machine.device.minor);
    }
    if (memory.relinquished) raise(Fault::kIllegalInstruction, "tcgen05.alloc after relinquish_alloc_permit");
    if (columns > memory.latest_allocation) {
        raise(Fault::kIllegalInstruction, "tcgen05.alloc of %u columns after one of %u: allocations must not grow",
              columns, memory.latest_allocation);
    }
    uint16_t found = 0;
    if (i.x == 2) {
        Cta* peer = peer_of(cta);
        std::deque<PairAllocation>& pending = cta.cluster.ctas[cta.rank & ~1u]->pair_allocations;
        const uint32_t half = cta.rank & 1;
        for (PairAllocation& entry : pending) {
            if (entry.taken[half]) continue;
            if (__builtin_popcount(entry.columns) != static_cast<int>(columns / kTensorAllocationUnit)) {
                raise(Fault::kIllegalInstruction, "the CTAs of a pair allocate different numbers of columns");
            }
            entry.taken[half] = true;
            found = entry.columns;
            break;
        }
        if (!found) {
            found = find_free(used_on_sm(cta) | used_on_sm(*peer), columns);
            if (!found) return Step::kBlock;
            PairAllocation entry;
            entry.columns = found;
            entry.taken[half] = true;
            pending.push_back(entry);
        }
        while (!pending.empty() && pending.front().taken[0] && pending.front().taken[1]) pending.pop_front();
    } else {
        found = find_free(used_on_sm(cta), columns);
        if (!found) return Step::kBlock;
    }
    memory.allocated |= found;
    memory.latest_allocation = columns;
    const auto address = static_cast<uint32_t>(__builtin_ctz(found)) * kTensorAllocationUnit;
    warp.machine.checker.tensor_allocation(warp, address, columns);
    const auto& data = static_cast<const AllocationData&>(*i.data);
    const MemoryReference to = resolve_shared(warp, data.destination.shared_at(warp, first_lane(mask)), 4, 4);
    warp.machine.checker.shared_access(warp, kWarpSize, *to.owner, to.offset, 4, AccessKind::kWrite);
    std::memcpy(to.data, &address, 4);
    to.owner->shared.written_by_generic(to.offset, 4);
    warp.machine.progressed();
    return Step::kNext;
}

std::string describe_allocate(const Warp& warp, const Instruction& i) {
    return format("waits for %u free columns of tensor memory; allocated on its SM are units %04x",
                  warp.lanes<uint32_t>(i.a)[0], used_on_sm(warp.cta));
}

void decode_alloc(DecodeContext& c) {
    c.allow(1, "alloc cta_group::1 cta_group::2 sync aligned shared::cta b32");
    c.out.x = decode_cta_group(c);
    auto data = std::make_shared<AllocationData>();
    data->destination = decode_address(c, c.operand(0), 4);
    c.out.data = std::move(data);
    c.out.a = c.read(1, 4);
    c.info.describe_wait = describe_allocate;
    c.out.handler = allocate;
}

// a: address, b: columns
Step deallocate(Warp& warp, const Instruction& i, LaneMask mask) {
    if (!warp.converged()) return Step::kBlock;
    const uint32_t lane = first_lane(mask);
    const uint32_t columns = warp.lanes<uint32_t>(i.b)[lane];
    const uint32_t first = warp.lanes<uint32_t>(i.a)[lane] & 0xffff;
    check_columns(columns);
    TensorMemory& memory = warp.cta.tensor_memory;
    memory.require_allocated(first, columns);
    if (first % kTensorAllocationUnit) raise(Fault::kIllegalInstruction, "tcgen05.dealloc of column %u", first);
    warp.tensor_memory.make_streams(warp);
    Checker& checker = warp.machine.checker;
    // Whatever uses the columns must have completed: as a write by this warp would demand.
    AsyncAgent agent = checker.agent(warp, warp.clock.component, 0, false);
    // It is not asynchronous: what it comes after needs no fence behind the barrier.
    agent.knowledge.tensor.join(agent.knowledge.tensor_released);
    checker.tensor_access(agent, warp.cta, first, columns, 0, kTensorLanes, AccessKind::kWrite, false);
    const auto units = static_cast<uint16_t>(unit_mask(columns) << first / kTensorAllocationUnit);
    memory.allocated &= static_cast<uint16_t>(~units);
    memory.freed |= units;
    warp.machine.progressed();
    return Step::kNext;
}

void decode_dealloc(DecodeContext& c) {
    c.allow(1, "dealloc cta_group::1 cta_group::2 sync aligned b32");
    decode_cta_group(c);
    c.out.a = c.read(0, 4);
    c.out.b = c.read(1, 4);
    c.out.handler = deallocate;
}

Step relinquish(Warp& warp, const Instruction&, LaneMask) {
    warp.cta.tensor_memory.relinquished = true;
    return Step::kNext;
}

void decode_relinquish(DecodeContext& c) {
    c.allow(1, "relinquish_alloc_permit cta_group::1 cta_group::2 sync aligned");
    decode_cta_group(c);
    c.out.handler = relinquish;
}

// ---- loads and stores

enum class Shape : uint32_t { k32x32b, k16x64b, k16x128b, k16x256b, k16x32bx2 };

struct Cell {
    uint32_t lane, column;
};

// Which cell register r of a lane holds (after cute/atom/copy_traits_sm100.hpp). split: columns from the first to the
// second half of .16x32bx2.
Cell cell_of(Shape shape, uint32_t lane, uint32_t r, uint32_t split) {
    switch (shape) {
        case Shape::k32x32b:
            return {lane, r};
        case Shape::k16x64b:
            return {lane / 4 + 8 * (lane % 2), lane / 2 % 2 + 2 * r};
        case Shape::k16x128b:
            return {lane / 4 + 8 * (r % 2), lane % 4 + 4 * (r / 2)};
        case Shape::k16x256b:
            return {lane / 4 + 8 * (r / 2 % 2), 2 * (lane % 4) + r % 2 + 8 * (r / 4)};
        case Shape::k16x32bx2:
            return {lane % 16, r + lane / 16 * split};
    }
    return {0, 0};
}

struct AccessData : InstructionData {
    AddressOperand address;
    Shape shape = Shape::k32x32b;
    uint32_t split = 0;
    uint32_t columns = 0;  // from the first to the last, inclusive of both
};

// The first lane and column; checks that the warp may access them.
Cell access_base(Warp& warp, const AccessData& data, LaneMask mask) {
    const auto address = static_cast<uint32_t>(data.address.at(warp, first_lane(mask)));
    for_lanes(mask, [&](uint32_t lane) {
        if (static_cast<uint32_t>(data.address.at(warp, lane)) != address) {
            raise(Fault::kIllegalInstruction, "the lanes of a warp give different addresses of tensor memory");
        }
    });
    const Cell base{(address >> 16) % kTensorLanes, address & 0xffff};
    const uint32_t quarter = warp.index % 4 * kWarpSize;
    const bool whole = data.shape == Shape::k32x32b;
    if (base.lane != quarter && (whole || base.lane != quarter + 16)) {
        raise(Fault::kIllegalAddress,
              "tensor memory at lane %u: warp %u may access lanes %u to %u, beginning at the first%s", base.lane,
              warp.index, quarter, quarter + 31, whole ? "" : " or in the middle");
    }
    warp.cta.tensor_memory.check_access(warp, base.column, data.columns);
    return base;
}

void record_access(Warp& warp, const AccessData& data, uint32_t registers, const Cell& base, const AsyncAgent& agent,
                   AccessKind kind) {
    Checker& checker = warp.machine.checker;
    if (!checker.enabled()) return;
    const uint32_t lanes = data.shape == Shape::k32x32b ? 32 : 16;
    const uint32_t half = data.shape == Shape::k16x32bx2 ? registers : data.columns;
    const uint32_t second = std::max(half, data.split);  // where the second half begins
    checker.tensor_access(agent, warp.cta, base.column, half, base.lane, lanes, kind, false);
    if (second < data.columns) {
        checker.tensor_access(agent, warp.cta, base.column + second, data.columns - second, base.lane, lanes, kind,
                              false);
    }
}

Step load(Warp& warp, const Instruction& i, LaneMask mask) {
    if (!warp.converged()) return Step::kBlock;
    const auto& data = static_cast<const AccessData&>(*i.data);
    const Cell base = access_base(warp, data, mask);
    TensorMemoryAccess& access = warp.tensor_memory;
    access.make_streams(warp);
    const AsyncAgent agent = warp.machine.checker.agent(warp, access.load_stream, access.load_epoch, false);
    record_access(warp, data, i.list_size[0], base, agent, AccessKind::kRead);
    if (data.shape == Shape::k32x32b) {
        for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
            const uint32_t* cells = warp.cta.tensor_memory.at(base.lane + lane, base.column);
            for (uint32_t r = 0; r < i.list_size[0]; ++r) warp.lanes<uint32_t>(i.list[0][r])[lane] = cells[r];
        }
        return Step::kNext;
    }
    for (uint32_t r = 0; r < i.list_size[0]; ++r) {
        auto* registers = warp.lanes<uint32_t>(i.list[0][r]);
        for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
            const Cell cell = cell_of(data.shape, lane, r, data.split);
            registers[lane] = *warp.cta.tensor_memory.at(base.lane + cell.lane, base.column + cell.column);
        }
    }
    return Step::kNext;
}

Step store(Warp& warp, const Instruction& i, LaneMask mask) {
    if (!warp.converged()) return Step::kBlock;
    const auto& data = static_cast<const AccessData&>(*i.data);
    const Cell base = access_base(warp, data, mask);
    TensorMemoryAccess& access = warp.tensor_memory;
    access.make_streams(warp);
    const AsyncAgent agent = warp.machine.checker.agent(warp, access.store_stream, access.store_epoch, false);
    record_access(warp, data, i.list_size[0], base, agent, AccessKind::kWrite);
    std::vector<uint32_t> values;
    for (uint32_t r = 0; r < i.list_size[0]; ++r) {
        const auto* registers = warp.lanes<uint32_t>(i.list[0][r]);
        values.insert(values.end(), registers, registers + kWarpSize);
    }
    Cta* cta = &warp.cta;
    access.stores_outstanding = true;
    warp.machine.async.submit(
        access.stores, [cta, base, shape = data.shape, split = data.split, values = std::move(values)] {
            if (shape == Shape::k32x32b) {
                for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
                    uint32_t* cells = cta->tensor_memory.at(base.lane + lane, base.column);
                    for (uint32_t n = lane; n < values.size(); n += kWarpSize) *cells++ = values[n];
                }
                cta->machine.progressed();
                return;
            }
            for (uint32_t n = 0; n < values.size(); ++n) {
                const Cell cell = cell_of(shape, n % kWarpSize, n / kWarpSize, split);
                *cta->tensor_memory.at(base.lane + cell.lane, base.column + cell.column) = values[n];
            }
            cta->machine.progressed();
        });
    return Step::kNext;
}

void decode_access(DecodeContext& c, bool loads) {
    c.allow(1, "ld st sync aligned 32x32b 16x64b 16x128b 16x256b 16x32bx2 x1 x2 x4 x8 x16 x32 x64 x128 b32");
    auto data = std::make_shared<AccessData>();
    data->address = decode_address(c, c.operand(loads ? 1 : 0), 4);
    struct {
        const char* name;
        Shape shape;
        uint32_t columns, registers;  // of .x1
    } const shapes[] = {{"32x32b", Shape::k32x32b, 1, 1},
                        {"16x64b", Shape::k16x64b, 2, 1},
                        {"16x128b", Shape::k16x128b, 4, 2},
                        {"16x256b", Shape::k16x256b, 8, 4},
                        {"16x32bx2", Shape::k16x32bx2, 1, 1}};
    uint32_t repeat = 0, registers = 0;
    for (const std::string& word : c.syntax.modifiers) {
        if (word[0] == 'x') repeat = static_cast<uint32_t>(std::stoul(word.substr(1)));
    }
    for (const auto& known : shapes) {
        if (!c.has(known.name)) continue;
        data->shape = known.shape;
        data->columns = known.columns * repeat;
        registers = known.registers * repeat;
    }
    if (registers == 0 || registers > 128) c.fail("unknown shape");
    if (loads) {
        c.write_list(0, c.operand(0), 4);
    } else {
        c.read_list(0, c.operand(c.operand_count() - 1), 4);
    }
    if (data->shape == Shape::k16x32bx2) {
        data->split = static_cast<uint32_t>(c.immediate(loads ? 2 : 1));
        data->columns = data->split + registers;
    }
    if (c.out.list_size[0] != registers) c.fail("wrong number of registers");
    c.out.data = std::move(data);
    c.out.handler = loads ? load : store;
}

void decode_load(DecodeContext& c) {
    decode_access(c, true);
}
void decode_store(DecodeContext& c) {
    decode_access(c, false);
}

// x: of stores
Step wait(Warp& warp, const Instruction& i, LaneMask) {
    if (!warp.converged()) return Step::kBlock;
    TensorMemoryAccess& access = warp.tensor_memory;
    Checker& checker = warp.machine.checker;
    if (i.x) {
        access.stores.run_through(access.stores.issued());
        access.stores_outstanding = false;
        if (access.has_streams) checker.tensor_complete(warp, access.store_stream, access.store_epoch++);
    } else if (access.has_streams) {
        checker.tensor_complete(warp, access.load_stream, access.load_epoch++);
    }
    return Step::kNext;
}

void decode_wait(DecodeContext& c) {
    c.allow(1, "wait::ld wait::st sync aligned");
    c.set_role(kRoleSynchronization);
    c.out.x = c.has("wait::st");
    c.out.handler = wait;
}

// x: before_thread_sync
Step fence(Warp& warp, const Instruction& i, LaneMask) {
    Checker& checker = warp.machine.checker;
    if (i.x) {
        checker.tensor_fence_before(warp);
    } else {
        checker.tensor_fence_after(warp);
    }
    return Step::kNext;
}

void decode_fence(DecodeContext& c) {
    c.allow(1, "fence::before_thread_sync fence::after_thread_sync");
    c.set_role(kRoleSynchronization);
    c.out.x = c.has("fence::before_thread_sync");
    c.out.handler = fence;
}

}  // namespace

void register_tcgen05(OpcodeTable& table) {
    table.add("tcgen05.alloc", decode_alloc);
    table.add("tcgen05.dealloc", decode_dealloc);
    table.add("tcgen05.relinquish_alloc_permit", decode_relinquish);
    table.add("tcgen05.ld", decode_load);
    table.add("tcgen05.st", decode_store);
    table.add("tcgen05.wait::ld", decode_wait);
    table.add("tcgen05.wait::st", decode_wait);
    table.add("tcgen05.fence::before_thread_sync", decode_fence);
    table.add("tcgen05.fence::after_thread_sync", decode_fence);
}

}  // namespace ptx_emulator
