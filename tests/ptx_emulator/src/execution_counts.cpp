#include "execution_counts.h"

#include "errors.h"

namespace ptx_emulator {

std::string ExecutionCounts::text() const {
    std::string out;
    auto number = [](uint64_t value) { return static_cast<unsigned long long>(value); };
    for (uint32_t pc = 0; pc < program_.code.size(); ++pc) {
        std::string warps, sizes;
        for (uint32_t warp = 0; warp < warps_; ++warp) {
            const Count& count = counts_[size_t{pc} * warps_ + warp];
            if (count.times) warps += format(" %u:%llu:%llu", warp, number(count.times), number(count.lanes));
        }
        if (warps.empty()) continue;
        for (auto it = sizes_.lower_bound({pc, 0, 0, 0}); it != sizes_.end() && std::get<0>(it->first) == pc; ++it) {
            const auto& [at, warp, a, b] = it->first;
            sizes += format(" %u:%ux%u:%llu", warp, a, b, number(it->second));
        }
        const InstructionInfo& info = program_.info[pc];
        out += format("%u\t%d\t%s\t%s\t%s\t%s\n", pc, info.line, program_.source(pc).c_str(), info.text.c_str(),
                      warps.c_str() + 1, sizes.empty() ? "" : sizes.c_str() + 1);
    }
    return out;
}

}  // namespace ptx_emulator
