// Vector clocks (Fidge 1988, Mattern 1989): what one agent knows of the others' progress.
//
// A component is a warp, or a stream of asynchronous effects whose completions are ordered: the cp.async groups of a
// warp, the phases of an mbarrier, the wgmma groups of a warpgroup. Component numbers are per cluster (ClockDomain).
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace ptx_emulator {

using Component = uint16_t;

class VectorClock {
  public:
    uint32_t get(Component component) const { return component < epochs_.size() ? epochs_[component] : 0; }
    void raise_to(Component component, uint32_t epoch) {
        if (component >= epochs_.size()) epochs_.resize(component + 1, 0);
        epochs_[component] = std::max(epochs_[component], epoch);
    }
    void join(const VectorClock& other) {
        if (other.epochs_.size() > epochs_.size()) epochs_.resize(other.epochs_.size(), 0);
        for (size_t i = 0; i < other.epochs_.size(); ++i) epochs_[i] = std::max(epochs_[i], other.epochs_[i]);
    }
    void set(Component component, uint32_t epoch) {
        if (component >= epochs_.size()) epochs_.resize(component + 1, 0);
        epochs_[component] = epoch;
    }
    bool covers(const VectorClock& other) const {
        for (size_t i = 0; i < other.epochs_.size(); ++i) {
            if (other.epochs_[i] > get(static_cast<Component>(i))) return false;
        }
        return true;
    }
    void clear() { epochs_.clear(); }

  private:
    std::vector<uint32_t> epochs_;
};

// What an agent knows: of its own cluster by component, in both proxies, and of other clusters of the launch.
struct Knowledge {
    VectorClock generic;    // accesses that happen before, as any generic access sees them
    VectorClock published;  // the part of the generic writes that a proxy fence has made visible to the async proxy
    VectorClock tensor;     // accesses of tensor memory that its own later ones come after
    VectorClock tensor_released;  // those that others' may come after: behind a tcgen05.fence::before_thread_sync
    VectorClock operands;         // `generic` at the latest tcgen05.fence::after_thread_sync: what products come after
    std::map<uint32_t, VectorClock> foreign;            // cluster index -> clock; through global memory only
    std::map<uint32_t, VectorClock> foreign_published;  // its part behind a fence.proxy.async of global memory

    void join(const Knowledge& other, bool same_cluster, uint32_t other_cluster, uint32_t own_cluster);
};

// The clock of a synchronisation object: a barrier phase, an mbarrier phase, an atomic location.
struct SyncClock {
    Knowledge knowledge;
    uint32_t cluster = 0;
    bool used = false;
};

}  // namespace ptx_emulator
