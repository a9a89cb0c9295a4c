// The only file that the version and commit reach, so that a new commit compiles nothing else again.
#include "binding/build_info.h"

// JSON, from the build: {"version", "commit", "compiler", "options"}.
#ifndef FLASH_EXT_BUILD_INFO
#define FLASH_EXT_BUILD_INFO "{\"version\": \"unknown\", \"commit\": \"unknown\"}"
#endif

namespace flash_ext {

const char* const kModuleBuildInfo = FLASH_EXT_BUILD_INFO;

}  // namespace flash_ext
