// Floating-point arithmetic (PTX ISA 9.7.3 to 9.7.5): f32, f64, f16, bf16 and their packed pairs. Directed rounding
// (.rz .rm .rp) for f32 and f64; .approx functions are computed to the last ulps rather than to the GPU's error.
#include <cfenv>
#include <cmath>

#include "float_ops.h"
#include "lanes.h"
#include "numeric.h"
#include "opcode_table.h"

namespace ptx_emulator {

namespace {

// ---- scalar functions of an already widened type
struct Add {
    template <class T>
    T operator()(T a, T b) const {
        return a + b;
    }
};
struct Subtract {
    template <class T>
    T operator()(T a, T b) const {
        return a - b;
    }
};
struct Multiply {
    template <class T>
    T operator()(T a, T b) const {
        return a * b;
    }
};
struct Divide {
    template <class T>
    T operator()(T a, T b) const {
        return a / b;
    }
};
// The other operand if one is NaN; -0 < +0.
struct Minimum {
    template <class T>
    T operator()(T a, T b) const {
        const T smaller = a < b ? a : b < a ? b : std::signbit(a) ? a : b;
        return a != a ? b : b != b ? a : smaller;
    }
};
struct Maximum {
    template <class T>
    T operator()(T a, T b) const {
        const T larger = a > b ? a : b > a ? b : std::signbit(a) ? b : a;
        return a != a ? b : b != b ? a : larger;
    }
};
struct MinimumNan {
    template <class T>
    T operator()(T a, T b) const {
        return a != a || b != b ? static_cast<T>(NAN) : Minimum{}(a, b);
    }
};
struct MaximumNan {
    template <class T>
    T operator()(T a, T b) const {
        return a != a || b != b ? static_cast<T>(NAN) : Maximum{}(a, b);
    }
};
struct Fma {
    float operator()(float a, float b, float c) const { return __builtin_fmaf(a, b, c); }
    double operator()(double a, double b, double c) const { return __builtin_fma(a, b, c); }
};
struct Negate {
    template <class T>
    T operator()(T a) const {
        return -a;
    }
};
struct Absolute {
    template <class T>
    T operator()(T a) const {
        return std::fabs(a);
    }
};
struct Exp2 {
    float operator()(float a) const { return exp2_vectorizable(a); }
};
struct Log2 {
    float operator()(float a) const { return std::log2(a); }
};
struct Reciprocal {
    template <class T>
    T operator()(T a) const {
        return T{1} / a;
    }
};
struct SquareRoot {
    template <class T>
    T operator()(T a) const {
        return std::sqrt(a);
    }
};
struct ReciprocalSquareRoot {
    template <class T>
    T operator()(T a) const {
        return T{1} / std::sqrt(a);
    }
};
struct Sine {
    float operator()(float a) const { return std::sin(a); }
};
struct Cosine {
    float operator()(float a) const { return std::cos(a); }
};
struct Tanh {
    float operator()(float a) const { return static_cast<float>(std::tanh(static_cast<double>(a))); }
};

// ---- storage formats: how a register holds the value the scalar function works on
template <bool kFlush>
struct F32 {
    using Storage = uint32_t;
    using Value = float;
    static Value load(Storage bits) { return maybe_flush<kFlush>(bit_cast<float>(bits)); }
    static Storage store(Value value) { return bit_cast<uint32_t>(maybe_flush<kFlush>(value)); }
};
struct F32Saturated {
    using Storage = uint32_t;
    using Value = float;
    static Value load(Storage bits) { return bit_cast<float>(bits); }
    static Storage store(Value value) { return bit_cast<uint32_t>(value > 1.0f ? 1.0f : value > 0.0f ? value : 0.0f); }
};
struct F64 {
    using Storage = uint64_t;
    using Value = double;
    static Value load(Storage bits) { return bit_cast<double>(bits); }
    static Storage store(Value value) { return bit_cast<uint64_t>(value); }
};
struct F16 {
    using Storage = uint16_t;
    using Value = float;
    static Value load(Storage bits) { return f16_to_float(bits); }
    static Storage store(Value value) { return float_to_f16(value); }
};
struct Bf16 {
    using Storage = uint16_t;
    using Value = float;
    static Value load(Storage bits) { return bf16_to_float(bits); }
    static Storage store(Value value) { return float_to_bf16(value); }
};

// One scalar of a format.
template <class Format, class F>
struct Scalar {
    using S = typename Format::Storage;
    S operator()(S a) const { return Format::store(F{}(Format::load(a))); }
    S operator()(S a, S b) const { return Format::store(F{}(Format::load(a), Format::load(b))); }
    S operator()(S a, S b, S c) const { return Format::store(F{}(Format::load(a), Format::load(b), Format::load(c))); }
};
// Two scalars side by side in a register of twice the size.
template <class Format, class F>
struct Packed {
    using S = typename Format::Storage;
    using P = std::conditional_t<sizeof(S) == 2, uint32_t, uint64_t>;
    static constexpr int kShift = 8 * sizeof(S);
    template <class... Arguments>
    P operator()(Arguments... arguments) const {
        const Scalar<Format, F> f{};
        return P{f(static_cast<S>(arguments)...)} | P{f(static_cast<S>(arguments >> kShift)...)} << kShift;
    }
};

template <class S, class F>
constexpr Handler unary_handler = map1<S, S, F>;
template <class S, class F>
constexpr Handler binary_handler = map2<S, S, S, F>;
template <class S, class F>
constexpr Handler ternary_handler = map3<S, S, S, S, F>;

template <class F>
Handler unary(const std::string& type, bool ftz) {
    if (type == "f32")
        return ftz ? unary_handler<uint32_t, Scalar<F32<true>, F>> : unary_handler<uint32_t, Scalar<F32<false>, F>>;
    if (type == "f16") return unary_handler<uint16_t, Scalar<F16, F>>;
    if (type == "bf16") return unary_handler<uint16_t, Scalar<Bf16, F>>;
    if (type == "f16x2") return unary_handler<uint32_t, Packed<F16, F>>;
    if (type == "bf16x2") return unary_handler<uint32_t, Packed<Bf16, F>>;
    return nullptr;
}

template <class F>
Handler unary_with_double(const std::string& type, bool ftz) {
    return type == "f64" ? unary_handler<uint64_t, Scalar<F64, F>> : unary<F>(type, ftz);
}

template <class F>
Handler binary(const std::string& type, bool ftz, bool saturate) {
    if (saturate) return type == "f32" ? binary_handler<uint32_t, Scalar<F32Saturated, F>> : nullptr;
    if (type == "f32")
        return ftz ? binary_handler<uint32_t, Scalar<F32<true>, F>> : binary_handler<uint32_t, Scalar<F32<false>, F>>;
    if (type == "f64") return binary_handler<uint64_t, Scalar<F64, F>>;
    if (type == "f16") return binary_handler<uint16_t, Scalar<F16, F>>;
    if (type == "bf16") return binary_handler<uint16_t, Scalar<Bf16, F>>;
    if (type == "f16x2") return binary_handler<uint32_t, Packed<F16, F>>;
    if (type == "bf16x2") return binary_handler<uint32_t, Packed<Bf16, F>>;
    if (type == "f32x2")
        return ftz ? binary_handler<uint64_t, Packed<F32<true>, F>> : binary_handler<uint64_t, Packed<F32<false>, F>>;
    return nullptr;
}

// ---- directed rounding, by the host's rounding mode; the compiler must not move the arithmetic across the switch
enum class Operation : uint32_t { kAdd, kSubtract, kMultiply, kDivide, kFma, kReciprocal, kSquareRoot };

template <class T>
T evaluate(Operation operation, T a, T b, T c) {
    switch (operation) {
        case Operation::kAdd:
            return a + b;
        case Operation::kSubtract:
            return a - b;
        case Operation::kMultiply:
            return a * b;
        case Operation::kDivide:
            return a / b;
        case Operation::kFma:
            return std::fma(a, b, c);
        case Operation::kReciprocal:
            return T{1} / a;
        case Operation::kSquareRoot:
            return std::sqrt(a);
    }
    return a;
}

// x: Operation, y: rounding mode of <cfenv>, z: .ftz
template <class T>
Step directed(Warp& warp, const Instruction& i, LaneMask mask) {
    const int saved = std::fegetround();
    const T *a = warp.lanes<T>(i.a), *b = warp.lanes<T>(i.b), *c = warp.lanes<T>(i.c);
    T* d = warp.lanes<T>(i.dst);
    auto clean = [&](T value) { return i.z ? static_cast<T>(flush(static_cast<float>(value))) : value; };
    for_lanes(mask, [&](uint32_t lane) {
        const volatile T x = clean(a[lane]), y = clean(b[lane]), z = clean(c[lane]);
        std::fesetround(static_cast<int>(i.y));
        const volatile T result = evaluate<T>(static_cast<Operation>(i.x), x, y, z);
        std::fesetround(saved);
        d[lane] = clean(result);
    });
    return Step::kNext;
}

// True if the instruction asks for directed rounding; its operands are then decoded, and its handler set.
bool decode_directed(DecodeContext& c) {
    const int mode = c.has("rz") ? FE_TOWARDZERO : c.has("rm") ? FE_DOWNWARD : c.has("rp") ? FE_UPWARD : -1;
    if (mode < 0) return false;
    static const std::pair<const char*, Operation> operations[] = {
        {"add", Operation::kAdd},        {"sub", Operation::kSubtract},    {"mul", Operation::kMultiply},
        {"div", Operation::kDivide},     {"fma", Operation::kFma},         {"mad", Operation::kFma},
        {"rcp", Operation::kReciprocal}, {"sqrt", Operation::kSquareRoot},
    };
    const int bytes = c.type_size();
    if ((c.type() != "f32" && c.type() != "f64") || c.has("sat"))
        c.fail("directed rounding of this form is not supported");
    bool found = false;
    for (const auto& [name, operation] : operations) {
        if (c.syntax.modifiers[0] != name) continue;
        c.out.x = static_cast<uint32_t>(operation);
        found = true;
    }
    if (!found) c.fail("directed rounding of this form is not supported");
    c.out.y = static_cast<uint32_t>(mode);
    c.out.z = c.has("ftz");
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.b = c.operand_count() > 2 ? c.read(2, bytes) : c.out.a;
    c.out.c = c.operand_count() > 3 ? c.read(3, bytes) : c.out.a;
    c.out.handler = bytes == 4 ? directed<float> : directed<double>;
    return true;
}

constexpr const char* kModifiers = "rn ftz sat approx full NaN f32 f64 f16 bf16 f16x2 bf16x2 f32x2";

template <class F>
struct ThreeInput {
    template <class T>
    T operator()(T a, T b, T c) const {
        return F{}(F{}(a, b), c);
    }
};

template <class F>
Handler three_input(const std::string& type, bool ftz) {
    if (type != "f32") return nullptr;
    return ftz ? ternary_handler<uint32_t, Scalar<F32<true>, ThreeInput<F>>>
               : ternary_handler<uint32_t, Scalar<F32<false>, ThreeInput<F>>>;
}

void decode_unary_function(DecodeContext& c) {
    if (decode_directed(c)) return;
    c.allow(1, kModifiers);
    const std::string& mnemonic = c.syntax.modifiers[0];
    const std::string& type = c.type();
    const bool ftz = c.has("ftz");
    const int bytes = c.type_size();
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    Handler handler = nullptr;
    if (mnemonic == "ex2") handler = unary<Exp2>(type, ftz);
    if (mnemonic == "lg2") handler = unary<Log2>(type, ftz);
    if (mnemonic == "rcp") handler = unary_with_double<Reciprocal>(type, ftz);
    if (mnemonic == "sqrt") handler = unary_with_double<SquareRoot>(type, ftz);
    if (mnemonic == "rsqrt") handler = unary_with_double<ReciprocalSquareRoot>(type, ftz);
    if (mnemonic == "sin") handler = unary<Sine>(type, ftz);
    if (mnemonic == "cos") handler = unary<Cosine>(type, ftz);
    if (mnemonic == "tanh") handler = unary<Tanh>(type, ftz);
    c.out.handler = c.require(handler);
}

}  // namespace

void decode_float_unary(DecodeContext& c) {
    c.allow(1, kModifiers);
    const int bytes = c.type_size();
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    const bool ftz = c.has("ftz");
    c.out.handler = c.require(c.syntax.modifiers[0] == "neg" ? unary_with_double<Negate>(c.type(), ftz)
                                                             : unary_with_double<Absolute>(c.type(), ftz));
}

void decode_float_binary(DecodeContext& c) {
    if (decode_directed(c)) return;
    c.allow(1, kModifiers);
    const std::string& mnemonic = c.syntax.modifiers[0];
    const std::string& type = c.type();
    const int bytes = c.type_size();
    const bool ftz = c.has("ftz"), saturate = c.has("sat"), nan = c.has("NaN");
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.b = c.read(2, bytes);
    Handler handler = nullptr;
    if (c.operand_count() == 4) {  // min and max of three, sm_100 and later
        c.out.c = c.read(3, bytes);
        if (mnemonic == "min") handler = nan ? three_input<MinimumNan>(type, ftz) : three_input<Minimum>(type, ftz);
        if (mnemonic == "max") handler = nan ? three_input<MaximumNan>(type, ftz) : three_input<Maximum>(type, ftz);
    } else {
        if (mnemonic == "add") handler = binary<Add>(type, ftz, saturate);
        if (mnemonic == "sub") handler = binary<Subtract>(type, ftz, saturate);
        if (mnemonic == "mul") handler = binary<Multiply>(type, ftz, saturate);
        if (mnemonic == "div") handler = binary<Divide>(type, ftz, saturate);
        if (mnemonic == "min") handler = nan ? binary<MinimumNan>(type, ftz, false) : binary<Minimum>(type, ftz, false);
        if (mnemonic == "max") handler = nan ? binary<MaximumNan>(type, ftz, false) : binary<Maximum>(type, ftz, false);
    }
    c.out.handler = c.require(handler);
}

void decode_fma(DecodeContext& c) {
    if (decode_directed(c)) return;
    c.allow(1, kModifiers);
    const std::string& type = c.type();
    const int bytes = c.type_size();
    const bool ftz = c.has("ftz");
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.b = c.read(2, bytes);
    c.out.c = c.read(3, bytes);
    Handler handler = nullptr;
    if (c.has("sat")) {
        if (type == "f32") handler = ternary_handler<uint32_t, Scalar<F32Saturated, Fma>>;
    } else if (type == "f32") {
        handler = ftz ? ternary_handler<uint32_t, Scalar<F32<true>, Fma>>
                      : ternary_handler<uint32_t, Scalar<F32<false>, Fma>>;
    } else if (type == "f64") {
        handler = ternary_handler<uint64_t, Scalar<F64, Fma>>;
    } else if (type == "f16") {
        handler = ternary_handler<uint16_t, Scalar<F16, Fma>>;
    } else if (type == "bf16") {
        handler = ternary_handler<uint16_t, Scalar<Bf16, Fma>>;
    } else if (type == "f16x2") {
        handler = ternary_handler<uint32_t, Packed<F16, Fma>>;
    } else if (type == "bf16x2") {
        handler = ternary_handler<uint32_t, Packed<Bf16, Fma>>;
    } else if (type == "f32x2") {
        handler = ftz ? ternary_handler<uint64_t, Packed<F32<true>, Fma>>
                      : ternary_handler<uint64_t, Packed<F32<false>, Fma>>;
    }
    c.out.handler = c.require(handler);
}

namespace {

// The magnitude of b with the sign of a.
template <class T>
struct CopySign {
    T operator()(T a, T b) const { return std::copysign(b, a); }
};

void decode_copysign(DecodeContext& c) {
    c.allow(1, "f32 f64");
    const int bytes = c.type_size();
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.b = c.read(2, bytes);
    c.out.handler =
        bytes == 4 ? map2<float, float, float, CopySign<float>> : map2<double, double, double, CopySign<double>>;
}

template <class T>
Step test_property(Warp& warp, const Instruction& i, LaneMask mask) {
    const T* a = warp.lanes<T>(i.a);
    LaneMask result = 0;
    for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
        const int category = std::fpclassify(a[lane]);
        // x: the accepted categories of <cmath>, one bit each
        result |= i.x >> category & 1 ? lane_bit(lane) : 0;
    }
    warp.set_predicate(i.dst, result, mask);
    return Step::kNext;
}

void decode_testp(DecodeContext& c) {
    c.allow(1, "finite infinite number notanumber normal subnormal f32 f64");
    const uint32_t nan = 1u << FP_NAN, infinite = 1u << FP_INFINITE, normal = 1u << FP_NORMAL;
    const uint32_t subnormal = 1u << FP_SUBNORMAL, zero = 1u << FP_ZERO;
    c.out.x = c.has("finite")       ? normal | subnormal | zero
              : c.has("infinite")   ? infinite
              : c.has("number")     ? normal | subnormal | zero | infinite
              : c.has("notanumber") ? nan
              : c.has("normal")     ? normal
                                    : subnormal;
    c.out.dst = c.write_predicate(c.operand(0));
    c.out.a = c.read(1, c.type_size());
    c.out.handler = c.type_size() == 4 ? test_property<float> : test_property<double>;
}

}  // namespace

void register_float(OpcodeTable& table) {
    table.add("copysign", decode_copysign);
    table.add("testp", decode_testp);
    table.add("fma", decode_fma);
    for (const char* mnemonic : {"ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "tanh"}) {
        table.add(mnemonic, decode_unary_function);
    }
}

}  // namespace ptx_emulator
