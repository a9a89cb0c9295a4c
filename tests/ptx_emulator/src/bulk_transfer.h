// What the bulk copies of ops_bulk.cpp and ops_tensor_copy.cpp share: pieces to move, and where they complete.
#pragma once

#include <vector>

#include "bulk_copy.h"
#include "bulk_reduction.h"
#include "machine.h"
#include "memory.h"

namespace ptx_emulator {

// Bytes that lie together on both sides.
struct BulkPiece {
    uint64_t address = 0;  // global; 0: zeros (or the fill) are written to shared memory
    uint32_t offset = 0;   // in shared memory
    uint32_t bytes = 0;
    bool operator==(const BulkPiece& o) const { return address == o.address && offset == o.offset && bytes == o.bytes; }
};

// Copies pieces from global memory into shared memory of `to`, and counts `bytes` on the mbarrier when done. fill: the
// element that stands for what lies outside of a tensor, of fill_bytes bytes.
void load_pieces(Warp& warp, uint32_t lane, Cta& to, std::vector<BulkPiece> pieces, uint32_t bytes,
                 const MemoryReference& barrier, uint32_t fill, uint32_t fill_bytes);

// Copies (reduction nullptr) or reduces pieces of the CTA's shared memory into global memory, in the lane's bulk group.
// repeated: another lane of the instruction makes the same copy; for the checker the two are one.
void store_pieces(Warp& warp, uint32_t lane, Cta& from, std::vector<BulkPiece> pieces, Reduction reduction,
                  bool repeated = false);

// The mbarrier of a bulk copy; reports one whose initialisation no fence made visible to the async proxy.
MemoryReference bulk_barrier(Warp& warp, uint32_t lane, uint32_t address);

}  // namespace ptx_emulator
