// One CTA: shared memory, named barriers, warps.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "cluster_barrier.h"
#include "mbarrier.h"
#include "named_barrier.h"
#include "shadow.h"
#include "shared_memory.h"
#include "tensor_memory.h"
#include "types.h"
#include "warp.h"
#include "warpgroup.h"

namespace ptx_emulator {

constexpr uint32_t kNamedBarriers = 16;

class Cta {
  public:
    Cta(Machine& machine, Cluster& cluster, uint32_t rank, Dim3 id);
    ~Cta();
    Cta(const Cta&) = delete;

    uint32_t live_threads() const;  // of warps that have not ended, in whole warps
    void warp_ended(Warp& warp);

    Machine& machine;
    Cluster& cluster;
    const uint32_t rank;  // in its cluster
    const Dim3 id;        // %ctaid
    uint32_t sm = 0;      // %smid
    SharedMemory shared;
    std::vector<Granule> shared_shadow;  // one per kGranuleBytes, empty when the checker is off
    NamedBarrier barriers[kNamedBarriers];
    std::vector<std::unique_ptr<Warp>> warps;

    // ---- state of instruction families; a new family adds its struct here
    MemoryBarriers memory_barriers;
    Warpgroup warpgroups[32 / kWarpgroupWarps];
    RegisterPool register_pool;
    TensorMemory tensor_memory;
    TensorPipe tensor_pipe;                       // of the pair, in its even CTA, with .cta_group::2
    std::deque<PairAllocation> pair_allocations;  // in the even CTA of a pair
};

}  // namespace ptx_emulator
