// Tensor memory (PTX ISA 9.7.16.1): 128 lanes of 512 columns of 32 bits per CTA, and who uses it.
#pragma once

#include <cstdint>
#include <vector>

#include "async_engine.h"
#include "shadow.h"
#include "types.h"
#include "vector_clock.h"

namespace ptx_emulator {

constexpr uint32_t kTensorLanes = 128;
constexpr uint32_t kTensorColumns = 512;
constexpr uint32_t kTensorAllocationUnit = 32;  // columns
constexpr uint32_t kTensorSlice = 16;           // lanes that the checker tells apart

// Of a CTA.
class TensorMemory {
  public:
    // Raises when columns [column, column + count) are not all allocated by this CTA.
    void require_allocated(uint32_t column, uint32_t count) const;
    // The same for an access, but columns that the CTA has had and freed are a hazard: the access may be earlier in
    // another schedule.
    void check_access(Warp& by, uint32_t column, uint32_t count) const;
    uint32_t* at(uint32_t lane, uint32_t column) {
        if (cells_.empty()) cells_.assign(size_t{kTensorLanes} * kTensorColumns, 0xffffffffu);
        return &cells_[size_t{lane % kTensorLanes} * kTensorColumns + column];
    }
    std::vector<Granule>& shadow() {
        if (shadow_.empty()) shadow_.resize(kTensorColumns);
        return shadow_;
    }

    uint16_t allocated = 0;                       // one bit per allocation unit
    uint16_t freed = 0;                           // units that have been allocated before
    uint32_t latest_allocation = kTensorColumns;  // columns; later ones must not be larger
    bool relinquished = false;
    AccessRecord allocations[kTensorColumns / kTensorAllocationUnit] = {};  // the latest of each unit

  private:
    // The first unit of these columns that is not in a mask, or -1.
    int first_missing(uint16_t units, uint32_t column, uint32_t count) const;

    std::vector<uint32_t> cells_;  // filled with 0xff: NaN
    std::vector<Granule> shadow_;  // per column, a bit per slice of lanes
};

// The tensor core of a CTA, or of a pair (the even CTA's): products and commits one after another.
struct TensorPipe {
    TensorPipe() : queue(AsyncQueue::Order::kFifo, AsyncQueue::Trigger::kIdle) {}
    AsyncQueue queue;
};

// An allocation that both CTAs of a pair make: the first to come decides where.
struct PairAllocation {
    uint16_t columns = 0;  // bits of allocation units
    bool taken[2] = {false, false};
};

// Of a warp: its loads and stores between tcgen05.wait, its products between tcgen05.commit.
struct TensorMemoryAccess {
    TensorMemoryAccess() : stores(AsyncQueue::Order::kAny, AsyncQueue::Trigger::kWait) {}
    AsyncQueue stores;
    bool has_streams = false;
    Component load_stream = 0, store_stream = 0, product_stream = 0;
    uint32_t load_epoch = 1, store_epoch = 1, product_epoch = 1;
    bool stores_outstanding = false;
    void make_streams(Warp& warp);
};

}  // namespace ptx_emulator
