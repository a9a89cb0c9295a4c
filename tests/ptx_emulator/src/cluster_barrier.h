// barrier.cluster (PTX ISA 9.7.13.4), the registers that setmaxnreg moves between warps (9.7.19.5).
#pragma once

#include <cstdint>

#include "types.h"
#include "vector_clock.h"

namespace ptx_emulator {

struct ClusterBarrier {
    uint32_t generation = 0;  // phases completed
    SyncClock arriving, completed;
};

// What a warp remembers between barrier.cluster.arrive and barrier.cluster.wait.
struct ClusterBarrierWait {
    bool arrived = false;
    bool relaxed = false;     // the arrival
    uint32_t generation = 0;  // at arrival
};

// Registers of a CTA that setmaxnreg.dec has given back and .inc may take. The launch hands every warp the same share.
struct RegisterPool {
    uint32_t free = 0;  // 32-bit registers
};

// Completes the phase if every warp that has not ended has arrived.
void recheck_cluster_barrier(Cluster& cluster);

}  // namespace ptx_emulator
