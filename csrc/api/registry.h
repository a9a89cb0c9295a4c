// What the generator writes for csrc/api: the kernels of one library in the order of csrc/kernels.toml, and a JSON
// description of the build. The generated registry.cpp defines these three names and nothing else.
#pragma once

#include <stdint.h>

#include "api/abi.h"

namespace flash_ext {

// The `when` of a tile in csrc/kernels.toml. A call is masked if it is causal or has a window.
enum class When : int32_t { kAlways = 0, kMasked = 1, kFull = 2 };

struct RegistryEntry {
    const KernelInfo* kernel;
    When when;
};

// Row by row of the table; within a row dtype, then tile, then variant vary fastest last: the first entry of a tile
// that can do what a call asks is its first variant. An empty library has count 0 and one entry of nullptr.
extern const RegistryEntry kRegistry[];
extern const int32_t kRegistryCount;

// JSON: {"version", "commit", "compiler", "cuda", "gencode", "options"}.
extern const char* const kBuildInfo;

}  // namespace flash_ext
