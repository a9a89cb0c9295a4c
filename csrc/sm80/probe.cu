// Probe for sm80: fills memory with a value. It proves compiler, library, binding and stream before any attention.
#include <cuda_runtime_api.h>
#include <stdint.h>

#include "params.h"

namespace flash_ext {
namespace sm80 {

constexpr int kProbeThreads = 256;
constexpr int64_t kProbeMaxBlocks = 1024;

// data: (count) fp32.
__global__ void __launch_bounds__(kProbeThreads) probe_kernel(float* data, int64_t count, float value) {
    const int64_t step = int64_t{gridDim.x} * kProbeThreads;
    for (int64_t i = int64_t{blockIdx.x} * kProbeThreads + threadIdx.x; i < count; i += step) data[i] = value;
}

}  // namespace sm80

int32_t probe(float* data, int64_t count, float value, const LaunchContext* context) {
    if (count <= 0) return cudaSuccess;
    const int64_t blocks = (count + sm80::kProbeThreads - 1) / sm80::kProbeThreads;
    const int grid = static_cast<int>(blocks < sm80::kProbeMaxBlocks ? blocks : sm80::kProbeMaxBlocks);
    sm80::probe_kernel<<<grid, sm80::kProbeThreads, 0, static_cast<cudaStream_t>(context->stream)>>>(data, count,
                                                                                                     value);
    return cudaGetLastError();
}

}  // namespace flash_ext
