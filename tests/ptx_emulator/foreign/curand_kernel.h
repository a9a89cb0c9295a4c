// What CUTLASS's examples take from cuRAND to fill their inputs, so that they compile with a toolkit without it.
#pragma once

#include <stdint.h>

struct curandState_t {
    uint64_t counter;
};

// splitmix64: each number is a hash of a counter; sequences start far apart.
__device__ inline uint64_t flash_ext_random_bits(curandState_t* state) {
    uint64_t bits = state->counter += 0x9e3779b97f4a7c15;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
    return bits ^ bits >> 31;
}

__device__ inline void curand_init(uint64_t seed, uint64_t sequence, uint64_t offset, curandState_t* state) {
    state->counter = seed * 0xd1342543de82ef95 + offset;
    state->counter = flash_ext_random_bits(state) + sequence * 0xda942042e4dd58b5;
}

// In (0, 1].
__device__ inline float curand_uniform(curandState_t* state) {
    return static_cast<float>((flash_ext_random_bits(state) >> 40) + 1) * 0x1p-24f;
}

__device__ inline double curand_uniform_double(curandState_t* state) {
    return static_cast<double>((flash_ext_random_bits(state) >> 11) + 1) * 0x1p-53;
}

// The sum of twelve uniform numbers: mean 0, variance 1, and close enough to normal for inputs.
__device__ inline float curand_normal(curandState_t* state) {
    uint32_t sum = 0;
    for (int draw = 0; draw < 3; ++draw) {
        const uint64_t bits = flash_ext_random_bits(state);
        for (int part = 0; part < 4; ++part) {
            sum += static_cast<uint32_t>(bits >> 16 * part & 0xffff);
        }
    }
    return static_cast<float>(sum) * 0x1p-16f - 6.0f;
}

__device__ inline double curand_normal_double(curandState_t* state) {
    return curand_normal(state);
}
