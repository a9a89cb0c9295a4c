// Number formats and rounding as the GPU has them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace ptx_emulator {

template <class To, class From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline float bf16_to_float(uint16_t bits) {
    return bit_cast<float>(uint32_t{bits} << 16);
}

// Round to nearest even; any NaN becomes the canonical 0x7fff, as cvt.rn.bf16.f32 does.
inline uint16_t float_to_bf16(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded);
}

inline float f16_to_float(uint16_t bits) {
#ifdef __F16C__
    return _cvtsh_ss(bits);
#else
    const uint32_t sign = uint32_t{bits} << 16 & 0x80000000u;
    const uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return bit_cast<float>(sign | 0x7f800000u | fraction << 13);
    if (exponent) return bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
    const float magnitude = static_cast<float>(fraction) * (1.0f / 16777216.0f);
    return sign ? -magnitude : magnitude;
#endif
}

// Round to nearest even; overflow gives infinity.
inline uint16_t float_to_f16(float value) {
#ifdef __F16C__
    return static_cast<uint16_t>(value != value ? 0x7fff : _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;
    if (magnitude < 0x38800000) {  // subnormal: adding 0.5 aligns the fraction and rounds it
        const uint32_t aligned = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f);
        return sign | static_cast<uint16_t>(aligned - 0x3f000000);
    }
    return sign | static_cast<uint16_t>((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
#endif
}

// .ftz: subnormals become zero of the same sign.
inline float flush(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    return bit_cast<float>(bits & 0x7f800000 ? bits : bits & 0x80000000);
}

template <bool kFlush>
inline float maybe_flush(float value) {
    return kFlush ? flush(value) : value;
}

// 2^x within 1.5 ulp, without branches, for the vectoriser: 2^n times a polynomial on [-0.5, 0.5] with
// minimal relative error (reweighted least squares, 1e-3 ulp before rounding).
inline float exp2_vectorizable(float x) {
    const float clamped = x < -151.0f ? -151.0f : x > 129.0f ? 129.0f : x;
    const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const float whole = (clamped + shifter) - shifter;
    const float f = clamped - whole;
    float p = 1.5196182151e-5f;
    p = p * f + 1.5466756702e-4f;
    p = p * f + 1.3333934954e-3f;
    p = p * f + 9.6180381307e-3f;
    p = p * f + 5.5504103661e-2f;
    p = p * f + 2.4022651067e-1f;
    p = p * f + 6.9314718070e-1f;
    p = p * f + 1.0f;
    // Two steps, so that results below the normal range come out subnormal and above it infinite.
    const int n = static_cast<int>(whole), half = n / 2;
    const float scale1 = bit_cast<float>(static_cast<uint32_t>(half + 127) << 23);
    const float scale2 = bit_cast<float>(static_cast<uint32_t>(n - half + 127) << 23);
    const float result = p * scale1 * scale2;
    return x != x ? x : result;
}

// fp8 of the OCP formats. e4m3 has no infinity: 0x7f is NaN, 448 the largest number.
float e4m3_to_float(uint8_t bits);
float e5m2_to_float(uint8_t bits);
// cvt.rn.satfinite
uint8_t float_to_e4m3(float value);
uint8_t float_to_e5m2(float value);

}  // namespace ptx_emulator
