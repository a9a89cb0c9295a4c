// Special registers (PTX ISA chapter 10) whose value is fixed for a warp's life.
#pragma once

#include <cstdint>
#include <string>

namespace ptx_emulator {

class Warp;

using SpecialValue = uint64_t (*)(const Warp& warp, uint32_t lane);

// By name ("%tid.x"); nullptr if there is none, or the emulator does not know it.
SpecialValue find_special_register(const std::string& name);

}  // namespace ptx_emulator
