#include "options.h"

#include <cstdlib>

#include "errors.h"

namespace ptx_emulator {

static const char* variable(const char* name) {
    const char* value = std::getenv(name);
    return value && *value ? value : nullptr;
}

static int64_t number(const char* name, int64_t fallback) {
    const char* text = variable(name);
    if (!text) return fallback;
    char* end = nullptr;
    const long long value = std::strtoll(text, &end, 10);
    if (*end) raise(Fault::kInvalidConfiguration, "%s=%s is not a number", name, text);
    return value;
}

Options Options::from_environment() {
    Options options;
    if (const char* text = variable("FLASH_EXT_EMULATOR_SCHEDULE")) {
        const std::string name = text;
        if (name == "eager") {
            options.schedule = Schedule::kEager;
        } else if (name == "lazy") {
            options.schedule = Schedule::kLazy;
        } else if (name == "random") {
            options.schedule = Schedule::kRandom;
        } else if (name == "pct") {
            options.schedule = Schedule::kPct;
        } else {
            raise(Fault::kInvalidConfiguration, "FLASH_EXT_EMULATOR_SCHEDULE=%s: eager, lazy, random and pct exist",
                  text);
        }
    }
    options.seed = static_cast<uint64_t>(number("FLASH_EXT_EMULATOR_SEED", 0));
    options.check = number("FLASH_EXT_EMULATOR_CHECK", 1) != 0;
    options.deterministic = number("FLASH_EXT_EMULATOR_DETERMINISTIC", 0) != 0;
    options.remove = number("FLASH_EXT_EMULATOR_REMOVE", -1);
    if (const char* text = variable("FLASH_EXT_EMULATOR_REMOVE_KERNEL")) options.remove_kernel = text;
    options.stall_limit = static_cast<uint64_t>(number("FLASH_EXT_EMULATOR_STALL_LIMIT", 20'000'000));
    options.trace = number("FLASH_EXT_EMULATOR_TRACE", 0) != 0;
    return options;
}

}  // namespace ptx_emulator
