// Integer arithmetic (PTX ISA 9.7.1, 9.7.2): add sub mul mad div rem min max abs neg, carries, bit counting and fields.
// The mnemonics that exist for floating point too (add, mul, ...) are dispatched here by type.
#include <algorithm>
#include <type_traits>

#include "float_ops.h"
#include "lanes.h"
#include "opcode_table.h"

namespace ptx_emulator {

namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;
template <class T>
using Wide =
    std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                       std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                                          std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;

// 16-bit products are formed in 32 bits: uint16_t would promote to int and could overflow.
template <class T>
T wrapping_multiply(T a, T b) {
    using Product = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    return static_cast<T>(static_cast<Product>(a) * static_cast<Product>(b));
}

struct Add {
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>(Unsigned<T>(a) + Unsigned<T>(b));
    }
};
struct Subtract {
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>(Unsigned<T>(a) - Unsigned<T>(b));
    }
};
struct MultiplyLow {
    template <class T>
    T operator()(T a, T b) const {
        return wrapping_multiply(a, b);
    }
};
struct MultiplyHigh {
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>((Wide<T>(a) * Wide<T>(b)) >> (8 * sizeof(T)));
    }
};
struct Divide {
    template <class T>
    T operator()(T a, T b) const {
        if (b == 0) return static_cast<T>(-1);  // unspecified by the ISA
        if (std::is_signed_v<T> && b == static_cast<T>(-1)) return static_cast<T>(Unsigned<T>(0) - Unsigned<T>(a));
        return static_cast<T>(a / b);
    }
};
struct Remainder {
    template <class T>
    T operator()(T a, T b) const {
        if (b == 0) return a;
        if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
        return static_cast<T>(a % b);
    }
};
struct Minimum {
    template <class T>
    T operator()(T a, T b) const {
        return a < b ? a : b;
    }
};
struct Maximum {
    template <class T>
    T operator()(T a, T b) const {
        return a > b ? a : b;
    }
};
struct AbsoluteDifference {
    template <class T>
    T operator()(T a, T b, T c) const {
        return static_cast<T>(c + (a > b ? a - b : b - a));
    }
};
struct MultiplyAddLow {
    template <class T>
    T operator()(T a, T b, T c) const {
        return static_cast<T>(Unsigned<T>(wrapping_multiply(a, b)) + Unsigned<T>(c));
    }
};
struct MultiplyAddHigh {
    template <class T>
    T operator()(T a, T b, T c) const {
        return static_cast<T>(Unsigned<T>(MultiplyHigh{}(a, b)) + Unsigned<T>(c));
    }
};
template <class T>
struct MultiplyWide {
    Wide<T> operator()(T a, T b) const { return static_cast<Wide<T>>(Wide<T>(a) * Wide<T>(b)); }
};
template <class T>
struct MultiplyAddWide {
    Wide<T> operator()(T a, T b, Wide<T> c) const {
        return static_cast<Wide<T>>(Unsigned<Wide<T>>(Wide<T>(a) * Wide<T>(b)) + Unsigned<Wide<T>>(c));
    }
};
struct Negate {
    template <class T>
    T operator()(T a) const {
        return static_cast<T>(Unsigned<T>(0) - Unsigned<T>(a));
    }
};
struct Absolute {
    template <class T>
    T operator()(T a) const {
        return a < 0 ? Negate{}(a) : a;
    }
};

template <class F>
Handler binary(const std::string& type) {
    if (type == "u16" || type == "b16") return map2<uint16_t, uint16_t, uint16_t, F>;
    if (type == "s16") return map2<int16_t, int16_t, int16_t, F>;
    if (type == "u32" || type == "b32") return map2<uint32_t, uint32_t, uint32_t, F>;
    if (type == "s32") return map2<int32_t, int32_t, int32_t, F>;
    if (type == "u64" || type == "b64") return map2<uint64_t, uint64_t, uint64_t, F>;
    if (type == "s64") return map2<int64_t, int64_t, int64_t, F>;
    return nullptr;
}

template <class F>
Handler ternary(const std::string& type) {
    if (type == "u16") return map3<uint16_t, uint16_t, uint16_t, uint16_t, F>;
    if (type == "s16") return map3<int16_t, int16_t, int16_t, int16_t, F>;
    if (type == "u32") return map3<uint32_t, uint32_t, uint32_t, uint32_t, F>;
    if (type == "s32") return map3<int32_t, int32_t, int32_t, int32_t, F>;
    if (type == "u64") return map3<uint64_t, uint64_t, uint64_t, uint64_t, F>;
    if (type == "s64") return map3<int64_t, int64_t, int64_t, int64_t, F>;
    return nullptr;
}

bool is_float_type(const std::string& type) {
    return type[0] == 'f' || type.compare(0, 2, "bf") == 0;
}

// ---- two operands of the same integer type, or floating point
template <class F>
void decode_binary(DecodeContext& c) {
    if (is_float_type(c.type())) return decode_float_binary(c);
    const int bytes = c.type_size();
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.b = c.read(2, bytes);
    c.out.handler = c.require(binary<F>(c.type()));
}

Step saturating_add(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto* a = warp.lanes<int32_t>(i.a);
    const auto* b = warp.lanes<int32_t>(i.b);
    auto* d = warp.lanes<int32_t>(i.dst);
    for_lanes(mask, [&](uint32_t lane) {
        const int64_t exact = i.x ? int64_t{a[lane]} - b[lane] : int64_t{a[lane]} + b[lane];
        d[lane] = static_cast<int32_t>(exact > INT32_MAX ? INT32_MAX : exact < INT32_MIN ? INT32_MIN : exact);
    });
    return Step::kNext;
}

// add.cc, addc, sub.cc, subc and their .cc forms. x: subtract, y: takes the carry in, z: sets the carry
template <class T>
Step add_with_carry(Warp& warp, const Instruction& i, LaneMask mask) {
    const T* a = warp.lanes<T>(i.a);
    const T* b = warp.lanes<T>(i.b);
    T* d = warp.lanes<T>(i.dst);
    LaneMask carry = warp.carry;
    for_lanes(mask, [&](uint32_t lane) {
        const T in = i.y ? warp.carry >> lane & 1 : 0;
        unsigned __int128 exact = i.x ? static_cast<unsigned __int128>(a[lane]) - b[lane] - in
                                      : static_cast<unsigned __int128>(a[lane]) + b[lane] + in;
        d[lane] = static_cast<T>(exact);
        const bool out = exact >> (8 * sizeof(T)) & 1;
        carry = (carry & ~lane_bit(lane)) | (out ? lane_bit(lane) : 0);
    });
    if (i.z) warp.carry = carry;
    return Step::kNext;
}

template <class F, bool kSubtract>
void decode_add(DecodeContext& c) {
    if (is_float_type(c.type())) return decode_float_binary(c);
    const bool carry_out = c.has("cc");
    const bool carry_in = c.syntax.modifiers[0] == "addc" || c.syntax.modifiers[0] == "subc";
    if (!carry_out && !carry_in && !c.has("sat")) return decode_binary<F>(c);
    const int bytes = c.type_size();
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.b = c.read(2, bytes);
    c.out.x = kSubtract;
    c.out.y = carry_in;
    c.out.z = carry_out;
    if (c.has("sat")) {
        if (c.type() != "s32") c.fail(".sat is for s32");
        c.out.handler = saturating_add;
    } else {
        c.out.handler = bytes == 4 ? add_with_carry<uint32_t> : bytes == 8 ? add_with_carry<uint64_t> : nullptr;
    }
}

void decode_mul(DecodeContext& c) {
    if (is_float_type(c.type())) return decode_float_binary(c);
    const int bytes = c.type_size();
    c.out.dst = c.write(0, c.has("wide") ? 2 * bytes : bytes);
    c.out.a = c.read(1, bytes);
    c.out.b = c.read(2, bytes);
    const std::string& type = c.type();
    if (c.has("lo")) {
        c.out.handler = binary<MultiplyLow>(type);
    } else if (c.has("hi")) {
        c.out.handler = binary<MultiplyHigh>(type);
    } else if (c.has("wide")) {
        c.out.handler = type == "u16"   ? map2<uint32_t, uint16_t, uint16_t, MultiplyWide<uint16_t>>
                        : type == "s16" ? map2<int32_t, int16_t, int16_t, MultiplyWide<int16_t>>
                        : type == "u32" ? map2<uint64_t, uint32_t, uint32_t, MultiplyWide<uint32_t>>
                        : type == "s32" ? map2<int64_t, int32_t, int32_t, MultiplyWide<int32_t>>
                                        : nullptr;
    }
}

void decode_mad(DecodeContext& c) {
    if (is_float_type(c.type())) return decode_fma(c);
    const int bytes = c.type_size();
    const bool wide = c.has("wide");
    c.out.dst = c.write(0, wide ? 2 * bytes : bytes);
    c.out.a = c.read(1, bytes);
    c.out.b = c.read(2, bytes);
    c.out.c = c.read(3, wide ? 2 * bytes : bytes);
    const std::string& type = c.type();
    if (c.has("cc") || c.has("sat")) c.fail("carry and saturation are not supported here");
    if (c.has("lo")) {
        c.out.handler = ternary<MultiplyAddLow>(type);
    } else if (c.has("hi")) {
        c.out.handler = ternary<MultiplyAddHigh>(type);
    } else if (wide) {
        c.out.handler = type == "u16"   ? map3<uint32_t, uint16_t, uint16_t, uint32_t, MultiplyAddWide<uint16_t>>
                        : type == "s16" ? map3<int32_t, int16_t, int16_t, int32_t, MultiplyAddWide<int16_t>>
                        : type == "u32" ? map3<uint64_t, uint32_t, uint32_t, uint64_t, MultiplyAddWide<uint32_t>>
                        : type == "s32" ? map3<int64_t, int32_t, int32_t, int64_t, MultiplyAddWide<int32_t>>
                                        : nullptr;
    }
}

void decode_sad(DecodeContext& c) {
    const int bytes = c.type_size();
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.b = c.read(2, bytes);
    c.out.c = c.read(3, bytes);
    c.out.handler = ternary<AbsoluteDifference>(c.type());
}

void decode_neg(DecodeContext& c) {
    if (is_float_type(c.type())) return decode_float_unary(c);
    const int bytes = c.type_size();
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.handler = bytes == 2   ? map1<int16_t, int16_t, Negate>
                    : bytes == 4 ? map1<int32_t, int32_t, Negate>
                                 : map1<int64_t, int64_t, Negate>;
}

void decode_abs(DecodeContext& c) {
    if (is_float_type(c.type())) return decode_float_unary(c);
    const int bytes = c.type_size();
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.handler = bytes == 2   ? map1<int16_t, int16_t, Absolute>
                    : bytes == 4 ? map1<int32_t, int32_t, Absolute>
                                 : map1<int64_t, int64_t, Absolute>;
}

// ---- bits
template <class T>
struct PopulationCount {
    uint32_t operator()(T a) const { return static_cast<uint32_t>(__builtin_popcountll(a)); }
};
struct LeadingZeros32 {
    uint32_t operator()(uint32_t a) const { return a ? static_cast<uint32_t>(__builtin_clz(a)) : 32; }
};
struct LeadingZeros64 {
    uint32_t operator()(uint64_t a) const { return a ? static_cast<uint32_t>(__builtin_clzll(a)) : 64; }
};
struct Reverse {
    template <class T>
    T operator()(T a) const {
        T result = 0;
        for (size_t bit = 0; bit < 8 * sizeof(T); ++bit) result = static_cast<T>(result << 1 | (a >> bit & 1));
        return result;
    }
};
// Position of the highest bit that differs from the sign; ~0 if there is none.
template <class T>
struct FindHighest {
    uint32_t operator()(T a) const {
        const uint64_t bits = std::is_signed_v<T> && a < 0 ? static_cast<uint64_t>(Unsigned<T>(~a)) : Unsigned<T>(a);
        return bits ? 63u - static_cast<uint32_t>(__builtin_clzll(bits)) : 0xffffffffu;
    }
};
template <class T>
struct ExtractField {
    T operator()(T a, uint32_t position, uint32_t length) const {
        constexpr uint32_t kBits = 8 * sizeof(T);
        position &= 255;
        length &= 255;
        if (length == 0) return 0;
        const uint32_t top = std::min(position + length - 1, kBits - 1);
        const T sign = std::is_signed_v<T> && (a >> top & 1) ? static_cast<T>(-1) : T{0};
        if (position >= kBits) return sign;
        T result = sign;
        for (uint32_t bit = 0; bit < length && bit < kBits; ++bit) {
            const Unsigned<T> one = Unsigned<T>(1) << bit;
            const bool set = position + bit < kBits ? a >> (position + bit) & 1 : sign != 0;
            result = static_cast<T>(set ? Unsigned<T>(result) | one : Unsigned<T>(result) & ~one);
        }
        return result;
    }
};

void decode_popc(DecodeContext& c) {
    const int bytes = c.type_size();
    c.out.dst = c.write(0, 4);
    c.out.a = c.read(1, bytes);
    c.out.handler = bytes == 4 ? map1<uint32_t, uint32_t, PopulationCount<uint32_t>>
                               : map1<uint32_t, uint64_t, PopulationCount<uint64_t>>;
}

void decode_clz(DecodeContext& c) {
    const int bytes = c.type_size();
    c.out.dst = c.write(0, 4);
    c.out.a = c.read(1, bytes);
    c.out.handler = bytes == 4 ? map1<uint32_t, uint32_t, LeadingZeros32> : map1<uint32_t, uint64_t, LeadingZeros64>;
}

void decode_brev(DecodeContext& c) {
    const int bytes = c.type_size();
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.handler = bytes == 4 ? map1<uint32_t, uint32_t, Reverse> : map1<uint64_t, uint64_t, Reverse>;
}

void decode_bfind(DecodeContext& c) {
    if (c.has("shiftamt")) c.fail(".shiftamt is not supported");
    const std::string& type = c.type();
    c.out.dst = c.write(0, 4);
    c.out.a = c.read(1, c.type_size());
    c.out.handler = type == "u32"   ? map1<uint32_t, uint32_t, FindHighest<uint32_t>>
                    : type == "s32" ? map1<uint32_t, int32_t, FindHighest<int32_t>>
                    : type == "u64" ? map1<uint32_t, uint64_t, FindHighest<uint64_t>>
                    : type == "s64" ? map1<uint32_t, int64_t, FindHighest<int64_t>>
                                    : nullptr;
}

void decode_bfe(DecodeContext& c) {
    const std::string& type = c.type();
    const int bytes = c.type_size();
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.b = c.read(2, 4);
    c.out.c = c.read(3, 4);
    c.out.handler = type == "u32"   ? map3<uint32_t, uint32_t, uint32_t, uint32_t, ExtractField<uint32_t>>
                    : type == "s32" ? map3<int32_t, int32_t, uint32_t, uint32_t, ExtractField<int32_t>>
                    : type == "u64" ? map3<uint64_t, uint64_t, uint32_t, uint32_t, ExtractField<uint64_t>>
                    : type == "s64" ? map3<int64_t, int64_t, uint32_t, uint32_t, ExtractField<int64_t>>
                                    : nullptr;
}

// dst = b with `length` (d) bits of a inserted at `position` (c)
template <class T>
Step insert_field(Warp& warp, const Instruction& i, LaneMask mask) {
    const T* a = warp.lanes<T>(i.a);
    const T* b = warp.lanes<T>(i.b);
    const auto* positions = warp.lanes<uint32_t>(i.c);
    const auto* lengths = warp.lanes<uint32_t>(i.d);
    T* d = warp.lanes<T>(i.dst);
    for_lanes(mask, [&](uint32_t lane) {
        constexpr uint32_t kBits = 8 * sizeof(T);
        const uint32_t position = positions[lane] & 255, length = lengths[lane] & 255;
        const T ones = length >= kBits ? static_cast<T>(-1) : static_cast<T>((T{1} << length) - 1);
        const T field = position >= kBits ? T{0} : static_cast<T>(ones << position);
        const T value = position >= kBits ? T{0} : static_cast<T>(a[lane] << position);
        d[lane] = static_cast<T>((b[lane] & ~field) | (value & field));
    });
    return Step::kNext;
}

void decode_bfi(DecodeContext& c) {
    const int bytes = c.type_size();
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.b = c.read(2, bytes);
    c.out.c = c.read(3, 4);
    c.out.d = c.read(4, 4);
    c.out.handler = bytes == 4 ? insert_field<uint32_t> : insert_field<uint64_t>;
}

template <class F>
void decode_min_max(DecodeContext& c) {
    if (is_float_type(c.type())) return decode_float_binary(c);
    if (c.has("relu")) c.fail(".relu is not supported for integers");
    decode_binary<F>(c);
}

}  // namespace

void register_integer(OpcodeTable& table) {
    table.add("add", decode_add<Add, false>);
    table.add("addc", decode_add<Add, false>);
    table.add("sub", decode_add<Subtract, true>);
    table.add("subc", decode_add<Subtract, true>);
    table.add("mul", decode_mul);
    table.add("mad", decode_mad);
    table.add("div", decode_binary<Divide>);
    table.add("rem", decode_binary<Remainder>);
    table.add("min", decode_min_max<Minimum>);
    table.add("max", decode_min_max<Maximum>);
    table.add("sad", decode_sad);
    table.add("neg", decode_neg);
    table.add("abs", decode_abs);
    table.add("popc", decode_popc);
    table.add("clz", decode_clz);
    table.add("brev", decode_brev);
    table.add("bfind", decode_bfind);
    table.add("bfe", decode_bfe);
    table.add("bfi", decode_bfi);
}

}  // namespace ptx_emulator
