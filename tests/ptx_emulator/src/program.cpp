#include "program.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "decoder.h"
#include "errors.h"
#include "opcode_table.h"
#include "shadow.h"

namespace ptx_emulator {

ModuleGlobals::ModuleGlobals(const ModuleSyntax& module) {
    for (const VariableSyntax& variable : module.globals) {
        if (variable.is_extern) continue;
        const uint32_t alignment = std::max<uint32_t>(variable.alignment, 16);
        storage_.emplace_back(variable.bytes + alignment, 0);
        uint8_t* data = storage_.back().data();
        data += (alignment - reinterpret_cast<uintptr_t>(data) % alignment) % alignment;
        std::memcpy(data, variable.initial.data(), std::min<size_t>(variable.initial.size(), variable.bytes));
        addresses_[variable.name] = reinterpret_cast<uint64_t>(data);
    }
    for (const VariableSyntax& variable : module.globals) {
        for (const auto& [offset, symbol] : variable.relocations) {
            const uint64_t value = address(symbol);
            if (!value) {
                raise(Fault::kInvalidPtx, "unknown symbol '%s' in the initial value of '%s'", symbol.c_str(),
                      variable.name.c_str());
            }
            if (offset + 8 > variable.bytes) {
                raise(Fault::kInvalidPtx, "the initial value of '%s' has more than its %u bytes", variable.name.c_str(),
                      variable.bytes);
            }
            std::memcpy(reinterpret_cast<uint8_t*>(addresses_[variable.name]) + offset, &value, 8);
        }
    }
}

uint64_t ModuleGlobals::address(const std::string& name) const {
    const auto it = addresses_.find(name);
    return it == addresses_.end() ? 0 : it->second;
}

Program::Program(const ModuleSyntax& module, const KernelSyntax& kernel, const ModuleGlobals& globals, std::string path)
    : name(kernel.name), ptx_path(std::move(path)), target(module.target), files(module.files) {
    parameters = kernel.parameters;
    parameter_bytes = kernel.parameter_bytes;
    min_ctas_per_sm = kernel.min_ctas_per_sm;
    std::copy(kernel.required_cluster, kernel.required_cluster + 3, required_cluster);
    std::copy(kernel.max_threads, kernel.max_threads + 3, max_threads);
    std::copy(kernel.required_threads, kernel.required_threads + 3, required_threads);
    if (kernel.instructions.size() > kMaxCheckedInstructions) {
        raise(Fault::kUnsupported, "kernel %s has %zu instructions, the checker numbers %zu", name.c_str(),
              kernel.instructions.size(), kMaxCheckedInstructions);
    }
    executed.assign(kernel.instructions.size(), 0);
    decode(module, kernel, globals, {});
    decode(module, kernel, globals, share_registers(kernel, register_uses(kernel)));
    number_registers();
}

void Program::decode(const ModuleSyntax& module, const KernelSyntax& kernel, const ModuleGlobals& globals,
                     const std::vector<uint32_t>& slots) {
    register_bytes = static_shared = local_bytes = 0;
    specials.clear();
    symbols.clear();
    lists_.clear();
    RegisterFileBuilder registers(*this, module, kernel, globals, slots);
    code.assign(kernel.instructions.size(), {});
    info.assign(kernel.instructions.size(), {});
    for (size_t i = 0; i < kernel.instructions.size(); ++i) {
        const SyntaxInstruction& syntax = kernel.instructions[i];
        info[i].opcode = syntax.opcode;
        info[i].text = syntax.text;
        info[i].line = syntax.line;
        info[i].source = syntax.source;
        DecodeContext context(syntax, kernel, *this, registers, code[i], info[i]);
        if (syntax.guard >= 0) {
            code[i].guard = registers.of_register(syntax.guard);
            code[i].guard_negated = syntax.guard_negated;
            info[i].reads.push_back(code[i].guard);
        }
        const DecodeFunction decode = OpcodeTable::instance().find(syntax.modifiers);
        if (!decode) context.fail("unknown opcode");
        decode(context);
        if (!code[i].handler) context.fail("unknown form of the opcode");
        uses_wgmma |= (info[i].roles & kRoleWarpgroupMultiply) != 0;
        uses_async_proxy |= (info[i].roles & kRoleAsyncProxy) != 0;
    }
    registers.finish();
    register_offsets_.clear();
    for (size_t r = 0; r < kernel.registers.size(); ++r) {
        register_offsets_.push_back(registers.of_register(static_cast<int>(r)));
    }
}

std::vector<RegisterUse> Program::register_uses(const KernelSyntax& kernel) const {
    std::unordered_map<uint32_t, uint32_t> register_at;
    for (uint32_t r = 0; r < register_offsets_.size(); ++r) register_at[register_offsets_[r]] = r;
    std::vector<RegisterUse> uses(code.size());
    for (size_t i = 0; i < code.size(); ++i) {
        RegisterUse& use = uses[i];
        auto note = [&](uint32_t offset, std::vector<uint32_t>& where) {
            const auto it = register_at.find(offset);  // constants are no registers
            if (it != register_at.end()) where.push_back(it->second);
        };
        for (uint32_t offset : info[i].reads) note(offset, use.reads);
        for (uint32_t offset : info[i].writes) note(offset, use.writes);
        use.partial = kernel.instructions[i].guard >= 0;
        use.waits_for_flight = !use.partial && (info[i].roles & kRoleWarpgroupWaitAll) != 0;
        if (info[i].roles & kRoleWarpgroupMultiply) {
            // Accumulators, which the lists of the in-flight check leave out.
            for (uint32_t r = 0; r < code[i].list_size[0]; ++r) note(code[i].list[0][r], use.reads);
            use.in_flight = true;
        }
    }
    return uses;
}

// Registers that share a place have one number.
void Program::number_registers() {
    constexpr uint32_t kNone = ~0u;
    register_numbers_.assign(register_bytes / 4 + 1, kNone);
    register_count = 0;
    auto number = [&](uint32_t offset) {
        uint32_t& known = register_numbers_[offset / 4];
        if (known == kNone) known = register_count++;
        return known;
    };
    for (uint32_t offset : register_offsets_) number(offset);
    for (const InstructionInfo& at : info) {
        TouchedRegisters registers;
        registers.first = static_cast<uint32_t>(touched_registers.size());
        registers.reads = static_cast<uint32_t>(at.reads.size());
        registers.writes = static_cast<uint32_t>(at.writes.size());
        registers.copies = (at.roles & kRoleCopiesRegisters) != 0;
        for (uint32_t offset : at.reads) touched_registers.push_back(number(offset));
        for (uint32_t offset : at.writes) touched_registers.push_back(number(offset));
        touched.push_back(registers);
    }
}

std::string Program::source(uint32_t pc) const {
    const auto file = files.find(info[pc].source.file);
    return file == files.end() ? "" : format("%s:%d", file->second.c_str(), info[pc].source.line);
}

std::string Program::where(uint32_t pc) const {
    if (pc >= info.size()) return name + ": end of the kernel";
    const InstructionInfo& at = info[pc];
    const auto file = files.find(at.source.file);
    auto base = [](const std::string& path) { return path.substr(path.find_last_of('/') + 1); };
    const std::string source =
        file == files.end() ? "" : format(" (%s:%d)", base(file->second).c_str(), at.source.line);
    return format("%s:%d%s: %s", base(ptx_path).c_str(), at.line, source.c_str(), at.text.c_str());
}

const uint32_t* Program::keep(std::vector<uint32_t> list) {
    lists_.push_back(std::move(list));
    return lists_.back().data();
}

}  // namespace ptx_emulator
