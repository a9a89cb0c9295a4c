// What a process sets for all calls: the environment variables for tests, as flash_ext/environment.py reads them.
#pragma once

#include <stdint.h>

namespace flash_ext {

struct Settings {
    int32_t block_m, block_n;   // FLASH_EXT_TILE: only kernels with this tile; 0: any
    int32_t sm_count;           // FLASH_EXT_SM_COUNT: multiprocessors that launches count with, at most; 0: all
    int32_t max_shared_memory;  // FLASH_EXT_MAX_SHARED_MEMORY: bytes that a CTA may use, at most; 0: the device's
};

// Those of this library: all 0 until flash_ext_configure.
const Settings& settings();

}  // namespace flash_ext

// Exported like the functions of api/abi.h. While no other call runs: nothing is locked, and what is known of a device
// already stays.
extern "C" void flash_ext_configure(const flash_ext::Settings* settings);
