// The one source of chance: a small generator whose sequence depends on the seed alone, on every machine.
#pragma once

#include <cstdint>

namespace ptx_emulator {

// xorshift64* (Vigna, 2016).
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 0x2545F4914F6CDD1Dull) {
        if (state_ == 0) state_ = 1;
        for (int i = 0; i < 8; ++i) next();
    }
    uint32_t next() {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return static_cast<uint32_t>((state_ * 0x2545F4914F6CDD1Dull) >> 32);
    }
    uint32_t below(uint32_t bound) { return static_cast<uint32_t>((uint64_t{next()} * bound) >> 32); }
    double uniform() { return next() * (1.0 / 4294967296.0); }

  private:
    uint64_t state_;
};

}  // namespace ptx_emulator
