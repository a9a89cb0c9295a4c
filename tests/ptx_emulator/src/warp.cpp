#include "warp.h"

#include <algorithm>
#include <cstring>

#include "address_space.h"
#include "errors.h"
#include "machine.h"

namespace ptx_emulator {

Warp::Warp(Machine& m, Cta& c, uint32_t i, LaneMask lanes) : machine(m), cta(c), program(m.program), index(i) {
    groups.push_back({lanes, 0, false});
    register_storage_.reset(new uint8_t[program.register_bytes + 64]);  // initialize_registers fills it
    registers_ = register_storage_.get();
    registers_ += (64 - reinterpret_cast<uintptr_t>(registers_) % 64) % 64;
    local_storage_.assign(size_t{program.local_bytes} * kWarpSize, 0xff);
    initialize_registers();
    if (program.uses_wgmma && machine.checker.enabled()) access_ages_.assign(program.register_count, 0);
    machine.async.attach(&copies.queue);
    machine.async.attach(&bulk.queue);
    machine.async.attach(&tensor_memory.stores);
}

Warp::~Warp() {
    machine.async.detach(&copies.queue);
    machine.async.detach(&bulk.queue);
    machine.async.detach(&tensor_memory.stores);
}

void Warp::initialize_registers() {
    std::memcpy(registers_, program.initial_registers.data(), program.register_bytes);
    auto put = [&](uint32_t offset, uint32_t bytes, uint32_t lane, uint64_t value) {
        std::memcpy(registers_ + offset + lane * bytes, &value, bytes);
    };
    const uint64_t rank = uint64_t{cta.rank} << kSharedRankShift;
    for (const SymbolRegister& symbol : program.symbols) {
        uint64_t value = symbol.value;
        switch (symbol.kind) {
            case SymbolRegister::Kind::kShared:
                value |= rank;
                break;
            case SymbolRegister::Kind::kDynamicShared:
                value = rank | (machine.dynamic_shared_offset() + value);
                break;
            case SymbolRegister::Kind::kLocal:
                break;
            case SymbolRegister::Kind::kParam:
                value += reinterpret_cast<uint64_t>(machine.parameters());
                break;
        }
        for (uint32_t lane = 0; lane < kWarpSize; ++lane) put(symbol.offset, symbol.bytes, lane, value);
    }
    for (const SpecialRegister& special : program.specials) {
        for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
            put(special.offset, special.bytes, lane, special.value(*this, lane));
        }
    }
}

LaneMask Warp::live() const {
    LaneMask mask = 0;
    for (const LaneGroup& group : groups) mask |= group.mask;
    return mask;
}

uint8_t* Warp::local(uint32_t lane, uint64_t offset, uint32_t bytes) {
    if (offset > program.local_bytes || offset + bytes > program.local_bytes) {
        raise(Fault::kIllegalAddress, "local memory access at %llu, %u bytes, of %u per thread",
              static_cast<unsigned long long>(offset), bytes, program.local_bytes);
    }
    return &local_storage_[size_t{lane} * program.local_bytes + offset];
}

// The runnable group with the lowest pc, or with the highest one after a lowest group has starved the others.
int Warp::pick_group() {
    int best = -1;
    for (size_t i = 0; i < groups.size(); ++i) {
        if (groups[i].blocked) continue;
        const bool better =
            best < 0 || (starve_lowest_ ? groups[i].pc > groups[best].pc : groups[i].pc < groups[best].pc);
        if (better) best = static_cast<int>(i);
    }
    starve_lowest_ = false;
    return best;
}

void Warp::count_size(uint32_t a, uint32_t b) {
    if (machine.counts) machine.counts->add_size(index, pc_, a, b);
}

void Warp::note_accesses(uint32_t pc) {
    const TouchedRegisters& touched = program.touched[pc];
    const uint32_t* const reads = program.touched_registers.data() + touched.first;
    const uint32_t* const writes = reads + touched.reads;
    uint32_t age = fences_;
    if (touched.copies) {
        const uint32_t guard = program.code[pc].guard;
        const uint32_t not_copied = guard == kNoRegister ? program.register_count : program.register_number(guard);
        age = 0;
        for (uint32_t r = 0; r < touched.reads; ++r) {
            if (reads[r] != not_copied) age = std::max(age, access_ages_[reads[r]]);
        }
    } else if (!(program.info[pc].roles & kRoleWarpgroupMultiply)) {
        for (uint32_t r = 0; r < touched.reads; ++r) access_ages_[reads[r]] = fences_;
    }
    for (uint32_t r = 0; r < touched.writes; ++r) access_ages_[writes[r]] = age;
}

Warp::Outcome Warp::run(uint32_t budget) {
    for (LaneGroup& group : groups) group.blocked = false;
    const Instruction* const code = program.code.data();
    const uint64_t begin = instructions;
    ExecutionCounts* const counts = machine.counts.get();
    while (instructions - begin < budget) {
        if (groups.empty()) {
            cta.warp_ended(*this);
            return Outcome::kDone;
        }
        int current = pick_group();
        if (current < 0) return Outcome::kBlocked;
        // Groups that have met go on together.
        for (size_t i = 0; i < groups.size();) {
            if (static_cast<int>(i) != current && groups[i].pc == groups[current].pc) {
                groups[current].mask |= groups[i].mask;
                groups.erase(groups.begin() + static_cast<std::ptrdiff_t>(i));
                if (static_cast<int>(i) < current) --current;
            } else {
                ++i;
            }
        }
        const bool alone = groups.size() == 1;
        uint32_t meet = ~0u;  // the next pc at which another group waits
        if (!alone) {
            for (const LaneGroup& group : groups) {
                if (group.pc > groups[current].pc) meet = std::min(meet, group.pc);
            }
        }
        const LaneMask mask = groups[current].mask;
        uint32_t pc = groups[current].pc;
        active_ = mask;
        for (bool switch_group = false; !switch_group;) {
            if (pc >= program.code.size()) {  // a body may end without ret
                groups.erase(groups.begin() + current);
                machine.progressed();
                break;
            }
            const Instruction& instruction = code[pc];
            LaneMask lanes = mask;
            if (instruction.guard != kNoRegister) {
                const LaneMask guard = predicate(instruction.guard);
                lanes &= instruction.guard_negated ? ~guard : guard;
            }
            ++instructions;
            pc_ = pc;
            Step step = Step::kNext;
            if (lanes) {
                program.executed[pc] = 1;
                executing_ = lanes;
                if (registers_in_flight) machine.checker.check_in_flight(*this, instruction);
                step = instruction.handler(*this, instruction, lanes);
                if (!access_ages_.empty()) note_accesses(pc);
            }
            // A wait counts once, when it is over.
            if (counts && step != Step::kBlock && step != Step::kYield) {
                counts->add(index, pc, static_cast<uint32_t>(__builtin_popcount(lanes)));
            }
            const uint32_t before = pc;
            switch (step) {
                case Step::kNext:
                    ++pc;
                    break;
                case Step::kJump:
                    if (lanes == mask) {
                        pc = instruction.target;
                    } else {
                        groups[current].mask = mask & ~lanes;
                        groups[current].pc = pc + 1;
                        groups.push_back({lanes, instruction.target, false});
                        switch_group = true;
                    }
                    break;
                case Step::kBlock:
                    groups[current].pc = pc;
                    groups[current].blocked = true;
                    switch_group = true;
                    break;
                case Step::kYield:
                    groups[current].pc = pc + 1;
                    groups[current].blocked = true;
                    switch_group = true;
                    break;
                case Step::kExit:
                    if (lanes == mask) {
                        groups.erase(groups.begin() + current);
                    } else {
                        groups[current].mask = mask & ~lanes;
                        groups[current].pc = pc + 1;
                    }
                    if (added_.empty()) machine.progressed();
                    groups.insert(groups.end(), added_.begin(), added_.end());
                    added_.clear();
                    switch_group = true;
                    break;
            }
            if (switch_group) break;
            const bool spent = instructions - begin >= budget;
            if (pc >= meet || spent || (!alone && pc < before)) {
                groups[current].pc = pc;
                if (spent && !alone) starve_lowest_ = true;
                break;
            }
        }
    }
    if (groups.empty()) {
        cta.warp_ended(*this);
        return Outcome::kDone;
    }
    return Outcome::kBudget;
}

}  // namespace ptx_emulator
