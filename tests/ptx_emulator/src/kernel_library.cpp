#include "kernel_library.h"

#include <dlfcn.h>

#include <fstream>
#include <sstream>

#include "errors.h"
#include "mutation.h"
#include "parser.h"

namespace ptx_emulator {

KernelLibrary& KernelLibrary::instance() {
    static KernelLibrary* library = new KernelLibrary;  // never destroyed: kernels may run while the process ends
    return *library;
}

void KernelLibrary::load_index() {
    if (loaded_) return;
    Dl_info self;
    if (!dladdr(reinterpret_cast<void*>(&KernelLibrary::instance), &self) || !self.dli_fname) {
        raise(Fault::kMissingKernel, "cannot find the file of the emulated library");
    }
    index_path_ = self.dli_fname;
    const size_t suffix = index_path_.rfind(".so");
    if (suffix != std::string::npos) index_path_.resize(suffix);
    index_path_ += ".ptx_index";
    const size_t slash = index_path_.rfind('/');
    const std::string folder = slash == std::string::npos ? "" : index_path_.substr(0, slash + 1);
    std::ifstream file(index_path_);
    if (!file) raise(Fault::kMissingKernel, "cannot read %s", index_path_.c_str());
    std::string line;
    while (std::getline(file, line)) {
        const size_t tab = line.find('\t');
        if (tab == std::string::npos) continue;
        const std::string key = line.substr(0, tab), value = line.substr(tab + 1);
        if (key == "compute_capability") {
            capability_ = value;
        } else {
            paths_[key] = value[0] == '/' ? value : folder + value;
        }
    }
    loaded_ = true;
}

const std::string& KernelLibrary::default_capability() {
    load_index();
    return capability_;
}

const Program& KernelLibrary::program(const std::string& kernel, const Options& options) {
    load_index();
    const bool removes = options.remove >= 0 && (options.remove_kernel.empty() || options.remove_kernel == kernel);
    Loaded& loaded = programs_[kernel];
    if (!loaded.program) loaded.program = load(kernel);
    // Decoding a kernel takes as long as a small launch: mutations share the program.
    if (loaded.removed >= 0 && (!removes || options.remove != loaded.removed)) {
        restore_instruction(*loaded.program, static_cast<size_t>(loaded.removed), std::move(loaded.original));
        loaded.removed = -1;
    }
    if (removes && loaded.removed < 0) {
        loaded.original = remove_instruction(*loaded.program, static_cast<size_t>(options.remove));
        loaded.removed = options.remove;
    }
    return *loaded.program;
}

std::unique_ptr<Program> KernelLibrary::load(const std::string& kernel) {
    const auto path = paths_.find(kernel);
    if (path == paths_.end()) {
        raise(Fault::kMissingKernel, "no PTX for kernel %s in %s", kernel.c_str(), index_path_.c_str());
    }
    Module& module = modules_[path->second];
    if (!module.syntax) {
        std::ifstream file(path->second);
        if (!file) raise(Fault::kMissingKernel, "cannot read %s", path->second.c_str());
        std::stringstream text;
        text << file.rdbuf();
        try {
            auto syntax = std::make_unique<ModuleSyntax>(parse_module(text.str()));
            module.globals = std::make_unique<ModuleGlobals>(*syntax);
            module.syntax = std::move(syntax);
        } catch (const EmulationError& error) {
            throw EmulationError(error.fault(), path->second + ": " + error.what());
        }
    }
    const auto entry = module.syntax->kernels.find(kernel);
    if (entry == module.syntax->kernels.end()) {
        raise(Fault::kMissingKernel, "kernel %s is not in %s", kernel.c_str(), path->second.c_str());
    }
    return std::make_unique<Program>(*module.syntax, entry->second, *module.globals, path->second);
}

}  // namespace ptx_emulator
