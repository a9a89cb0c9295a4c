// The arithmetic of cp.reduce.async.bulk: memory op= data, element by element.
#pragma once

#include <cstdint>

namespace ptx_emulator {

class DecodeContext;

struct Reduction {
    void (*apply)(uint8_t* memory, const uint8_t* data, uint32_t bytes) = nullptr;
    bool rounds = false;  // an addition of floats: the sum depends on the order

    explicit operator bool() const { return apply != nullptr; }
};

// From the modifiers .add, .min, ... and the type; of a tensor map the type comes at run time, as CUtensorMapDataType.
Reduction reduction_of(const char* operation, const char* type);
Reduction tensor_reduction_of(const char* operation, uint32_t data_type);

}  // namespace ptx_emulator
