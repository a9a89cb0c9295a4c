#include "special_register.h"

#include <map>

#include "machine.h"

namespace ptx_emulator {

namespace {

Dim3 thread_of(const Warp& warp, uint32_t lane) {
    const Dim3& block = warp.machine.config.block;
    const uint32_t thread = warp.index * kWarpSize + lane;
    return {thread % block.x, thread / block.x % block.y, thread / block.x / block.y};
}
Dim3 block_of(const Warp& warp, uint32_t) {
    return warp.machine.config.block;
}
Dim3 cta_of(const Warp& warp, uint32_t) {
    return warp.cta.id;
}
Dim3 grid_of(const Warp& warp, uint32_t) {
    return warp.machine.config.grid;
}
Dim3 cluster_of(const Warp& warp, uint32_t) {
    const Dim3 &id = warp.cta.id, &size = warp.machine.config.cluster;
    return {id.x / size.x, id.y / size.y, id.z / size.z};
}
Dim3 clusters_of(const Warp& warp, uint32_t) {
    const Dim3 &grid = warp.machine.config.grid, &size = warp.machine.config.cluster;
    return {grid.x / size.x, grid.y / size.y, grid.z / size.z};
}
Dim3 cta_in_cluster(const Warp& warp, uint32_t) {
    const Dim3 &id = warp.cta.id, &size = warp.machine.config.cluster;
    return {id.x % size.x, id.y % size.y, id.z % size.z};
}
Dim3 cluster_size(const Warp& warp, uint32_t) {
    return warp.machine.config.cluster;
}

using Vector = Dim3 (*)(const Warp&, uint32_t);

template <Vector vector, uint32_t Dim3::* component>
uint64_t component_of(const Warp& warp, uint32_t lane) {
    return vector(warp, lane).*component;
}

uint64_t below(uint32_t lane) {
    return lane_bit(lane) - 1;
}

std::map<std::string, SpecialValue> known_registers() {
    std::map<std::string, SpecialValue> known = {
        {"%laneid", [](const Warp&, uint32_t lane) -> uint64_t { return lane; }},
        {"%warpid", [](const Warp& warp, uint32_t) -> uint64_t { return warp.index; }},
        {"%nwarpid",
         [](const Warp& warp, uint32_t) -> uint64_t {
             return (warp.machine.config.block.count() + kWarpSize - 1) / kWarpSize;
         }},
        {"%cluster_ctarank", [](const Warp& warp, uint32_t) -> uint64_t { return warp.cta.rank; }},
        {"%cluster_nctarank", [](const Warp& warp, uint32_t) { return warp.machine.config.cluster.count(); }},
        {"%is_explicit_cluster",
         [](const Warp& warp, uint32_t) -> uint64_t { return warp.machine.config.cluster.count() > 1; }},
        {"%smid", [](const Warp& warp, uint32_t) -> uint64_t { return warp.cta.sm; }},
        {"%nsmid", [](const Warp& warp, uint32_t) -> uint64_t { return warp.machine.device.sm_count; }},
        {"%gridid", [](const Warp&, uint32_t) -> uint64_t { return 1; }},
        {"%lanemask_eq", [](const Warp&, uint32_t lane) -> uint64_t { return lane_bit(lane); }},
        {"%lanemask_lt", [](const Warp&, uint32_t lane) { return below(lane); }},
        {"%lanemask_le", [](const Warp&, uint32_t lane) { return lane_bit(lane) | below(lane); }},
        {"%lanemask_gt", [](const Warp&, uint32_t lane) { return ~(lane_bit(lane) | below(lane)); }},
        {"%lanemask_ge", [](const Warp&, uint32_t lane) { return ~below(lane); }},
        {"%dynamic_smem_size",
         [](const Warp& warp, uint32_t) -> uint64_t { return warp.machine.config.dynamic_shared; }},
        {"%total_smem_size", [](const Warp& warp, uint32_t) -> uint64_t { return warp.machine.shared_bytes(); }},
    };
    const struct {
        const char* name;
        SpecialValue x, y, z;
    } vectors[] = {
#define FLASH_EXT_VECTOR(name, vector) \
    {name, component_of<vector, &Dim3::x>, component_of<vector, &Dim3::y>, component_of<vector, &Dim3::z>}
        FLASH_EXT_VECTOR("%tid", thread_of),
        FLASH_EXT_VECTOR("%ntid", block_of),
        FLASH_EXT_VECTOR("%ctaid", cta_of),
        FLASH_EXT_VECTOR("%nctaid", grid_of),
        FLASH_EXT_VECTOR("%clusterid", cluster_of),
        FLASH_EXT_VECTOR("%nclusterid", clusters_of),
        FLASH_EXT_VECTOR("%cluster_ctaid", cta_in_cluster),
        FLASH_EXT_VECTOR("%cluster_nctaid", cluster_size),
#undef FLASH_EXT_VECTOR
    };
    for (const auto& [name, x, y, z] : vectors) {
        known[std::string(name) + ".x"] = x;
        known[std::string(name) + ".y"] = y;
        known[std::string(name) + ".z"] = z;
    }
    // Read by mov at run time (ops_move.cpp).
    for (const char* clock :
         {"%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"}) {
        known[clock] = [](const Warp&, uint32_t) -> uint64_t { return 0; };
    }
    return known;
}

}  // namespace

SpecialValue find_special_register(const std::string& name) {
    static const auto* known = new std::map<std::string, SpecialValue>(known_registers());
    const auto it = known->find(name);
    return it == known->end() ? nullptr : it->second;
}

}  // namespace ptx_emulator
