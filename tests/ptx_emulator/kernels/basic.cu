// Small kernels for the emulator's own tests: one mechanism each.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

extern "C" {

__global__ void vector_add(const float* a, const float* b, float* out, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = a[i] + b[i];
}

// Sum of each row by shuffles: one warp per row of 32 * per_lane values.
__global__ void row_sum(const float* in, float* out, int per_lane) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    float sum = 0.0f;
    for (int i = 0; i < per_lane; ++i) sum += in[(row * per_lane + i) * 32 + lane];
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane == 0) out[row] = sum;
}

// Each lane runs a loop of its own length and leaves at its own time.
__global__ void collatz(const int* start, int* steps, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long value = start[i];
    int n = 0;
    while (value != 1) {
        if (value % 2 == 0) {
            value /= 2;
        } else {
            value = 3 * value + 1;
        }
        if (++n > 10000) break;
    }
    steps[i] = n;
}

// One warp: lane n loads word n * stride, and the 16 bytes number n >> shift.
__global__ void shared_banks(const float* in, float* out, int stride, int shift) {
    __shared__ float4 vectors[256];
    float* const words = reinterpret_cast<float*>(vectors);
    for (int i = threadIdx.x; i < 1024; i += 32) words[i] = in[i];
    __syncwarp();
    const float word = words[threadIdx.x * stride];
    const float4 vector = vectors[threadIdx.x >> shift];
    out[threadIdx.x] = word + vector.x + vector.y + vector.z + vector.w;
}

__global__ void histogram(const int* values, int* counts, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) atomicAdd(&counts[values[i]], 1);
}

// Persistent CTAs take tiles from a counter; taken[tile] names the CTA.
__global__ void take_tiles(int* counter, int* taken, int tiles) {
    __shared__ int tile;
    for (;;) {
        if (threadIdx.x == 0) tile = atomicAdd(counter, 1);
        __syncthreads();
        const int mine = tile;
        __syncthreads();
        if (mine >= tiles) return;
        if (threadIdx.x == 0) taken[mine] = blockIdx.x;
    }
}

// Functions of one argument, by number; the tests compare with numpy.
__global__ void unary_float(const float* in, float* out, int count, int function) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float x = in[i], y = 0.0f;
    if (function == 0) asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    if (function == 1) asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    if (function == 2) asm("rcp.rn.f32 %0, %1;" : "=f"(y) : "f"(x));
    if (function == 3) asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    if (function == 4) y = sqrtf(x);
    if (function == 5) y = __half2float(__float2half_rn(x));
    if (function == 6) y = __bfloat162float(__float2bfloat16_rn(x));
    if (function == 7) y = static_cast<float>(__float2int_rd(x));
    if (function == 8) y = expf(x);
    if (function == 9) y = sinf(x);
    out[i] = y;
}

// Integer operations of two 32-bit arguments, by number, results as 64 bits.
__global__ void binary_integer(const uint32_t* a, const uint32_t* b, uint64_t* out, int count, int function) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const uint32_t x = a[i], y = b[i];
    const int32_t sx = static_cast<int32_t>(x), sy = static_cast<int32_t>(y);
    uint64_t r = 0;
    if (function == 0) r = static_cast<uint64_t>(x) * y;
    if (function == 1) r = static_cast<uint64_t>(static_cast<int64_t>(sx) * sy);
    if (function == 2) r = __umulhi(x, y);
    if (function == 3) r = static_cast<uint32_t>(__mulhi(sx, sy));
    if (function == 4) r = y ? x / y : 0;
    if (function == 5) r = sy ? static_cast<uint32_t>(sx % sy) : 0;
    if (function == 6) r = __funnelshift_l(x, y, y & 31);
    if (function == 7) r = __byte_perm(x, y, 0x6543);
    if (function == 8) r = __popc(x) * 64 + __clz(y);
    if (function == 9) r = (x & y) ^ (~x & (y >> 3));
    if (function == 10) r = static_cast<uint32_t>(min(sx, sy)) + (static_cast<uint64_t>(max(x, y)) << 32);
    if (function == 11) r = static_cast<uint64_t>(x) + (static_cast<uint64_t>(y) << 31) - 7ull * x;
    out[i] = r;
}

}  // extern "C"
