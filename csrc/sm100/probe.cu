// Probe for sm100: fills memory with a value that has been through tensor memory. It proves compiler, CUTLASS headers,
// library, binding and stream before any attention.
//
// Warp 0 of a CTA allocates 32 columns of tensor memory; each of the 4 warps stores the value to its own 32 lanes of
// one column (tcgen05.st) and loads it back (tcgen05.ld), so that the value a thread fills with is the one tensor
// memory held.
#include <cuda_runtime_api.h>
#include <stdint.h>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm100.hpp>
#include <cute/arch/tmem_allocator_sm100.hpp>

#include "params.h"
#include "ptx/tcgen05.cuh"

namespace flash_ext {
namespace sm100 {

constexpr int kProbeThreads = 128;  // one warpgroup: the 128 lanes of tensor memory
constexpr int kProbeColumns = 32;   // the smallest allocation
constexpr int64_t kProbeMaxBlocks = 1024;

// data: (count) fp32.
__global__ void __launch_bounds__(kProbeThreads) probe_kernel(float* data, int64_t count, float value) {
    __shared__ uint32_t tmem_base_smem;
    const uint32_t warp = threadIdx.x / 32;
    cute::TMEM::Allocator1Sm allocator;
    if (warp == 0) {
        allocator.allocate(kProbeColumns, &tmem_base_smem);
        allocator.release_allocation_lock();  // other CTAs of this SM may allocate
    }
    __syncthreads();  // the base address is in shared memory

    const uint32_t base_tmem = tmem_base_smem;
    const uint32_t lanes_tmem = base_tmem + ((warp * 32) << 16);  // a warp reaches its own quarter of the lanes
    uint32_t bits;
    cute::SM100::TMEM::STORE::SM100_TMEM_STORE_32dp32b1x::copy(__float_as_uint(value), lanes_tmem);
    cutlass::arch::fence_view_async_tmem_store();
    cute::SM100::TMEM::LOAD::SM100_TMEM_LOAD_32dp32b1x::copy(lanes_tmem, bits);
    cutlass::arch::fence_view_async_tmem_load();
    ptx::tcgen05_fence_before_thread_sync();
    const float loaded = __uint_as_float(bits);

    const int64_t step = int64_t{gridDim.x} * kProbeThreads;
    for (int64_t i = int64_t{blockIdx.x} * kProbeThreads + threadIdx.x; i < count; i += step) data[i] = loaded;

    __syncthreads();  // no warp reads tensor memory any more
    if (warp == 0) allocator.free(base_tmem, kProbeColumns);
}

}  // namespace sm100

int32_t probe(float* data, int64_t count, float value, const LaunchContext* context) {
    if (count <= 0) return cudaSuccess;
    const int64_t blocks = (count + sm100::kProbeThreads - 1) / sm100::kProbeThreads;
    const int grid = static_cast<int>(blocks < sm100::kProbeMaxBlocks ? blocks : sm100::kProbeMaxBlocks);
    sm100::probe_kernel<<<grid, sm100::kProbeThreads, 0, static_cast<cudaStream_t>(context->stream)>>>(data, count,
                                                                                                       value);
    return cudaGetLastError();
}

}  // namespace flash_ext
