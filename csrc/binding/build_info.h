// How this module was built.
#pragma once

namespace flash_ext {

extern const char* const kModuleBuildInfo;  // JSON

}  // namespace flash_ext
