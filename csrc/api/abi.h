// The C ABI of a path's library (libflash_ext_sm80.so, ...). The binding finds these functions with dlsym; nothing else
// is exported. Every function is thread-safe. Functions that return int32_t return a cudaError_t value (0: success).
#pragma once

#include <stdint.h>

#include "params.h"

namespace flash_ext {

// One built kernel: a row of csrc/kernels.toml times dtype, tile and variant. Made by the generator.
struct KernelInfo {
    const char* name;  // sm80_forward_bf16_d128x128_m128n64_plain
    const char* path;  // sm80
    Direction direction;
    DataType dtype;
    int32_t head_dim;  // of q and k that the tile holds; smaller ones run on it by predication or TMA fill
    int32_t head_dim_v;
    int32_t block_m;        // query rows of a tile
    int32_t block_n;        // key rows of a tile
    int32_t stages;         // depth of the key/value pipeline
    int32_t warps;          // per CTA
    uint32_t features;      // bitwise or of Feature: what it can do
    int64_t shared_memory;  // bytes per CTA, static and dynamic
    // Bytes of workspace this launch needs (0 or more); params is a ForwardParams or BackwardParams.
    int64_t (*workspace)(const void* params, const LaunchContext* context);
    // Enqueues the kernel and whatever clears its workspace on context->stream; returns a cudaError_t. Must not
    // synchronise, allocate or read device memory on the host (the call may be captured into a CUDA graph).
    int32_t (*launch)(const void* params, const LaunchContext* context);
};

// What the choice of a kernel may depend on: never on batch, lengths or load (the numerical contract).
struct KernelQuery {
    Direction direction;
    DataType dtype;
    int32_t head_dim;
    int32_t head_dim_v;
    uint32_t features;  // bitwise or of Feature: what the call asks for
    int32_t device;     // CUDA ordinal
};

struct DeviceInfo {
    int32_t compute_capability_major;
    int32_t compute_capability_minor;
    int32_t sm_count;             // after FLASH_EXT_SM_COUNT
    int32_t shared_memory_optin;  // bytes a CTA may use, after FLASH_EXT_MAX_SHARED_MEMORY
    char name[256];
};

}  // namespace flash_ext

extern "C" {
int32_t flash_ext_abi_version(void);
// JSON: compiler, CUDA version, architectures, options, commit.
const char* flash_ext_build_info(void);
// All kernels of this library, in order of preference within equal (direction, dtype, head dims).
const flash_ext::KernelInfo* flash_ext_kernels(int32_t* count);
int32_t flash_ext_device_count(int32_t* count);
int32_t flash_ext_device_info(int32_t device, flash_ext::DeviceInfo* info);
// The index of the kernel that serves the query, or -1 with the reason, one sentence without the leading "flash_ext: ",
// written to reason (always terminated). FLASH_EXT_TILE=MxN restricts the choice to tiles of that shape.
int32_t flash_ext_choose(const flash_ext::KernelQuery* query, char* reason, int32_t reason_size);
int32_t flash_ext_set_device(int32_t device, int32_t* previous);
int64_t flash_ext_workspace(int32_t kernel, const void* params, const flash_ext::LaunchContext* context);
int32_t flash_ext_launch(int32_t kernel, const void* params, const flash_ext::LaunchContext* context);
// Fills count fp32 values at data with value: proves compiler, library, binding and stream before any attention.
int32_t flash_ext_probe(float* data, int64_t count, float value, const flash_ext::LaunchContext* context);
const char* flash_ext_error_name(int32_t error);    // cudaErrorInvalidValue
const char* flash_ext_error_string(int32_t error);  // invalid argument
}
