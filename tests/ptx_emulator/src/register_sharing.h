// Which registers of a kernel may live in the same place.
//
// PTX has a register for each value: thousands per thread, of which few are alive at once. A register file that holds
// them all takes megabytes for each warp and does not fit into a cache.
#pragma once

#include <cstdint>
#include <vector>

#include "ast.h"

namespace ptx_emulator {

// What one instruction does with registers, by their numbers in KernelSyntax::registers.
struct RegisterUse {
    std::vector<uint32_t> reads, writes;
    bool partial = false;           // a guard may keep it from writing
    bool in_flight = false;         // an asynchronous operation uses them after the instruction
    bool waits_for_flight = false;  // ends all such uses before it
};

// For each register the number of its slot. Two registers in one slot have the same width, and no lane needs both at
// any time; a register that may be read before anything has written it has a slot to itself.
std::vector<uint32_t> share_registers(const KernelSyntax& kernel, const std::vector<RegisterUse>& uses);

}  // namespace ptx_emulator
