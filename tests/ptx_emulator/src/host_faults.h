// Faults of the host's memory in code that follows pointers which others made: a kernel's, a caller's.
#pragma once

#include <functional>

namespace ptx_emulator {

// Runs f. False if it touched memory that is not there: then f has not ended, its stack is gone, and *address says
// where. Other threads' faults go where they would have gone. One at a time: callers hold launch_mutex().
bool survives_faults(const std::function<void()>& f, void** address);

}  // namespace ptx_emulator
