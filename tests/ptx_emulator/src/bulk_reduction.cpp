#include "bulk_reduction.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "numeric.h"

namespace ptx_emulator {

namespace {

struct Add {
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>(a + b);
    }
};
struct Min {
    template <class T>
    T operator()(T a, T b) const {
        return std::min(a, b);
    }
};
struct Max {
    template <class T>
    T operator()(T a, T b) const {
        return std::max(a, b);
    }
};
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

template <class T, class F>
void reduce(uint8_t* memory, const uint8_t* data, uint32_t bytes) {
    for (uint32_t at = 0; at + sizeof(T) <= bytes; at += sizeof(T)) {
        T a, b;
        std::memcpy(&a, memory + at, sizeof a);
        std::memcpy(&b, data + at, sizeof b);
        a = F{}(a, b);
        std::memcpy(memory + at, &a, sizeof a);
    }
}

template <bool kBf16, class F>
void reduce_half(uint8_t* memory, const uint8_t* data, uint32_t bytes) {
    for (uint32_t at = 0; at + 2 <= bytes; at += 2) {
        uint16_t a, b;
        std::memcpy(&a, memory + at, 2);
        std::memcpy(&b, data + at, 2);
        const float x = kBf16 ? bf16_to_float(a) : f16_to_float(a), y = kBf16 ? bf16_to_float(b) : f16_to_float(b);
        a = kBf16 ? float_to_bf16(F{}(x, y)) : float_to_f16(F{}(x, y));
        std::memcpy(memory + at, &a, 2);
    }
}

using Apply = decltype(Reduction::apply);

template <class F>
Apply arithmetic(const std::string& type) {
    if (type == "f32") return reduce<float, F>;
    if (type == "f64") return reduce<double, F>;
    if (type == "f16") return reduce_half<false, F>;
    if (type == "bf16") return reduce_half<true, F>;
    if (type == "u32") return reduce<uint32_t, F>;
    if (type == "s32") return reduce<int32_t, F>;
    if (type == "u64") return reduce<uint64_t, F>;
    if (type == "s64") return reduce<int64_t, F>;
    return nullptr;
}

template <class F>
Apply bitwise(const std::string& type) {
    const bool wide = type.size() == 3 && type.compare(1, 2, "64") == 0;
    return wide ? reduce<uint64_t, F> : reduce<uint32_t, F>;
}

}  // namespace

Reduction reduction_of(const char* operation, const char* type) {
    const std::string name = operation, of = type;
    if (name == "add") return {arithmetic<Add>(of), of[0] == 'f' || of[0] == 'b'};
    if (name == "min") return {arithmetic<Min>(of)};
    if (name == "max") return {arithmetic<Max>(of)};
    if (name == "and") return {bitwise<And>(of)};
    if (name == "or") return {bitwise<Or>(of)};
    if (name == "xor") return {bitwise<Xor>(of)};
    return {};
}

Reduction tensor_reduction_of(const char* operation, uint32_t data_type) {
    // In the order of CUtensorMapDataType.
    static const char* const types[] = {"u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16"};
    return data_type < 10 ? reduction_of(operation, types[data_type]) : Reduction{};
}

}  // namespace ptx_emulator
