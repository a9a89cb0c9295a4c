// Names shared by every part of the emulator.
#pragma once

#include <cstdint>

namespace ptx_emulator {

using LaneMask = uint32_t;  // bit l: lane l of the warp takes part
constexpr uint32_t kWarpSize = 32;
constexpr LaneMask kAllLanes = 0xffffffffu;

constexpr LaneMask lane_bit(uint32_t lane) {
    return LaneMask{1} << lane;
}

// A .b128 register of one lane.
struct Word128 {
    uint64_t low, high;
};

struct Dim3 {
    uint32_t x = 1, y = 1, z = 1;
    uint64_t count() const { return uint64_t{x} * y * z; }
};

// State spaces of PTX (ISA section 5.1). kGeneric addresses are resolved at run time by their tag (address_space.h).
enum class Space : uint8_t { kGeneric, kGlobal, kShared, kLocal, kParam, kConst };

class Warp;
class Cta;
class Cluster;
class Machine;
class Program;
struct Instruction;

}  // namespace ptx_emulator
