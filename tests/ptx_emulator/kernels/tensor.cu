// Tensor-core and asynchronous-copy kernels for the emulator's tests.
#include <cuda_bf16.h>
#include <stdint.h>

namespace {

__device__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void copy16(void* to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}
__device__ void commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N>
__device__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace

extern "C" {

// D (16 x 8, fp32) = A (16 x 16, row) B^T (8 x 16, row), one warp, through ldmatrix.
__global__ void mma_tile(const __nv_bfloat16* a, const __nv_bfloat16* b, float* d) {
    __shared__ __align__(16) __nv_bfloat16 a_smem[16 * 16], b_smem[8 * 16];
    const int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) a_smem[i] = a[i];
    for (int i = lane; i < 128; i += 32) b_smem[i] = b[i];
    __syncwarp();
    uint32_t a_frag[4], b_frag[2];
    const uint32_t a_row = shared_address(&a_smem[(lane % 16) * 16 + lane / 16 * 8]);
    const uint32_t b_row = shared_address(&b_smem[(lane % 8) * 16 + lane / 8 % 2 * 8]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a_frag[0]), "=r"(a_frag[1]), "=r"(a_frag[2]), "=r"(a_frag[3])
                 : "r"(a_row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(b_frag[0]), "=r"(b_frag[1])
                 : "r"(b_row));
    float d_frag[4] = {};
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d_frag[0]), "+f"(d_frag[1]), "+f"(d_frag[2]), "+f"(d_frag[3])
        : "r"(a_frag[0]), "r"(a_frag[1]), "r"(a_frag[2]), "r"(a_frag[3]), "r"(b_frag[0]), "r"(b_frag[1]));
    for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d_frag[i];
}

// out[j] = sum over tiles of in[tile * 512 + (j + 16) % 512], through a ring of two cp.async stages. Each thread reads
// what another thread copied, so every wait and barrier matters. skip: leave one of them out.
//   1: the wait for the copies   2: the barrier after the wait   3: the barrier before a stage is filled again
__global__ void copy_pipeline(const float* in, float* out, int tiles, int skip) {
    __shared__ __align__(16) float stage[2][512];
    const int t = threadIdx.x;  // 128 threads
    auto fill = [&](int tile) {
        if (tile < tiles) copy16(&stage[tile % 2][4 * t], in + tile * 512 + 4 * t, 16);
        commit();
    };
    fill(0);
    float sum[4] = {};
    for (int tile = 0; tile < tiles; ++tile) {
        if (skip != 3) __syncthreads();
        fill(tile + 1);
        if (skip != 1) wait<1>();
        if (skip != 2) __syncthreads();
        for (int i = 0; i < 4; ++i) sum[i] += stage[tile % 2][(4 * t + i + 16) % 512];
    }
    wait<0>();
    for (int i = 0; i < 4; ++i) out[4 * t + i] = sum[i];
}

}  // extern "C"
