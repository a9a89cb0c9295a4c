// Removing one synchronisation instruction: what the mutation runner does to a kernel.
#pragma once

#include <cstddef>
#include <vector>

#include "program.h"

namespace ptx_emulator {

// Indices in the code of all instructions with kRoleSynchronization, in order.
std::vector<size_t> synchronization_instructions(const Program& program);

// Turns the n-th of them into a no-op; one that yields a predicate (try_wait) yields true. An access that orders others
// (ld.acquire) becomes a relaxed one: without its value a loop would never end, whatever the order is good for. Returns
// the instruction as it was, which restore_instruction() puts back. Throws on n out of range.
Instruction remove_instruction(Program& program, size_t n);
void restore_instruction(Program& program, size_t n, Instruction original);

}  // namespace ptx_emulator
