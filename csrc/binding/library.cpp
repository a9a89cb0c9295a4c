#include "binding/library.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

#include <memory>

#include "api/gpus.h"
#include "binding/tensor.h"

namespace py = pybind11;

namespace flash_ext {
namespace {

bool exists(const std::string& file) {
    return access(file.c_str(), F_OK) == 0;
}

std::string package_dir() {
    Dl_info info;
    if (dladdr(reinterpret_cast<const void*>(&package_dir), &info) == 0 || info.dli_fname == nullptr) return ".";
    const std::string file = info.dli_fname;
    const size_t slash = file.rfind('/');
    return slash == std::string::npos ? "." : file.substr(0, slash);
}

void check_path_name(std::string_view path) {
    for (const std::string_view known : kPaths) {
        if (path == known) return;
    }
    raise_value_error("path='" + std::string(path) + "' has no kernels; allowed are sm80, sm90 and sm100");
}

template <typename Function>
void find(void* handle, const std::string& file, const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(handle, name));
    if (*function == nullptr) raise_runtime_error(file + " has no function " + name + "; build it again");
}

}  // namespace

std::string library_dir() {
    const char* text = getenv("FLASH_EXT_LIBRARY_DIR");
    return text != nullptr && *text != '\0' ? text : package_dir();
}

std::string library_file(std::string_view path) {
    return library_dir() + "/libflash_ext_" + std::string(path) + ".so";
}

std::vector<std::string> available_paths() {
    std::vector<std::string> result;
    for (const std::string_view path : kPaths) {
        if (exists(library_file(path))) result.emplace_back(path);
    }
    return result;
}

Library& Library::get(std::string_view path) {
    // Never destroyed: kernels may still run when the interpreter ends.
    static auto* libraries = new std::vector<std::unique_ptr<Library>>();
    for (const auto& library : *libraries) {
        if (library->path() == path) return *library;
    }
    check_path_name(path);
    libraries->emplace_back(new Library(path));
    return *libraries->back();
}

Library::Library(std::string_view path) : path_(path) {
    const std::string file = library_file(path);
    if (!exists(file)) {
        raise_runtime_error("path " + path_ + " is not built: " + file +
                            " does not exist. Build it with FLASH_EXT_PATHS=" + path_ +
                            " pip install ., or set FLASH_EXT_LIBRARY_DIR to the folder that holds it");
    }
    struct Close {
        void operator()(void* library) const { dlclose(library); }
    };
    std::unique_ptr<void, Close> library(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL));
    void* const handle = library.get();
    if (handle == nullptr) raise_runtime_error("cannot load " + file + ": " + dlerror());

    decltype(&flash_ext_abi_version) abi_version = nullptr;
    find(handle, file, "flash_ext_abi_version", &abi_version);
    if (const int32_t version = abi_version(); version != kAbiVersion) {
        raise_runtime_error(file + " has ABI version " + std::to_string(version) + ", flash_ext._C needs " +
                            std::to_string(kAbiVersion) + "; build both from the same sources");
    }
    decltype(&flash_ext_kernels) kernels = nullptr;
    find(handle, file, "flash_ext_kernels", &kernels);
    find(handle, file, "flash_ext_build_info", &build_info_);
    find(handle, file, "flash_ext_device_info", &device_info_);
    find(handle, file, "flash_ext_choose", &choose_);
    find(handle, file, "flash_ext_set_device", &set_device_);
    find(handle, file, "flash_ext_workspace", &workspace_);
    find(handle, file, "flash_ext_launch", &launch_);
    find(handle, file, "flash_ext_probe", &probe_);
    find(handle, file, "flash_ext_error_name", &error_name_);
    find(handle, file, "flash_ext_error_string", &error_string_);
    kernels_ = kernels(&kernel_count_);
    library.release();  // loaded for good
}

int32_t Library::choose(const KernelQuery& query, std::string* reason) {
    const Key key = {static_cast<uint64_t>(query.direction) << 48 | static_cast<uint64_t>(query.dtype) << 32 |
                         static_cast<uint32_t>(query.device),
                     static_cast<uint64_t>(query.head_dim) << 32 | static_cast<uint32_t>(query.head_dim_v),
                     query.features};
    if (const auto cached = choices_.find(key); cached != choices_.end()) return cached->second;
    char text[512] = "";
    const int32_t kernel = choose_(&query, text, sizeof(text));
    if (kernel < 0) {
        *reason = text;
    } else {
        choices_.emplace(key, kernel);
    }
    return kernel;
}

const DeviceInfo& Library::device_info(int32_t device) {
    if (const auto cached = devices_.find(device); cached != devices_.end()) return cached->second;
    DeviceInfo info = {};
    if (const int32_t error = device_info_(device, &info); error != 0) {
        raise_cuda_error("path " + path_ + " cannot use device " + std::to_string(device), error);
    }
    return devices_.emplace(device, info).first->second;
}

void Library::raise_cuda_error(const std::string& what, int32_t error) const {
    raise_runtime_error(what + ": " + error_name_(error) + " (" + error_string_(error) + ")");
}

}  // namespace flash_ext
