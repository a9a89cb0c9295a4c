// What the files of the tcgen05 family share.
#pragma once

#include "decoder.h"

namespace ptx_emulator {

// .cta_group::1 or ::2; the same in all tcgen05 instructions of a kernel.
uint32_t decode_cta_group(DecodeContext& c);

}  // namespace ptx_emulator
