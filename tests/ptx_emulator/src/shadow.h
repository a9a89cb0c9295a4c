// Shadow memory of the checker: who accessed which bytes last.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace ptx_emulator {

enum class AccessKind : uint8_t {
    kRead,
    kWrite,
    kStrongRead,  // volatile, relaxed or acquire: does not race with other strong accesses
    kAtomic,      // a read-modify-write, or a strong write
    kFloatAdd,    // an atomic whose result depends on the order (FLASH_EXT_EMULATOR_DETERMINISTIC)
};

constexpr bool writes(AccessKind kind) {
    return kind != AccessKind::kRead && kind != AccessKind::kStrongRead;
}
constexpr bool is_strong(AccessKind kind) {
    return kind != AccessKind::kRead && kind != AccessKind::kWrite;
}

constexpr uint32_t kGranuleBytes = 16;

// In place of a lane: several lanes of a warp, each for itself; or the warp as a whole (ldmatrix).
constexpr uint32_t kManyLanes = 32;
constexpr uint32_t kCollective = 33;

struct AccessRecord {
    uint32_t cluster = 0;  // of the launch
    uint32_t epoch = 0;
    uint32_t pc = 0;
    uint16_t component = 0;
    uint16_t bytes = 0;  // mask within the granule
    uint16_t warp = 0;   // CTA rank in its cluster * 32 + warp, for reports
    uint8_t lane = 0;    // kManyLanes, kCollective, or the one
    AccessKind kind = AccessKind::kRead;
    bool async_proxy = false;
};

// The records of 16 bytes that may still matter. Few in practice, so they live in place until there are many.
class Granule {
  public:
    std::vector<AccessRecord>& records() { return records_; }
    const std::vector<AccessRecord>& records() const { return records_; }

  private:
    std::vector<AccessRecord> records_;
};

// Sparse shadow of global memory, by 4 KiB page.
class ShadowPages {
  public:
    Granule& at(uint64_t address) {
        const uint64_t page = address >> 12;
        if (page != last_page_ || !last_) {
            auto& slot = pages_[page];
            if (!slot) slot = std::make_unique<Page>();
            last_ = slot.get();
            last_page_ = page;
        }
        return last_->granules[(address & 4095) / kGranuleBytes];
    }

    const Granule* find(uint64_t address) const {
        const auto it = pages_.find(address >> 12);
        return it == pages_.end() ? nullptr : &it->second->granules[(address & 4095) / kGranuleBytes];
    }

  private:
    struct Page {
        Granule granules[4096 / kGranuleBytes];
    };
    std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;
    uint64_t last_page_ = 0;
    Page* last_ = nullptr;
};

}  // namespace ptx_emulator
