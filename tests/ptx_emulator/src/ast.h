// What the parser makes of PTX text: modules, kernels and instructions by name, before anything is decoded.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ptx_emulator {

struct SyntaxOperand {
    enum class Kind {
        kRegister,   // reg: index into KernelSyntax::registers
        kSpecial,    // name: %tid.x, %laneid, ...
        kImmediate,  // bits, immediate_type
        kSymbol,     // name: a variable, parameter, label or function
        kVector,     // parts: {a, b, c}
        kAddress,    // parts[0] + displacement, in brackets; more parts: [tensor_map, {coordinates}]
        kPair,       // parts: a|b
        kSink,       // _
    };
    enum class ImmediateType { kInteger, kFloat32, kFloat64 };
    Kind kind = Kind::kSink;
    ImmediateType immediate_type = ImmediateType::kInteger;
    bool negated = false;  // !%p
    int reg = -1;
    int64_t bits = 0;  // kImmediate: the integer, or the bits of the floating-point number
    int64_t displacement = 0;
    std::string name;
    std::vector<SyntaxOperand> parts;
};

// A source position from .loc, for reports.
struct SourceLocation {
    int file = 0;  // index of .file, 0: none
    int line = 0;
};

struct SyntaxInstruction {
    std::string opcode;                  // "ld.global.v4.u32"
    std::vector<std::string> modifiers;  // split at the dots; [0] is the mnemonic
    int guard = -1;                      // register index of @%p, -1: none
    bool guard_negated = false;
    std::vector<SyntaxOperand> operands;
    std::vector<SyntaxOperand> call_arguments;  // call (operands), name, (call_arguments)
    std::string callee;
    std::vector<int> targets;  // bra: one instruction index; brx.idx: the table
    int line = 0;              // of the PTX text
    SourceLocation source;
    std::string text;  // as written, blanks normalised
};

struct RegisterDeclaration {
    std::string name;
    std::string type;    // "b32", "f64", "pred", ...
    uint32_t bytes = 4;  // 0: predicate
};

struct VariableSyntax {
    std::string name;
    uint32_t bytes = 0;
    uint32_t alignment = 1;
    bool is_extern = false;
    std::vector<uint8_t> initial;                               // may be shorter than bytes: the rest is 0
    std::vector<std::pair<uint32_t, std::string>> relocations;  // offset in the variable <- address of a symbol
};

struct ParameterSyntax {
    std::string name;
    uint32_t offset = 0;
    uint32_t bytes = 0;
};

struct KernelSyntax {
    std::string name;
    std::vector<ParameterSyntax> parameters;
    uint32_t parameter_bytes = 0;
    std::vector<RegisterDeclaration> registers;
    std::vector<SyntaxInstruction> instructions;
    std::vector<VariableSyntax> shared;        // declared in the body
    std::vector<VariableSyntax> local;         // .local, and .param of call sequences
    uint32_t required_cluster[3] = {0, 0, 0};  // .reqnctapercluster, 0: not given
    uint32_t max_threads[3] = {0, 0, 0};       // .maxntid
    uint32_t required_threads[3] = {0, 0, 0};  // .reqntid
    uint32_t min_ctas_per_sm = 0;
    int line = 0;
};

struct ModuleSyntax {
    std::string version;  // "9.0"
    std::string target;   // "sm_90a"
    std::map<int, std::string> files;
    std::vector<VariableSyntax> globals;  // .global and .const
    std::vector<VariableSyntax> shared;   // module-scope .shared, extern ones (dynamic) included
    std::map<std::string, KernelSyntax> kernels;
};

}  // namespace ptx_emulator
