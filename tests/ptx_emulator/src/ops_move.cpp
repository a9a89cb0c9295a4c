// mov, cvta and isspacep (PTX ISA 9.7.9.3, 9.7.9.20, 9.7.9.19).
#include <cstring>

#include "address_space.h"
#include "lanes.h"
#include "opcode_table.h"

namespace ptx_emulator {

namespace {

template <class T>
Step move(Warp& warp, const Instruction& i, LaneMask mask) {
    alignas(64) T values[kWarpSize];
    std::memcpy(values, warp.lanes<T>(i.a), sizeof values);
    store_lanes(warp.lanes<T>(i.dst), values, mask);
    return Step::kNext;
}

Step move_predicate(Warp& warp, const Instruction& i, LaneMask mask) {
    const LaneMask value = warp.predicate(i.a);
    warp.set_predicate(i.dst, i.negate_predicate ? ~value : value, mask);
    return Step::kNext;
}

// {a, b} = c: x bytes per element, y of the whole
Step unpack(Warp& warp, const Instruction& i, LaneMask mask) {
    alignas(64) uint8_t whole[kWarpSize * 16];
    std::memcpy(whole, warp.lanes<uint8_t>(i.a), kWarpSize * i.y);
    for (uint32_t element = 0; element < i.list_size[0]; ++element) {
        uint8_t* d = warp.lanes<uint8_t>(i.list[0][element]);
        for_lanes(mask, [&](uint32_t lane) { std::memcpy(d + lane * i.x, whole + lane * i.y + element * i.x, i.x); });
    }
    return Step::kNext;
}

// a = {b, c}
Step pack(Warp& warp, const Instruction& i, LaneMask mask) {
    alignas(64) uint8_t whole[kWarpSize * 16];
    for (uint32_t element = 0; element < i.list_size[0]; ++element) {
        const uint8_t* source = warp.lanes<uint8_t>(i.list[0][element]);
        for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
            std::memcpy(whole + lane * i.y + element * i.x, source + lane * i.x, i.x);
        }
    }
    uint8_t* d = warp.lanes<uint8_t>(i.dst);
    for_lanes(mask, [&](uint32_t lane) { std::memcpy(d + lane * i.y, whole + lane * i.y, i.y); });
    return Step::kNext;
}

// The common cases of pack and unpack: 16-bit halves of 32, 32-bit halves of 64.
template <class Whole, class Half>
Step unpack_two(Warp& warp, const Instruction& i, LaneMask mask) {
    const Whole* a = warp.lanes<Whole>(i.a);
    alignas(64) Half low[kWarpSize], high[kWarpSize];
    for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
        low[lane] = static_cast<Half>(a[lane]);
        high[lane] = static_cast<Half>(a[lane] >> (8 * sizeof(Half)));
    }
    store_lanes(warp.lanes<Half>(i.list[0][0]), low, mask);
    store_lanes(warp.lanes<Half>(i.list[0][1]), high, mask);
    return Step::kNext;
}

template <class Whole, class Half>
Step pack_two(Warp& warp, const Instruction& i, LaneMask mask) {
    const Half* low = warp.lanes<Half>(i.list[0][0]);
    const Half* high = warp.lanes<Half>(i.list[0][1]);
    alignas(64) Whole values[kWarpSize];
    for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
        values[lane] = static_cast<Whole>(static_cast<Whole>(high[lane]) << (8 * sizeof(Half)) | low[lane]);
    }
    store_lanes(warp.lanes<Whole>(i.dst), values, mask);
    return Step::kNext;
}

// %clock and its kin count executed instructions of the warp; they only have to go up.
template <class T>
Step move_clock(Warp& warp, const Instruction& i, LaneMask mask) {
    for_lanes(mask, [&](uint32_t lane) { warp.lanes<T>(i.dst)[lane] = static_cast<T>(warp.instructions); });
    return Step::kNext;
}

void decode_mov(DecodeContext& c) {
    c.set_role(kRoleCopiesRegisters);
    const int bytes = c.type_size();
    const SyntaxOperand &destination = c.operand(0), &source = c.operand(1);
    using Kind = SyntaxOperand::Kind;
    if (bytes == 0) {
        c.out.dst = c.write_predicate(destination);
        c.out.a = c.read_predicate(source, &c.out.negate_predicate);
        c.out.handler = move_predicate;
        return;
    }
    if (destination.kind == Kind::kVector || source.kind == Kind::kVector) {
        const bool unpacks = destination.kind == Kind::kVector;
        const size_t elements = (unpacks ? destination : source).parts.size();
        if (elements == 0 || bytes % elements) c.fail("the vector's elements do not make up the type");
        c.out.y = static_cast<uint32_t>(bytes);
        c.out.x = static_cast<uint32_t>(bytes / elements);
        if (unpacks) {
            c.write_list(0, destination, c.out.x);
            c.out.a = c.read(source, bytes);
        } else {
            c.read_list(0, source, c.out.x);
            c.out.dst = c.write(destination, bytes);
        }
        if (elements == 2 && bytes == 4) {
            c.out.handler = unpacks ? unpack_two<uint32_t, uint16_t> : pack_two<uint32_t, uint16_t>;
        } else if (elements == 2 && bytes == 8) {
            c.out.handler = unpacks ? unpack_two<uint64_t, uint32_t> : pack_two<uint64_t, uint32_t>;
        } else {
            c.out.handler = unpacks ? unpack : pack;
        }
        return;
    }
    c.out.dst = c.write(destination, bytes);
    const bool clock = source.kind == Kind::kSpecial && (source.name.find("clock") != std::string::npos ||
                                                         source.name.find("timer") != std::string::npos);
    if (clock) {
        c.out.handler = bytes == 8 ? move_clock<uint64_t> : move_clock<uint32_t>;
        return;
    }
    c.out.a = c.read(source, bytes);
    c.out.handler = bytes == 2    ? move<uint16_t>
                    : bytes == 4  ? move<uint32_t>
                    : bytes == 8  ? move<uint64_t>
                    : bytes == 1  ? move<uint8_t>
                    : bytes == 16 ? move<Word128>
                                  : nullptr;
}

// cvta and cvta.to. x: the tag of the space, y: to that space (else from it)
Step convert_address(Warp& warp, const Instruction& i, LaneMask mask) {
    const uint64_t tag = i.x == 1 ? kSharedTag : i.x == 2 ? kLocalTag : 0;
    const auto* a = warp.lanes<uint64_t>(i.a);
    alignas(64) uint64_t values[kWarpSize];
    for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
        values[lane] = tag == 0 ? a[lane] : i.y ? a[lane] & 0xffffffffu : (a[lane] & 0xffffffffu) | tag;
    }
    store_lanes(warp.lanes<uint64_t>(i.dst), values, mask);
    return Step::kNext;
}

void decode_cvta(DecodeContext& c) {
    c.allow(1, "to global const param shared shared::cta shared::cluster local u64");
    c.out.dst = c.write(0, 8);
    c.out.a = c.read(1, 8);
    const bool shared = c.has("shared") || c.has("shared::cta") || c.has("shared::cluster");
    c.out.x = shared ? 1 : c.has("local") ? 2 : 0;
    c.out.y = c.has("to");
    c.out.handler = convert_address;
}

// isspacep: x as above, 3: global
Step is_space(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto* a = warp.lanes<uint64_t>(i.a);
    LaneMask result = 0;
    for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
        const bool inside = i.x == 1   ? is_shared_generic(a[lane])
                            : i.x == 2 ? is_local_generic(a[lane])
                                       : a[lane] >> 60 == 0;
        result |= inside ? lane_bit(lane) : 0;
    }
    warp.set_predicate(i.dst, result, mask);
    return Step::kNext;
}

void decode_isspacep(DecodeContext& c) {
    c.out.dst = c.write_predicate(c.operand(0));
    c.out.a = c.read(1, 8);
    c.out.x = c.has("shared") || c.has("shared::cta") || c.has("shared::cluster") ? 1 : c.has("local") ? 2 : 3;
    c.out.handler = is_space;
}

}  // namespace

void register_move(OpcodeTable& table) {
    table.add("mov", decode_mov);
    table.add("cvta", decode_cvta);
    table.add("isspacep", decode_isspacep);
}

}  // namespace ptx_emulator
