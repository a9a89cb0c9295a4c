// Shadow memory of the checker: who accessed which bytes last.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
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

// The records of one granule that may still matter, or of several granules that have the same: then nobody changes them
// (copy on write). The records lie behind this head, three of them in the same cache line.
struct alignas(16) RecordList {
    uint32_t references;  // of granules, and of a Repetition
    uint32_t size;
    uint32_t log2_lines;  // cache lines that it takes

    AccessRecord* records() { return reinterpret_cast<AccessRecord*>(this + 1); }
    const AccessRecord* records() const { return reinterpret_cast<const AccessRecord*>(this + 1); }
    uint32_t capacity() const { return (4u << log2_lines) - 1; }
};
static_assert(sizeof(RecordList) == sizeof(AccessRecord), "a head in place of a record");

// Memory for lists of records: taken in blocks of 1, 2, 4, ... cache lines, given back all at once with the arena.
class RecordArena {
  public:
    RecordList* take(uint32_t log2_lines) {
        RecordList* list = available_[log2_lines];
        if (list) {
            std::memcpy(&available_[log2_lines], list->records(), sizeof(RecordList*));
        } else {
            const size_t count = size_t{1} << log2_lines;
            if (count > left_) add_chunk(count);
            list = new (next_) RecordList;
            next_ += count;
            left_ -= count;
        }
        list->references = 1;
        list->size = 0;
        list->log2_lines = log2_lines;
        return list;
    }
    void release(RecordList* list) {
        if (--list->references) return;
        std::memcpy(list->records(), &available_[list->log2_lines], sizeof(RecordList*));
        available_[list->log2_lines] = list;
    }

  private:
    struct alignas(64) Line {
        uint8_t bytes[64];
    };
    static constexpr size_t kChunk = 512;

    void add_chunk(size_t at_least) {
        left_ = std::max(at_least, kChunk);
        chunks_.emplace_back(new Line[left_]);
        next_ = chunks_.back().get();
    }

    std::vector<std::unique_ptr<Line[]>> chunks_;
    RecordList* available_[24] = {};  // by log2_lines; the place of the first record has the next one
    Line* next_ = nullptr;
    size_t left_ = 0;
};

// What the checker keeps of 16 bytes. All its lists come from one arena, the one that is passed here.
class Granule {
  public:
    uint32_t size() const { return list_ ? list_->size : 0; }
    const AccessRecord& operator[](uint32_t i) const { return list_->records()[i]; }
    // The rest changes the list; other granules must not have it.
    AccessRecord& operator[](uint32_t i) { return list_->records()[i]; }
    void make_own(RecordArena& arena) {
        if (list_ && list_->references > 1) copy(list_->log2_lines, arena);
    }
    void push(const AccessRecord& record, uint32_t lane, uint16_t bytes, RecordArena& arena) {
        if (!list_) {
            list_ = arena.take(0);
        } else if (list_->size == list_->capacity()) {
            copy(list_->log2_lines + 1u, arena);
        }
        AccessRecord& added = list_->records()[list_->size++];
        added = record;
        added.lane = lane & 63;
        added.bytes = bytes;
    }
    // The last record takes the place of the i-th.
    void remove(uint32_t i) {
        AccessRecord* const records = list_->records();
        records[i] = records[--list_->size];
    }
    void prefetch() const { __builtin_prefetch(list_); }

  private:
    friend class Repetition;

    void copy(uint32_t log2_lines, RecordArena& arena) {
        RecordList* const list = arena.take(log2_lines);
        list->size = list_->size;
        std::memcpy(list->records(), list_->records(), list_->size * sizeof(AccessRecord));
        arena.release(list_);
        list_ = list;
    }

    RecordList* list_ = nullptr;
};

// What an access has done to the records of a granule. The granules of a tile mostly have the same records, for they
// are accessed together: then they share a list, the same access does the same to the next one, which gets the list
// that the access before has left, and there is nothing new to report.
class Repetition {
  public:
    explicit Repetition(RecordArena& arena) : arena_(arena) {}
    ~Repetition() {
        if (before_) arena_.release(before_);
        if (after_) arena_.release(after_);
    }
    Repetition(const Repetition&) = delete;
    Repetition& operator=(const Repetition&) = delete;

    bool matches(const Granule& granule, uint16_t bytes) const {
        return known_ && granule.list_ == before_ && bytes == bytes_;
    }
    void repeat(Granule& granule) const {
        if (before_) --before_->references;  // this object has one, too
        ++after_->references;
        granule.list_ = after_;
    }
    void begin(const Granule& granule, uint16_t bytes) {
        bytes_ = bytes;
        if (before_) arena_.release(before_);
        before_ = granule.list_;
        // A list that only this granule has will not come again, and may be changed where it is.
        known_ = !before_ || before_->references > 1;
        if (!known_) before_ = nullptr;
        if (before_) ++before_->references;
    }
    // Granules whose records have become the same share them from now on.
    void end(Granule& granule) {
        if (after_ == granule.list_) return;
        if (after_ && same(*after_, *granule.list_)) {
            arena_.release(granule.list_);
            granule.list_ = after_;
        } else {
            if (after_) arena_.release(after_);
            after_ = granule.list_;
        }
        ++after_->references;
    }

  private:
    static bool same(const RecordList& a, const RecordList& b) {
        // Where lists differ, their first records mostly do: those of the lanes that have written the granules.
        const size_t first = sizeof(AccessRecord);
        return a.size == b.size && std::memcmp(a.records(), b.records(), first) == 0 &&
               std::memcmp(a.records() + 1, b.records() + 1, a.size * first - first) == 0;
    }

    RecordArena& arena_;
    RecordList* before_ = nullptr;  // nullptr, if known: no access before
    RecordList* after_ = nullptr;
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
