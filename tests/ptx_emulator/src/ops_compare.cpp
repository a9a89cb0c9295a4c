// Comparison and selection (PTX ISA 9.7.6, 9.7.7): setp, set, selp, slct.
#include <cmath>

#include "lanes.h"
#include "numeric.h"
#include "opcode_table.h"

namespace ptx_emulator {

namespace {

struct Equal {
    template <class T>
    bool operator()(T a, T b) const {
        return a == b;
    }
};
struct NotEqual {  // ordered: false if one is NaN
    template <class T>
    bool operator()(T a, T b) const {
        return a < b || a > b;
    }
};
struct Less {
    template <class T>
    bool operator()(T a, T b) const {
        return a < b;
    }
};
struct LessEqual {
    template <class T>
    bool operator()(T a, T b) const {
        return a <= b;
    }
};
struct Greater {
    template <class T>
    bool operator()(T a, T b) const {
        return a > b;
    }
};
struct GreaterEqual {
    template <class T>
    bool operator()(T a, T b) const {
        return a >= b;
    }
};
template <class F>  // the unordered form: true if one is NaN
struct Unordered {
    template <class T>
    bool operator()(T a, T b) const {
        return F{}(a, b) || a != a || b != b;
    }
};
struct IsNumber {
    template <class T>
    bool operator()(T a, T b) const {
        return a == a && b == b;
    }
};
struct IsNan {
    template <class T>
    bool operator()(T a, T b) const {
        return a != a || b != b;
    }
};

template <class T>
T widen(T value) {
    return value;
}
struct Half {
    uint16_t bits;
};
struct BFloat {
    uint16_t bits;
};
inline float widen(Half value) {
    return f16_to_float(value.bits);
}
inline float widen(BFloat value) {
    return bf16_to_float(value.bits);
}

template <class T, class F>
LaneMask compare(const Warp& warp, const Instruction& i) {
    const T* a = warp.lanes<T>(i.a);
    const T* b = warp.lanes<T>(i.b);
    LaneMask result = 0;
    for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
        result |= static_cast<LaneMask>(F{}(widen(a[lane]), widen(b[lane]))) << lane;
    }
    return result;
}

enum Combine : uint32_t { kNone, kAnd, kOr, kXor };

inline LaneMask combine(uint32_t how, LaneMask compared, LaneMask with) {
    return how == kAnd ? compared & with : how == kOr ? compared | with : how == kXor ? compared ^ with : compared;
}

// x: how to combine with predicate c
template <class T, class F>
Step set_predicate(Warp& warp, const Instruction& i, LaneMask mask) {
    const LaneMask compared = compare<T, F>(warp, i);
    const LaneMask with = i.x == kNone ? 0 : i.negate_predicate ? ~warp.predicate(i.c) : warp.predicate(i.c);
    warp.set_predicate(i.dst, combine(i.x, compared, with), mask);
    if (i.dst2 != kNoRegister) warp.set_predicate(i.dst2, combine(i.x, ~compared, with), mask);
    return Step::kNext;
}

// y: the value of true, an integer -1 or the bits of 1.0f
template <class T, class F>
Step set_value(Warp& warp, const Instruction& i, LaneMask mask) {
    const LaneMask compared = compare<T, F>(warp, i);
    const LaneMask with = i.x == kNone ? 0 : i.negate_predicate ? ~warp.predicate(i.c) : warp.predicate(i.c);
    const LaneMask result = combine(i.x, compared, with);
    auto* d = warp.lanes<uint32_t>(i.dst);
    for_lanes(mask, [&](uint32_t lane) { d[lane] = result >> lane & 1 ? i.y : 0; });
    return Step::kNext;
}

template <class T, class F>
constexpr Handler comparison(bool value) {
    return value ? set_value<T, F> : set_predicate<T, F>;
}

template <class T>
Handler by_operator(const std::string& op, bool value) {
    if (op == "eq") return comparison<T, Equal>(value);
    if (op == "ne") return comparison<T, NotEqual>(value);
    if (op == "lt" || op == "lo") return comparison<T, Less>(value);
    if (op == "le" || op == "ls") return comparison<T, LessEqual>(value);
    if (op == "gt" || op == "hi") return comparison<T, Greater>(value);
    if (op == "ge" || op == "hs") return comparison<T, GreaterEqual>(value);
    return nullptr;
}

template <class T>
Handler by_float_operator(const std::string& op, bool value) {
    if (op == "equ") return comparison<T, Unordered<Equal>>(value);
    if (op == "neu") return comparison<T, Unordered<NotEqual>>(value);
    if (op == "ltu") return comparison<T, Unordered<Less>>(value);
    if (op == "leu") return comparison<T, Unordered<LessEqual>>(value);
    if (op == "gtu") return comparison<T, Unordered<Greater>>(value);
    if (op == "geu") return comparison<T, Unordered<GreaterEqual>>(value);
    if (op == "num") return comparison<T, IsNumber>(value);
    if (op == "nan") return comparison<T, IsNan>(value);
    return by_operator<T>(op, value);
}

Handler comparison_handler(const std::string& op, const std::string& type, bool value) {
    if (type == "f32") return by_float_operator<float>(op, value);
    if (type == "f64") return by_float_operator<double>(op, value);
    if (type == "f16") return by_float_operator<Half>(op, value);
    if (type == "bf16") return by_float_operator<BFloat>(op, value);
    if (type == "s16") return by_operator<int16_t>(op, value);
    if (type == "u16" || type == "b16") return by_operator<uint16_t>(op, value);
    if (type == "s32") return by_operator<int32_t>(op, value);
    if (type == "u32" || type == "b32") return by_operator<uint32_t>(op, value);
    if (type == "s64") return by_operator<int64_t>(op, value);
    if (type == "u64" || type == "b64") return by_operator<uint64_t>(op, value);
    return nullptr;
}

void decode_comparison(DecodeContext& c, bool value) {
    const int bytes = c.type_size();
    c.out.a = c.read(1, bytes);
    c.out.b = c.read(2, bytes);
    c.out.x = c.has("and") ? kAnd : c.has("or") ? kOr : c.has("xor") ? kXor : kNone;
    if (c.out.x != kNone) c.out.c = c.read_predicate(c.operand(3), &c.out.negate_predicate);
    c.out.handler = c.require(comparison_handler(c.syntax.modifiers[1], c.type(), value));
}

void decode_setp(DecodeContext& c) {
    decode_comparison(c, false);
    const SyntaxOperand& destination = c.operand(0);
    if (destination.kind == SyntaxOperand::Kind::kPair) {
        c.out.dst = c.write_predicate(destination.parts[0]);
        c.out.dst2 = c.write_predicate(destination.parts[1]);
    } else {
        c.out.dst = c.write_predicate(destination);
    }
}

void decode_set(DecodeContext& c) {
    decode_comparison(c, true);
    const std::string& result = c.syntax.modifiers[c.syntax.modifiers.size() - 2];
    if (result != "u32" && result != "s32" && result != "f32") c.fail("result type of set");
    c.out.dst = c.write(0, 4);
    c.out.y = result == "f32" ? 0x3f800000u : ~0u;
}

template <class T>
Step select(Warp& warp, const Instruction& i, LaneMask mask) {
    const T* a = warp.lanes<T>(i.a);
    const T* b = warp.lanes<T>(i.b);
    const LaneMask p = i.negate_predicate ? ~warp.predicate(i.c) : warp.predicate(i.c);
    alignas(64) T values[kWarpSize];
    for (uint32_t lane = 0; lane < kWarpSize; ++lane) values[lane] = p >> lane & 1 ? a[lane] : b[lane];
    store_lanes(warp.lanes<T>(i.dst), values, mask);
    return Step::kNext;
}

void decode_selp(DecodeContext& c) {
    const int bytes = c.type_size();
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.b = c.read(2, bytes);
    c.out.c = c.read_predicate(c.operand(3), &c.out.negate_predicate);
    c.out.handler = bytes == 2   ? select<uint16_t>
                    : bytes == 4 ? select<uint32_t>
                    : bytes == 8 ? select<uint64_t>
                                 : nullptr;
}

template <class T, class C>
struct SelectBySign {
    T operator()(T a, T b, C c) const { return c >= 0 ? a : b; }
};

void decode_slct(DecodeContext& c) {
    const std::string& type = c.syntax.modifiers[c.syntax.modifiers.size() - 2];
    const bool by_float = c.type() == "f32";
    const uint32_t bytes = type.find("64") != std::string::npos ? 8 : 4;
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.b = c.read(2, bytes);
    c.out.c = c.read(3, 4);
    using U4 = uint32_t;
    using U8 = uint64_t;
    c.out.handler = bytes == 4 ? (by_float ? map3<U4, U4, U4, float, SelectBySign<U4, float>>
                                           : map3<U4, U4, U4, int32_t, SelectBySign<U4, int32_t>>)
                               : (by_float ? map3<U8, U8, U8, float, SelectBySign<U8, float>>
                                           : map3<U8, U8, U8, int32_t, SelectBySign<U8, int32_t>>);
}

}  // namespace

void register_compare(OpcodeTable& table) {
    table.add("setp", decode_setp);
    table.add("set", decode_set);
    table.add("selp", decode_selp);
    table.add("slct", decode_slct);
}

}  // namespace ptx_emulator
