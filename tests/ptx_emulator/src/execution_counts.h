// How often each instruction of a launch was executed, per warp of the CTA (FLASH_EXT_EMULATOR_COUNT=1).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "program.h"

namespace ptx_emulator {

class ExecutionCounts {
  public:
    ExecutionCounts(const Program& program, uint32_t warps_per_cta)
        : program_(program), counts_(program.code.size() * warps_per_cta), warps_(warps_per_cta) {}

    // A warp executes an instruction with so many lanes; 0: all of them were predicated off.
    void add(uint32_t warp, uint32_t pc, uint32_t lanes) {
        Count& count = counts_[size_t{pc} * warps_ + warp];
        ++count.times;
        count.lanes += lanes;
    }
    // A size that operands decide, not the opcode: the bytes of a bulk copy (b: how many CTAs it goes to), M and N of a
    // tcgen05.mma, the clocks that ld or st keeps shared memory busy (b: 1).
    void add_size(uint32_t warp, uint32_t pc, uint32_t a, uint32_t b) { ++sizes_[{pc, warp, a, b}]; }

    // One line per instruction that was executed, separated by tabs: its number in the kernel, PTX line, source
    // "file:line" or nothing, text, "warp:times:lanes" for each warp of the CTA that executed it, with blanks between
    // them, and "warp:axb:times" for each size.
    std::string text() const;

  private:
    struct Count {
        uint64_t times = 0, lanes = 0;
    };
    const Program& program_;
    std::vector<Count> counts_;  // by instruction, then warp
    uint32_t warps_;
    std::map<std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>, uint64_t> sizes_;  // pc, warp, a, b
};

}  // namespace ptx_emulator
