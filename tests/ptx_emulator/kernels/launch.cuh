// Launches kernels by name and makes their tensor maps: what the tests call through ctypes. Included by an entry file
// after the kernels, which then defines kEntries.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <string.h>

struct Entry {
    const char* name;
    const void* kernel;
};

namespace {

bool programmatic = false;

}  // namespace

// Whether later launches may overlap their predecessors (programmatic dependent launch).
extern "C" void flash_ext_test_programmatic(int32_t value) {
    programmatic = value != 0;
}

// arguments: pointers to the kernel's arguments. Returns a cudaError_t, -1 for an unknown name.
static int32_t launch_entry(const Entry* entries, size_t count, const char* name, const uint32_t* grid,
                            const uint32_t* block, uint64_t shared, void** arguments) {
    for (size_t i = 0; i < count; ++i) {
        const Entry& entry = entries[i];
        if (strcmp(entry.name, name) != 0) continue;
        cudaLaunchAttribute attribute = {};
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = programmatic;
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(grid[0], grid[1], grid[2]);
        config.blockDim = dim3(block[0], block[1], block[2]);
        config.dynamicSmemBytes = shared;
        config.attrs = &attribute;
        config.numAttrs = 1;
        return cudaLaunchKernelExC(&config, entry.kernel, arguments);
    }
    return -1;
}

extern "C" const char* flash_ext_test_error(int32_t error) {
    return cudaGetErrorString(static_cast<cudaError_t>(error));
}

// A map over a row-major tensor of two dimensions; inner first. Returns 0, or the CUresult.
extern "C" int32_t flash_ext_test_tensor_map(void* map, int32_t type, void* base, const uint64_t* dims, uint64_t pitch,
                                             const uint32_t* box, int32_t swizzle) {
    using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &result);
    if (!symbol) return -1;
    const cuuint64_t sizes[2] = {dims[0], dims[1]}, strides[1] = {pitch};
    const cuuint32_t ones[2] = {1, 1};
    return reinterpret_cast<Encode>(symbol)(static_cast<CUtensorMap*>(map), static_cast<CUtensorMapDataType>(type), 2,
                                            base, sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                            static_cast<CUtensorMapSwizzle>(swizzle), CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

#define FLASH_EXT_TEST_LAUNCH(entries)                                                                          \
    extern "C" int32_t flash_ext_test_launch(const char* name, const uint32_t* grid, const uint32_t* block,     \
                                             uint64_t shared, void** arguments) {                               \
        return launch_entry(entries, sizeof entries / sizeof entries[0], name, grid, block, shared, arguments); \
    }
