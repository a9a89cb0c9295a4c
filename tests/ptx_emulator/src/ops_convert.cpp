// cvt (PTX ISA 9.7.9.21): between integers, floats, and packed half precision and fp8 pairs.
#include <cmath>
#include <limits>
#include <type_traits>

#include "lanes.h"
#include "numeric.h"
#include "opcode_table.h"

namespace ptx_emulator {

namespace {

enum class Rounding : uint32_t { kNone, kNearest, kZero, kDown, kUp };

// A value on its way from source to destination: integers exactly, floats as double (f32, f16 and bf16 fit exactly).
struct Value {
    bool is_float = false;
    double number = 0;
    __int128 integer = 0;
};

// Types as small codes, so that a handler can switch on them.
enum class Type : uint32_t { kU8, kS8, kU16, kS16, kU32, kS32, kU64, kS64, kF16, kBf16, kF32, kF64, kNone };

Type type_code(const std::string& name) {
    static const char* names[] = {"u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64"};
    for (uint32_t i = 0; i < 12; ++i) {
        if (name == names[i]) return static_cast<Type>(i);
    }
    return Type::kNone;
}

Value load(Type type, const uint8_t* source) {
    Value value;
    auto raw = [&](auto zero) {
        std::memcpy(&zero, source, sizeof zero);
        return zero;
    };
    switch (type) {
        case Type::kU8:
            value.integer = raw(uint8_t{});
            break;
        case Type::kS8:
            value.integer = raw(int8_t{});
            break;
        case Type::kU16:
            value.integer = raw(uint16_t{});
            break;
        case Type::kS16:
            value.integer = raw(int16_t{});
            break;
        case Type::kU32:
            value.integer = raw(uint32_t{});
            break;
        case Type::kS32:
            value.integer = raw(int32_t{});
            break;
        case Type::kU64:
            value.integer = raw(uint64_t{});
            break;
        case Type::kS64:
            value.integer = raw(int64_t{});
            break;
        case Type::kF16:
            value.number = f16_to_float(raw(uint16_t{}));
            value.is_float = true;
            break;
        case Type::kBf16:
            value.number = bf16_to_float(raw(uint16_t{}));
            value.is_float = true;
            break;
        case Type::kF32:
            value.number = raw(float{});
            value.is_float = true;
            break;
        case Type::kF64:
            value.number = raw(double{});
            value.is_float = true;
            break;
        case Type::kNone:
            break;
    }
    return value;
}

double round_to_integer(double value, Rounding rounding) {
    switch (rounding) {
        case Rounding::kZero:
            return std::trunc(value);
        case Rounding::kDown:
            return std::floor(value);
        case Rounding::kUp:
            return std::ceil(value);
        default:
            return std::nearbyint(value);
    }
}

// A float rounded towards zero, down or up from a double; nearest is the cast itself.
float round_to_float(double value, Rounding rounding) {
    float nearest = static_cast<float>(value);
    if (rounding == Rounding::kNone || rounding == Rounding::kNearest || value != value) return nearest;
    const bool towards_zero_up = rounding == Rounding::kZero && value < 0;
    if (rounding == Rounding::kUp || towards_zero_up)
        return nearest < value ? std::nextafter(nearest, INFINITY) : nearest;
    return nearest > value ? std::nextafter(nearest, -INFINITY) : nearest;
}

// Clamps to the destination's range: always for float to integer, on .sat for integer to integer.
template <class T>
uint64_t store_integer(const Value& value, Rounding rounding, bool saturate) {
    T result;
    if (value.is_float) {
        const double rounded = round_to_integer(value.number, rounding);
        if (rounded != rounded) {
            result = 0;
        } else if (rounded <= static_cast<double>(std::numeric_limits<T>::min())) {
            result = std::numeric_limits<T>::min();
        } else if (rounded >= static_cast<double>(std::numeric_limits<T>::max())) {
            result = std::numeric_limits<T>::max();
        } else {
            result = static_cast<T>(rounded);
        }
    } else if (saturate && value.integer < std::numeric_limits<T>::min()) {
        result = std::numeric_limits<T>::min();
    } else if (saturate && value.integer > std::numeric_limits<T>::max()) {
        result = std::numeric_limits<T>::max();
    } else {
        result = static_cast<T>(value.integer);
    }
    // A wider register gets the sign or zeros.
    return std::is_signed_v<T> ? static_cast<uint64_t>(static_cast<int64_t>(result)) : static_cast<uint64_t>(result);
}

struct ConvertData : InstructionData {
    Type from = Type::kNone, to = Type::kNone;
    Rounding rounding = Rounding::kNone;
    bool integer_rounding = false, saturate = false, relu = false, flush = false;
    uint32_t source_bytes = 0, destination_bytes = 0;  // of the registers
};

// Any conversion of one value to another.
Step convert_general(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto& data = static_cast<const ConvertData&>(*i.data);
    const auto* source = warp.lanes<uint8_t>(i.a);
    auto* destination = warp.lanes<uint8_t>(i.dst);
    for_lanes(mask, [&](uint32_t lane) {
        Value value = load(data.from, source + lane * data.source_bytes);
        if (data.flush && value.is_float) value.number = flush(static_cast<float>(value.number));
        if (value.is_float && data.integer_rounding) value.number = round_to_integer(value.number, data.rounding);
        double number = value.is_float ? value.number : static_cast<double>(value.integer);
        const bool to_float = data.to >= Type::kF16;
        if (to_float && data.saturate) number = number > 1 ? 1 : number > 0 ? number : 0;
        if (to_float && data.relu) number = number > 0 ? number : number != number ? number : 0;
        uint64_t bits = 0;
        switch (data.to) {
            case Type::kU8:
                bits = store_integer<uint8_t>(value, data.rounding, data.saturate);
                break;
            case Type::kS8:
                bits = store_integer<int8_t>(value, data.rounding, data.saturate);
                break;
            case Type::kU16:
                bits = store_integer<uint16_t>(value, data.rounding, data.saturate);
                break;
            case Type::kS16:
                bits = store_integer<int16_t>(value, data.rounding, data.saturate);
                break;
            case Type::kU32:
                bits = store_integer<uint32_t>(value, data.rounding, data.saturate);
                break;
            case Type::kS32:
                bits = store_integer<int32_t>(value, data.rounding, data.saturate);
                break;
            case Type::kU64:
                bits = store_integer<uint64_t>(value, data.rounding, data.saturate);
                break;
            case Type::kS64:
                bits = store_integer<int64_t>(value, data.rounding, data.saturate);
                break;
            case Type::kF16:
                bits = float_to_f16(round_to_float(number, data.rounding));
                break;
            case Type::kBf16:
                bits = float_to_bf16(round_to_float(number, data.rounding));
                break;
            case Type::kF32: {
                // A 64-bit integer does not fit a double: the compiler's own conversion rounds once.
                float result = round_to_float(number, data.rounding);
                if (!value.is_float && data.rounding <= Rounding::kNearest) {
                    result = data.from == Type::kU64 ? static_cast<float>(static_cast<uint64_t>(value.integer))
                                                     : static_cast<float>(static_cast<int64_t>(value.integer));
                }
                bits = bit_cast<uint32_t>(data.flush ? flush(result) : result);
                break;
            }
            case Type::kF64:
                bits = bit_cast<uint64_t>(number);
                break;
            case Type::kNone:
                break;
        }
        std::memcpy(destination + lane * data.destination_bytes, &bits, data.destination_bytes);
    });
    return Step::kNext;
}

// ---- the conversions that inner loops use, vectorised
struct Bf16FromFloat {
    uint16_t operator()(float a) const { return float_to_bf16(a); }
};
struct F16FromFloat {
    uint16_t operator()(float a) const { return float_to_f16(a); }
};
struct FloatFromBf16 {
    float operator()(uint16_t a) const { return bf16_to_float(a); }
};
struct FloatFromF16 {
    float operator()(uint16_t a) const { return f16_to_float(a); }
};
template <class D, class S>
struct Cast {
    D operator()(S a) const { return static_cast<D>(a); }
};
template <bool kRelu>
float relu(float value) {
    return kRelu && !(value > 0.0f) && value == value ? 0.0f : value;
}
// The first operand goes to the upper half.
template <bool kRelu>
struct Bf16PairFromFloats {
    uint32_t operator()(float upper, float lower) const {
        return uint32_t{float_to_bf16(relu<kRelu>(upper))} << 16 | float_to_bf16(relu<kRelu>(lower));
    }
};
template <bool kRelu>
struct F16PairFromFloats {
    uint32_t operator()(float upper, float lower) const {
        return uint32_t{float_to_f16(relu<kRelu>(upper))} << 16 | float_to_f16(relu<kRelu>(lower));
    }
};
struct E4m3PairFromFloats {
    uint16_t operator()(float upper, float lower) const {
        return static_cast<uint16_t>(float_to_e4m3(upper) << 8 | float_to_e4m3(lower));
    }
};
struct E5m2PairFromFloats {
    uint16_t operator()(float upper, float lower) const {
        return static_cast<uint16_t>(float_to_e5m2(upper) << 8 | float_to_e5m2(lower));
    }
};
struct F16PairFromE4m3 {
    uint32_t operator()(uint16_t a) const {
        return uint32_t{float_to_f16(e4m3_to_float(static_cast<uint8_t>(a >> 8)))} << 16 |
               float_to_f16(e4m3_to_float(static_cast<uint8_t>(a)));
    }
};
struct F16PairFromE5m2 {
    uint32_t operator()(uint16_t a) const {
        return uint32_t{float_to_f16(e5m2_to_float(static_cast<uint8_t>(a >> 8)))} << 16 |
               float_to_f16(e5m2_to_float(static_cast<uint8_t>(a)));
    }
};

void decode_pair(DecodeContext& c, const std::string& to) {
    if (!c.has("rn")) c.fail("only .rn is supported");
    const bool relu = c.has("relu");
    const bool fp8 = to == "e4m3x2" || to == "e5m2x2";
    c.out.dst = c.write(0, fp8 ? 2 : 4);
    if (c.type() != "f32") {
        if (to != "f16x2") c.fail("unknown form of the opcode");
        c.out.a = c.read(1, 2);
        c.out.handler = c.type() == "e4m3x2"   ? map1<uint32_t, uint16_t, F16PairFromE4m3>
                        : c.type() == "e5m2x2" ? map1<uint32_t, uint16_t, F16PairFromE5m2>
                                               : nullptr;
        return;
    }
    c.out.a = c.read(1, 4);
    c.out.b = c.read(2, 4);
    if (to == "bf16x2") {
        c.out.handler = relu ? map2<uint32_t, float, float, Bf16PairFromFloats<true>>
                             : map2<uint32_t, float, float, Bf16PairFromFloats<false>>;
    } else if (to == "f16x2") {
        c.out.handler = relu ? map2<uint32_t, float, float, F16PairFromFloats<true>>
                             : map2<uint32_t, float, float, F16PairFromFloats<false>>;
    } else {
        if (!c.has("satfinite") || relu) c.fail("fp8 needs .satfinite");
        c.out.handler = to == "e4m3x2" ? map2<uint16_t, float, float, E4m3PairFromFloats>
                                       : map2<uint16_t, float, float, E5m2PairFromFloats>;
    }
}

Handler fast_conversion(Type to, Type from) {
    if (to == Type::kBf16 && from == Type::kF32) return map1<uint16_t, float, Bf16FromFloat>;
    if (to == Type::kF16 && from == Type::kF32) return map1<uint16_t, float, F16FromFloat>;
    if (to == Type::kF32 && from == Type::kBf16) return map1<float, uint16_t, FloatFromBf16>;
    if (to == Type::kF32 && from == Type::kF16) return map1<float, uint16_t, FloatFromF16>;
    if (to == Type::kF32 && from == Type::kS32) return map1<float, int32_t, Cast<float, int32_t>>;
    if (to == Type::kF32 && from == Type::kU32) return map1<float, uint32_t, Cast<float, uint32_t>>;
    if (to == Type::kS64 && from == Type::kS32) return map1<int64_t, int32_t, Cast<int64_t, int32_t>>;
    if ((to == Type::kU64 || to == Type::kS64) && from == Type::kU32)
        return map1<uint64_t, uint32_t, Cast<uint64_t, uint32_t>>;
    if ((to == Type::kU32 || to == Type::kS32) && (from == Type::kU64 || from == Type::kS64)) {
        return map1<uint32_t, uint64_t, Cast<uint32_t, uint64_t>>;
    }
    return nullptr;
}

void decode_cvt(DecodeContext& c) {
    const auto& modifiers = c.syntax.modifiers;
    if (modifiers.size() < 3) c.fail("cvt needs two types");
    const std::string& to = modifiers[modifiers.size() - 2];
    if (to.find("x2") != std::string::npos) return decode_pair(c, to);
    c.allow(1, "rn rz rm rp rni rzi rmi rpi ftz sat relu u8 s8 u16 s16 u32 s32 u64 s64 f16 bf16 f32 f64");
    auto data = std::make_shared<ConvertData>();
    data->to = type_code(to);
    data->from = type_code(c.type());
    if (data->to == Type::kNone || data->from == Type::kNone) c.fail("unknown type");
    const bool nearest = c.has("rn") || c.has("rni"), zero = c.has("rz") || c.has("rzi");
    const bool down = c.has("rm") || c.has("rmi"), up = c.has("rp") || c.has("rpi");
    data->rounding = nearest ? Rounding::kNearest
                     : zero  ? Rounding::kZero
                     : down  ? Rounding::kDown
                     : up    ? Rounding::kUp
                             : Rounding::kNone;
    data->integer_rounding = c.has("rni") || c.has("rzi") || c.has("rmi") || c.has("rpi");
    const bool half = data->to == Type::kF16 || data->to == Type::kBf16;
    if (half && data->rounding > Rounding::kNearest && !data->integer_rounding) c.fail("only .rn is supported");
    data->saturate = c.has("sat");
    data->relu = c.has("relu");
    data->flush = c.has("ftz");
    data->destination_bytes = static_cast<uint32_t>(c.type_size());
    c.out.dst = c.write_wide(c.operand(0), &data->destination_bytes);
    c.out.a = c.read_wide(c.operand(1), static_cast<uint32_t>(c.type_size()), &data->source_bytes);
    const bool plain = !data->saturate && !data->relu && !data->flush && !data->integer_rounding &&
                       data->rounding <= Rounding::kNearest;
    const uint32_t to_bytes = to.find("64") != std::string::npos ? 8 : to.find("32") != std::string::npos ? 4 : 2;
    Handler fast = nullptr;
    if (plain && data->destination_bytes == to_bytes && data->source_bytes == static_cast<uint32_t>(c.type_size())) {
        fast = fast_conversion(data->to, data->from);
    }
    c.out.handler = fast ? fast : convert_general;
    c.out.data = std::move(data);
}

}  // namespace

void register_convert(OpcodeTable& table) {
    table.add("cvt", decode_cvt);
}

}  // namespace ptx_emulator
