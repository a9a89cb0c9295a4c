// What tests and the mutation runner ask of an emulated library, through ctypes: beside the C ABI, with its prefix.
#include <algorithm>
#include <cstring>

#include "kernel_library.h"
#include "mutation.h"
#include "runtime.h"

namespace ptx_emulator {

namespace {

LaunchStatistics latest_statistics;
std::vector<std::string> launched;
std::string counted;

// Copies text with its terminator; returns the bytes it takes, so that a caller can come again with more room.
uint64_t hand_out(const std::string& text, char* out, uint64_t size) {
    if (text.size() < size) std::memcpy(out, text.c_str(), text.size() + 1);
    return text.size() + 1;
}

}  // namespace

std::mutex& launch_mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
}

void note_launch(const std::string& kernel, const LaunchStatistics* statistics) {
    if (statistics) {
        latest_statistics = *statistics;
    } else {
        launched.push_back(kernel);
    }
}

void note_counts(const std::string& kernel, const LaunchStatistics& statistics, const ExecutionCounts& counts) {
    counted += format("launch\t%s\t%u\n", kernel.c_str(), statistics.ctas) + counts.text();
}

}  // namespace ptx_emulator

using namespace ptx_emulator;

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

// The latest launch that ended well: CTAs started, CTAs resident at once at most, warp instructions.
EXPORTED void flash_ext_emulator_statistics(uint32_t* ctas, uint32_t* resident, uint64_t* instructions) {
    const std::lock_guard<std::mutex> lock(launch_mutex());
    *ctas = latest_statistics.ctas;
    *resident = latest_statistics.resident_ctas;
    *instructions = latest_statistics.warp_instructions;
}

// The mangled names of the kernels launched since the last call, one a line. Cleared once they fit.
EXPORTED uint64_t flash_ext_emulator_launched(char* out, uint64_t size) {
    const std::lock_guard<std::mutex> lock(launch_mutex());
    std::string text;
    for (const std::string& name : launched) text += name + "\n";
    const uint64_t needed = hand_out(text, out, size);
    if (needed <= size) launched.clear();
    return needed;
}

// With FLASH_EXT_EMULATOR_COUNT=1: for each launch since the last call, under the first of its schedules, a line
// "launch", kernel and number of CTAs, then the lines of ExecutionCounts::text. Cleared once they fit.
EXPORTED uint64_t flash_ext_emulator_counts(char* out, uint64_t size) {
    const std::lock_guard<std::mutex> lock(launch_mutex());
    const uint64_t needed = hand_out(counted, out, size);
    if (needed <= size) counted.clear();
    return needed;
}

// The synchronisation instructions of a kernel, one a line: number, executed since the last such call (0 or 1), PTX
// line, source "file:line" or nothing, text; separated by tabs. 0: the kernel does not load (the error is on stderr).
EXPORTED uint64_t flash_ext_emulator_synchronization(const char* kernel, char* out, uint64_t size) {
    const std::lock_guard<std::mutex> lock(launch_mutex());
    uint64_t needed = 0;
    guarded([&] {
        const Program& program = KernelLibrary::instance().program(kernel, Options{});
        std::string text;
        const std::vector<size_t> all = synchronization_instructions(program);
        for (size_t n = 0; n < all.size(); ++n) {
            const InstructionInfo& info = program.info[all[n]];
            text += format("%zu\t%d\t%d\t%s\t%s\n", n, program.executed[all[n]], info.line,
                           program.source(static_cast<uint32_t>(all[n])).c_str(), info.text.c_str());
        }
        needed = hand_out(text, out, size);
        if (needed <= size) std::fill(program.executed.begin(), program.executed.end(), uint8_t{0});
    });
    return needed;
}
}
