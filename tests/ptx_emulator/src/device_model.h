// The GPU that is pretended: limits of one compute capability (CUDA programming guide, table of technical
// specifications per compute capability) and a small number of SMs.
#pragma once

#include <cstdint>
#include <string>

namespace ptx_emulator {

struct DeviceModel {
    int major = 9, minor = 0;
    uint32_t sm_count = 2;
    uint32_t shared_per_sm = 0;       // bytes
    uint32_t shared_per_cta = 0;      // bytes, opt-in maximum
    uint32_t shared_reserved = 1024;  // bytes the system takes per CTA
    uint32_t threads_per_sm = 0;
    uint32_t ctas_per_sm = 0;
    uint32_t tensor_memory_columns = 0;  // per SM
    std::string name;

    // FLASH_EXT_EMULATE_CC ("8.6", else default_capability), FLASH_EXT_EMULATE_SM_COUNT (default 2).
    // Throws EmulationError(kInvalidConfiguration).
    static DeviceModel from_environment(const std::string& default_capability);

    // CTAs of one kernel that fit on an SM at once; 0: not even one.
    uint32_t occupancy(uint32_t threads, uint32_t shared_bytes) const;
};

}  // namespace ptx_emulator
