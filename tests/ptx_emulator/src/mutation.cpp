#include "mutation.h"

#include <utility>

#include "errors.h"
#include "warp.h"

namespace ptx_emulator {

std::vector<size_t> synchronization_instructions(const Program& program) {
    std::vector<size_t> found;
    for (size_t i = 0; i < program.info.size(); ++i) {
        if (program.info[i].roles & kRoleSynchronization) found.push_back(i);
    }
    return found;
}

static Step skip(Warp&, const Instruction&, LaneMask) {
    return Step::kNext;
}

static Step skip_with_success(Warp& warp, const Instruction& i, LaneMask mask) {
    warp.set_predicate(i.dst, kAllLanes, mask);
    return Step::kNext;
}

static Step skip_reduction(Warp& warp, const Instruction& i, LaneMask mask) {
    const LaneMask own = warp.predicate(i.c);
    warp.set_predicate(i.dst, i.negate_predicate ? ~own : own, mask);
    return Step::kNext;
}

Instruction remove_instruction(Program& program, size_t n) {
    const std::vector<size_t> all = synchronization_instructions(program);
    if (n >= all.size()) {
        raise(Fault::kInvalidConfiguration, "kernel %s has %zu synchronisation instructions, there is no number %zu",
              program.name.c_str(), all.size(), n);
    }
    const InstructionInfo& info = program.info[all[n]];
    Instruction& instruction = program.code[all[n]];
    Instruction original = instruction;
    if (info.unordered) {
        instruction.data = info.unordered;
    } else {
        instruction.handler = info.roles & kRoleStoresResult       ? skip_with_success
                              : info.roles & kRoleReducesPredicate ? skip_reduction
                                                                   : skip;
    }
    return original;
}

void restore_instruction(Program& program, size_t n, Instruction original) {
    program.code[synchronization_instructions(program)[n]] = std::move(original);
}

}  // namespace ptx_emulator
