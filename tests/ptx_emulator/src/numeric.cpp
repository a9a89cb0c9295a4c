#include "numeric.h"

#include <algorithm>
#include <limits>

namespace ptx_emulator {

static float small_to_float(uint8_t bits, int exponent_bits, int fraction_bits, int bias) {
    const int exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1);
    const int fraction = bits & ((1 << fraction_bits) - 1);
    const float magnitude =
        exponent ? std::ldexp(1.0f + static_cast<float>(fraction) / (1 << fraction_bits), exponent - bias)
                 : std::ldexp(static_cast<float>(fraction) / (1 << fraction_bits), 1 - bias);
    return bits & 0x80 ? -magnitude : magnitude;
}

float e4m3_to_float(uint8_t bits) {
    if ((bits & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
    return small_to_float(bits, 4, 3, 7);
}

float e5m2_to_float(uint8_t bits) {
    if ((bits & 0x7f) > 0x7c) return std::numeric_limits<float>::quiet_NaN();
    if ((bits & 0x7f) == 0x7c) return bits & 0x80 ? -INFINITY : INFINITY;
    return small_to_float(bits, 5, 2, 15);
}

// Round to nearest even among the finite values; beyond the largest, the largest.
static uint8_t float_to_small(float value, int fraction_bits, int bias, float largest, uint8_t largest_bits) {
    const uint8_t sign = std::signbit(value) ? 0x80 : 0;
    const float magnitude = std::fabs(value);
    if (magnitude >= largest) return sign | largest_bits;
    int exponent = 0;
    std::frexp(magnitude, &exponent);  // magnitude = m * 2^exponent, m in [0.5, 1)
    exponent = std::max(exponent - 1, 1 - bias);
    const float quantum = std::ldexp(1.0f, exponent - fraction_bits);
    const auto steps = static_cast<int>(std::nearbyint(magnitude / quantum));
    // steps counts fraction units; the implicit bit carries into the exponent field by itself
    const int biased = exponent + bias - 1;
    return sign | static_cast<uint8_t>((biased << fraction_bits) + steps);
}

uint8_t float_to_e4m3(float value) {
    return value != value ? 0x7f : float_to_small(value, 3, 7, 448.0f, 0x7e);
}

uint8_t float_to_e5m2(float value) {
    return value != value ? 0x7f : float_to_small(value, 2, 15, 57344.0f, 0x7b);
}

}  // namespace ptx_emulator
