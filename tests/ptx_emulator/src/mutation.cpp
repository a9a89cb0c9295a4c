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

Handler remove_instruction(Program& program, size_t n) {
    const std::vector<size_t> all = synchronization_instructions(program);
    if (n >= all.size()) {
        raise(Fault::kInvalidConfiguration, "kernel %s has %zu synchronisation instructions, there is no number %zu",
              program.name.c_str(), all.size(), n);
    }
    const bool stores = program.info[all[n]].roles & kRoleStoresResult;
    return std::exchange(program.code[all[n]].handler, stores ? skip_with_success : skip);
}

void restore_instruction(Program& program, size_t n, Handler handler) {
    program.code[synchronization_instructions(program)[n]].handler = handler;
}

}  // namespace ptx_emulator
