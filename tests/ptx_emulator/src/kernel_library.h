// Finds and decodes the PTX of a kernel by its name.
//
// Beside a library NAME.so linked with the emulator lies NAME.ptx_index (tests/ptx_emulator/build.py), one line each:
//     compute_capability<TAB>9.0                      what the device model is unless FLASH_EXT_EMULATE_CC says
//     otherwise <mangled kernel name><TAB><path of a .ptx file, relative to the index or absolute>
#pragma once

#include <map>
#include <memory>
#include <string>

#include "options.h"
#include "program.h"

namespace ptx_emulator {

class KernelLibrary {
  public:
    // The library this code is linked into.
    static KernelLibrary& instance();

    // A decoded kernel, with the removal that options ask for, until the next call. Throws kMissingKernel or
    // kInvalidPtx.
    const Program& program(const std::string& kernel, const Options& options);
    const std::string& default_capability();

  private:
    struct Module {
        std::unique_ptr<ModuleSyntax> syntax;
        std::unique_ptr<ModuleGlobals> globals;
    };
    struct Loaded {
        std::unique_ptr<Program> program;
        int64_t removed = -1;  // the synchronisation instruction that is missing now, and how it was
        Instruction original;
    };
    void load_index();
    std::unique_ptr<Program> load(const std::string& kernel);

    bool loaded_ = false;
    std::string index_path_;
    std::string capability_ = "9.0";
    std::map<std::string, std::string> paths_;  // kernel -> PTX file
    std::map<std::string, Module> modules_;     // PTX file -> module
    std::map<std::string, Loaded> programs_;
};

}  // namespace ptx_emulator
