// The order in which a one-dimensional grid walks (batch, head, tile).
//
// Heads are taken in sections. Within a section the tile is the slow index and the head the fast one, so that with
// heaviest_first the long tiles of every head start before the short ones; a section's keys and values fit the L2
// cache, so that the tiles of a head that run at the same time read them from there. A section of one head walks its
// tiles in order. The query heads of one key head are neighbours.
#pragma once

#include <stdint.h>

namespace flash_ext {

struct TileOrder {
    int64_t heads;           // batch * heads (dense) or heads (packed)
    int32_t tiles;           // per head
    int32_t section;         // heads per section
    int32_t heaviest_first;  // 1: tiles from the last to the first
};

struct TileIndex {
    int64_t head;
    int32_t tile;
};

inline TileOrder make_tile_order(int64_t heads, int64_t tiles, bool heaviest_first, int64_t key_bytes_per_head) {
    // Half of the smallest L2 cache of the data-centre parts; too few heads would leave a long tile to the end.
    constexpr int64_t kSectionBytes = int64_t{20} << 20, kMinHeads = 8;
    int64_t section = 1;
    if (heaviest_first) {
        section = key_bytes_per_head > 0 ? kSectionBytes / key_bytes_per_head : heads;
        section = section < kMinHeads ? kMinHeads : section;
        section = section > 4096 ? 4096 : section;
        section = section > heads ? heads : section;
    }
    return {heads, static_cast<int32_t>(tiles), static_cast<int32_t>(section < 1 ? 1 : section), heaviest_first};
}

__device__ __forceinline__ TileIndex tile_at(const TileOrder& order, uint64_t position) {
    const uint64_t per_section = static_cast<uint64_t>(order.section) * static_cast<uint32_t>(order.tiles);
    const int64_t section = static_cast<int64_t>(position / per_section);
    const uint64_t rest = position - section * per_section;
    const int64_t first_head = section * order.section;
    const uint64_t heads = static_cast<uint64_t>(min(static_cast<int64_t>(order.section), order.heads - first_head));
    const int32_t tile = static_cast<int32_t>(rest / heads);
    const int32_t head = static_cast<int32_t>(rest - tile * heads);
    return {first_head + head, order.heaviest_first ? order.tiles - 1 - tile : tile};
}

}  // namespace flash_ext
