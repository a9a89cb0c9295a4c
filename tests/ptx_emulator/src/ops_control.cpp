// Control flow (PTX ISA 9.7.12): bra, brx.idx, ret, exit, trap, call of the device runtime's print and assert.
#include <cstdio>
#include <cstring>

#include "errors.h"
#include "lanes.h"
#include "memory.h"
#include "opcode_table.h"

namespace ptx_emulator {

namespace {

Step branch(Warp&, const Instruction&, LaneMask) {
    return Step::kJump;
}

Step end(Warp&, const Instruction&, LaneMask) {
    return Step::kExit;
}

Step trap(Warp&, const Instruction&, LaneMask) {
    raise(Fault::kTrap, "trap");
}

Step nothing(Warp&, const Instruction&, LaneMask) {
    return Step::kNext;
}

void decode_bra(DecodeContext& c) {
    c.allow(1, "uni");
    if (c.syntax.targets.size() != 1) c.fail("branch without a target");
    c.out.target = static_cast<uint32_t>(c.syntax.targets[0]);
    c.out.handler = branch;
}

// The lanes that go elsewhere than the first active lane become groups of their own.
Step indexed_branch(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto* index = warp.lanes<uint32_t>(i.a);
    LaneMask rest = mask;
    std::vector<LaneGroup> groups;
    while (rest) {
        const uint32_t value = index[first_lane(rest)];
        if (value >= i.list_size[0])
            raise(Fault::kIllegalInstruction, "brx.idx: index %u of %u", value, i.list_size[0]);
        LaneMask same = 0;
        for_lanes(rest, [&](uint32_t lane) { same |= index[lane] == value ? lane_bit(lane) : 0; });
        groups.push_back({same, i.list[0][value], false});
        rest &= ~same;
    }
    warp.split(groups);
    return Step::kExit;
}

void decode_brx(DecodeContext& c) {
    if (c.syntax.targets.empty()) c.fail("brx.idx without a table of targets");
    c.out.a = c.read(0, 4);
    c.keep_list(0, std::vector<uint32_t>(c.syntax.targets.begin(), c.syntax.targets.end()));
    if (c.syntax.targets.size() > 255) c.fail("more than 255 targets");
    c.out.handler = indexed_branch;
}

void decode_end(DecodeContext& c) {
    c.out.handler = end;
}
void decode_trap(DecodeContext& c) {
    c.out.handler = trap;
}
void decode_nothing(DecodeContext& c) {
    c.out.handler = nothing;
}

std::string string_at(Warp& warp, uint64_t address, uint32_t lane) {
    std::string text;
    for (;; ++address) {
        const char letter = static_cast<char>(*resolve(warp, Space::kGeneric, address, lane, 1, 1).data);
        if (!letter || text.size() > 4096) return text;
        text += letter;
    }
}

// vprintf(format, arguments): list[0] are the local addresses of the two parameters.
Step device_print(Warp& warp, const Instruction& i, LaneMask mask) {
    for_lanes(mask, [&](uint32_t lane) {
        auto parameter = [&](uint32_t index) {
            uint64_t value;
            std::memcpy(&value, warp.local(lane, i.list[0][index], 8), 8);
            return value;
        };
        const std::string pattern = string_at(warp, parameter(0), lane);
        uint64_t argument = parameter(1);
        std::string out;
        for (size_t k = 0; k < pattern.size(); ++k) {
            if (pattern[k] != '%' || pattern[k + 1] == '%') {
                out += pattern[k];
                k += pattern[k] == '%';
                continue;
            }
            const size_t last = pattern.find_first_of("diouxXeEfFgGaAcsp", k + 1);
            if (last == std::string::npos) break;
            const std::string spec = pattern.substr(k, last - k + 1);
            const char kind = spec.back();
            const bool eight = spec.find('l') != std::string::npos || std::strchr("eEfFgGaAsp", kind);
            argument = (argument + (eight ? 7 : 3)) & ~uint64_t{eight ? 7u : 3u};
            uint64_t bits = 0;
            std::memcpy(&bits, resolve(warp, Space::kGeneric, argument, lane, eight ? 8 : 4, 4).data, eight ? 8 : 4);
            argument += eight ? 8 : 4;
            char text[512];
            if (std::strchr("eEfFgGaA", kind)) {
                double value;
                std::memcpy(&value, &bits, 8);
                std::snprintf(text, sizeof text, spec.c_str(), value);
            } else if (kind == 's') {
                std::snprintf(text, sizeof text, spec.c_str(), string_at(warp, bits, lane).c_str());
            } else if (eight) {
                std::snprintf(text, sizeof text, spec.c_str(), bits);
            } else {
                std::snprintf(text, sizeof text, spec.c_str(), static_cast<uint32_t>(bits));
            }
            out += text;
            k = last;
        }
        std::fputs(out.c_str(), stdout);
    });
    std::fflush(stdout);
    return Step::kNext;
}

// __assertfail(message, file, line, function, size)
Step device_assert(Warp& warp, const Instruction& i, LaneMask mask) {
    const uint32_t lane = first_lane(mask);
    uint64_t message, file;
    uint32_t line;
    std::memcpy(&message, warp.local(lane, i.list[0][0], 8), 8);
    std::memcpy(&file, warp.local(lane, i.list[0][1], 8), 8);
    std::memcpy(&line, warp.local(lane, i.list[0][2], 4), 4);
    raise(Fault::kTrap, "device assert '%s' at %s:%u", string_at(warp, message, lane).c_str(),
          string_at(warp, file, lane).c_str(), line);
}

void decode_call(DecodeContext& c) {
    const std::string& callee = c.syntax.callee;
    if (callee != "vprintf" && callee != "__assertfail") {
        c.fail("calls of device functions are not supported (" + callee + ")");
    }
    std::vector<uint32_t> offsets;
    for (const SyntaxOperand& argument : c.syntax.call_arguments) offsets.push_back(c.local_offset(argument));
    c.keep_list(0, std::move(offsets));
    c.out.handler = callee == "vprintf" ? device_print : device_assert;
}

}  // namespace

void register_control(OpcodeTable& table) {
    table.add("bra", decode_bra);
    table.add("brx.idx", decode_brx);
    table.add("ret", decode_end);
    table.add("exit", decode_end);
    table.add("trap", decode_trap);
    table.add("brkpt", decode_trap);
    table.add("call", decode_call);
    table.add("nanosleep", decode_nothing);
    table.add("pmevent", decode_nothing);
}

}  // namespace ptx_emulator
