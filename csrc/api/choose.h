// The run-time choice of a kernel from the registry.
#pragma once

#include <stdint.h>

#include "api/abi.h"

namespace flash_ext {

// As flash_ext_choose of api/abi.h.
int32_t choose(const KernelQuery& query, char* reason, int32_t reason_size);

}  // namespace flash_ext
