// The functions that a path's library exports.
#include "api/abi.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>

#include <atomic>

#include "api/choose.h"
#include "api/device.h"
#include "api/registry.h"
#include "api/settings.h"

namespace flash_ext {

// csrc/<path>/probe.cu
int32_t probe(float* data, int64_t count, float value, const LaunchContext* context);

namespace {

Settings the_settings = {};

const KernelInfo* kernel_at(int32_t index) {
    return index >= 0 && index < kRegistryCount ? kRegistry[index].kernel : nullptr;
}

}  // namespace

const Settings& settings() {
    return the_settings;
}

}  // namespace flash_ext

using flash_ext::kernel_at;
using flash_ext::KernelInfo;

// Nothing else of the library is visible (hidden visibility and a version script).
#define FLASH_EXT_EXPORT extern "C" __attribute__((visibility("default")))

FLASH_EXT_EXPORT int32_t flash_ext_abi_version(void) {
    return flash_ext::kAbiVersion;
}

FLASH_EXT_EXPORT void flash_ext_configure(const flash_ext::Settings* settings) {
    flash_ext::the_settings = *settings;
}

FLASH_EXT_EXPORT const char* flash_ext_build_info(void) {
    return flash_ext::kBuildInfo;
}

FLASH_EXT_EXPORT const KernelInfo* flash_ext_kernels(int32_t* count) {
    *count = flash_ext::kRegistryCount;
    if (*count == 0) return nullptr;
    // The registry holds pointers into the generated units; the ABI promises an array. Two threads may both build it:
    // the first to publish wins.
    static std::atomic<KernelInfo*> published{nullptr};
    KernelInfo* kernels = published.load(std::memory_order_acquire);
    if (kernels != nullptr) return kernels;
    kernels = static_cast<KernelInfo*>(malloc(sizeof(KernelInfo) * static_cast<size_t>(*count)));
    if (kernels == nullptr) {
        *count = 0;
        return nullptr;
    }
    for (int32_t i = 0; i < *count; ++i) kernels[i] = *flash_ext::kRegistry[i].kernel;
    KernelInfo* expected = nullptr;
    if (published.compare_exchange_strong(expected, kernels, std::memory_order_acq_rel)) return kernels;
    free(kernels);
    return expected;
}

FLASH_EXT_EXPORT int32_t flash_ext_device_count(int32_t* count) {
    *count = 0;
    const cudaError_t error = cudaGetDeviceCount(count);
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}

FLASH_EXT_EXPORT int32_t flash_ext_device_info(int32_t device, flash_ext::DeviceInfo* info) {
    return flash_ext::device_info(device, info);
}

FLASH_EXT_EXPORT int32_t flash_ext_choose(const flash_ext::KernelQuery* query, char* reason, int32_t reason_size) {
    return flash_ext::choose(*query, reason, reason_size);
}

FLASH_EXT_EXPORT int32_t flash_ext_set_device(int32_t device, int32_t* previous) {
    int current = -1;
    if (const cudaError_t error = cudaGetDevice(&current); error != cudaSuccess) return error;
    if (previous != nullptr) *previous = current;
    return current == device ? cudaSuccess : cudaSetDevice(device);
}

FLASH_EXT_EXPORT int64_t flash_ext_workspace(int32_t kernel, const void* params,
                                             const flash_ext::LaunchContext* context) {
    const KernelInfo* info = kernel_at(kernel);
    return info == nullptr || info->workspace == nullptr ? 0 : info->workspace(params, context);
}

FLASH_EXT_EXPORT int32_t flash_ext_launch(int32_t kernel, const void* params, const flash_ext::LaunchContext* context) {
    const KernelInfo* info = kernel_at(kernel);
    return info == nullptr ? cudaErrorInvalidValue : info->launch(params, context);
}

FLASH_EXT_EXPORT int32_t flash_ext_probe(float* data, int64_t count, float value,
                                         const flash_ext::LaunchContext* context) {
    return flash_ext::probe(data, count, value, context);
}

FLASH_EXT_EXPORT const char* flash_ext_error_name(int32_t error) {
    return cudaGetErrorName(static_cast<cudaError_t>(error));
}

FLASH_EXT_EXPORT const char* flash_ext_error_string(int32_t error) {
    return cudaGetErrorString(static_cast<cudaError_t>(error));
}
