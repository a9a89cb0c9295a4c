#include "register_sharing.h"

#include <algorithm>
#include <map>
#include <queue>

namespace ptx_emulator {

namespace {

// Instructions that run from the first to the last without a branch between them.
struct Block {
    uint32_t first = 0, last = 0;
    std::vector<uint32_t> successors;
};

class BitSet {
  public:
    explicit BitSet(size_t size) : words_((size + 63) / 64, 0) {}
    bool get(uint32_t i) const { return words_[i / 64] >> i % 64 & 1; }
    void set(uint32_t i) { words_[i / 64] |= uint64_t{1} << i % 64; }
    void clear(uint32_t i) { words_[i / 64] &= ~(uint64_t{1} << i % 64); }
    void clear() { std::fill(words_.begin(), words_.end(), 0); }
    // this |= other; whether that changed anything
    bool add(const BitSet& other) {
        uint64_t fresh = 0;
        for (size_t w = 0; w < words_.size(); ++w) {
            fresh |= other.words_[w] & ~words_[w];
            words_[w] |= other.words_[w];
        }
        return fresh != 0;
    }
    template <class F>
    void for_each(F f) const {
        for (size_t w = 0; w < words_.size(); ++w) {
            for (uint64_t rest = words_[w]; rest; rest &= rest - 1) {
                f(static_cast<uint32_t>(64 * w + __builtin_ctzll(rest)));
            }
        }
    }

  private:
    std::vector<uint64_t> words_;
};

bool falls_through(const SyntaxInstruction& instruction) {
    const std::string& name = instruction.modifiers[0];
    return instruction.guard >= 0 || !(name == "bra" || name == "brx" || name == "ret" || name == "exit");
}

std::vector<Block> blocks_of(const KernelSyntax& kernel) {
    const auto count = static_cast<uint32_t>(kernel.instructions.size());
    std::vector<bool> starts(count + 1, false);
    starts[0] = true;
    for (uint32_t i = 0; i < count; ++i) {
        const SyntaxInstruction& instruction = kernel.instructions[i];
        for (int target : instruction.targets) starts[static_cast<size_t>(target)] = true;
        if (!instruction.targets.empty() || !falls_through(instruction)) starts[i + 1] = true;
    }
    std::vector<Block> blocks;
    std::vector<uint32_t> block_at(count + 1, 0);
    for (uint32_t i = 0; i < count; ++i) {
        if (starts[i]) blocks.push_back({i, i, {}});
        blocks.back().last = i;
        block_at[i] = static_cast<uint32_t>(blocks.size() - 1);
    }
    for (Block& block : blocks) {
        const SyntaxInstruction& end = kernel.instructions[block.last];
        for (int target : end.targets) {
            if (static_cast<uint32_t>(target) < count)
                block.successors.push_back(block_at[static_cast<size_t>(target)]);
        }
        if (falls_through(end) && block.last + 1 < count) block.successors.push_back(block_at[block.last + 1]);
    }
    return blocks;
}

}  // namespace

std::vector<uint32_t> share_registers(const KernelSyntax& kernel, const std::vector<RegisterUse>& uses) {
    const size_t registers = kernel.registers.size();
    std::vector<uint32_t> slots(registers, 0);
    if (uses.empty()) {
        for (uint32_t r = 0; r < registers; ++r) slots[r] = r;
        return slots;
    }
    const std::vector<Block> blocks = blocks_of(kernel);
    // Alive: a later instruction may read the value. In flight: an asynchronous operation may still use the register.
    std::vector<BitSet> alive_in(blocks.size(), BitSet(registers)), alive_out = alive_in;
    std::vector<BitSet> flight_in = alive_in, flight_out = alive_in;
    auto step_back = [&](uint32_t i, BitSet& alive) {
        const RegisterUse& use = uses[i];
        if (!use.partial) {
            for (uint32_t r : use.writes) alive.clear(r);
        }
        for (uint32_t r : use.reads) alive.set(r);
    };
    auto step_forward = [&](uint32_t i, BitSet& flight) {
        const RegisterUse& use = uses[i];
        if (use.waits_for_flight) flight.clear();
        if (!use.in_flight) return;
        for (uint32_t r : use.reads) flight.set(r);
        for (uint32_t r : use.writes) flight.set(r);
    };
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t b = blocks.size(); b-- > 0;) {
            for (uint32_t next : blocks[b].successors) alive_out[b].add(alive_in[next]);
            BitSet alive = alive_out[b];
            for (uint32_t i = blocks[b].last + 1; i-- > blocks[b].first;) step_back(i, alive);
            changed |= alive_in[b].add(alive);
        }
    }
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t b = 0; b < blocks.size(); ++b) {
            BitSet flight = flight_in[b];
            for (uint32_t i = blocks[b].first; i <= blocks[b].last; ++i) step_forward(i, flight);
            flight_out[b].add(flight);
            for (uint32_t next : blocks[b].successors) changed |= flight_in[next].add(flight_out[b]);
        }
    }

    // From the first to the last instruction that needs a register, in the order of the text.
    constexpr uint32_t kNever = 0xffffffffu;
    std::vector<uint32_t> begin(registers, kNever), end(registers, 0);
    auto need = [&](uint32_t r, uint32_t at) {
        begin[r] = std::min(begin[r], at);
        end[r] = std::max(end[r], at);
    };
    for (size_t b = 0; b < blocks.size(); ++b) {
        const Block& block = blocks[b];
        alive_in[b].for_each([&](uint32_t r) { need(r, block.first); });
        alive_out[b].for_each([&](uint32_t r) { need(r, block.last); });
        flight_in[b].for_each([&](uint32_t r) { need(r, block.first); });
        flight_out[b].for_each([&](uint32_t r) { need(r, block.last); });
        std::vector<uint32_t> in_flight;  // since an instruction of this block
        for (uint32_t i = block.first; i <= block.last; ++i) {
            for (uint32_t r : uses[i].reads) need(r, i);
            for (uint32_t r : uses[i].writes) need(r, i);
            if (uses[i].waits_for_flight) {
                for (uint32_t r : in_flight) need(r, i);
                flight_in[b].for_each([&](uint32_t r) { need(r, i); });
                in_flight.clear();
                flight_in[b].clear();
            }
            if (uses[i].in_flight) {
                in_flight.insert(in_flight.end(), uses[i].reads.begin(), uses[i].reads.end());
                in_flight.insert(in_flight.end(), uses[i].writes.begin(), uses[i].writes.end());
            }
        }
    }

    // Linear scan (Poletto and Sarkar, 1999) without spilling; a register begins after the last instruction of the one
    // before it in its slot.
    std::vector<uint32_t> order;
    for (uint32_t r = 0; r < registers; ++r) {
        if (begin[r] != kNever) order.push_back(r);
    }
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return begin[a] < begin[b]; });
    std::map<uint32_t, std::vector<uint32_t>> free_slots;  // by bytes
    using Ending = std::pair<uint32_t, uint32_t>;          // last instruction, register
    std::priority_queue<Ending, std::vector<Ending>, std::greater<Ending>> active;
    uint32_t count = 1;  // slot 0: registers that no instruction names
    for (uint32_t r : order) {
        while (!active.empty() && active.top().first < begin[r]) {
            const uint32_t ended = active.top().second;
            free_slots[kernel.registers[ended].bytes].push_back(slots[ended]);
            active.pop();
        }
        if (alive_in[0].get(r)) {
            slots[r] = count++;
            continue;
        }
        std::vector<uint32_t>& available = free_slots[kernel.registers[r].bytes];
        if (available.empty()) {
            slots[r] = count++;
        } else {
            slots[r] = available.back();
            available.pop_back();
        }
        active.emplace(end[r], r);
    }
    return slots;
}

}  // namespace ptx_emulator
