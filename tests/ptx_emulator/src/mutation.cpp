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

Handler remove_instruction(Program& program, size_t n) {
    const std::vector<size_t> all = synchronization_instructions(program);
    if (n >= all.size()) {
        raise(Fault::kInvalidConfiguration, "kernel %s has %zu synchronisation instructions, there is no number %zu",
              program.name.c_str(), all.size(), n);
    }
    const uint32_t roles = program.info[all[n]].roles;
    const Handler without = roles & kRoleStoresResult       ? skip_with_success
                            : roles & kRoleReducesPredicate ? skip_reduction
                                                            : skip;
    return std::exchange(program.code[all[n]].handler, without);
}

void restore_instruction(Program& program, size_t n, Handler handler) {
    program.code[synchronization_instructions(program)[n]].handler = handler;
}

}  // namespace ptx_emulator
