// Shadow memory of the checker: who accessed which bytes last.
#pragma once

#include <algorithm>
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

// Without initial values: arenas make many at once.
struct AccessRecord {
    uint32_t cluster;  // of the launch
    uint32_t epoch;
    uint32_t pc;
    uint16_t component;
    uint16_t bytes;  // mask within the granule
    uint16_t warp;   // CTA rank in its cluster * 32 + warp, for reports
    uint8_t lane;    // kManyLanes, kCollective, or the one
    AccessKind kind;
    bool async_proxy;
};

// Memory for records: taken in blocks of 1, 2, 4, ... of them, given back all at once with the arena.
class RecordArena {
  public:
    AccessRecord* take(uint32_t log2_count) {
        std::vector<AccessRecord*>& available = free_[log2_count];
        if (!available.empty()) {
            AccessRecord* records = available.back();
            available.pop_back();
            return records;
        }
        const size_t count = size_t{1} << log2_count;
        if (count > left_) {
            left_ = std::max(count, kChunk);
            chunks_.emplace_back(new AccessRecord[left_]);
            next_ = chunks_.back().get();
        }
        AccessRecord* records = next_;
        next_ += count;
        left_ -= count;
        return records;
    }
    void give(AccessRecord* records, uint32_t log2_count) { free_[log2_count].push_back(records); }

  private:
    static constexpr size_t kChunk = 1024;
    std::vector<std::unique_ptr<AccessRecord[]>> chunks_;
    std::vector<AccessRecord*> free_[16];
    AccessRecord* next_ = nullptr;
    size_t left_ = 0;
};

// The records of 16 bytes that may still matter; few in practice. They live in the arena that push() is given, always
// the same one.
class Granule {
  public:
    AccessRecord* begin() { return records_; }
    AccessRecord* end() { return records_ + size_; }
    const AccessRecord* begin() const { return records_; }
    const AccessRecord* end() const { return records_ + size_; }
    uint32_t size() const { return size_; }
    AccessRecord& operator[](size_t i) { return records_[i]; }
    void push(const AccessRecord& record, RecordArena& arena) {
        if (size_ == capacity()) grow(arena);
        records_[size_++] = record;
    }
    // The last record takes the place of the i-th.
    void remove(size_t i) { records_[i] = records_[--size_]; }

  private:
    uint32_t capacity() const { return records_ ? 1u << log2_capacity_ : 0; }
    void grow(RecordArena& arena) {
        const uint32_t log2_count = records_ ? log2_capacity_ + 1u : 1u;
        AccessRecord* records = arena.take(log2_count);
        std::copy(begin(), end(), records);
        if (records_) arena.give(records_, log2_capacity_);
        records_ = records;
        log2_capacity_ = static_cast<uint16_t>(log2_count);
    }

    AccessRecord* records_ = nullptr;
    uint16_t size_ = 0, log2_capacity_ = 0;
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
