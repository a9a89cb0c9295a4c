// Which GPUs each path serves.
#pragma once

#include <stdint.h>

#include <string_view>

namespace flash_ext {

// Most specific first: the order in which the dispatcher tries them.
constexpr std::string_view kPaths[] = {"sm100", "sm90", "sm80"};

constexpr const char* path_gpus(std::string_view path) {
    if (path == "sm100") return "10.0 and 10.3";
    if (path == "sm90") return "9.0";
    if (path == "sm80") return "8.0 and newer";
    return "none";
}

constexpr bool path_serves(std::string_view path, int32_t major, int32_t minor) {
    if (path == "sm100") return major == 10 && (minor == 0 || minor == 3);
    if (path == "sm90") return major == 9 && minor == 0;
    return path == "sm80" && major >= 8;
}

}  // namespace flash_ext
