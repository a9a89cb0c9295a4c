#include "memory.h"

#include "errors.h"
#include "machine.h"

namespace ptx_emulator {

MemoryReference resolve_other_shared(Warp& warp, uint32_t address, uint32_t bytes, uint32_t alignment) {
    const uint32_t rank = address >> kSharedRankShift;
    const uint32_t offset = address & kSharedOffsetMask;
    Cluster& cluster = warp.cta.cluster;
    if (rank >= cluster.ctas.size()) {
        raise(Fault::kIllegalAddress, "shared address 0x%x: CTA %u of a cluster of %zu", address, rank,
              cluster.ctas.size());
    }
    Cta& owner = *cluster.ctas[rank];
    if (offset + bytes > owner.shared.size()) {
        raise(Fault::kIllegalAddress, "shared address 0x%x, %u bytes: beyond the CTA's %u bytes", address, bytes,
              owner.shared.size());
    }
    if (offset % alignment) {
        raise(Fault::kMisalignedAddress, "shared address 0x%x: must be a multiple of %u", address, alignment);
    }
    if (&owner != &warp.cta) require_running(warp, owner);
    return {owner.shared.generic(offset), Space::kShared, &owner, offset};
}

void require_running(const Warp& warp, const Cta& owner) {
    if (&owner == &warp.cta || owner.live_threads() > 0) return;
    raise(Fault::kIllegalAddress, "access to shared memory of CTA rank %u of the cluster, which has ended", owner.rank);
}

MemoryReference resolve_other(Warp& warp, Space space, uint64_t address, uint32_t lane, uint32_t bytes,
                              uint32_t alignment) {
    if (space == Space::kGeneric) {
        space = is_shared_generic(address)  ? Space::kShared
                : is_local_generic(address) ? Space::kLocal
                                            : Space::kGlobal;
        if (space != Space::kGlobal) address &= 0xffffffffu;
    }
    if (space == Space::kShared) return resolve_shared(warp, static_cast<uint32_t>(address), bytes, alignment);
    if (address % alignment) {
        raise(Fault::kMisalignedAddress, "address 0x%llx of lane %u: must be a multiple of %u",
              static_cast<unsigned long long>(address), lane, alignment);
    }
    if (space == Space::kLocal) return {warp.local(lane, address, bytes), Space::kLocal, nullptr, 0};
    if (address < 4096 || address >> 47) {
        raise(Fault::kIllegalAddress, "address 0x%llx of lane %u is no global address",
              static_cast<unsigned long long>(address), lane);
    }
    return {reinterpret_cast<uint8_t*>(address), space, nullptr, 0};
}

}  // namespace ptx_emulator
