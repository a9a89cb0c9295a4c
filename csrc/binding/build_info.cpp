// The only file that the version and commit reach, so that a new commit compiles nothing else again.
#include "binding/build_info.h"

#ifndef FLASH_EXT_VERSION
#define FLASH_EXT_VERSION "unknown"
#endif
#ifndef FLASH_EXT_COMMIT
#define FLASH_EXT_COMMIT "unknown"
#endif
#ifndef FLASH_EXT_OPTIONS
#define FLASH_EXT_OPTIONS "unknown"
#endif

namespace flash_ext {

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "gcc " __VERSION__;
#endif

const BuildInfo kModuleBuildInfo = {FLASH_EXT_VERSION, FLASH_EXT_COMMIT, kCompiler, FLASH_EXT_OPTIONS};

}  // namespace flash_ext
