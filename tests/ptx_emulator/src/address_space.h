// Addresses. A shared address is (CTA rank in its cluster << 24) | offset, as shared::cluster addresses are; a generic
// address carries its space in the top four bits, and is a host pointer when they are 0.
#pragma once

#include <cstdint>

namespace ptx_emulator {

constexpr uint32_t kSharedRankShift = 24;
constexpr uint32_t kSharedOffsetMask = (1u << kSharedRankShift) - 1;
constexpr uint64_t kSharedTag = uint64_t{1} << 60;
constexpr uint64_t kLocalTag = uint64_t{2} << 60;

constexpr bool is_shared_generic(uint64_t address) {
    return address >> 60 == 1;
}
constexpr bool is_local_generic(uint64_t address) {
    return address >> 60 == 2;
}

}  // namespace ptx_emulator
