// Shadow memory of the checker: who accessed which bytes last.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
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

// 16 bytes, because a granule's records are what the checker reads most. Without initial values: arenas make many at
// once.
struct AccessRecord {
    uint32_t cluster;  // of the launch
    uint16_t component;
    uint16_t bytes;            // mask within the granule
    uint32_t epoch : 28;       // of the component
    uint32_t async_proxy : 1;  // through it
    uint32_t kind_bits : 3;    // AccessKind
    uint32_t pc : 17;
    uint32_t lane : 6;  // kManyLanes, kCollective, or the one
    uint32_t warp : 9;  // CTA rank in its cluster * 32 + warp, for reports

    AccessKind kind() const { return static_cast<AccessKind>(kind_bits); }
};
static_assert(sizeof(AccessRecord) == 16, "four to a cache line");
constexpr size_t kMaxCheckedInstructions = size_t{1} << 17;  // of a kernel

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
    std::vector<AccessRecord*> free_[24];
    AccessRecord* next_ = nullptr;
    size_t left_ = 0;
};

// The records of 16 bytes that may still matter: few in practice, so that one cache line has them; the others are in
// the arena that push() is given, always the same one.
class alignas(64) Granule {
  public:
    uint32_t size() const { return size_; }
    AccessRecord& operator[](uint32_t i) { return i < kInline ? inline_[i] : more_[i - kInline]; }
    const AccessRecord& operator[](uint32_t i) const { return i < kInline ? inline_[i] : more_[i - kInline]; }
    void push(const AccessRecord& record, RecordArena& arena) {
        if (size_ >= kInline && size_ - kInline == capacity_) grow(arena);
        ++size_;
        (*this)[size_ - 1] = record;
    }
    // The last record takes the place of the i-th.
    void remove(uint32_t i) {
        (*this)[i] = (*this)[size_ - 1];
        --size_;
    }
    bool holds(const AccessRecord* records, uint32_t count) const {
        if (size_ != count) return false;
        const uint32_t near = std::min(count, kInline);
        return same(inline_, records, near) && (count == near || same(more_, records + near, count - near));
    }
    // Those from the first-th on: the ones before are what they were.
    void assign(const AccessRecord* records, uint32_t first, uint32_t count, RecordArena& arena) {
        while (count > kInline + capacity_) grow(arena);
        size_ = count;
        for (uint32_t i = first; i < count; ++i) (*this)[i] = records[i];
    }
    void prefetch_more() const { __builtin_prefetch(more_); }

  private:
    static constexpr uint32_t kInline = 3;

    static bool same(const AccessRecord* a, const AccessRecord* b, uint32_t count) {
        uint64_t difference = 0;
        for (uint32_t i = 0; i < count; ++i) {
            uint64_t x[2], y[2];
            std::memcpy(x, &a[i], sizeof x);
            std::memcpy(y, &b[i], sizeof y);
            difference |= (x[0] ^ y[0]) | (x[1] ^ y[1]);
        }
        return difference == 0;
    }
    void grow(RecordArena& arena) {
        const uint32_t log2_count = capacity_ ? static_cast<uint32_t>(__builtin_ctz(capacity_)) + 1 : 1;
        AccessRecord* records = arena.take(log2_count);
        std::copy(more_, more_ + capacity_, records);
        if (capacity_) arena.give(more_, log2_count - 1);
        more_ = records;
        capacity_ = 1u << log2_count;
    }

    AccessRecord inline_[kInline];
    AccessRecord* more_ = nullptr;
    uint32_t size_ = 0, capacity_ = 0;  // capacity of more_
};

// What an access has done to the records of a granule. The granules of a tile mostly have the same records, for they
// are accessed together: then the same access does the same to the next one, and has nothing new to report.
class Repetition {
  public:
    bool matches(const Granule& granule, uint16_t bytes) const {
        return known_ && bytes == bytes_ && granule.holds(before_, before_size_);
    }
    void repeat(Granule& granule, RecordArena& arena) const { granule.assign(after_, kept_, after_size_, arena); }
    void begin(const Granule& granule, uint16_t bytes) {
        bytes_ = bytes;
        before_size_ = copy(granule, before_);
    }
    void end(const Granule& granule) {
        after_size_ = copy(granule, after_);
        known_ = before_size_ <= kMost && after_size_ <= kMost;
        if (!known_) return;
        kept_ = 0;
        const uint32_t common = std::min(before_size_, after_size_);
        while (kept_ < common && std::memcmp(&before_[kept_], &after_[kept_], sizeof(AccessRecord)) == 0) ++kept_;
    }

  private:
    static constexpr uint32_t kMost = 24;

    static uint32_t copy(const Granule& granule, AccessRecord* records) {
        for (uint32_t i = 0; i < std::min(granule.size(), kMost); ++i) records[i] = granule[i];
        return granule.size();
    }

    AccessRecord before_[kMost], after_[kMost];
    uint32_t before_size_ = 0, after_size_ = 0;
    uint32_t kept_ = 0;  // records that are the same before and after
    uint16_t bytes_ = 0;
    bool known_ = false;
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
