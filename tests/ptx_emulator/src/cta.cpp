#include "cta.h"

#include "errors.h"
#include "machine.h"
#include "synchronization.h"

namespace ptx_emulator {

Cta::Cta(Machine& m, Cluster& c, uint32_t r, Dim3 i) : machine(m), cluster(c), rank(r), id(i) {
    shared.reset(machine.shared_bytes(), machine.program.uses_async_proxy);
    if (machine.checker.enabled()) shared_shadow.resize(machine.shared_bytes() / kGranuleBytes + 1);
    for (Warpgroup& group : warpgroups) machine.async.attach(&group.queue);
    machine.async.attach(&tensor_pipe.queue);
    const auto threads = static_cast<uint32_t>(machine.config.block.count());
    for (uint32_t first = 0; first < threads; first += kWarpSize) {
        const uint32_t count = std::min(threads - first, kWarpSize);
        const LaneMask lanes = count == kWarpSize ? kAllLanes : lane_bit(count) - 1;
        warps.push_back(std::make_unique<Warp>(machine, *this, first / kWarpSize, lanes));
    }
}

Cta::~Cta() {
    for (Warpgroup& group : warpgroups) machine.async.detach(&group.queue);
    machine.async.detach(&tensor_pipe.queue);
}

uint32_t Cta::live_threads() const {
    uint32_t threads = 0;
    for (const auto& warp : warps) threads += warp->done() ? 0 : kWarpSize;
    return threads;
}

void Cta::warp_ended(Warp& warp) {
    if (warp.copies.queue.issued() > warp.copies.tickets_waited) {
        raise(Fault::kIllegalInstruction,
              "CTA (%u,%u,%u) warp %u ends with cp.async copies outstanding that nothing waited for", id.x, id.y, id.z,
              warp.index);
    }
    for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
        const BulkGroups* groups = warp.bulk.lanes[lane].get();
        if (groups && !groups->settled()) {
            raise(Fault::kIllegalInstruction,
                  "CTA (%u,%u,%u) warp %u lane %u ends with bulk copies out of shared memory that nothing waited for",
                  id.x, id.y, id.z, warp.index, lane);
        }
    }
    if (!warp.multiply.settled()) {
        raise(Fault::kIllegalInstruction, "CTA (%u,%u,%u) warp %u ends with wgmma products that nothing waited for",
              id.x, id.y, id.z, warp.index);
    }
    if (warp.tensor_memory.stores_outstanding) {
        machine.checker.report_once(
            warp.pc(), warp.pc(),
            format("hazard: CTA (%u,%u,%u) warp %u ends with stores to tensor memory that nothing waited for", id.x,
                   id.y, id.z, warp.index));
        warp.tensor_memory.stores.run_through(warp.tensor_memory.stores.issued());
    }
    if (live_threads() == 0) machine.checker.check_end(*this);
    if (live_threads() == 0 && tensor_memory.allocated) {
        raise(Fault::kIllegalInstruction, "CTA (%u,%u,%u) ends with tensor memory allocated", id.x, id.y, id.z);
    }
    for (NamedBarrier& barrier : barriers) recheck_barrier(*this, barrier);
    recheck_cluster_barrier(cluster);
    machine.progressed();
}

}  // namespace ptx_emulator
