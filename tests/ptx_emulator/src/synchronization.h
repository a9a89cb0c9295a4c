// The state transitions of named barriers, apart from the instructions that cause them.
#pragma once

#include "cta.h"

namespace ptx_emulator {

// One warp arrives; count: threads of the phase, 0: all of the CTA that are alive. Fails on a count that disagrees with
// the phase's first arrival or is exceeded.
void arrive_at_barrier(Warp& warp, uint32_t id, uint32_t count, bool waits);
// Completes the phase if all that it still waits for have ended.
void recheck_barrier(Cta& cta, NamedBarrier& barrier);

}  // namespace ptx_emulator
