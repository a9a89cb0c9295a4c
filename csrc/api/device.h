// What csrc/api knows of a GPU: read once per device, then cached for the life of the process.
#pragma once

#include <stdint.h>

#include "api/abi.h"

namespace flash_ext {

// Fills info for a CUDA ordinal; returns a cudaError_t value.
int32_t device_info(int32_t device, DeviceInfo* info);

}  // namespace flash_ext
