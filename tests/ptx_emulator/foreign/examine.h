// The kernels under test run as the environment says; those that fill the inputs and the reference, which are slow and
// nobody's concern here, under one schedule and without the checker.
#pragma once

#include <cstdlib>
#include <string>

// Whether the launches that follow are of kernels under test.
inline void flash_ext_examine(bool on) {
    static const char* const names[] = {"FLASH_EXT_EMULATOR_SCHEDULE", "FLASH_EXT_EMULATOR_CHECK",
                                        "FLASH_EXT_EMULATOR_FORMS"};
    static const char* const quick[] = {"eager", "0", ""};
    static std::string asked[3];
    for (int i = 0; i < 3; ++i) {
        if (!on) {
            const char* value = std::getenv(names[i]);
            asked[i] = value ? value : "";
        }
        setenv(names[i], on ? asked[i].c_str() : quick[i], 1);
    }
}

// Stands around the example's launch.
template <class Launch>
auto flash_ext_launch(Launch launch) {
    flash_ext_examine(true);
    const auto status = launch();
    flash_ext_examine(false);
    return status;
}
