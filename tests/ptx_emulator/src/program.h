// A kernel ready to run: decoded instructions, the layout of its register file, shared and local memory.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ast.h"
#include "instruction.h"
#include "register_sharing.h"
#include "special_register.h"

namespace ptx_emulator {

// The globals of a loaded module; they live as long as the process, as device variables do.
class ModuleGlobals {
  public:
    explicit ModuleGlobals(const ModuleSyntax& module);
    // Host address of a .global or .const variable, 0 if there is none of that name.
    uint64_t address(const std::string& name) const;

  private:
    std::map<std::string, uint64_t> addresses_;
    std::deque<std::vector<uint8_t>> storage_;
};

struct SpecialRegister {
    SpecialValue value;
    uint32_t offset = 0;
    uint32_t bytes = 4;
};

// Register-file constants that depend on the CTA or warp: filled when a warp starts.
struct SymbolRegister {
    enum class Kind { kShared, kDynamicShared, kLocal, kParam } kind = Kind::kShared;
    uint32_t offset = 0;  // in the register file
    uint32_t bytes = 8;
    uint32_t value = 0;  // offset in that space
};

// The registers that an instruction reads and, behind them, writes: where they begin in Program::touched_registers.
struct TouchedRegisters {
    uint32_t first = 0;
    uint32_t reads = 0, writes = 0;
    bool copies = false;  // kRoleCopiesRegisters
};

class Program {
  public:
    // Decodes a kernel. Throws EmulationError(kInvalidPtx) with opcode and line for what no handler knows.
    Program(const ModuleSyntax& module, const KernelSyntax& kernel, const ModuleGlobals& globals, std::string ptx_path);

    std::string name;
    std::string ptx_path;
    std::string target;  // "sm_80"
    std::map<int, std::string> files;
    std::vector<Instruction> code;
    std::vector<InstructionInfo> info;  // beside code
    // Beside code: what the checks of every instruction need of info, close together and by register_number().
    std::vector<TouchedRegisters> touched;
    std::vector<uint32_t> touched_registers;
    std::vector<ParameterSyntax> parameters;
    uint32_t parameter_bytes = 0;
    uint32_t static_shared = 0;       // bytes
    uint32_t dynamic_alignment = 16;  // of extern .shared
    uint32_t local_bytes = 0;         // per thread
    uint32_t required_cluster[3] = {0, 0, 0};
    uint32_t max_threads[3] = {0, 0, 0};
    uint32_t required_threads[3] = {0, 0, 0};
    uint32_t min_ctas_per_sm = 0;
    bool uses_async_proxy = false;
    bool uses_wgmma = false;
    uint32_t tensor_cta_group = 0;          // of the tcgen05 instructions, 0: there are none
    mutable std::vector<uint8_t> executed;  // beside code: 1 once a warp has executed it, until asked for

    // ---- register file: per register 32 lanes of its width; predicates are one LaneMask
    uint32_t register_bytes = 0;
    std::vector<uint8_t> initial_registers;  // 0xff where undefined, constants in place
    std::vector<SpecialRegister> specials;
    std::vector<SymbolRegister> symbols;
    uint32_t register_count = 0;
    // Of the register at an offset: less than register_count.
    uint32_t register_number(uint32_t offset) const { return register_numbers_[offset / 4]; }

    // "csrc/sm90/forward.cuh:88", or nothing in a build without line information.
    std::string source(uint32_t pc) const;
    // "kernel.ptx:120 (forward.cuh:88): ldmatrix..." for reports.
    std::string where(uint32_t pc) const;
    // Keeps vector operands alive; used by the decoder.
    const uint32_t* keep(std::vector<uint32_t> list);

  private:
    void decode(const ModuleSyntax& module, const KernelSyntax& kernel, const ModuleGlobals& globals,
                const std::vector<uint32_t>& slots);
    // By register number, from the offsets of a decoding that gave each register a slot of its own.
    std::vector<RegisterUse> register_uses(const KernelSyntax& kernel) const;
    void number_registers();

    std::deque<std::vector<uint32_t>> lists_;
    std::vector<uint32_t> register_offsets_;
    std::vector<uint32_t> register_numbers_;  // by offset / 4
};

}  // namespace ptx_emulator
