// Launches a kernel of this folder by name: what the tests call through ctypes.
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <string.h>

#include "basic.cu"
#include "races.cu"
#include "tensor.cu"

namespace {

struct Entry {
    const char* name;
    const void* kernel;
};

const Entry kEntries[] = {
#define ENTRY(name) {#name, reinterpret_cast<const void*>(&name)}
    ENTRY(vector_add),    ENTRY(row_sum),          ENTRY(collatz),      ENTRY(histogram),     ENTRY(take_tiles),
    ENTRY(unary_float),   ENTRY(binary_integer),   ENTRY(mma_tile),     ENTRY(copy_pipeline), ENTRY(shared_exchange),
    ENTRY(lane_exchange), ENTRY(write_after_read), ENTRY(global_add),   ENTRY(hand_over),     ENTRY(out_of_shared),
    ENTRY(wild_pointer),  ENTRY(misaligned),       ENTRY(deadlock),     ENTRY(wait_for_last), ENTRY(unwritten_shared),
    ENTRY(volatile_read), ENTRY(float_add),        ENTRY(shared_banks),
#undef ENTRY
};

}  // namespace

// arguments: pointers to the kernel's arguments. Returns a cudaError_t, -1 for an unknown name.
extern "C" int32_t flash_ext_test_launch(const char* name, const uint32_t* grid, const uint32_t* block, uint64_t shared,
                                         void** arguments) {
    for (const Entry& entry : kEntries) {
        if (strcmp(entry.name, name) != 0) continue;
        return cudaLaunchKernel(entry.kernel, dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]),
                                arguments, shared, nullptr);
    }
    return -1;
}

// Allocate and free device memory; clear memory. They return a cudaError_t.
extern "C" int32_t flash_ext_test_allocate(uint64_t bytes) {
    void* pointer = nullptr;
    const cudaError_t error = cudaMalloc(&pointer, bytes);
    if (error == cudaSuccess) cudaFree(pointer);
    return error;
}

extern "C" int32_t flash_ext_test_clear(void* pointer, uint64_t bytes) {
    return cudaMemset(pointer, 0, bytes);
}

extern "C" const char* flash_ext_test_error(int32_t error) {
    return cudaGetErrorString(static_cast<cudaError_t>(error));
}
