// What a launch writes to global memory, so that it can be undone and run again under another schedule.
//
// Each byte's value before its first write is kept. Bytes, not pages: between small tensors lies memory of the host
// process itself, the emulator's included.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

namespace ptx_emulator {

class GlobalJournal {
  public:
    // To be called before each write. rounded_sum: fp32 atomic additions, whose sum depends on their order.
    void before_write(uint64_t address, uint32_t bytes, bool rounded_sum = false);

    // Takes the launch back: memory is as it was, the results stay in the journal.
    void undo();
    // After both launches have been undone: the first address at which the results differ, as text, or nothing. Sums
    // in no fixed order may differ by kSumTolerance of the largest sum on their page.
    std::string difference(const GlobalJournal& other) const;
    // Puts the results of a launch that was undone back into memory.
    void redo() const;

  private:
    static constexpr uint32_t kPageBytes = 4096, kGranule = 16;
    static constexpr float kSumTolerance = 1.0f / 4096;

    struct Page {
        uint16_t written[kPageBytes / kGranule] = {};  // masks of bytes
        uint16_t summed[kPageBytes / kGranule] = {};
        uint8_t before[kPageBytes];
        uint8_t after[kPageBytes];
    };
    Page& page(uint64_t number);
    static std::string difference(uint64_t address, const Page* a, const Page* b);

    std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;
    uint64_t last_number_ = ~uint64_t{0};
    Page* last_ = nullptr;
};

}  // namespace ptx_emulator
