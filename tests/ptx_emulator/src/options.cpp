#include "options.h"

#include <algorithm>
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

const char* name_of(Schedule schedule) {
    static const char* const names[] = {"eager", "lazy", "random", "pct"};
    return names[static_cast<int>(schedule)];
}

// "pct", or several with commas between them.
static std::vector<Schedule> read_schedules(const std::string& text) {
    std::vector<Schedule> found;
    for (size_t begin = 0; begin <= text.size();) {
        const size_t end = std::min(text.find(',', begin), text.size());
        const std::string name = text.substr(begin, end - begin);
        const size_t before = found.size();
        for (const Schedule schedule : {Schedule::kEager, Schedule::kLazy, Schedule::kRandom, Schedule::kPct}) {
            if (name == name_of(schedule)) found.push_back(schedule);
        }
        if (found.size() == before) {
            raise(Fault::kInvalidConfiguration, "FLASH_EXT_EMULATOR_SCHEDULE=%s: eager, lazy, random and pct exist",
                  text.c_str());
        }
        begin = end + 1;
    }
    return found;
}

Options Options::from_environment() {
    Options options;
    if (const char* text = variable("FLASH_EXT_EMULATOR_SCHEDULE")) options.schedules = read_schedules(text);
    options.schedule = options.schedules.front();
    options.seed = static_cast<uint64_t>(number("FLASH_EXT_EMULATOR_SEED", 0));
    options.check = number("FLASH_EXT_EMULATOR_CHECK", 1) != 0;
    options.deterministic = number("FLASH_EXT_EMULATOR_DETERMINISTIC", 0) != 0;
    options.strict = number("FLASH_EXT_EMULATOR_STRICT", 1) != 0;
    options.remove = number("FLASH_EXT_EMULATOR_REMOVE", -1);
    if (const char* text = variable("FLASH_EXT_EMULATOR_REMOVE_KERNEL")) options.remove_kernel = text;
    options.stall_limit = static_cast<uint64_t>(number("FLASH_EXT_EMULATOR_STALL_LIMIT", 20'000'000));
    if (const char* text = variable("FLASH_EXT_EMULATOR_FORMS")) options.forms_file = text;
    options.trace = number("FLASH_EXT_EMULATOR_TRACE", 0) != 0;
    options.count = number("FLASH_EXT_EMULATOR_COUNT", 0) != 0;
    return options;
}

}  // namespace ptx_emulator
