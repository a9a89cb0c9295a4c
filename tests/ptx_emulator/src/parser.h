// PTX tokens to syntax (PTX ISA chapters 4 and 5).
#pragma once

#include <string>

#include "ast.h"

namespace ptx_emulator {

// Parses one PTX file. Throws EmulationError(kInvalidPtx) naming the line. Registers and labels of nested { } scopes
// are resolved here: a register becomes an index, a branch an instruction index.
ModuleSyntax parse_module(const std::string& text);

// Bytes of a PTX type without its dot ("u16", "f32", "bf16x2", "b128"); 0 for "pred"; -1 for what is no type.
int type_bytes(const std::string& type);

}  // namespace ptx_emulator
