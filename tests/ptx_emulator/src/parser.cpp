#include "parser.h"

#include <cctype>
#include <cstdlib>
#include <cstring>

#include "errors.h"
#include "lexer.h"

namespace ptx_emulator {

int type_bytes(const std::string& type) {
    static const std::map<std::string, int> sizes = {
        {"pred", 0},   {"b8", 1},    {"u8", 1},    {"s8", 1},     {"b16", 2},    {"u16", 2},  {"s16", 2},
        {"f16", 2},    {"bf16", 2},  {"b32", 4},   {"u32", 4},    {"s32", 4},    {"f32", 4},  {"f16x2", 4},
        {"bf16x2", 4}, {"tf32", 4},  {"u16x2", 4}, {"s16x2", 4},  {"b64", 8},    {"u64", 8},  {"s64", 8},
        {"f64", 8},    {"f32x2", 8}, {"b128", 16}, {"e4m3x2", 2}, {"e5m2x2", 2}, {"e4m3", 1}, {"e5m2", 1},
    };
    const auto it = sizes.find(type);
    return it == sizes.end() ? -1 : it->second;
}

static uint32_t align_up(uint32_t value, uint32_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}

static std::vector<std::string> split_at_dots(const std::string& word) {
    std::vector<std::string> parts;
    size_t begin = 0;
    while (begin <= word.size()) {
        size_t end = word.find('.', begin);
        if (end == std::string::npos) end = word.size();
        parts.push_back(word.substr(begin, end - begin));
        begin = end + 1;
    }
    return parts;
}

namespace {

constexpr uint32_t kMaxAlignment = 1u << 20, kMaxBytes = 1u << 30, kMaxRegisters = 1u << 20;
constexpr uint32_t kMaxParameterBytes = 32764;  // PTX ISA 5.2.2, of sm_70 and later
constexpr int kMaxNesting = 16;                 // of operands and initialisers in brackets

// Registers, variables and labels of one { } block.
struct Scope {
    int parent = -1;
    std::map<std::string, int> registers;                      // name -> register index
    std::map<std::string, std::pair<int, uint32_t>> families;  // "%r" -> first index, count, of ".reg .b32 %r<100>"
    std::map<std::string, std::string> variables;              // name -> unique name
    std::map<std::string, int> labels;                         // name -> instruction index
    std::map<std::string, std::vector<std::string>> tables;    // .branchtargets
};

class Parser {
  public:
    explicit Parser(const std::string& text) : tokens_(tokenize(text)) {}

    ModuleSyntax run() {
        while (at().kind != Token::Kind::kEnd) module_statement();
        return std::move(module_);
    }

  private:
    // ---- tokens
    const Token& at(size_t ahead = 0) const {
        return tokens_[position_ + ahead < tokens_.size() ? position_ + ahead : tokens_.size() - 1];
    }
    // The end is never taken: a text that stops in the middle fails here, whatever wanted to go on.
    Token take() {
        const Token token = at();
        if (token.kind == Token::Kind::kEnd) fail("the text ends in the middle of a statement");
        ++position_;
        return token;
    }
    bool accept(const char* text) {
        if (!at().is(text)) return false;
        take();
        return true;
    }
    void expect(const char* text) {
        if (!accept(text)) fail(format("expected '%s' before '%s'", text, at().text.c_str()));
    }
    [[noreturn]] void fail(const std::string& message) const {
        raise(Fault::kInvalidPtx, "PTX line %d: %s", at().line, message.c_str());
    }
    int integer() {
        bool negative = accept("-");
        const Token token = take();
        if (token.kind != Token::Kind::kNumber) fail("expected a number instead of '" + token.text + "'");
        const int value = static_cast<int>(std::strtoll(token.text.c_str(), nullptr, 0));
        return negative ? -value : value;
    }
    // A size, a count or an alignment: what the emulator allocates must stay within what a kernel could have.
    uint32_t size(uint64_t limit) {
        const Token token = take();
        uint64_t value = 0;
        if (token.kind == Token::Kind::kNumber) value = std::strtoull(token.text.c_str(), nullptr, 0);
        if (token.kind != Token::Kind::kNumber || value > limit) {
            fail(format("expected a number up to %llu instead of '%s'", static_cast<unsigned long long>(limit),
                        token.text.c_str()));
        }
        return static_cast<uint32_t>(value);
    }
    uint32_t alignment() {
        const uint32_t value = size(kMaxAlignment);
        if (value == 0 || (value & (value - 1)) != 0) fail(format("an alignment of %u", value));
        return value;
    }
    uint32_t array(uint32_t element) {
        const uint64_t bytes = uint64_t{element} * size(kMaxBytes);
        if (bytes > kMaxBytes) fail(format("%llu bytes", static_cast<unsigned long long>(bytes)));
        return static_cast<uint32_t>(bytes);
    }
    void skip_block() {
        expect("{");
        for (int depth = 1; depth > 0;) {
            const Token token = take();
            depth += token.is("{") ? 1 : token.is("}") ? -1 : 0;
        }
    }

    // ---- module scope
    void module_statement() {
        const Token& token = at();
        if (token.is(".version")) {
            take();
            module_.version = take().text;
        } else if (token.is(".target")) {
            take();
            module_.target = take().text;
            while (accept(",")) take();
        } else if (token.is(".address_size")) {
            take();
            if (take().text != "64") fail("only .address_size 64 is supported");
        } else if (token.is(".file")) {
            file_directive();
        } else if (token.is(".section")) {
            take();
            take();
            skip_block();
        } else if (token.is(".pragma")) {
            while (!accept(";")) take();
        } else if (token.is(";")) {
            take();
        } else {
            linked_declaration();
        }
    }

    void file_directive() {
        const int line = at().line;
        take();
        const int index = integer();
        module_.files[index] = take().text;
        while (at().line == line && at().kind != Token::Kind::kEnd) take();
    }

    // A declaration with its linking directives: .entry, .func, .global, .const, .shared.
    void linked_declaration() {
        bool is_extern = false;
        for (;;) {
            if (accept(".extern")) {
                is_extern = true;
            } else if (!accept(".visible") && !accept(".weak") && !accept(".common")) {
                break;
            }
        }
        if (accept(".entry")) {
            entry();
        } else if (accept(".func")) {
            function(is_extern);
        } else if (at().is(".global") || at().is(".const")) {
            take();
            variables(module_.globals, is_extern);
        } else if (accept(".shared")) {
            variables(module_.shared, is_extern);
        } else {
            fail("unexpected '" + at().text + "' at module scope");
        }
    }

    // Bodies of functions are skipped: a call of one is refused where it stands (kernels here are fully inlined).
    void function(bool) {
        while (!at().is("{") && !at().is(";")) {
            take();
        }
        if (at().is("{")) {
            skip_block();
        } else {
            take();
        }
    }

    // The part of a variable declaration after its state space, to the semicolon.
    void variables(std::vector<VariableSyntax>& out, bool is_extern) {
        uint32_t asked_alignment = 0, vector = 1;
        int bytes = -1;
        bool is_float = false;
        while (at().kind == Token::Kind::kWord && at().text[0] == '.') {
            const std::string word = take().text;
            if (word == ".align") {
                asked_alignment = alignment();
            } else if (word == ".v2" || word == ".v4") {
                vector = word[2] - '0';
            } else if (word == ".attribute") {
                while (!accept(")")) take();
            } else {
                bytes = type_bytes(word.substr(1));
                if (bytes <= 0) fail("unknown type '" + word + "'");
                is_float = word[1] == 'f';
            }
        }
        if (bytes <= 0) fail("a variable without a type");
        do {
            VariableSyntax variable;
            variable.name = take().text;
            variable.is_extern = is_extern;
            const uint32_t element = bytes * vector;
            variable.alignment = asked_alignment ? asked_alignment : element;
            variable.bytes = element;
            bool unsized = false;
            while (accept("[")) {
                if (accept("]")) {
                    unsized = true;
                    variable.bytes = 0;
                } else {
                    variable.bytes = array(variable.bytes);
                    expect("]");
                }
            }
            if (accept("=")) {
                initializer(variable, bytes, is_float);
                if (unsized) variable.bytes = static_cast<uint32_t>(variable.initial.size());
            }
            out.push_back(variable);
        } while (accept(","));
        expect(";");
    }

    void initializer(VariableSyntax& variable, int bytes, bool is_float, int depth = 0) {
        if (depth > kMaxNesting) fail("brackets nested too deeply");
        if (accept("{")) {
            while (!accept("}")) {
                initializer(variable, bytes, is_float, depth + 1);
                accept(",");
            }
            return;
        }
        uint64_t bits = 0;
        const bool negative = accept("-");
        const Token token = take();
        if (token.kind == Token::Kind::kNumber) {
            SyntaxOperand number = parse_number(token.text, negative);
            bits = number.bits;
            if (is_float && number.immediate_type == SyntaxOperand::ImmediateType::kInteger && bits)
                fail("initialiser");
        } else {
            std::string name = token.text;
            if (bytes != 8) fail("the address of '" + name + "' in an element of " + std::to_string(bytes) + " bytes");
            if (name == "generic") {
                expect("(");
                name = take().text;
                expect(")");
            }
            variable.relocations.push_back({static_cast<uint32_t>(variable.initial.size()), name});
        }
        const uint8_t* raw = reinterpret_cast<const uint8_t*>(&bits);
        variable.initial.insert(variable.initial.end(), raw, raw + bytes);
    }

    void entry() {
        KernelSyntax kernel;
        kernel.line = at().line;
        kernel.name = take().text;
        if (accept("(")) {
            while (!accept(")")) {
                parameter(kernel);
                accept(",");
            }
        }
        while (!at().is("{")) {
            const std::string word = take().text;
            if (word == ".maxntid") {
                dimensions(kernel.max_threads);
            } else if (word == ".reqntid") {
                dimensions(kernel.required_threads);
            } else if (word == ".reqnctapercluster") {
                dimensions(kernel.required_cluster);
            } else if (word == ".minnctapersm") {
                kernel.min_ctas_per_sm = integer();
            } else if (word == ".maxnreg" || word == ".maxclusterrank") {
                integer();
            } else if (word == ".pragma") {
                while (!accept(";")) take();
            } else if (word != ".explicitcluster" && word != ".blocksareclusters" && word != ".noreturn") {
                fail("unknown kernel directive '" + word + "'");
            }
        }
        body(kernel);
        module_.kernels[kernel.name] = std::move(kernel);
    }

    void dimensions(uint32_t* out) {
        out[0] = integer();
        out[1] = out[2] = 1;
        for (int i = 1; i < 3 && accept(","); ++i) out[i] = integer();
    }

    void parameter(KernelSyntax& kernel) {
        expect(".param");
        uint32_t asked_alignment = 0;
        int bytes = 0;
        while (at().kind == Token::Kind::kWord && at().text[0] == '.') {
            const std::string word = take().text;
            if (word == ".align") {
                const uint32_t value = alignment();
                if (!bytes) asked_alignment = value;  // after the type it belongs to .ptr
            } else if (word != ".ptr" && word != ".global" && word != ".shared" && word != ".const" &&
                       word != ".local") {
                bytes = type_bytes(word.substr(1));
                if (bytes <= 0) fail("unknown parameter type '" + word + "'");
            }
        }
        if (bytes <= 0) fail("a parameter without a type");
        ParameterSyntax parameter;
        parameter.name = take().text;
        parameter.bytes = bytes;
        if (accept("[")) {
            parameter.bytes = array(parameter.bytes);
            expect("]");
        }
        kernel.parameter_bytes = align_up(kernel.parameter_bytes, asked_alignment ? asked_alignment : bytes);
        parameter.offset = kernel.parameter_bytes;
        if (parameter.bytes > kMaxParameterBytes || parameter.offset + parameter.bytes > kMaxParameterBytes) {
            fail(format("the parameters of kernel %s exceed %u bytes", kernel.name.c_str(), kMaxParameterBytes));
        }
        kernel.parameter_bytes += parameter.bytes;
        kernel.parameters.push_back(parameter);
    }

    // ---- kernel bodies
    void body(KernelSyntax& kernel) {
        kernel_ = &kernel;
        scopes_.assign(1, Scope{});
        scope_ = 0;
        branches_.clear();
        source_ = SourceLocation{};
        expect("{");
        for (int depth = 1; depth > 0;) {
            const Token& token = at();
            if (token.kind == Token::Kind::kEnd) fail("the text ends within kernel " + kernel.name);
            if (token.is("{")) {
                take();
                Scope inner;
                inner.parent = scope_;
                scopes_.push_back(inner);
                scope_ = static_cast<int>(scopes_.size()) - 1;
                ++depth;
            } else if (token.is("}")) {
                take();
                scope_ = scopes_[scope_].parent;
                --depth;
            } else {
                statement();
            }
        }
        resolve_branches();
    }

    void statement() {
        const Token& token = at();
        if (token.is(";")) {
            take();
        } else if (token.kind == Token::Kind::kWord && at(1).is(":")) {
            const std::string label = take().text;
            take();
            if (at().is(".branchtargets")) {
                take();
                do {
                    scopes_[scope_].tables[label].push_back(take().text);
                } while (accept(","));
                expect(";");
            } else if (at().is(".callprototype")) {
                while (!accept(";")) take();
            } else {
                scopes_[scope_].labels[label] = static_cast<int>(kernel_->instructions.size());
            }
        } else if (token.is(".loc")) {
            location();
        } else if (token.is(".file")) {
            file_directive();
        } else if (token.is(".pragma")) {
            while (!accept(";")) take();
        } else if (token.is(".reg")) {
            register_declaration();
        } else if (token.is(".shared") || token.is(".local") || token.is(".param")) {
            const bool shared = take().is(".shared");
            std::vector<VariableSyntax> declared;
            variables(declared, false);
            declare(declared, shared);
        } else if (token.kind == Token::Kind::kWord && token.text[0] == '.') {
            fail("unknown directive '" + token.text + "'");
        } else {
            instruction();
        }
    }

    void location() {
        const int line = at().line;
        take();
        source_.file = integer();
        source_.line = integer();
        while (at().line == line && at().kind != Token::Kind::kEnd) take();
    }

    void register_declaration() {
        take();
        std::string type = take().text.substr(1);
        if (type == "v2" || type == "v4") fail("vector registers are not supported");
        const int bytes = type_bytes(type);
        if (bytes < 0) fail("unknown register type '" + type + "'");
        do {
            const std::string name = take().text;
            const int first = static_cast<int>(kernel_->registers.size());
            if (accept("<")) {
                const uint32_t count = size(kMaxRegisters);
                expect(">");
                for (uint32_t i = 0; i < count; ++i) {
                    kernel_->registers.push_back({name + std::to_string(i), type, static_cast<uint32_t>(bytes)});
                }
                scopes_[scope_].families[name] = {first, count};
            } else {
                kernel_->registers.push_back({name, type, static_cast<uint32_t>(bytes)});
                scopes_[scope_].registers[name] = first;
            }
        } while (accept(","));
        expect(";");
    }

    int find_register(const std::string& name) const {
        size_t digits = name.size();
        while (digits > 0 && std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
        for (int s = scope_; s >= 0; s = scopes_[s].parent) {
            const auto single = scopes_[s].registers.find(name);
            if (single != scopes_[s].registers.end()) return single->second;
            if (digits == name.size()) continue;
            const auto family = scopes_[s].families.find(name.substr(0, digits));
            if (family == scopes_[s].families.end()) continue;
            const unsigned long index = std::strtoul(name.c_str() + digits, nullptr, 10);
            if (index < family->second.second) return family->second.first + static_cast<int>(index);
        }
        return -1;
    }

    SyntaxOperand parse_number(const std::string& text, bool negative) const {
        SyntaxOperand operand;
        operand.kind = SyntaxOperand::Kind::kImmediate;
        const bool tagged = text.size() > 2 && text[0] == '0';
        if (tagged && (text[1] == 'f' || text[1] == 'F')) {
            operand.immediate_type = SyntaxOperand::ImmediateType::kFloat32;
            uint32_t bits = static_cast<uint32_t>(std::strtoul(text.c_str() + 2, nullptr, 16));
            operand.bits = negative ? bits ^ 0x80000000u : bits;
        } else if (tagged && (text[1] == 'd' || text[1] == 'D')) {
            operand.immediate_type = SyntaxOperand::ImmediateType::kFloat64;
            uint64_t bits = std::strtoull(text.c_str() + 2, nullptr, 16);
            operand.bits = static_cast<int64_t>(negative ? bits ^ (uint64_t{1} << 63) : bits);
        } else if (text.find('.') != std::string::npos) {
            operand.immediate_type = SyntaxOperand::ImmediateType::kFloat64;
            double value = std::strtod(text.c_str(), nullptr);
            if (negative) value = -value;
            std::memcpy(&operand.bits, &value, 8);
        } else {
            const uint64_t value = tagged && (text[1] == 'b' || text[1] == 'B')
                                       ? std::strtoull(text.c_str() + 2, nullptr, 2)
                                       : std::strtoull(text.c_str(), nullptr, 0);
            operand.bits = static_cast<int64_t>(negative ? 0 - value : value);
        }
        return operand;
    }

    SyntaxOperand operand(int depth = 0) {
        SyntaxOperand result = simple_operand(depth);
        if (accept("|")) {
            SyntaxOperand pair;
            pair.kind = SyntaxOperand::Kind::kPair;
            pair.parts.push_back(result);
            pair.parts.push_back(simple_operand(depth));
            return pair;
        }
        // "symbol+4" outside of brackets: the address of a variable with an offset
        if (result.kind == SyntaxOperand::Kind::kSymbol && at().is("+")) {
            take();
            result.displacement = integer();
        }
        return result;
    }

    SyntaxOperand simple_operand(int depth = 0) {
        if (depth > kMaxNesting) fail("brackets nested too deeply");
        SyntaxOperand result;
        if (accept("{")) {
            result.kind = SyntaxOperand::Kind::kVector;
            while (!accept("}")) {
                result.parts.push_back(operand(depth + 1));
                accept(",");
            }
            return result;
        }
        if (accept("[")) {
            result.kind = SyntaxOperand::Kind::kAddress;
            while (!accept("]")) {
                result.parts.push_back(simple_operand(depth + 1));
                if (accept("+")) {
                    const bool negative = accept("-");
                    const Token number = take();
                    if (number.kind != Token::Kind::kNumber)
                        fail("expected an offset instead of '" + number.text + "'");
                    result.displacement = parse_number(number.text, negative).bits;
                } else if (at().is("-")) {
                    take();
                    result.displacement = parse_number(take().text, true).bits;
                }
                accept(",");
            }
            return result;
        }
        if (accept("!")) {
            result = simple_operand(depth + 1);
            result.negated = true;
            return result;
        }
        const bool negative = accept("-");
        const Token token = take();
        if (token.kind == Token::Kind::kNumber) return parse_number(token.text, negative);
        if (token.kind != Token::Kind::kWord || negative) fail("unexpected operand '" + token.text + "'");
        if (token.text == "_") return result;
        result.name = token.text;
        result.reg = find_register(token.text);
        if (result.reg >= 0) {
            result.kind = SyntaxOperand::Kind::kRegister;
        } else if (token.text[0] == '%') {
            result.kind = SyntaxOperand::Kind::kSpecial;
        } else {
            result.kind = SyntaxOperand::Kind::kSymbol;
            for (int s = scope_; s >= 0; s = scopes_[s].parent) {
                const auto it = scopes_[s].variables.find(token.text);
                if (it == scopes_[s].variables.end()) continue;
                result.name = it->second;
                break;
            }
        }
        return result;
    }

    void instruction() {
        SyntaxInstruction out;
        const size_t first = position_;
        out.line = at().line;
        out.source = source_;
        if (accept("@")) {
            out.guard_negated = accept("!");
            const std::string name = take().text;
            out.guard = find_register(name);
            if (out.guard < 0) fail("unknown predicate '" + name + "'");
        }
        const Token opcode = take();
        if (opcode.kind != Token::Kind::kWord) fail("expected an instruction instead of '" + opcode.text + "'");
        out.opcode = opcode.text;
        out.modifiers = split_at_dots(opcode.text);
        if (out.modifiers[0] == "call") {
            call(out);
        } else {
            while (!at().is(";")) {
                out.operands.push_back(operand());
                if (!accept(",")) break;
            }
        }
        for (size_t i = first; i < position_; ++i) {
            const std::string& text = tokens_[i].text;
            if (!out.text.empty() && tokens_[i].kind != Token::Kind::kPunctuation &&
                std::string(",({[|!@-+").find(out.text.back()) == std::string::npos) {
                out.text += ' ';
            } else if (!out.text.empty() && out.text.back() == ',') {
                out.text += ' ';
            } else if ((text == "[" || text == "{" || text == "-") && !out.text.empty() && out.text.back() != '[' &&
                       out.text.back() != '{' && out.text.back() != '+') {
                out.text += ' ';
            }
            out.text += text;
        }
        expect(";");
        if (out.modifiers[0] == "bra" || out.modifiers[0] == "brx") {
            branches_.push_back({kernel_->instructions.size(), scope_});
        }
        kernel_->instructions.push_back(std::move(out));
    }

    // call{.uni} (return value), function, (arguments);
    void call(SyntaxInstruction& out) {
        if (at().is("(")) {
            take();
            while (!accept(")")) {
                out.operands.push_back(operand());
                accept(",");
            }
            expect(",");
        }
        out.callee = take().text;
        if (accept(",")) {
            if (accept("(")) {
                while (!accept(")")) {
                    out.call_arguments.push_back(operand());
                    accept(",");
                }
            }
            while (!at().is(";")) take();  // a prototype of an indirect call
        }
    }

    void declare(std::vector<VariableSyntax>& declared, bool shared) {
        for (VariableSyntax& variable : declared) {
            const std::string unique = variable.name + "@" + std::to_string(scope_);
            scopes_[scope_].variables[variable.name] = unique;
            variable.name = unique;
            (shared ? kernel_->shared : kernel_->local).push_back(variable);
        }
    }

    void resolve_branches() {
        auto label = [&](int scope, const std::string& name) {
            for (int s = scope; s >= 0; s = scopes_[s].parent) {
                const auto it = scopes_[s].labels.find(name);
                if (it != scopes_[s].labels.end()) return it->second;
            }
            return -1;
        };
        for (const auto& [index, scope] : branches_) {
            SyntaxInstruction& branch = kernel_->instructions[index];
            std::vector<std::string> names;
            if (branch.modifiers[0] == "bra") {
                if (branch.operands.empty()) raise(Fault::kInvalidPtx, "PTX line %d: bra without a label", branch.line);
                names.push_back(branch.operands[0].name);
            } else {
                if (branch.operands.empty()) raise(Fault::kInvalidPtx, "PTX line %d: brx without a table", branch.line);
                for (int s = scope; s >= 0 && names.empty(); s = scopes_[s].parent) {
                    const auto it = scopes_[s].tables.find(branch.operands.back().name);
                    if (it != scopes_[s].tables.end()) names = it->second;
                }
            }
            for (const std::string& name : names) {
                const int target = label(scope, name);
                if (target < 0) raise(Fault::kInvalidPtx, "PTX line %d: no label '%s'", branch.line, name.c_str());
                branch.targets.push_back(target);
            }
        }
    }

    std::vector<Token> tokens_;
    size_t position_ = 0;
    ModuleSyntax module_;
    KernelSyntax* kernel_ = nullptr;
    std::vector<Scope> scopes_;
    int scope_ = 0;
    std::vector<std::pair<size_t, int>> branches_;  // instruction, its scope
    SourceLocation source_;
};

}  // namespace

ModuleSyntax parse_module(const std::string& text) {
    return Parser(text).run();
}

}  // namespace ptx_emulator
