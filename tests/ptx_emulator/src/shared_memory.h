// Shared memory of a CTA in two views: what the generic proxy (ld, st, ldmatrix, cp.async) sees, and what the async
// proxy (bulk copies, TMA, wgmma, tcgen05) sees. A generic write reaches the async view at the next proxy fence only
// (PTX ISA, "Async proxy"); an async write reaches both. Kernels without async-proxy instructions keep one view.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace ptx_emulator {

class SharedMemory {
  public:
    // Filled with 0xff: what nothing wrote reads as NaN or as a wild index.
    void reset(uint32_t bytes, bool two_views) {
        generic_.assign(bytes, 0xff);
        async_.assign(two_views ? bytes : 0, 0xff);
        unpublished_.clear();
    }
    uint32_t size() const { return static_cast<uint32_t>(generic_.size()); }
    bool two_views() const { return !async_.empty(); }

    // Bounds are the caller's business (memory.h).
    uint8_t* generic(uint32_t offset) { return generic_.data() + offset; }
    const uint8_t* async(uint32_t offset) const { return (two_views() ? async_ : generic_).data() + offset; }

    // To be called after every generic write.
    void written_by_generic(uint32_t offset, uint32_t bytes) {
        if (!two_views()) return;
        if (unpublished_.size() < kMaxUnpublished) {
            unpublished_.emplace_back(offset, bytes);
        } else {
            unpublished_.assign(1, {0, size()});  // async writes are in both views, so all of it may be copied
        }
    }
    void write_by_async(uint32_t offset, const void* data, uint32_t bytes) {
        std::memcpy(generic_.data() + offset, data, bytes);
        if (two_views()) std::memcpy(async_.data() + offset, data, bytes);
    }
    // fence.proxy.async
    void publish() {
        for (const auto& [offset, bytes] : unpublished_) {
            std::memcpy(async_.data() + offset, generic_.data() + offset, bytes);
        }
        unpublished_.clear();
    }

  private:
    static constexpr size_t kMaxUnpublished = 1u << 20;

    std::vector<uint8_t> generic_, async_;
    std::vector<std::pair<uint32_t, uint32_t>> unpublished_;  // offset, bytes
};

}  // namespace ptx_emulator
