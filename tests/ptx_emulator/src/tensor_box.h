// A box of a tensor, as TMA moves it: rows of the innermost dimension, what lies outside of the tensor left out, and
// the swizzle of the shared side (PTX ISA 5.5, "Tensors").
#pragma once

#include <algorithm>
#include <cstdint>

#include "tensor_map.h"

namespace ptx_emulator {

// Permutes the 16-byte chunks of 1024 (512, 256) bytes: address bits 4 and up are changed by bits 7 and up; or the
// 32-byte chunks of 512 bytes.
constexpr uint32_t swizzle_address(uint32_t address, Swizzle swizzle) {
    if (swizzle == Swizzle::k128Atom32) return address ^ (address >> 7 & 3) << 5;
    const uint32_t bits = (1u << static_cast<uint32_t>(swizzle)) - 1;
    return address ^ (address >> 7 & bits) << 4;
}

inline uint32_t row_bytes(const TensorMap& map) {
    return uint32_t{map.box[0]} * map.element_bytes;
}

inline uint32_t box_bytes(const TensorMap& map) {
    uint32_t bytes = row_bytes(map);
    for (uint32_t d = 1; d < map.rank; ++d) bytes *= map.box[d];
    return bytes;
}

struct BoxRow {
    uint64_t address;       // global, of the element first
    uint32_t first, count;  // elements of the row that are inside of the tensor
    uint32_t offset;        // of the row in the box, bytes, before swizzling
};

// Calls f(BoxRow) for each row of the box at these coordinates; count is 0 for rows outside.
template <class F>
void for_box_rows(const TensorMap& map, const int32_t (&origin)[5], F f) {
    uint32_t rows = 1;
    for (uint32_t d = 1; d < map.rank; ++d) rows *= map.box[d];
    const int64_t first = std::max<int64_t>(0, -int64_t{origin[0]});
    const int64_t last = std::min<int64_t>(map.box[0], static_cast<int64_t>(map.dim[0]) - origin[0]);
    for (uint32_t row = 0; row < rows; ++row) {
        uint32_t rest = row;
        bool inside = last > first;
        int64_t offset = 0;
        for (uint32_t d = 1; d < map.rank; ++d) {
            const int64_t x = int64_t{origin[d]} + rest % map.box[d];
            rest /= map.box[d];
            inside &= x >= 0 && x < static_cast<int64_t>(map.dim[d]);
            offset += x * static_cast<int64_t>(map.stride[d - 1]);
        }
        BoxRow result{0, 0, 0, row * row_bytes(map)};
        if (inside) {
            result.first = static_cast<uint32_t>(first);
            result.count = static_cast<uint32_t>(last - first);
            result.address = map.base + static_cast<uint64_t>(offset + (origin[0] + first) * map.element_bytes);
        }
        f(result);
    }
}

}  // namespace ptx_emulator
