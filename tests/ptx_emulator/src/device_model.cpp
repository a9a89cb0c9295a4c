#include "device_model.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "errors.h"

namespace ptx_emulator {

namespace {

struct Capability {
    int major, minor;
    uint32_t shared_per_sm_kib, shared_per_cta_kib, threads_per_sm, ctas_per_sm, tensor_memory_columns;
};

constexpr Capability kCapabilities[] = {
    {8, 0, 164, 163, 2048, 32, 0},    {8, 6, 100, 99, 1536, 16, 0},     {8, 7, 164, 163, 1536, 16, 0},
    {8, 9, 100, 99, 1536, 24, 0},     {9, 0, 228, 227, 2048, 32, 0},    {10, 0, 228, 227, 2048, 32, 512},
    {10, 3, 228, 227, 2048, 32, 512}, {11, 0, 228, 227, 1536, 24, 512}, {12, 0, 100, 99, 1536, 24, 0},
    {12, 1, 100, 99, 1536, 24, 0},
};

}  // namespace

DeviceModel DeviceModel::from_environment(const std::string& default_capability) {
    const char* text = std::getenv("FLASH_EXT_EMULATE_CC");
    if (!text || !*text) text = default_capability.c_str();
    DeviceModel model;
    if (std::sscanf(text, "%d.%d", &model.major, &model.minor) != 2) {
        raise(Fault::kInvalidConfiguration, "FLASH_EXT_EMULATE_CC=%s: expected something like 8.6", text);
    }
    const auto* row = std::find_if(std::begin(kCapabilities), std::end(kCapabilities), [&](const Capability& c) {
        return c.major == model.major && c.minor == model.minor;
    });
    if (row == std::end(kCapabilities)) {
        std::string known;
        for (const Capability& c : kCapabilities) known += format(" %d.%d", c.major, c.minor);
        raise(Fault::kInvalidConfiguration, "FLASH_EXT_EMULATE_CC=%s: known are%s", text, known.c_str());
    }
    model.shared_per_sm = row->shared_per_sm_kib * 1024;
    model.shared_per_cta = row->shared_per_cta_kib * 1024;
    model.threads_per_sm = row->threads_per_sm;
    model.ctas_per_sm = row->ctas_per_sm;
    model.tensor_memory_columns = row->tensor_memory_columns;
    if (const char* count = std::getenv("FLASH_EXT_EMULATE_SM_COUNT"); count && *count) {
        const int value = std::atoi(count);
        if (value < 1 || value > 1024) raise(Fault::kInvalidConfiguration, "FLASH_EXT_EMULATE_SM_COUNT=%s", count);
        model.sm_count = static_cast<uint32_t>(value);
    }
    model.name = format("PTX emulator %d.%d", model.major, model.minor);
    return model;
}

uint32_t DeviceModel::occupancy(uint32_t threads, uint32_t shared_bytes) const {
    const uint32_t warps_threads = (threads + 31) / 32 * 32;
    if (warps_threads == 0 || shared_bytes > shared_per_cta) return 0;
    return std::min({ctas_per_sm, threads_per_sm / warps_threads, shared_per_sm / (shared_bytes + shared_reserved)});
}

}  // namespace ptx_emulator
