// Matrix products of the sm100 kernels: descriptors of tiles in panels (sm90/panel.cuh), and the instructions of a
// whole tile. One thread issues them.
#pragma once

#include <stdint.h>

#include "params.h"
#include "ptx/tcgen05.cuh"
#include "sm90/panel.cuh"

namespace flash_ext::sm100 {

// PTX ISA 9.7.16.4.1 (shared memory descriptor) of a tile in panels: what may differ, start and distance of panels, in
// its lower half, so that stepping through the tile is one 32-bit addition. leading_bytes: from a panel to the next
// where the operand is MN-major; 16 (one unit, unused) where it is K-major.
__device__ __forceinline__ uint32_t panel_descriptor(uint32_t address_smem, uint32_t leading_bytes) {
    return (address_smem & 0x3ffff) >> 4 | leading_bytes >> 4 << 16;
}

__device__ __forceinline__ uint64_t whole_descriptor(uint32_t lower) {
    constexpr uint64_t kStride = sm90::kSwizzleRows * sm90::kPanelRowBytes >> 4;
    constexpr uint64_t kUpper = kStride << 32 | uint64_t{1} << 46 | uint64_t{2} << 61;  // fixed bit; 128-byte swizzle
    return kUpper | lower;
}

// PTX ISA 9.7.16.4.2 (instruction descriptor): fp32 accumulators of kM x kN, A K-major.
template <DataType kType, int kM, int kN, bool kBIsMnMajor>
__device__ constexpr uint32_t instruction_descriptor() {
    static_assert(kM % 16 == 0 && kN % 16 == 0 && kN <= 256);
    constexpr uint32_t kFormat = kType == DataType::kFloat16 ? 0 : 1, kFloat32 = 1;
    return kFloat32 << 4 | kFormat << 7 | kFormat << 10 | (kBIsMnMajor ? 1u : 0u) << 16 | uint32_t{kN} / 8 << 17 |
           uint32_t{kM} / 16 << 24;
}

}  // namespace flash_ext::sm100
