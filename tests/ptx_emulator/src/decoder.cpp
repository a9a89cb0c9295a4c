#include "decoder.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "errors.h"
#include "parser.h"

namespace ptx_emulator {

static uint32_t align_up(uint32_t value, uint32_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}

constexpr uint32_t kMaxStaticBytes = 1u << 20;  // more than any SM; what a launch may have is the device model's
constexpr uint32_t kMaxLocalBytes = 512 * 1024;

RegisterFileBuilder::RegisterFileBuilder(Program& program, const ModuleSyntax& module, const KernelSyntax& kernel,
                                         const ModuleGlobals& globals, const std::vector<uint32_t>& slots)
    : program_(program), globals_(globals) {
    std::map<uint32_t, uint32_t> offset_of_slot;
    for (size_t r = 0; r < kernel.registers.size(); ++r) {
        const uint32_t bytes = kernel.registers[r].bytes;
        const auto [it, fresh] = offset_of_slot.try_emplace(slots.empty() ? static_cast<uint32_t>(r) : slots[r], 0);
        if (fresh) it->second = allocate(bytes ? kWarpSize * bytes : sizeof(LaneMask));
        offsets_.push_back(it->second);
    }
    for (const ParameterSyntax& parameter : kernel.parameters) parameters_[parameter.name] = parameter.offset;
    auto place = [&](const VariableSyntax& variable) {
        if (variable.is_extern) {
            dynamic_[variable.name] = true;
            program_.dynamic_alignment = std::max(program_.dynamic_alignment, variable.alignment);
            return;
        }
        program_.static_shared = align_up(program_.static_shared, std::max(variable.alignment, 1u));
        shared_[variable.name] = program_.static_shared;
        program_.static_shared += variable.bytes;
        if (program_.static_shared > kMaxStaticBytes) {
            raise(Fault::kInvalidPtx, "kernel %s declares %u bytes of shared memory and more", kernel.name.c_str(),
                  program_.static_shared);
        }
    };
    // Module-scope shared variables take room only in the kernels that name them.
    for (const VariableSyntax& variable : module.shared) {
        const bool used = std::any_of(kernel.instructions.begin(), kernel.instructions.end(), [&](const auto& syntax) {
            return std::any_of(syntax.operands.begin(), syntax.operands.end(), [&](const SyntaxOperand& operand) {
                return operand.name == variable.name ||
                       std::any_of(operand.parts.begin(), operand.parts.end(),
                                   [&](const SyntaxOperand& part) { return part.name == variable.name; });
            });
        });
        if (used || variable.is_extern) place(variable);
    }
    for (const VariableSyntax& variable : kernel.shared) place(variable);
    for (const VariableSyntax& variable : kernel.local) {
        program_.local_bytes = align_up(program_.local_bytes, std::max(variable.alignment, 1u));
        locals_[variable.name] = program_.local_bytes;
        program_.local_bytes += variable.bytes;
        if (program_.local_bytes > kMaxLocalBytes) {
            raise(Fault::kInvalidPtx, "kernel %s declares %u bytes of local memory per thread, %u are possible",
                  kernel.name.c_str(), program_.local_bytes, kMaxLocalBytes);
        }
    }
    program_.local_bytes = align_up(program_.local_bytes, 16);
}

uint32_t RegisterFileBuilder::allocate(uint32_t bytes) {
    const uint32_t offset = program_.register_bytes;
    program_.register_bytes += bytes < 64 ? 8 : align_up(bytes, 64);
    if (bytes >= 64 && offset % 64) {
        program_.register_bytes = align_up(offset, 64) + align_up(bytes, 64);
        return align_up(offset, 64);
    }
    return offset;
}

uint32_t RegisterFileBuilder::immediate(uint64_t bits, uint32_t bytes) {
    if (bytes < 8) bits &= (uint64_t{1} << (8 * bytes)) - 1;
    if (bytes == 0) bits = 0;
    const auto [it, fresh] = immediates_.try_emplace({bits, bytes}, 0);
    if (fresh) it->second = allocate(kWarpSize * std::max(bytes, 2u));
    return it->second;
}

uint32_t RegisterFileBuilder::special(const std::string& name) {
    const auto [it, fresh] = specials_.try_emplace(name, 0);
    if (fresh) {
        const bool wide = name.find("64") != std::string::npos || name == "%globaltimer" || name == "%gridid" ||
                          name == "%total_smem_size64";
        it->second = allocate(kWarpSize * (wide ? 8 : 4));
        program_.specials.push_back({find_special_register(name), it->second, wide ? 8u : 4u});
    }
    return it->second;
}

uint32_t RegisterFileBuilder::symbol(const std::string& name, int64_t displacement, uint32_t bytes, int line) {
    const std::string key = name + "+" + std::to_string(displacement) + "/" + std::to_string(bytes);
    const auto known = symbols_.find(key);
    if (known != symbols_.end()) return known->second;
    SymbolRegister entry;
    entry.bytes = bytes;
    const auto value = static_cast<uint32_t>(displacement);
    if (const auto it = shared_.find(name); it != shared_.end()) {
        entry.kind = SymbolRegister::Kind::kShared;
        entry.value = it->second + value;
    } else if (dynamic_.count(name)) {
        entry.kind = SymbolRegister::Kind::kDynamicShared;
        entry.value = value;
    } else if (const auto local = locals_.find(name); local != locals_.end()) {
        entry.kind = SymbolRegister::Kind::kLocal;
        entry.value = local->second + value;
    } else if (const auto parameter = parameters_.find(name); parameter != parameters_.end()) {
        entry.kind = SymbolRegister::Kind::kParam;
        entry.value = parameter->second + value;
    } else if (const uint64_t global = globals_.address(name)) {
        const uint32_t offset = immediate(global + displacement, 8);
        return symbols_[key] = offset;
    } else {
        raise(Fault::kInvalidPtx, "PTX line %d: unknown symbol '%s'", line, name.c_str());
    }
    entry.offset = allocate(kWarpSize * bytes);
    program_.symbols.push_back(entry);
    return symbols_[key] = entry.offset;
}

uint32_t RegisterFileBuilder::scratch(uint32_t) {
    if (scratch_ == kNoRegister) scratch_ = allocate(kWarpSize * 16);
    return scratch_;
}

void RegisterFileBuilder::finish() {
    program_.initial_registers.assign(program_.register_bytes, 0xff);
    for (const auto& [key, offset] : immediates_) {
        const auto& [bits, bytes] = key;
        for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
            std::memcpy(&program_.initial_registers[offset + lane * bytes], &bits, bytes);
        }
    }
}

bool DecodeContext::has(const char* modifier) const {
    return std::find(syntax.modifiers.begin() + 1, syntax.modifiers.end(), modifier) != syntax.modifiers.end();
}

void DecodeContext::allow(size_t from, const char* known) const {
    const std::string words = " " + std::string(known) + " ";
    for (size_t i = from; i < syntax.modifiers.size(); ++i) {
        if (words.find(" " + syntax.modifiers[i] + " ") == std::string::npos) {
            fail("modifier '." + syntax.modifiers[i] + "' is not supported");
        }
    }
}

int DecodeContext::type_size() const {
    const int size = type_bytes(type());
    if (size < 0) fail("expected a type at the end");
    return size;
}

const SyntaxOperand& DecodeContext::operand(size_t index) const {
    if (index >= syntax.operands.size()) fail("too few operands");
    return syntax.operands[index];
}

void DecodeContext::fail(const std::string& why) const {
    raise(Fault::kInvalidPtx, "%s, PTX line %d: %s: opcode '%s' in: %s", program_.ptx_path.c_str(), syntax.line,
          why.c_str(), syntax.opcode.c_str(), syntax.text.c_str());
}

Handler DecodeContext::require(Handler handler) const {
    if (!handler) fail("unknown form of the opcode");
    return handler;
}

uint32_t DecodeContext::read(const SyntaxOperand& operand, uint32_t bytes) {
    switch (operand.kind) {
        case SyntaxOperand::Kind::kRegister: {
            const RegisterDeclaration& declared = kernel_.registers[operand.reg];
            if (declared.bytes != bytes) {
                fail(format("register %s has %u bytes, the instruction reads %u", declared.name.c_str(), declared.bytes,
                            bytes));
            }
            const uint32_t offset = registers_.of_register(operand.reg);
            info.reads.push_back(offset);
            return offset;
        }
        case SyntaxOperand::Kind::kImmediate: {
            uint64_t bits = static_cast<uint64_t>(operand.bits);
            if (operand.immediate_type == SyntaxOperand::ImmediateType::kFloat64 && bytes == 4) {
                double value;
                std::memcpy(&value, &bits, 8);
                const float narrow = static_cast<float>(value);
                bits = 0;
                std::memcpy(&bits, &narrow, 4);
            }
            return registers_.immediate(bits, bytes);
        }
        case SyntaxOperand::Kind::kSpecial:
            if (!find_special_register(operand.name)) fail("unknown register '" + operand.name + "'");
            return registers_.special(operand.name);
        case SyntaxOperand::Kind::kSymbol:
            return registers_.symbol(operand.name, operand.displacement, bytes, syntax.line);
        default:
            fail("unexpected kind of source operand");
    }
}

uint32_t DecodeContext::read_wide(const SyntaxOperand& operand, uint32_t default_bytes, uint32_t* bytes) {
    *bytes = operand.kind == SyntaxOperand::Kind::kRegister ? kernel_.registers[operand.reg].bytes : default_bytes;
    return read(operand, *bytes);
}

uint32_t DecodeContext::write(const SyntaxOperand& operand, uint32_t bytes) {
    if (operand.kind == SyntaxOperand::Kind::kSink) return registers_.scratch(bytes);
    if (operand.kind != SyntaxOperand::Kind::kRegister) fail("the destination is no register");
    const RegisterDeclaration& declared = kernel_.registers[operand.reg];
    if (declared.bytes != bytes) {
        fail(format("register %s has %u bytes, the instruction writes %u", declared.name.c_str(), declared.bytes,
                    bytes));
    }
    const uint32_t offset = registers_.of_register(operand.reg);
    info.writes.push_back(offset);
    return offset;
}

uint32_t DecodeContext::write_wide(const SyntaxOperand& operand, uint32_t* bytes) {
    if (operand.kind == SyntaxOperand::Kind::kSink) return registers_.scratch(*bytes);
    if (operand.kind != SyntaxOperand::Kind::kRegister) fail("the destination is no register");
    *bytes = kernel_.registers[operand.reg].bytes;
    return write(operand, *bytes);
}

uint32_t DecodeContext::read_predicate(const SyntaxOperand& operand, bool* negated) {
    if (operand.negated && !negated) fail("a negated predicate is not supported here");
    if (negated) *negated = operand.negated;
    if (operand.kind == SyntaxOperand::Kind::kImmediate) {
        return registers_.immediate(operand.bits ? ~uint64_t{0} : 0, 4);
    }
    if (operand.kind != SyntaxOperand::Kind::kRegister || kernel_.registers[operand.reg].bytes != 0) {
        fail("expected a predicate");
    }
    const uint32_t offset = registers_.of_register(operand.reg);
    info.reads.push_back(offset);
    return offset;
}

uint32_t DecodeContext::write_predicate(const SyntaxOperand& operand) {
    if (operand.kind == SyntaxOperand::Kind::kSink) return registers_.scratch(4);
    if (operand.kind != SyntaxOperand::Kind::kRegister || kernel_.registers[operand.reg].bytes != 0) {
        fail("expected a predicate as destination");
    }
    const uint32_t offset = registers_.of_register(operand.reg);
    info.writes.push_back(offset);
    return offset;
}

void DecodeContext::keep_list(int slot, std::vector<uint32_t> offsets) {
    out.list_size[slot] = static_cast<uint8_t>(offsets.size());
    out.list[slot] = program_.keep(std::move(offsets));
}

void DecodeContext::read_list(int slot, const SyntaxOperand& operand, uint32_t bytes) {
    std::vector<uint32_t> offsets;
    if (operand.kind == SyntaxOperand::Kind::kVector) {
        for (const SyntaxOperand& part : operand.parts) offsets.push_back(read(part, bytes));
    } else {
        offsets.push_back(read(operand, bytes));
    }
    keep_list(slot, std::move(offsets));
}

void DecodeContext::write_list(int slot, const SyntaxOperand& operand, uint32_t bytes) {
    std::vector<uint32_t> offsets;
    if (operand.kind == SyntaxOperand::Kind::kVector) {
        for (const SyntaxOperand& part : operand.parts) offsets.push_back(write(part, bytes));
    } else {
        offsets.push_back(write(operand, bytes));
    }
    keep_list(slot, std::move(offsets));
}

uint32_t DecodeContext::address(const SyntaxOperand& operand, Space space) {
    if (operand.kind != SyntaxOperand::Kind::kAddress || operand.parts.empty()) fail("expected an address in brackets");
    const SyntaxOperand& base = operand.parts[0];
    out.space = space;
    out.displacement = static_cast<int32_t>(operand.displacement);
    uint32_t bytes = 0;
    const uint32_t symbol_bytes = space == Space::kShared ? 4 : 8;
    const uint32_t offset = read_wide(base, symbol_bytes, &bytes);
    if (bytes != 4 && bytes != 8) fail("an address register has 32 or 64 bits");
    out.address_is_64 = bytes == 8;
    return offset;
}

uint32_t DecodeContext::local_offset(const SyntaxOperand& operand) const {
    if (operand.kind != SyntaxOperand::Kind::kSymbol || !is_local(operand.name)) fail("expected a local variable");
    return registers_.local_offset(operand.name);
}

bool DecodeContext::is_predicate(const SyntaxOperand& operand) const {
    return operand.kind == SyntaxOperand::Kind::kRegister && kernel_.registers[operand.reg].bytes == 0;
}

bool DecodeContext::is_immediate(size_t index) const {
    return operand(index).kind == SyntaxOperand::Kind::kImmediate;
}

int64_t DecodeContext::immediate(size_t index) const {
    if (!is_immediate(index)) fail("expected a constant operand");
    return operand(index).bits;
}

}  // namespace ptx_emulator
