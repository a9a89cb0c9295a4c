// Which forms of matrix products and copies have run: shapes, layouts, swizzles, CTA groups. For the question what
// flash_ext's kernels use that no known-good kernel from elsewhere does (tests/ptx_emulator/forms.py).
#pragma once

#include <set>
#include <string>

#include "program.h"

namespace ptx_emulator {

// Of this process; guarded by launch_mutex().
class Forms {
  public:
    static Forms& instance();

    void note(std::string form) {
        if (known_.insert(form).second) fresh_ += form + "\n";
    }
    // The opcodes of executed products, copies and accesses of tensor memory.
    void note_opcodes(const Program& program);
    // Appends what is new since the last call to a file, one form a line.
    void append_to(const std::string& path);

  private:
    std::set<std::string> known_;
    std::string fresh_;
};

}  // namespace ptx_emulator
