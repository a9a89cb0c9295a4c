// Clusters, proxies and grids: barrier.cluster, mapa, getctarank, fence.proxy, fence.mbarrier_init, setmaxnreg,
// griddepcontrol (PTX ISA 9.7.9.22, 9.7.9.23, 9.7.13.4, 9.7.13.5, 9.7.13.13, 9.7.19.5).
#include <algorithm>

#include "address_space.h"
#include "cluster_barrier.h"
#include "errors.h"
#include "lanes.h"
#include "machine.h"
#include "opcode_table.h"

namespace ptx_emulator {

void recheck_cluster_barrier(Cluster& cluster) {
    ClusterBarrier& barrier = cluster.barrier;
    bool any = false;
    for (const auto& cta : cluster.ctas) {
        for (const auto& warp : cta->warps) {
            const bool arrived =
                warp->cluster_barrier.arrived && warp->cluster_barrier.generation == barrier.generation;
            any |= arrived;
            if (!arrived && !warp->done()) return;
        }
    }
    if (!any) return;
    ++barrier.generation;
    cluster.machine.checker.join(barrier.completed, barrier.arriving);
    barrier.arriving = SyncClock{};
    cluster.machine.progressed();
}

namespace {

// x: relaxed
Step cluster_arrive(Warp& warp, const Instruction& i, LaneMask) {
    if (!warp.converged()) return Step::kBlock;
    Cluster& cluster = warp.cta.cluster;
    ClusterBarrierWait& wait = warp.cluster_barrier;
    if (wait.arrived) {
        raise(Fault::kIllegalInstruction, "barrier.cluster.arrive twice without barrier.cluster.wait between");
    }
    wait.arrived = true;
    wait.relaxed = i.x != 0;
    wait.generation = cluster.barrier.generation;
    Checker& checker = warp.machine.checker;
    if (i.x) {
        checker.join(cluster.barrier.arriving, checker.fenced(warp));
    } else {
        checker.release(warp, cluster.barrier.arriving);
    }
    warp.machine.progressed();
    recheck_cluster_barrier(cluster);
    return Step::kNext;
}

Step cluster_wait(Warp& warp, const Instruction&, LaneMask) {
    if (!warp.converged()) return Step::kBlock;
    ClusterBarrierWait& wait = warp.cluster_barrier;
    if (!wait.arrived) {
        raise(Fault::kIllegalInstruction, "barrier.cluster.wait without barrier.cluster.arrive before it");
    }
    const ClusterBarrier& barrier = warp.cta.cluster.barrier;
    if (barrier.generation == wait.generation) return Step::kBlock;
    Checker& checker = warp.machine.checker;
    if (wait.relaxed) {
        checker.acquire(warp, barrier.completed);
    } else {
        checker.leave_barrier(warp, barrier.completed);
    }
    wait.arrived = false;
    return Step::kNext;
}

std::string describe_cluster_wait(const Warp& warp, const Instruction&) {
    if (!warp.converged()) return "waits for its own lanes to come together";
    uint32_t arrived = 0, alive = 0;
    const Cluster& cluster = warp.cta.cluster;
    for (const auto& cta : cluster.ctas) {
        for (const auto& other : cta->warps) {
            alive += !other->done();
            arrived +=
                other->cluster_barrier.arrived && other->cluster_barrier.generation == cluster.barrier.generation;
        }
    }
    return format("waits at barrier.cluster: %u of %u warps have arrived", arrived, alive);
}

void decode_cluster_barrier(DecodeContext& c) {
    c.allow(1, "cluster arrive wait release relaxed acquire aligned");
    c.set_role(kRoleSynchronization);
    c.info.describe_wait = describe_cluster_wait;
    c.out.x = c.has("relaxed");
    c.out.handler = c.has("arrive") ? cluster_arrive : cluster_wait;
}

// a: address, b: CTA rank. The result is an address of the same kind: shared::cluster, or generic.
template <class T>
Step map_address(Warp& warp, const Instruction& i, LaneMask mask) {
    const T* a = warp.lanes<T>(i.a);
    const auto* rank = warp.lanes<uint32_t>(i.b);
    for_lanes(mask, [&](uint32_t lane) {
        if (rank[lane] >= warp.cta.cluster.ctas.size()) {
            raise(Fault::kIllegalAddress, "mapa to CTA rank %u of a cluster of %zu", rank[lane],
                  warp.cta.cluster.ctas.size());
        }
        const T rank_bits = static_cast<T>(rank[lane]) << kSharedRankShift;
        const T rank_mask = static_cast<T>(0xff) << kSharedRankShift;
        warp.lanes<T>(i.dst)[lane] = (a[lane] & ~rank_mask) | rank_bits;
    });
    return Step::kNext;
}

void decode_mapa(DecodeContext& c) {
    c.allow(1, "shared::cluster u32 u64");
    const uint32_t bytes = c.has("u64") ? 8 : 4;
    c.out.dst = c.write(0, bytes);
    c.out.a = c.read(1, bytes);
    c.out.b = c.read(2, 4);
    c.out.handler = bytes == 8 ? map_address<uint64_t> : map_address<uint32_t>;
}

template <class T>
Step rank_of_address(Warp& warp, const Instruction& i, LaneMask mask) {
    for_lanes(mask, [&](uint32_t lane) {
        warp.lanes<uint32_t>(i.dst)[lane] = static_cast<uint32_t>(warp.lanes<T>(i.a)[lane]) >> kSharedRankShift;
    });
    return Step::kNext;
}

void decode_getctarank(DecodeContext& c) {
    c.allow(1, "shared::cluster u32 u64");
    const uint32_t bytes = c.has("u64") ? 8 : 4;
    c.out.dst = c.write(0, 4);
    c.out.a = c.read(1, bytes);
    c.out.handler = bytes == 8 ? rank_of_address<uint64_t> : rank_of_address<uint32_t>;
}

// ---- fences

Step global_proxy_fence(Warp& warp, const Instruction&, LaneMask) {
    warp.machine.checker.global_proxy_fence(warp);
    return Step::kNext;
}

Step shared_proxy_fence(Warp& warp, const Instruction&, LaneMask) {
    warp.machine.checker.proxy_fence(warp);
    for (const auto& cta : warp.cta.cluster.ctas) {
        cta->shared.publish();
        cta->memory_barriers.publish(warp);
    }
    return Step::kNext;
}

Step proxy_fence(Warp& warp, const Instruction& instruction, LaneMask lanes) {
    global_proxy_fence(warp, instruction, lanes);
    return shared_proxy_fence(warp, instruction, lanes);
}

Step nothing(Warp&, const Instruction&, LaneMask) {
    return Step::kNext;
}

void decode_proxy_fence(DecodeContext& c) {
    c.allow(1,
            "proxy async alias tensormap::generic global shared::cta shared::cluster sc acquire release cta cluster "
            "gpu sys");
    const bool async = c.has("async");
    if (async) c.set_role(kRoleSynchronization);
    const bool shared = c.has("shared::cta") || c.has("shared::cluster");
    // Aliases and tensor maps in global memory: the emulator has one view of global memory.
    c.out.handler = !async ? nothing : c.has("global") ? global_proxy_fence : shared ? shared_proxy_fence : proxy_fence;
}

// Makes initialisations of mbarriers visible: to the async proxy, and through a later relaxed arrival. The checker
// takes it for a fence of everything, which is more than it is.
Step barrier_initialisation_fence(Warp& warp, const Instruction&, LaneMask) {
    warp.machine.checker.fence(warp);
    for (const auto& cta : warp.cta.cluster.ctas) cta->memory_barriers.publish(warp);
    return Step::kNext;
}

void decode_initialisation_fence(DecodeContext& c) {
    c.allow(1, "mbarrier_init release cluster");
    c.set_role(kRoleSynchronization);
    c.out.handler = barrier_initialisation_fence;
}

// ---- setmaxnreg

constexpr uint32_t kRegistersPerSm = 65536;

// What ptxas lets a thread have, by the launch bounds that setmaxnreg demands.
uint32_t launch_registers(const Warp& warp) {
    const auto threads = static_cast<uint32_t>(warp.machine.config.block.count());
    const uint32_t ctas = std::max(1u, warp.program.min_ctas_per_sm);
    return std::min(kRegistersPerSm / ctas / threads / 8 * 8, 256u);
}

// x: registers per thread, y: inc
Step set_registers(Warp& warp, const Instruction& i, LaneMask) {
    if (!warp.converged()) return Step::kBlock;
    if (warp.registers_per_thread == 0) warp.registers_per_thread = launch_registers(warp);
    const uint32_t now = warp.registers_per_thread;
    RegisterPool& pool = warp.cta.register_pool;
    if (i.y) {
        if (i.x < now) raise(Fault::kIllegalInstruction, "setmaxnreg.inc to %u registers, the warp has %u", i.x, now);
        const uint32_t wanted = (i.x - now) * kWarpSize;
        if (wanted > pool.free) return Step::kBlock;
        pool.free -= wanted;
    } else {
        if (i.x > now) raise(Fault::kIllegalInstruction, "setmaxnreg.dec to %u registers, the warp has %u", i.x, now);
        pool.free += (now - i.x) * kWarpSize;
        warp.machine.progressed();
    }
    warp.registers_per_thread = i.x;
    return Step::kNext;
}

std::string describe_set_registers(const Warp& warp, const Instruction& i) {
    const uint32_t now = warp.registers_per_thread ? warp.registers_per_thread : launch_registers(warp);
    return format("waits for registers: it has %u per thread and wants %u, %u are free in the CTA", now, i.x,
                  warp.cta.register_pool.free);
}

void decode_setmaxnreg(DecodeContext& c) {
    c.allow(1, "inc dec sync aligned u32");
    c.out.x = static_cast<uint32_t>(c.immediate(0));
    c.out.y = c.has("inc");
    if (c.out.x < 24 || c.out.x > 256 || c.out.x % 8) c.fail("setmaxnreg takes a multiple of 8 from 24 to 256");
    c.info.describe_wait = describe_set_registers;
    c.out.handler = set_registers;
}

// ---- griddepcontrol. Launches run one after another here; that the dependent grid may run beside its primary is the
// checker's knowledge (Checker::set_primaries).

Step wait_for_primary(Warp& warp, const Instruction&, LaneMask) {
    warp.machine.checker.primaries_done(warp);
    return Step::kNext;
}

void decode_griddepcontrol(DecodeContext& c) {
    c.allow(1, "wait launch_dependents");
    if (c.has("wait")) c.set_role(kRoleSynchronization);
    c.out.handler = c.has("wait") ? wait_for_primary : nothing;
}

}  // namespace

void register_cluster(OpcodeTable& table) {
    table.add("barrier.cluster", decode_cluster_barrier);
    table.add("mapa", decode_mapa);
    table.add("getctarank", decode_getctarank);
    table.add("fence.proxy", decode_proxy_fence);
    table.add("fence.mbarrier_init", decode_initialisation_fence);
    table.add("setmaxnreg", decode_setmaxnreg);
    table.add("griddepcontrol", decode_griddepcontrol);
}

}  // namespace ptx_emulator
