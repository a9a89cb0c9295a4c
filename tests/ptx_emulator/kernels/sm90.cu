// Hopper's mechanisms, one per kernel, for the emulator's tests: mbarriers, bulk and tensor copies, clusters, wgmma.
//
// `skip` leaves out one piece of synchronisation (0: none); the checker must report each of these twins.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "async.cuh"

namespace sm90 {

#define D32                                                                                                      \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define D32_OPERANDS                                                                                            \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

// D (64 x 64) (+)= A B^T, operands in shared memory.
template <bool kAMn, bool kBMn>
__device__ inline void multiply(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " D32
                 ", %32, %33, p, 1, 1, %35, %36;\n}\n"
                 : D32_OPERANDS
                 : "l"(a), "l"(b), "r"(accumulate), "n"(kAMn), "n"(kBMn));
}
__device__ inline void multiply_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void multiply_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ inline void multiply_wait() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
// Keeps the compiler from moving reads and writes of accumulators over this place.
__device__ inline void pin(float (&d)[32]) {
#pragma unroll
    for (float& value : d) asm volatile("" : "+f"(value)::"memory");
}
// Row and column of accumulator i of this thread.
__device__ inline int accumulator_row(int i) {
    return static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * (i / 2 % 2);
}
__device__ inline int accumulator_column(int i) {
    return 8 * (i / 4) + 2 * (static_cast<int>(threadIdx.x) % 4) + i % 2;
}
__device__ inline void store_accumulators(float* out, const float (&d)[32]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) out[accumulator_row(i) * 64 + accumulator_column(i)] = d[i];
}

// A and B (64 x 64 bf16 each) as TMA lays them out: one box per 16-byte column without swizzle, else per swizzle width.
// K-major: the map's inner dimension is K; MN-major: it is M or N.
template <int kSwizzle, bool kAMn, bool kBMn>
__device__ void product_tile(const CUtensorMap* a_map, const CUtensorMap* b_map, float* out) {
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ uint64_t barrier_storage;
    constexpr int kWidth = kSwizzle ? kSwizzle : 16, kBoxes = 128 / kWidth, kBoxBytes = 64 * kWidth;
    const uint32_t a_smem = shared_address(shared), b_smem = a_smem + 8192;
    const uint32_t barrier = shared_address(&barrier_storage);
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_fence();
        barrier_expect(barrier, 16384);
        for (int i = 0; i < kBoxes; ++i) {
            tensor_load(a_smem + i * kBoxBytes, a_map, i * kWidth / 2, 0, barrier);
            tensor_load(b_smem + i * kBoxBytes, b_map, i * kWidth / 2, 0, barrier);
        }
    }
    __syncthreads();
    barrier_wait(barrier, 0);
    float d[32];
    // The operand's descriptor at K = 16 k.
    auto at = [](uint32_t start, bool mn, int k) {
        if (mn) {
            return kSwizzle ? descriptor(start + k * 16 * kWidth, kBoxBytes, 8 * kWidth, kSwizzle)
                            : descriptor(start + k * 16 * kWidth, 128, kBoxBytes, 0);
        }
        const uint32_t offset = k * 32 / kWidth * kBoxBytes + k * 32 % kWidth;
        return kSwizzle ? descriptor(start + offset, 16, 8 * kWidth, kSwizzle)
                        : descriptor(start + offset, kBoxBytes, 128, 0);
    };
    pin(d);
    multiply_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply<kAMn, kBMn>(d, at(a_smem, kAMn, k), at(b_smem, kBMn, k), k != 0);
    multiply_commit();
    multiply_wait();
    pin(d);
    store_accumulators(out, d);
}

}  // namespace sm90

extern "C" {

using namespace sm90;

#define PRODUCT(swizzle, a_mn, b_mn)                                                                           \
    __global__ void product_##swizzle##_##a_mn##b_mn(const CUtensorMap* a, const CUtensorMap* b, float* out) { \
        product_tile<swizzle, a_mn, b_mn>(a, b, out);                                                          \
    }
PRODUCT(0, 0, 0);
PRODUCT(0, 0, 1);
PRODUCT(0, 1, 0);
PRODUCT(0, 1, 1);
PRODUCT(32, 0, 0);
PRODUCT(32, 0, 1);
PRODUCT(32, 1, 0);
PRODUCT(32, 1, 1);
PRODUCT(64, 0, 0);
PRODUCT(64, 0, 1);
PRODUCT(64, 1, 0);
PRODUCT(64, 1, 1);
PRODUCT(128, 0, 0);
PRODUCT(128, 0, 1);
PRODUCT(128, 1, 0);
PRODUCT(128, 1, 1);
#undef PRODUCT

// An operand of 64 x 32, unswizzled.
__device__ void write_fp8_operand(uint8_t* operand_smem, const uint8_t* values) {
    for (int i = threadIdx.x; i < 64 * 32; i += 128) {
        const int row = i / 32, k = i % 32;
        operand_smem[k / 16 * 1024 + row * 16 + k % 16] = values[i];
    }
}

// D (64 x 64) = -A B^T of e4m3 (64 x 32 each), unswizzled, written by threads. skip 1: wgmma.fence, 2: the proxy
// fence, 3: wait_group after the use of the accumulators, 4: the CTA barrier before the product, 5: nothing, but one
// warp waits by another instruction than the others.
__global__ void product_fp8(const uint8_t* a, const uint8_t* b, float* out, int skip) {
    __shared__ __align__(128) uint8_t a_smem[64 * 32], b_smem[64 * 32];
    write_fp8_operand(a_smem, a);
    write_fp8_operand(b_smem, b);
    if (skip != 2) proxy_fence();
    if (skip != 4) __syncthreads();
    float d[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) d[i] = out[accumulator_row(i) * 64 + accumulator_column(i)];
    pin(d);
    if (skip != 1) multiply_fence();
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " D32 ", %32, %33, 1, -1, 1;\n"
                 : D32_OPERANDS
                 : "l"(descriptor(shared_address(a_smem), 1024, 128, 0)),
                   "l"(descriptor(shared_address(b_smem), 1024, 128, 0)));
    multiply_commit();
    if (skip == 3) {
        store_accumulators(out, d);
        multiply_wait();
    } else if (skip == 5 && threadIdx.x < 32) {
        asm volatile("wgmma.wait_group.sync.aligned 0;  // apart, lest the two be merged\n" ::: "memory");
        pin(d);
        store_accumulators(out, d);
    } else {
        multiply_wait();
        pin(d);
        store_accumulators(out, d);
    }
}

// The same product twice into the same registers, the first of which is read between. skip 1: no wgmma.fence behind the
// read. All in one asm statement, so that the register keeps its name.
__global__ void product_and_read(const uint8_t* a, const uint8_t* b, float* out, int skip) {
    __shared__ __align__(128) uint8_t a_smem[64 * 32], b_smem[64 * 32];
    write_fp8_operand(a_smem, a);
    write_fp8_operand(b_smem, b);
    proxy_fence();
    __syncthreads();
    float d[32];
    pin(d);
    multiply_fence();
#define PRODUCT "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " D32 ", %32, %33, 0, 1, 1;\n"
#define PRODUCTS(between)                                                                                  \
    asm volatile(PRODUCT                                                                                   \
                 "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"                    \
                 "st.global.f32 [%34], %0;\n" between PRODUCT                                              \
                 : D32_OPERANDS                                                                            \
                 : "l"(descriptor(shared_address(a_smem), 1024, 128, 0)),                                  \
                   "l"(descriptor(shared_address(b_smem), 1024, 128, 0)), "l"(out + 64 * 64 + threadIdx.x) \
                 : "memory")
    if (skip) {
        PRODUCTS("");
    } else {
        PRODUCTS("wgmma.fence.sync.aligned;\n");
    }
#undef PRODUCTS
#undef PRODUCT
    multiply_commit();
    multiply_wait();
    pin(d);
    store_accumulators(out, d);
}

// D (64 x 64) = A B^T of f16 (64 x 16 each), A in registers. skip 1: A is overwritten before the wait.
__global__ void product_registers(const uint32_t* a, const __half* b, float* out, int skip) {
    __shared__ __align__(128) __half b_smem[64 * 16];
    for (int i = threadIdx.x; i < 64 * 16; i += 128) {
        const int row = i / 16, k = i % 16;
        b_smem[k / 8 * 512 + row * 8 + k % 8] = b[i];
    }
    proxy_fence();
    __syncthreads();
    float d[32];
    uint32_t fragment[4];
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    for (int r = 0; r < 4; ++r) fragment[r] = a[(row + (r & 1) * 8) * 8 + lane % 4 + (r >> 1) * 4];
#pragma unroll
    for (uint32_t& value : fragment) asm volatile("" : "+r"(value)::"memory");
    pin(d);
    multiply_fence();
    // The last instruction writes a register of A; it has to stand in one asm statement to keep its name.
    asm volatile(
        "{\n.reg .pred p;\n.reg .b32 a0;\nmov.b32 a0, %32;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " D32
        ", {a0, %33, %34, %35}, %36, 0, 1, 1, 0;\n"
        "wgmma.commit_group.sync.aligned;\n@p add.u32 a0, a0, 1;\n}\n"
        : D32_OPERANDS
        : "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]),
          "l"(descriptor(shared_address(b_smem), 1024, 128, 0)), "r"(skip)
        : "memory");
    multiply_wait();
    pin(d);
    store_accumulators(out, d);
}

// A ring of two stages of 128 floats, filled by bulk copies, summed by 128 threads. skip 1: the last wait for a free
// stage, 2: the last wait for a full stage, 3: the fence of the initialisation, 4: only one thread of the four warps
// hands back, 5: the lanes of a warp do not wait for each other before one of them hands back, 6: the last warp reads
// nothing and hands back without waiting.
__global__ void bulk_ring(const float* in, float* out, int tiles, int skip) {
    __shared__ __align__(128) float stages[2][128];
    __shared__ uint64_t full[2], empty[2];
    const int t = threadIdx.x;
    if (t == 0) {
        for (int s = 0; s < 2; ++s) {
            barrier_init(shared_address(&full[s]), 1);
            barrier_init(shared_address(&empty[s]), skip == 4 ? 1 : 4);
        }
        if (skip != 3) barrier_fence();
    }
    __syncthreads();
    if (t >= 128) {
        if (t == 128) {
            for (int tile = 0; tile < tiles; ++tile) {
                const int s = tile % 2;
                if (skip != 1 || tile + 1 < tiles) barrier_wait(shared_address(&empty[s]), (tile / 2 & 1) ^ 1);
                barrier_expect(shared_address(&full[s]), 512);
                bulk_load(shared_address(stages[s]), in + tile * 128, 512, shared_address(&full[s]));
            }
        }
        return;
    }
    float sum = 0;
    for (int tile = 0; tile < tiles; ++tile) {
        const int s = tile % 2;
        const bool idles = skip == 6 && t >= 96;
        if (!idles && (skip != 2 || tile + 1 < tiles)) barrier_wait(shared_address(&full[s]), tile / 2 & 1);
        if (!idles) sum += stages[s][(t + 32) % 128];
        if (skip != 5) __syncwarp();
        if (skip == 4 ? t == 0 : t % 32 == 0) barrier_arrive(shared_address(&empty[s]));
    }
    if (skip == 2) barrier_wait(shared_address(&full[(tiles - 1) % 2]), (tiles - 1) / 2 & 1);
    out[t] = sum;
}

// A tensor box through shared memory: loaded, doubled by threads, stored (mode 0) or added (1) to another tensor, or
// stored (2) or added (3) as 1024 plain bytes; mode 4: all lanes of a warp issue the store of mode 0. skip 1: the proxy
// fence before, 2: the CTA barrier before, 3: wait_group.read before shared memory is written again, 4: the wait before
// the kernel ends.
__global__ void box_and_back(const CUtensorMap* from, const CUtensorMap* to, float* plain, int x, int y, int mode,
                             int skip) {
    __shared__ __align__(1024) float box[256];
    __shared__ uint64_t barrier_storage;
    const uint32_t barrier = shared_address(&barrier_storage), at = shared_address(box);
    const int t = threadIdx.x;
    if (t == 0) {
        barrier_init(barrier, 1);
        barrier_fence();
        barrier_expect(barrier, 1024);
        tensor_load(at, from, x, y, barrier);
    }
    __syncthreads();
    barrier_wait(barrier, 0);
    box[t] *= 2;
    if (skip != 1) proxy_fence();
    if (skip != 2) __syncthreads();
    const bool stores = t < (mode == 4 ? 32 : 1);
    if (stores) {
        if (mode == 0 || mode == 4) {
            asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(to),
                         "r"(x), "r"(y), "r"(at)
                         : "memory");
        } else if (mode == 1) {
            asm volatile(
                "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(to),
                "r"(x), "r"(y), "r"(at)
                : "memory");
        } else if (mode == 2) {
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;" ::"l"(plain), "r"(at)
                         : "memory");
        } else {
            asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 1024;" ::"l"(plain),
                         "r"(at)
                         : "memory");
        }
        bulk_commit();
        if (skip != 3 && skip != 4) bulk_wait_read();
    }
    if (skip != 4) {
        __syncthreads();
        box[t] = 0;
        if (stores) bulk_wait();
    }
}

// What one lane of warp 0 has waited for, or has done, and others follow: `who` 0: the other lanes of the warp, behind
// bar.warp.sync; 1: warp 1, behind a barrier of both; 2: warp 1, behind an mbarrier at which lane 0 has arrived alone;
// 3: like 0, and all lanes wait for the groups, of which only lane 0 has any. `what` 0: it waits until a bulk copy has
// read shared memory, which they then write; 1: until one has written global memory, which they read; 2: for the
// mbarrier of a bulk copy into shared memory, which they read; 3: it writes shared memory, which they read, and arrives
// at an mbarrier that they do not wait for. skip 1: what they are behind.
__global__ void one_lane_waits(const int* in, int* out, int* result, int what, int who, int skip) {
    __shared__ __align__(128) int staging[32];
    __shared__ uint64_t barrier_storage[3];
    const uint32_t full = shared_address(&barrier_storage[0]), handed = shared_address(&barrier_storage[1]);
    const uint32_t staging_smem = shared_address(staging);
    const int t = threadIdx.x, lane = t % 32;
    if (t == 0) {
        for (int i = 0; i < 3; ++i) barrier_init(shared_address(&barrier_storage[i]), 1);
        barrier_fence();
    }
    if (t < 32) staging[lane] = in[lane];
    proxy_fence();
    __syncthreads();
    if (t < 32) {
        if (what <= 1) {
            if (t == 0) {
                asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128;" ::"l"(out),
                             "r"(staging_smem)
                             : "memory");
                bulk_commit();
            }
            if (t == 0 || who == 3) {
                if (what == 0) bulk_wait_read();
                if (what == 1) bulk_wait();
            }
        } else if (t == 0 && what == 2) {
            barrier_expect(full, 128);
            bulk_load(staging_smem, in, 128, full);
            barrier_wait(full, 0);
        } else if (t == 0) {
            for (int i = 0; i < 32; ++i) staging[i] = in[i];
            barrier_arrive(shared_address(&barrier_storage[2]));
        }
        if (t == 0 && who == 2) barrier_arrive(handed);
        if ((who == 0 || who == 3) && !skip) __syncwarp();
    }
    if (who == 1 && !skip) __syncthreads();
    if (who == 2 && !skip && t >= 32) barrier_wait(handed, 0);
    if ((who == 1 || who == 2) == (t >= 32)) {
        if (what == 0) staging[lane] = 0;
        result[lane] = what == 0 ? in[lane] : what == 1 ? out[lane] : staging[lane];
    }
    if (t == 0) bulk_wait();
}

// The copy engine by cp.async, its completion on an mbarrier. skip 1: nobody waits.
__global__ void copies_on_barrier(const int* in, int* out, int skip) {
    __shared__ __align__(16) int values[128];
    __shared__ uint64_t barrier_storage;
    const uint32_t barrier = shared_address(&barrier_storage);
    const int t = threadIdx.x;
    if (t == 0) barrier_init(barrier, 128);
    __syncthreads();
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(values + t)), "l"(in + t) : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
    if (skip != 1) barrier_wait(barrier, 0);
    out[t] = values[127 - t];
    if (skip == 1) barrier_wait(barrier, 0);
}

// Two CTAs: each writes into the other's shared memory, tells it through its mbarrier, and reads what it got; then CTA
// 0 loads 512 bytes into both. skip 1: the cluster barrier before the first remote access, 2: the wait for the remote
// arrival.
__global__ void __cluster_dims__(2, 1, 1) pair_exchange(const float* in, float* out, int skip) {
    __shared__ __align__(128) float mine[128], loaded[128];
    __shared__ uint64_t barrier_storage[2];
    const uint32_t rank = cluster_rank(), other = rank ^ 1;
    const uint32_t arrived = shared_address(&barrier_storage[0]), full = shared_address(&barrier_storage[1]);
    const int t = threadIdx.x;
    if (t == 0) {
        barrier_init(arrived, 128);
        barrier_init(full, 1);
        barrier_fence();
    }
    __syncthreads();
    if (skip != 1) {
        cluster_arrive();
        cluster_wait();
    }
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(map_to(shared_address(mine + t), other)),
                 "f"(static_cast<float>(100 * rank + t))
                 : "memory");
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(map_to(arrived, other))
                 : "memory");
    if (t == 0) {
        barrier_expect(full, 512);
        if (rank == 0) {
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], 512, "
                "[%2], %3;" ::"r"(shared_address(loaded)),
                "l"(in), "r"(full), "h"(static_cast<uint16_t>(3))
                : "memory");
        }
    }
    if (skip != 2) barrier_wait(arrived, 0);
    barrier_wait(full, 0);
    out[rank * 128 + t] = mine[t] + loaded[t];
    cluster_arrive();
    cluster_wait();
}

// Two CTAs: each copies what it has written into the other's shared memory, and reads what it got. skip 1: the proxy
// fence before the copy, 2: the wait for the other's copy, 3: the copy stays in its own CTA, 4: it reports to its own.
__global__ void __cluster_dims__(2, 1, 1) bulk_exchange(float* out, int skip) {
    __shared__ __align__(128) float mine[128], theirs[128];
    __shared__ uint64_t barrier_storage;
    const uint32_t rank = cluster_rank(), other = rank ^ 1;
    const uint32_t landed = shared_address(&barrier_storage);
    const int t = threadIdx.x;
    if (t == 0) {
        barrier_init(landed, 1);
        barrier_fence();
        barrier_expect(landed, 512);
    }
    cluster_arrive();
    cluster_wait();
    mine[t] = static_cast<float>(100 * rank + t);
    if (skip != 1) proxy_fence();
    __syncthreads();
    if (t == 0) {
        asm volatile(
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 512, [%2];" ::"r"(
                map_to(shared_address(theirs), skip == 3 ? rank : other)),
            "r"(shared_address(mine)), "r"(map_to(landed, skip == 4 ? rank : other))
            : "memory");
    }
    if (skip != 2) barrier_wait(landed, 0);
    out[rank * 128 + t] = theirs[t];
    if (skip == 2) barrier_wait(landed, 0);
    cluster_arrive();
    cluster_wait();
}

// CTA 0 stores 512 bytes by a bulk copy and says so through a flag; CTA 1 then adds to them by a bulk reduction. skip
// 1: the wait for the store, 2: the proxy fence behind the acquire, 3: it is one of shared memory.
__global__ void store_then_add(float* out, int* flag, int skip) {
    __shared__ __align__(128) float values[128];
    values[threadIdx.x] = threadIdx.x + 1000.f * blockIdx.x;
    proxy_fence();
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (blockIdx.x == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 512;" ::"l"(out),
                     "r"(shared_address(values))
                     : "memory");
        bulk_commit();
        if (skip != 1) bulk_wait();
        asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
    } else {
        int seen = 0;
        while (seen == 0) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        if (skip < 2) global_proxy_fence();
        if (skip == 3) proxy_fence();
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 512;" ::"l"(out),
                     "r"(shared_address(values))
                     : "memory");
        bulk_commit();
    }
    bulk_wait();
}

// CTA 1 ends while CTA 0 still writes into its shared memory.
__global__ void __cluster_dims__(2, 1, 1) write_to_ended(int times) {
    __shared__ int value;
    if (cluster_rank() == 1) return;
    for (int i = 0; i < times; ++i) {
        asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(map_to(shared_address(&value), 1)), "r"(i) : "memory");
    }
}

// setmaxnreg: 384 threads begin with 168 registers each; what one warpgroup gives back the two others take. skip 1: it
// keeps them.
__global__ void __launch_bounds__(384, 1) move_registers(int* out, int skip) {
    if (threadIdx.x < 128) {
        if (skip != 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        out[threadIdx.x] = 1;
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        out[threadIdx.x] = 2;
    }
}

// A grid and one that depends on it. skip 1: griddepcontrol.wait
__global__ void primary_grid(int* data) {
    asm volatile("griddepcontrol.launch_dependents;");
    data[threadIdx.x] = threadIdx.x;
}
__global__ void dependent_grid(const int* data, int* out, int skip) {
    if (skip != 1) asm volatile("griddepcontrol.wait;" ::: "memory");
    out[threadIdx.x] = data[threadIdx.x] + 1;
}

// A wait for a phase that never comes: what the deadlock report says.
__global__ void barrier_deadlock(int arrivals) {
    __shared__ uint64_t barrier_storage;
    const uint32_t barrier = shared_address(&barrier_storage);
    if (threadIdx.x == 0) barrier_init(barrier, arrivals);
    __syncthreads();
    if (threadIdx.x == 0) barrier_arrive(barrier);
    barrier_wait(barrier, 0);
}

// Misuse, each an error. what 0: more arrivals than the barrier counts, 1: no initialisation, 2: overwritten,
// 3: a misaligned destination of a tensor copy, 4: a product by one warp, 5: an accumulator tile in the swizzle's
// middle
__global__ void misuse(const CUtensorMap* map, int what) {
    __shared__ __align__(1024) uint8_t shared[16384];
    __shared__ uint64_t barrier_storage[1];
    const uint32_t barrier = shared_address(barrier_storage);
    if (threadIdx.x == 0 && what != 1) {
        barrier_init(barrier, 1);
        barrier_fence();
    }
    __syncthreads();
    if (what <= 3 && threadIdx.x == 0) {
        if (what == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 2;" ::"r"(barrier) : "memory");
        if (what == 1) barrier_arrive(barrier);
        if (what == 2) {
            *reinterpret_cast<volatile uint64_t*>(barrier_storage) = 7;
            barrier_arrive(barrier);
        }
        if (what == 3) {
            barrier_expect(barrier, 1024);
            tensor_load(shared_address(shared) + 16, map, 0, 0, barrier);
        }
    }
    if (what >= 4) {
        float d[32];
        pin(d);
        multiply_fence();
        multiply<false, false>(d, descriptor(shared_address(shared) + (what == 5 ? 128 : 0), 16, 1024, 128),
                               descriptor(shared_address(shared), 16, 1024, 128), 0);
        multiply_commit();
        multiply_wait();
    }
}

}  // extern "C"
