// Removing one synchronisation instruction: what the mutation runner does to a kernel.
#pragma once

#include <cstddef>
#include <vector>

#include "program.h"

namespace ptx_emulator {

// Indices in the code of all instructions with kRoleSynchronization, in order.
std::vector<size_t> synchronization_instructions(const Program& program);

// Turns the n-th of them into a no-op; one that yields a predicate (try_wait) yields true. Returns the handler that
// restore_instruction() puts back. Throws on n out of range.
Handler remove_instruction(Program& program, size_t n);
void restore_instruction(Program& program, size_t n, Handler handler);

}  // namespace ptx_emulator
