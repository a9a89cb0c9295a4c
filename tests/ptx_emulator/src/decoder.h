// What a decode function sees of one instruction: its modifiers, and operands turned into register offsets.
//
// Every read and write of a register is noted on the way, so that the checker knows which registers an instruction
// touches. A decode function fills `out` and returns; it calls fail() for any form it does not implement.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "ast.h"
#include "instruction.h"
#include "program.h"

namespace ptx_emulator {

// The register allocation of one program, shared by the decoding of all its instructions.
class RegisterFileBuilder {
  public:
    // slots: where each register goes (register_sharing.h); empty: each has a slot.
    RegisterFileBuilder(Program& program, const ModuleSyntax& module, const KernelSyntax& kernel,
                        const ModuleGlobals& globals, const std::vector<uint32_t>& slots);

    uint32_t of_register(int index) const { return offsets_[index]; }
    uint32_t immediate(uint64_t bits, uint32_t bytes);
    uint32_t special(const std::string& name);
    // The address of a variable or parameter plus displacement; fails on unknown names.
    uint32_t symbol(const std::string& name, int64_t displacement, uint32_t bytes, int line);
    bool has_parameter(const std::string& name) const { return parameters_.count(name) != 0; }
    bool has_local(const std::string& name) const { return locals_.count(name) != 0; }
    uint32_t local_offset(const std::string& name) const { return locals_.at(name); }
    uint32_t scratch(uint32_t bytes);  // where results that nobody wants go
    void finish();                     // writes the initial image

  private:
    uint32_t allocate(uint32_t bytes);

    Program& program_;
    const ModuleGlobals& globals_;
    std::vector<uint32_t> offsets_;
    std::map<std::pair<uint64_t, uint32_t>, uint32_t> immediates_;
    std::map<std::string, uint32_t> specials_, symbols_;
    std::map<std::string, uint32_t> parameters_, locals_, shared_;
    std::map<std::string, bool> dynamic_;
    uint32_t scratch_ = kNoRegister;
};

class DecodeContext {
  public:
    DecodeContext(const SyntaxInstruction& syntax, const KernelSyntax& kernel, Program& program,
                  RegisterFileBuilder& registers, Instruction& out, InstructionInfo& info)
        : syntax(syntax), out(out), info(info), kernel_(kernel), program_(program), registers_(registers) {}

    const SyntaxInstruction& syntax;
    Instruction& out;
    InstructionInfo& info;

    // ---- modifiers
    bool has(const char* modifier) const;
    // Fails unless every modifier after the first `from` is one of the blank-separated words in `known`.
    void allow(size_t from, const char* known) const;
    const std::string& type() const { return syntax.modifiers.back(); }
    int type_size() const;  // bytes of type(); fails if it is no type
    size_t operand_count() const { return syntax.operands.size(); }
    const SyntaxOperand& operand(size_t index) const;
    [[noreturn]] void fail(const std::string& why) const;
    // The sub-table's answer, or fail() when it is null.
    Handler require(Handler handler) const;

    // ---- operands to register offsets. `bytes` is the width the instruction reads; registers must have it exactly.
    uint32_t read(const SyntaxOperand& operand, uint32_t bytes);
    uint32_t read(size_t index, uint32_t bytes) { return read(operand(index), bytes); }
    // A register of any width (ld, st, cvt may use wider ones than the type): sets *bytes to its width.
    uint32_t read_wide(const SyntaxOperand& operand, uint32_t default_bytes, uint32_t* bytes);
    uint32_t write(const SyntaxOperand& operand, uint32_t bytes);
    uint32_t write(size_t index, uint32_t bytes) { return write(operand(index), bytes); }
    uint32_t write_wide(const SyntaxOperand& operand, uint32_t* bytes);
    // Predicates; a negated one sets *negated, or fails if negated is null.
    uint32_t read_predicate(const SyntaxOperand& operand, bool* negated);
    uint32_t write_predicate(const SyntaxOperand& operand);
    // {a, b, c} or a single register, into out.list[slot].
    void read_list(int slot, const SyntaxOperand& operand, uint32_t bytes);
    void write_list(int slot, const SyntaxOperand& operand, uint32_t bytes);
    void keep_list(int slot, std::vector<uint32_t> offsets);
    // [base + displacement]: sets out.displacement and out.address_is_64 and returns the base's offset.
    uint32_t address(const SyntaxOperand& operand, Space space);
    int64_t immediate(size_t index) const;
    bool is_immediate(size_t index) const;
    bool is_predicate(const SyntaxOperand& operand) const;
    bool is_parameter(const std::string& name) const { return registers_.has_parameter(name); }
    bool is_local(const std::string& name) const { return registers_.has_local(name); }
    // Offset in local memory of a .local variable, or of a .param of a call sequence.
    uint32_t local_offset(const SyntaxOperand& operand) const;

    void set_role(uint32_t roles) { info.roles |= roles; }
    Program& program() { return program_; }

  private:
    const KernelSyntax& kernel_;
    Program& program_;
    RegisterFileBuilder& registers_;
};

}  // namespace ptx_emulator
