#include "cluster.h"

#include <algorithm>

#include "machine.h"

namespace ptx_emulator {

Cluster::Cluster(Machine& m, uint32_t i, Dim3 first, uint32_t s)
    : machine(m), index(i), slot(s), bulk_copies(AsyncQueue::Order::kAny, AsyncQueue::Trigger::kIdle) {
    machine.async.attach(&bulk_copies);
    primaries = machine.checker.new_component(*this, "the grids this one depends on");
    const Dim3& shape = machine.config.cluster;
    uint32_t rank = 0;
    for (uint32_t z = 0; z < shape.z; ++z) {
        for (uint32_t y = 0; y < shape.y; ++y) {
            for (uint32_t x = 0; x < shape.x; ++x) {
                ctas.push_back(
                    std::make_unique<Cta>(machine, *this, rank++, Dim3{first.x + x, first.y + y, first.z + z}));
            }
        }
    }
    for (auto& cta : ctas) {
        cta->sm = (slot * static_cast<uint32_t>(shape.count()) + cta->rank) % machine.device.sm_count;
        for (auto& warp : cta->warps) machine.checker.start_warp(*warp);
    }
}

Cluster::~Cluster() {
    machine.async.detach(&bulk_copies);
}

bool Cluster::done() const {
    return std::all_of(ctas.begin(), ctas.end(), [](const auto& cta) {
        return std::all_of(cta->warps.begin(), cta->warps.end(), [](const auto& warp) { return warp->done(); });
    });
}

}  // namespace ptx_emulator
