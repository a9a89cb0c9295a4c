// What the emulator keeps in the 128 opaque bytes of a CUtensorMap.
#pragma once

#include <cstdint>

namespace ptx_emulator {

constexpr uint64_t kTensorMapMagic = 0x3150414d52534e54ull;  // "TNSRMAP1"

// In the order of CUtensorMapSwizzle. k128Atom32: 128 bytes whose chunks have 32 bytes, the others' have 16.
enum class Swizzle : uint8_t { kNone = 0, k32 = 1, k64 = 2, k128 = 3, k128Atom32 = 4 };

struct TensorMap {
    uint64_t magic;
    uint64_t base;       // global address, 16-byte aligned
    uint64_t dim[5];     // elements; [0] is the contiguous one
    uint64_t stride[4];  // bytes between elements of dimension 1, 2, ...
    uint16_t box[5];     // elements
    uint8_t rank;
    uint8_t data_type;  // CUtensorMapDataType
    uint8_t element_bytes;
    Swizzle swizzle;
    uint8_t nan_fill;  // 1: elements outside of the tensor read as NaN
};
static_assert(sizeof(TensorMap) <= 128, "it replaces a CUtensorMap");

}  // namespace ptx_emulator
