// What flash_ext/environment.py read from the environment, for the whole module: nothing here calls getenv.
#pragma once

#include <string>

#include "api/settings.h"

namespace flash_ext {

struct Environment {
    std::string library_dir;  // FLASH_EXT_LIBRARY_DIR; empty: the package's own folder
    bool emulated = false;    // FLASH_EXT_EMULATE: CPU tensors are the tensors of device 0 (tests/ptx_emulator)
    bool use_dlpack = true;   // false: FLASH_EXT_NO_DLPACK
    Settings settings = {};   // what each path's library gets when it is loaded
};

// Guarded by the GIL.
Environment& environment();

}  // namespace flash_ext
