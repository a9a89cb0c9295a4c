// Probe for sm90: fills memory with a value through the bulk copy engine. It proves compiler, CUTLASS headers, library,
// binding and stream before any attention.
//
// A CTA writes the value once to a tile in shared memory, then stores that tile to every slice of the output that falls
// to it (cp.async.bulk, 16-byte aligned); plain stores write what lies before the first and after the last aligned
// slice.
#include <cuda_runtime_api.h>
#include <stdint.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "params.h"

namespace flash_ext {
namespace sm90 {

constexpr int kProbeThreads = 128;
constexpr int kProbeTile = 1024;  // fp32 values; a multiple of 4: the bulk copy moves 16 bytes at a time
constexpr int64_t kProbeMaxBlocks = 1024;

// data: (count) fp32, aligned to 4 bytes.
__global__ void __launch_bounds__(kProbeThreads) probe_kernel(float* data, int64_t count, float value) {
    __shared__ alignas(16) float tile_smem[kProbeTile];

    // data[0, head) brings the pointer to a multiple of 16 bytes; body is a multiple of 4 values.
    const int64_t misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % 16 / sizeof(float));
    const int64_t to_boundary = (4 - misaligned) % 4;
    const int64_t head = to_boundary < count ? to_boundary : count;
    const int64_t body = (count - head) / 4 * 4;
    if (blockIdx.x == 0) {
        if (threadIdx.x < head) data[threadIdx.x] = value;
        const int64_t tail = head + body + threadIdx.x;
        if (threadIdx.x < 4 && tail < count) data[tail] = value;
    }

    for (int i = threadIdx.x; i < kProbeTile; i += kProbeThreads) tile_smem[i] = value;
    cute::tma_store_fence();  // these writes before the bulk copy's reads, which go through the async proxy
    __syncthreads();
    if (threadIdx.x == 0) {
        const int64_t step = int64_t{gridDim.x} * kProbeTile;
        for (int64_t start = int64_t{blockIdx.x} * kProbeTile; start < body; start += step) {
            const int64_t values = body - start < kProbeTile ? body - start : kProbeTile;
            cute::SM90_BULK_COPY_S2G::copy(tile_smem, data + head + start,
                                           static_cast<int32_t>(values * sizeof(float)));
        }
        cute::tma_store_arrive();
        cute::tma_store_wait<0>();  // shared memory must outlive the copies' reads
    }
}

}  // namespace sm90

int32_t probe(float* data, int64_t count, float value, const LaunchContext* context) {
    if (count <= 0) return cudaSuccess;
    const int64_t blocks = (count + sm90::kProbeTile - 1) / sm90::kProbeTile;
    const int grid = static_cast<int>(blocks < sm90::kProbeMaxBlocks ? blocks : sm90::kProbeMaxBlocks);
    sm90::probe_kernel<<<grid, sm90::kProbeThreads, 0, static_cast<cudaStream_t>(context->stream)>>>(data, count,
                                                                                                     value);
    return cudaGetLastError();
}

}  // namespace flash_ext
