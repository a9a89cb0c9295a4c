// What csrc/api knows of a GPU: read once per device, then cached for the life of the process.
#pragma once

#include <stdint.h>

#include "api/abi.h"

namespace flash_ext {

// Fills info for a CUDA ordinal; returns a cudaError_t value.
int32_t device_info(int32_t device, DeviceInfo* info);

// The name of the first environment variable of this file that is set to something other than a positive integer, or
// nullptr. device_info ignores such a variable; the choice of a kernel refuses it.
const char* malformed_environment();

}  // namespace flash_ext
