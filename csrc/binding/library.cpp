#include "binding/library.h"

#include <dlfcn.h>
#include <elf.h>
#include <stdint.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <vector>

#include "api/gpus.h"
#include "api/settings.h"
#include "binding/environment.h"
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

// How many bytes of an ELF file its headers speak of; 0 if it has none that can be read. The loader maps a file that
// was cut without a word, and whoever touches what is missing dies of SIGBUS.
uint64_t bytes_of_elf(const std::string& file) {
    std::ifstream stream(file, std::ios::binary);
    Elf64_Ehdr header = {};
    if (!stream.read(reinterpret_cast<char*>(&header), sizeof(header))) return 0;
    if (!std::equal(header.e_ident, header.e_ident + SELFMAG, reinterpret_cast<const unsigned char*>(ELFMAG))) return 0;
    uint64_t bytes = header.e_shoff + uint64_t{header.e_shnum} * header.e_shentsize;
    std::vector<Elf64_Phdr> segments(header.e_phentsize == sizeof(Elf64_Phdr) ? header.e_phnum : 0);
    stream.seekg(static_cast<std::streamoff>(header.e_phoff));
    const std::streamsize size = static_cast<std::streamsize>(segments.size() * sizeof(Elf64_Phdr));
    if (!stream.read(reinterpret_cast<char*>(segments.data()), size)) return bytes;
    for (const Elf64_Phdr& segment : segments) bytes = std::max(bytes, segment.p_offset + segment.p_filesz);
    return bytes;
}

uint64_t bytes_of_file(const std::string& file) {
    std::ifstream stream(file, std::ios::binary | std::ios::ate);
    return stream ? static_cast<uint64_t>(stream.tellg()) : 0;
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

Environment& environment() {
    static auto* read = new Environment();  // never destroyed: kernels may still run when the interpreter ends
    return *read;
}

std::string library_dir() {
    const std::string& given = environment().library_dir;
    return given.empty() ? package_dir() : given;
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

std::vector<std::unique_ptr<Library>>& Library::loaded() {
    // Never destroyed: kernels may still run when the interpreter ends.
    static auto* libraries = new std::vector<std::unique_ptr<Library>>();
    return *libraries;
}

Library& Library::get(std::string_view path) {
    for (const auto& library : loaded()) {
        if (library->path() == path) return *library;
    }
    check_path_name(path);
    loaded().emplace_back(new Library(path));
    return *loaded().back();
}

void Library::force_tile(int32_t block_m, int32_t block_n) {
    environment().settings.block_m = block_m;
    environment().settings.block_n = block_n;
    for (const auto& library : loaded()) {
        library->configure_(&environment().settings);
        library->choices_.clear();
    }
}

Library::Library(std::string_view path) : path_(path) {
    const std::string file = library_file(path);
    if (!exists(file)) {
        raise_runtime_error("path " + path_ + " is not built: " + file +
                            " does not exist. Build it with FLASH_EXT_PATHS=" + path_ +
                            " pip install ., or set FLASH_EXT_LIBRARY_DIR to the folder that holds it");
    }
    if (const uint64_t needed = bytes_of_elf(file), there = bytes_of_file(file); there < needed) {
        raise_runtime_error("cannot load " + file + ": it is incomplete, " + std::to_string(there) + " of " +
                            std::to_string(needed) + " bytes; copy or build it again");
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
    find(handle, file, "flash_ext_configure", &configure_);
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
    configure_(&environment().settings);
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
