// Division by a number that is known on the host, for the few divisions at the start of every CTA: a multiplication and
// a shift instead of some hundred cycles (Granlund, Montgomery: Division by invariant integers using multiplication,
// 1994).
#pragma once

#include <stdint.h>

namespace flash_ext {

struct FastDivisor {
    uint32_t divisor;
    uint32_t multiplier;
    uint32_t shift;
};

struct Quotient {
    uint32_t quotient;
    uint32_t remainder;
};

// divisor: 1 .. 2^31 - 1.
inline FastDivisor make_fast_divisor(uint32_t divisor) {
    // multiplier = ceil(2^(31 + ceil(log2 divisor)) / divisor) < 2^32: exact for all dividends below 2^31.
    uint32_t log = 0;
    while ((uint64_t{1} << log) < divisor) ++log;
    const uint64_t power = uint64_t{1} << (31 + log);
    return {divisor, static_cast<uint32_t>((power + divisor - 1) / divisor), log};
}

// dividend: below 2^31.
__device__ __forceinline__ Quotient divide(uint32_t dividend, const FastDivisor& by) {
    const uint32_t quotient =
        static_cast<uint32_t>((static_cast<uint64_t>(dividend) * by.multiplier) >> 31) >> by.shift;
    return {quotient, dividend - quotient * by.divisor};
}

// The same for a dividend of any size whose quotient fits.
__device__ __forceinline__ Quotient divide_any(int64_t dividend, const FastDivisor& by) {
    if (dividend <= INT32_MAX) return divide(static_cast<uint32_t>(dividend), by);
    const int64_t quotient = dividend / by.divisor;
    return {static_cast<uint32_t>(quotient), static_cast<uint32_t>(dividend - quotient * by.divisor)};
}

}  // namespace flash_ext
