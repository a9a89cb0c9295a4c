// What threads of a cluster write into each other's shared memory.
#pragma once

#include <stdint.h>

namespace flash_ext::ptx {

// PTX ISA 9.7.9.11 (st.shared::cluster.v4.b32). 16-byte aligned; the address may be that of another CTA (mapa).
__device__ __forceinline__ void st_shared_cluster_v4_b32(uint32_t address_cluster, uint4 value) {
    asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address_cluster), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}

}  // namespace flash_ext::ptx
