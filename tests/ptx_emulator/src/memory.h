// Addresses to host memory, with the checks a GPU makes: bounds and alignment.
#pragma once

#include <cstdint>

#include "address_space.h"
#include "cluster.h"
#include "cta.h"
#include "types.h"

namespace ptx_emulator {

struct MemoryReference {
    uint8_t* data = nullptr;
    Space space = Space::kGlobal;  // never kGeneric
    Cta* owner = nullptr;          // of shared memory
    uint32_t offset = 0;           // in shared memory
};

// Other than what most accesses are: in the warp's own CTA, within bounds, aligned.
MemoryReference resolve_other_shared(Warp& warp, uint32_t address, uint32_t bytes, uint32_t alignment);
MemoryReference resolve_other(Warp& warp, Space space, uint64_t address, uint32_t lane, uint32_t bytes,
                              uint32_t alignment);

// Shared memory at a shared::cluster address. Throws kIllegalAddress or kMisalignedAddress.
inline MemoryReference resolve_shared(Warp& warp, uint32_t address, uint32_t bytes, uint32_t alignment) {
    Cta& own = warp.cta;
    const uint32_t offset = address & kSharedOffsetMask;
    if (address >> kSharedRankShift != own.rank || offset + bytes > own.shared.size() || offset % alignment) {
        return resolve_other_shared(warp, address, bytes, alignment);
    }
    return {own.shared.generic(offset), Space::kShared, &own, offset};
}

// Any space. Global memory is not bounded here: a wild pointer faults, and the launch turns the fault into an error.
inline MemoryReference resolve(Warp& warp, Space space, uint64_t address, uint32_t lane, uint32_t bytes,
                               uint32_t alignment) {
    if (space == Space::kShared) return resolve_shared(warp, static_cast<uint32_t>(address), bytes, alignment);
    return resolve_other(warp, space, address, lane, bytes, alignment);
}

// Of an access to come, if the checker is on: its records are more than the caches hold.
inline void prefetch_records(const MemoryReference& reference) {
    if (reference.owner) reference.owner->shared_shadow[reference.offset / kGranuleBytes].prefetch();
}

// Raises when a remote access comes after the owner has ended.
void require_running(const Warp& warp, const Cta& owner);

// base register + displacement of lane, widened.
inline uint64_t lane_address(const Warp& warp, const Instruction& instruction, uint32_t base, uint32_t lane) {
    const int64_t displacement = instruction.displacement;
    if (instruction.address_is_64) return warp.lanes<uint64_t>(base)[lane] + displacement;
    return static_cast<uint32_t>(warp.lanes<uint32_t>(base)[lane] + displacement);
}

}  // namespace ptx_emulator
