// Logic and shifts (PTX ISA 9.7.8): and or xor not cnot lop3 shl shr shf prmt.
#include <type_traits>

#include "lanes.h"
#include "opcode_table.h"

namespace ptx_emulator {

namespace {

struct And {
    template <class T>
    T operator()(T a, T b) const {
        return a & b;
    }
};
struct Or {
    template <class T>
    T operator()(T a, T b) const {
        return a | b;
    }
};
struct Xor {
    template <class T>
    T operator()(T a, T b) const {
        return a ^ b;
    }
};
struct Not {
    template <class T>
    T operator()(T a) const {
        return static_cast<T>(~a);
    }
};
struct LogicalNot {
    template <class T>
    T operator()(T a) const {
        return a == 0;
    }
};
template <class T>
struct ShiftLeft {
    T operator()(T a, uint32_t n) const { return n < 8 * sizeof(T) ? static_cast<T>(a << n) : T{0}; }
};
template <class T>
struct ShiftRight {
    T operator()(T a, uint32_t n) const {
        constexpr uint32_t kBits = 8 * sizeof(T);
        if (std::is_signed_v<T>) return static_cast<T>(a >> (n < kBits ? n : kBits - 1));
        return n < kBits ? static_cast<T>(a >> n) : T{0};
    }
};

// Predicates are lane masks, so the logic of all lanes is one operation. x: and 0, or 1, xor 2, not 3
Step predicate_logic(Warp& warp, const Instruction& i, LaneMask mask) {
    const LaneMask a = warp.predicate(i.a), b = warp.predicate(i.b);
    warp.set_predicate(i.dst, i.x == 0 ? a & b : i.x == 1 ? a | b : i.x == 2 ? a ^ b : ~a, mask);
    return Step::kNext;
}

template <class F, uint32_t kCode>
void decode_logic(DecodeContext& c) {
    const int bytes = c.type_size();
    if (bytes == 0) {
        c.out.dst = c.write_predicate(c.operand(0));
        c.out.a = c.read_predicate(c.operand(1), nullptr);
        c.out.b = c.read_predicate(c.operand(2), nullptr);
        c.out.x = kCode;
        c.out.handler = predicate_logic;
        return;
    }
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.b = c.read(2, bytes);
    c.out.handler = bytes == 2   ? map2<uint16_t, uint16_t, uint16_t, F>
                    : bytes == 4 ? map2<uint32_t, uint32_t, uint32_t, F>
                    : bytes == 8 ? map2<uint64_t, uint64_t, uint64_t, F>
                                 : nullptr;
}

template <class F>
void decode_not(DecodeContext& c) {
    const int bytes = c.type_size();
    if (bytes == 0) {
        c.out.dst = c.write_predicate(c.operand(0));
        c.out.a = c.out.b = c.read_predicate(c.operand(1), nullptr);
        c.out.x = 3;
        c.out.handler = predicate_logic;
        return;
    }
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.handler = bytes == 2   ? map1<uint16_t, uint16_t, F>
                    : bytes == 4 ? map1<uint32_t, uint32_t, F>
                    : bytes == 8 ? map1<uint64_t, uint64_t, F>
                                 : nullptr;
}

void decode_shl(DecodeContext& c) {
    const int bytes = c.type_size();
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.b = c.read(2, 4);
    c.out.handler = bytes == 2   ? map2<uint16_t, uint16_t, uint32_t, ShiftLeft<uint16_t>>
                    : bytes == 4 ? map2<uint32_t, uint32_t, uint32_t, ShiftLeft<uint32_t>>
                    : bytes == 8 ? map2<uint64_t, uint64_t, uint32_t, ShiftLeft<uint64_t>>
                                 : nullptr;
}

void decode_shr(DecodeContext& c) {
    const int bytes = c.type_size();
    const bool is_signed = c.type()[0] == 's';
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.b = c.read(2, 4);
    if (is_signed) {
        c.out.handler = bytes == 2   ? map2<int16_t, int16_t, uint32_t, ShiftRight<int16_t>>
                        : bytes == 4 ? map2<int32_t, int32_t, uint32_t, ShiftRight<int32_t>>
                        : bytes == 8 ? map2<int64_t, int64_t, uint32_t, ShiftRight<int64_t>>
                                     : nullptr;
    } else {
        c.out.handler = bytes == 2   ? map2<uint16_t, uint16_t, uint32_t, ShiftRight<uint16_t>>
                        : bytes == 4 ? map2<uint32_t, uint32_t, uint32_t, ShiftRight<uint32_t>>
                        : bytes == 8 ? map2<uint64_t, uint64_t, uint32_t, ShiftRight<uint64_t>>
                                     : nullptr;
    }
}

// Funnel shift of (b << 32 | a).
template <bool kLeft, bool kWrap>
struct FunnelShift {
    uint32_t operator()(uint32_t a, uint32_t b, uint32_t n) const {
        n = kWrap ? n & 31 : n > 32 ? 32 : n;
        const uint64_t both = uint64_t{b} << 32 | a;
        return static_cast<uint32_t>(kLeft ? (both << n) >> 32 : both >> n);
    }
};

void decode_shf(DecodeContext& c) {
    c.allow(1, "l r wrap clamp b32");
    c.out.dst = c.write(0, 4);
    c.out.a = c.read(1, 4);
    c.out.b = c.read(2, 4);
    c.out.c = c.read(3, 4);
    using U = uint32_t;
    const bool wrap = c.has("wrap");
    c.out.handler =
        c.has("l") ? (wrap ? map3<U, U, U, U, FunnelShift<true, true>> : map3<U, U, U, U, FunnelShift<true, false>>)
                   : (wrap ? map3<U, U, U, U, FunnelShift<false, true>> : map3<U, U, U, U, FunnelShift<false, false>>);
}

// Any function of three bits, by its truth table x.
Step lop3(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto* a = warp.lanes<uint32_t>(i.a);
    const auto* b = warp.lanes<uint32_t>(i.b);
    const auto* c = warp.lanes<uint32_t>(i.c);
    alignas(64) uint32_t values[kWarpSize] = {};
    for (uint32_t term = 0; term < 8; ++term) {
        if (!(i.x >> term & 1)) continue;
        const uint32_t na = term & 4 ? 0 : ~0u, nb = term & 2 ? 0 : ~0u, nc = term & 1 ? 0 : ~0u;
        for (uint32_t lane = 0; lane < kWarpSize; ++lane)
            values[lane] |= (a[lane] ^ na) & (b[lane] ^ nb) & (c[lane] ^ nc);
    }
    store_lanes(warp.lanes<uint32_t>(i.dst), values, mask);
    return Step::kNext;
}

void decode_lop3(DecodeContext& c) {
    c.allow(1, "b32");
    c.out.dst = c.write(0, 4);
    c.out.a = c.read(1, 4);
    c.out.b = c.read(2, 4);
    c.out.c = c.read(3, 4);
    c.out.x = static_cast<uint32_t>(c.immediate(4)) & 255;
    c.out.handler = lop3;
}

// Byte permute, default mode: nibble n of the selector picks byte n of the result; its top bit replicates the sign.
struct Permute {
    uint32_t operator()(uint32_t a, uint32_t b, uint32_t selector) const {
        const uint64_t bytes = uint64_t{b} << 32 | a;
        uint32_t result = 0;
        for (uint32_t n = 0; n < 4; ++n) {
            const uint32_t pick = selector >> (4 * n) & 15;
            uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (pick & 7))) & 255;
            if (pick & 8) byte = byte & 128 ? 255 : 0;
            result |= byte << (8 * n);
        }
        return result;
    }
};

void decode_prmt(DecodeContext& c) {
    c.allow(1, "b32");
    c.out.dst = c.write(0, 4);
    c.out.a = c.read(1, 4);
    c.out.b = c.read(2, 4);
    c.out.c = c.read(3, 4);
    c.out.handler = map3<uint32_t, uint32_t, uint32_t, uint32_t, Permute>;
}

}  // namespace

void register_logic(OpcodeTable& table) {
    table.add("and", decode_logic<And, 0>);
    table.add("or", decode_logic<Or, 1>);
    table.add("xor", decode_logic<Xor, 2>);
    table.add("not", decode_not<Not>);
    table.add("cnot", decode_not<LogicalNot>);
    table.add("shl", decode_shl);
    table.add("shr", decode_shr);
    table.add("shf", decode_shf);
    table.add("lop3", decode_lop3);
    table.add("prmt", decode_prmt);
}

}  // namespace ptx_emulator
