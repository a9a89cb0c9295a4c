// The order in which a one-dimensional grid walks (batch, head, tile).
//
// Heads are taken in sections. Within a section the tile is the slow index and the head the fast one, so that with
// heaviest_first the long tiles of every head start before the short ones; what a section's tiles read in common fits
// the L2 cache (unless the least number of heads is too many), so that tiles of a head that run at once find it there.
// A section of one head walks its tiles in order. The query heads of one key head are neighbours.
#pragma once

#include <stdint.h>

#include "core/fast_division.cuh"

namespace flash_ext {

struct TileOrder {
    int64_t heads;             // batch * heads (dense) or heads (packed)
    int32_t tiles;             // per head
    int32_t heaviest_first;    // 1: tiles from the last to the first
    FastDivisor section;       // heads of a section
    FastDivisor last_section;  // of the last one
    FastDivisor per_section;   // tiles of a section
    int64_t sections;
    int32_t is_large;  // 1: positions beyond 2^31, so divide in 64 bits
};

struct TileIndex {
    int64_t head;
    int32_t tile;
};

// Sections of about `section` heads, each with its tiles in order. least_last: if more, of exactly `section` heads, and
// a last one of at least least_last and less than least_last + section.
inline TileOrder ascending_order(int64_t heads, int64_t tiles, int64_t section, int64_t least_last = 0) {
    // The rest of the division goes to the last section: it decides how evenly the launch ends, so it must not be
    // small.
    int64_t sections = heads > section ? heads / section : 1;
    if (least_last > section) {
        sections = heads > least_last ? (heads - least_last) / section + 1 : 1;
    } else {
        section = heads / sections > 0 ? heads / sections : 1;
    }
    TileOrder order;
    order.heads = heads;
    order.tiles = static_cast<int32_t>(tiles);
    order.heaviest_first = 0;
    order.section = make_fast_divisor(static_cast<uint32_t>(section));
    order.last_section = make_fast_divisor(static_cast<uint32_t>(heads - (sections - 1) * section));
    order.is_large = heads * tiles > INT32_MAX;
    order.per_section = make_fast_divisor(order.is_large ? 1 : static_cast<uint32_t>(section * tiles));
    order.sections = sections;
    return order;
}

// key_bytes_per_head: the keys and values that the tiles of a head read.
inline TileOrder make_tile_order(int64_t heads, int64_t tiles, bool heaviest_first, int64_t key_bytes_per_head) {
    // About half of the L2 cache of the data-centre parts. Too few heads would leave a long tile to the end.
    constexpr int64_t kSectionBytes = int64_t{20} << 20, kMinHeads = 8, kMaxHeads = 4096;
    int64_t section = 1;
    if (heaviest_first) {
        section = key_bytes_per_head > 0 ? kSectionBytes / key_bytes_per_head : kMaxHeads;
        section = section < kMinHeads ? kMinHeads : section;
        section = section > kMaxHeads ? kMaxHeads : section;
    }
    TileOrder order = ascending_order(heads, tiles, section);
    order.heaviest_first = heaviest_first;
    return order;
}

// position: below heads * tiles.
__device__ __forceinline__ TileIndex tile_at(const TileOrder& order, uint64_t position) {
    TileIndex index;
    if (order.is_large) {
        const uint64_t section = order.section.divisor;
        const uint64_t last = static_cast<uint64_t>(order.sections) - 1;
        const uint64_t number = min(position / (section * order.tiles), last);
        const uint64_t first_head = number * section;
        const uint64_t rest = position - first_head * order.tiles;
        const uint64_t heads_here = number == last ? static_cast<uint64_t>(order.heads) - first_head : section;
        index.head = static_cast<int64_t>(first_head + rest % heads_here);
        index.tile = static_cast<int32_t>(rest / heads_here);
    } else {
        const uint32_t last = static_cast<uint32_t>(order.sections) - 1;
        const uint32_t number = min(divide(static_cast<uint32_t>(position), order.per_section).quotient, last);
        const uint32_t rest = static_cast<uint32_t>(position) - number * order.per_section.divisor;
        const Quotient tile = divide(rest, number == last ? order.last_section : order.section);
        index.head = number * order.section.divisor + tile.remainder;
        index.tile = static_cast<int32_t>(tile.quotient);
    }
    if (order.heaviest_first) index.tile = order.tiles - 1 - index.tile;
    return index;
}

}  // namespace flash_ext
