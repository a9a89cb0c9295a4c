#include "forms.h"

#include <cstdio>

#include "errors.h"

namespace ptx_emulator {

Forms& Forms::instance() {
    static auto* forms = new Forms;
    return *forms;
}

void Forms::note_opcodes(const Program& program) {
    static const char* const families[] = {"tcgen05.",       "wgmma.mma_async", "mma.",      "ldmatrix.", "stmatrix.",
                                           "cp.async.bulk.", "cp.reduce.async", "cp.async.", "movmatrix."};
    for (size_t pc = 0; pc < program.code.size(); ++pc) {
        if (!program.executed[pc]) continue;
        const std::string& opcode = program.info[pc].opcode;
        for (const char* family : families) {
            if (opcode.rfind(family, 0) != 0) continue;
            note(opcode);
            break;
        }
    }
}

void Forms::append_to(const std::string& path) {
    if (fresh_.empty()) return;
    std::FILE* file = std::fopen(path.c_str(), "a");
    if (!file) raise(Fault::kInvalidConfiguration, "FLASH_EXT_EMULATOR_FORMS=%s cannot be written", path.c_str());
    // In one piece, so that several processes may write to one file.
    std::setvbuf(file, nullptr, _IOFBF, fresh_.size() + 1);
    std::fwrite(fresh_.data(), 1, fresh_.size(), file);
    std::fclose(file);
    fresh_.clear();
}

}  // namespace ptx_emulator
