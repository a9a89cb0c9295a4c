#include "api/device.h"

#include <cuda_runtime_api.h>
#include <string.h>

#include <atomic>

#include "api/settings.h"

namespace flash_ext {
namespace {

// A setting only ever lowers what the device has: a persistent kernel whose CTAs wait for one another must not be
// launched with more of them than fit.
int32_t lowered(int32_t value, int32_t limit) {
    return limit > 0 && limit < value ? limit : value;
}

int32_t query(int32_t device, DeviceInfo* info) {
    const struct {
        int32_t* value;
        cudaDeviceAttr attribute;
    } attributes[] = {
        {&info->compute_capability_major, cudaDevAttrComputeCapabilityMajor},
        {&info->compute_capability_minor, cudaDevAttrComputeCapabilityMinor},
        {&info->sm_count, cudaDevAttrMultiProcessorCount},
        {&info->shared_memory_optin, cudaDevAttrMaxSharedMemoryPerBlockOptin},
    };
    for (const auto& [value, attribute] : attributes) {
        if (const cudaError_t error = cudaDeviceGetAttribute(value, attribute, device); error != cudaSuccess) {
            return error;
        }
    }
    cudaDeviceProp properties;
    if (const cudaError_t error = cudaGetDeviceProperties(&properties, device); error != cudaSuccess) return error;
    static_assert(sizeof(properties.name) == sizeof(info->name));
    memcpy(info->name, properties.name, sizeof(info->name));
    info->sm_count = lowered(info->sm_count, settings().sm_count);
    info->shared_memory_optin = lowered(info->shared_memory_optin, settings().max_shared_memory);
    return cudaSuccess;
}

// A slot is written once, by the thread that moves it from kEmpty to kWriting. Another thread that asks meanwhile makes
// its own query instead of waiting, so no lock (and nothing of libstdc++) is needed.
enum : int32_t { kEmpty, kWriting, kReady };

struct Slot {
    std::atomic<int32_t> state{kEmpty};
    DeviceInfo info;
};

constexpr int32_t kSlots = 64;  // devices beyond are asked each time
Slot slots[kSlots];

}  // namespace

int32_t device_info(int32_t device, DeviceInfo* info) {
    Slot* slot = device >= 0 && device < kSlots ? &slots[device] : nullptr;
    if (slot != nullptr && slot->state.load(std::memory_order_acquire) == kReady) {
        *info = slot->info;
        return cudaSuccess;
    }
    if (const int32_t error = query(device, info); error != cudaSuccess) {
        cudaGetLastError();  // reported here: it must not come up again at the next launch
        return error;
    }
    int32_t expected = kEmpty;
    if (slot != nullptr && slot->state.compare_exchange_strong(expected, kWriting, std::memory_order_relaxed)) {
        slot->info = *info;
        slot->state.store(kReady, std::memory_order_release);
    }
    return cudaSuccess;
}

}  // namespace flash_ext
