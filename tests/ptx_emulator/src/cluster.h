// CTAs that start together and see each other's shared memory; without .cluster, one CTA.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cta.h"

namespace ptx_emulator {

class Cluster {
  public:
    Cluster(Machine& machine, uint32_t index, Dim3 first_cta, uint32_t slot);

    ~Cluster();
    Cluster(const Cluster&) = delete;

    bool done() const;

    Machine& machine;
    const uint32_t index;                      // in the launch, counting clusters in order of start
    const uint32_t slot;                       // among the resident clusters
    RecordArena records;                       // of the shadows of shared and of tensor memory
    std::vector<std::unique_ptr<Cta>> ctas;    // by rank
    std::vector<std::string> component_names;  // of the clock components (checker)

    // ---- state of instruction families; a new family adds its struct here
    ClusterBarrier barrier;
    AsyncQueue bulk_copies;   // into shared memory: they complete on mbarriers
    Component primaries = 0;  // known once griddepcontrol.wait has been executed (checker)
};

}  // namespace ptx_emulator
