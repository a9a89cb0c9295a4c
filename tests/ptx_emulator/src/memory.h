// Addresses to host memory, with the checks a GPU makes: bounds and alignment.
#pragma once

#include <cstdint>

#include "address_space.h"
#include "cta.h"
#include "types.h"

namespace ptx_emulator {

struct MemoryReference {
    uint8_t* data = nullptr;
    Space space = Space::kGlobal;  // never kGeneric
    Cta* owner = nullptr;          // of shared memory
    uint32_t offset = 0;           // in shared memory
};

// Shared memory at a shared::cluster address. Throws kIllegalAddress or kMisalignedAddress.
MemoryReference resolve_shared(Warp& warp, uint32_t address, uint32_t bytes, uint32_t alignment);
// Any space. Global memory is not bounded here: a wild pointer faults, and the launch turns the fault into an error.
MemoryReference resolve(Warp& warp, Space space, uint64_t address, uint32_t lane, uint32_t bytes, uint32_t alignment);

// Raises when a remote access comes after the owner has ended.
void require_running(const Warp& warp, const Cta& owner);

// base register + displacement of lane, widened.
uint64_t lane_address(const Warp& warp, const Instruction& instruction, uint32_t base, uint32_t lane);

}  // namespace ptx_emulator
