// What nvcc's objects do when a library is loaded: they register fat binaries, kernels and variables. Only the kernels'
// names are kept; their code is the PTX that the build left beside (kernel_library.h).
#include <map>
#include <mutex>
#include <string>

#include "runtime.h"

namespace ptx_emulator {

namespace {

struct Registry {
    std::mutex mutex;
    std::map<const void*, std::string> kernels;  // host stub -> mangled device name
};

// Built on first use: objects register from their own static initialisers.
Registry& registry() {
    static Registry* instance = new Registry;
    return *instance;
}

}  // namespace

const char* kernel_name(const void* host_function) {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    const auto it = r.kernels.find(host_function);
    return it == r.kernels.end() ? nullptr : it->second.c_str();
}

}  // namespace ptx_emulator

extern "C" {

void** __cudaRegisterFatBinary(void* fat_binary) {
    return static_cast<void**>(fat_binary);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) {
    return 1;
}

void __cudaRegisterFunction(void**, const char* host_function, char*, const char* device_name, int, void*, void*, void*,
                            void*, int*) {
    auto& r = ptx_emulator::registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    r.kernels[host_function] = device_name;
}

void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host_function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host_function));
    return cudaSuccess;
}
}
