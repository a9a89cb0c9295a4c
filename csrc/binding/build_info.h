// How this module was built.
#pragma once

namespace flash_ext {

struct BuildInfo {
    const char* version;
    const char* commit;
    const char* compiler;
    const char* options;
};

extern const BuildInfo kModuleBuildInfo;

}  // namespace flash_ext
