// Kernels of one call that follow one another closely (programmatic dependent launch).
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

namespace flash_ext {

// programmatic: the kernel may start beside the end of the one before it in the stream, which is of the same call, and
// in every CTA executes griddepcontrol.wait before it touches global memory: so the kernel behind it waits for all
// before.
inline cudaError_t launch_kernel(const void* kernel, dim3 grid, int threads, int64_t shared_memory, cudaStream_t stream,
                                 void** kernel_arguments, bool programmatic) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = static_cast<size_t>(shared_memory);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = programmatic ? 1 : 0;
    return cudaLaunchKernelExC(&config, kernel, kernel_arguments);
}

}  // namespace flash_ext
