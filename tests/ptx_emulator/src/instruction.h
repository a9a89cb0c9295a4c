// A decoded instruction: what the interpreter touches for each step, and beside it what only reports need.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ast.h"
#include "types.h"

namespace ptx_emulator {

// What a handler tells the interpreter.
enum class Step : uint8_t {
    kNext,   // done
    kJump,   // the lanes of the mask go on at Instruction::target
    kBlock,  // not done: try the same instruction again once something has changed
    kYield,  // done, but pointless to go on before something changes elsewhere (a failed try_wait)
    kExit,   // the lanes of the mask end
};

// mask: the lanes that execute the instruction (guard applied); never 0.
using Handler = Step (*)(Warp& warp, const Instruction& instruction, LaneMask mask);

// Tells a deadlock report what a blocked instruction waits for ("bar.sync 1: 64 of 128 threads arrived").
using WaitDescription = std::string (*)(const Warp& warp, const Instruction& instruction);

constexpr uint32_t kNoRegister = 0xffffffffu;

// Base of opcode-specific operands that do not fit the common fields.
struct InstructionData {
    virtual ~InstructionData() = default;
};

// Registers are named by their byte offset in the warp's register file (program.h). `a` to `d` may be constants of the
// program: immediates and addresses of symbols live in the same file.
struct Instruction {
    Handler handler = nullptr;
    uint32_t guard = kNoRegister;  // predicate
    bool guard_negated = false;
    bool negate_predicate = false;  // of the predicate operand (!%p)
    Space space = Space::kGeneric;
    bool address_is_64 = false;  // width of the address register
    uint8_t bytes = 0;           // of one element
    uint32_t dst = kNoRegister;
    uint32_t dst2 = kNoRegister;  // second result: the predicate of shfl, the other half of setp
    uint32_t a = 0, b = 0, c = 0, d = 0;
    int32_t displacement = 0;                                        // of the address operand
    uint32_t target = 0;                                             // of a branch
    uint32_t x = 0, y = 0, z = 0;                                    // opcode-specific constants
    const uint32_t* list[4] = {nullptr, nullptr, nullptr, nullptr};  // vector operands: offsets
    uint8_t list_size[4] = {0, 0, 0, 0};
    std::shared_ptr<const InstructionData> data;
};

// Roles the checker, the mutation runner and the deadlock report know an instruction by.
enum InstructionRole : uint32_t {
    kRoleSynchronization = 1u << 0,  // barrier, fence, wait, commit, arrive: the mutation runner may remove it
    kRoleAsyncProxy = 1u << 1,       // reads or writes memory through the async proxy
    kRoleStoresResult = 1u << 2,     // its removal must leave a predicate true (try_wait)
    kRoleCopiesRegisters = 1u << 3,  // mov: the front end's renaming, no computation
    kRoleWarpgroupMultiply = 1u << 4,
    kRoleWarpgroupWaitAll = 1u << 5,  // no wgmma is under way after it
    kRoleReducesPredicate = 1u << 6,  // its removal must leave each thread its own predicate (bar.red)
};

struct InstructionInfo {
    std::string opcode;
    std::string text;
    int line = 0;  // of the PTX file
    SourceLocation source;
    uint32_t roles = 0;
    std::vector<uint32_t> reads;  // register offsets, for the in-flight check
    std::vector<uint32_t> writes;
    WaitDescription describe_wait = nullptr;
    // Of an access that orders others (ld.acquire, red.release): what the instruction's data would be if it did not.
    std::shared_ptr<const InstructionData> unordered;
};

}  // namespace ptx_emulator
