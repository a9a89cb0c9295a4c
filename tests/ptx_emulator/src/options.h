// What the environment asks of a run; README.md lists the variables.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ptx_emulator {

// When the effects of asynchronous operations happen, and which warp runs.
enum class Schedule {
    kEager,   // at once; warps in turn
    kLazy,    // as late as legal: when waited for, or when nothing else can run
    kRandom,  // at random; warps change at random
    kPct,     // random priorities with random change points (Burckhardt et al., ASPLOS 2010)
};

const char* name_of(Schedule schedule);

struct Options {
    Schedule schedule = Schedule::kLazy;  // of the run
    // FLASH_EXT_EMULATOR_SCHEDULE: a launch is run under each of them and must give the same results.
    std::vector<Schedule> schedules = {Schedule::kLazy};
    uint64_t seed = 0;                  // FLASH_EXT_EMULATOR_SEED
    bool check = true;                  // FLASH_EXT_EMULATOR_CHECK: the happens-before checker
    bool deterministic = false;         // FLASH_EXT_EMULATOR_DETERMINISTIC: sums of floats must have a fixed order
    bool strict = true;                 // FLASH_EXT_EMULATOR_STRICT: the checker demands what kernels often leave out
    int64_t remove = -1;                // FLASH_EXT_EMULATOR_REMOVE: index of the synchronisation instruction to drop
    std::string remove_kernel;          // FLASH_EXT_EMULATOR_REMOVE_KERNEL: its kernel; empty: any
    uint64_t stall_limit = 20'000'000;  // FLASH_EXT_EMULATOR_STALL_LIMIT: warp instructions without progress
    bool trace = false;                 // FLASH_EXT_EMULATOR_TRACE: one line per launch on stderr
    bool count = false;                 // FLASH_EXT_EMULATOR_COUNT: keep how often each instruction was executed
    std::string forms_file;             // FLASH_EXT_EMULATOR_FORMS: what kernels use is appended to it; empty: nowhere

    // Read anew at every launch. Throws EmulationError(kInvalidConfiguration) on a value that means nothing.
    static Options from_environment();
};

}  // namespace ptx_emulator
