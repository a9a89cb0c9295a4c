// Blackwell's tensor core and tensor memory, one mechanism per kernel, for the emulator's tests.
//
// `skip` leaves out one piece of synchronisation (0: none); the checker must report each of these twins.
#include <cuda_bf16.h>
#include <stdint.h>

#include "async.cuh"

namespace sm100 {

using namespace sm90;

__device__ inline void tensor_alloc(uint32_t to, int columns) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(to), "r"(columns)
                 : "memory");
}
__device__ inline void tensor_dealloc(uint32_t address, int columns) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns) : "memory");
}
__device__ inline void commit(uint32_t barrier) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
                 : "memory");
}
__device__ inline void wait_loads() {
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}
__device__ inline void wait_stores() {
    asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}
__device__ inline void fence_before() {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ inline void fence_after() {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}
__device__ inline void product_f16(uint32_t d, uint64_t a, uint64_t b, uint32_t shape, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\ntcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}\n" ::"r"(
            d),
        "l"(a), "l"(b), "r"(shape), "r"(accumulate)
        : "memory");
}
__device__ inline void product_f16_tensor_a(uint32_t d, uint32_t a, uint64_t b, uint32_t shape, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\ntcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, {%5, %5, %5, "
        "%5}, p;\n}\n" ::"r"(d),
        "r"(a), "l"(b), "r"(shape), "r"(accumulate), "r"(0)
        : "memory");
}
// fp32 accumulators; types: 1 bf16 (kind::f16), 0 e4m3 (kind::f8f6f4)
__device__ constexpr uint32_t shape_of(int m, int n, bool a_mn, bool b_mn, uint32_t type) {
    return 1u << 4 | type << 7 | type << 10 | static_cast<uint32_t>(a_mn) << 15 | static_cast<uint32_t>(b_mn) << 16 |
           static_cast<uint32_t>(n / 8) << 17 | static_cast<uint32_t>(m / 16) << 24;
}
__device__ inline uint64_t descriptor100(uint32_t start, uint32_t leading, uint32_t stride, int swizzle_bytes) {
    const uint64_t mode = swizzle_bytes == 128 ? 2 : swizzle_bytes == 64 ? 4 : swizzle_bytes == 32 ? 6 : 0;
    return (start & 0x3ffff) >> 4 | uint64_t{leading >> 4} << 16 | uint64_t{stride >> 4} << 32 | uint64_t{1} << 46 |
           mode << 61;
}
// A box of `rows` rows (columns if mn) and 128 bytes as TMA lays it out, at depth 16 k.
__device__ inline uint64_t tile_at(uint32_t start, bool mn, int k, int rows, int swizzle) {
    const int width = swizzle ? swizzle : 16;
    if (mn) {
        const int box_bytes = 64 * width;  // 64 k
        return swizzle ? descriptor100(start + k * 16 * width, box_bytes, 8 * width, swizzle)
                       : descriptor100(start + k * 16 * width, 128, box_bytes, 0);
    }
    const int box_bytes = rows * width;
    const uint32_t offset = k * 32 / width * box_bytes + k * 32 % width;
    return swizzle ? descriptor100(start + offset, 16, 8 * width, swizzle)
                   : descriptor100(start + offset, box_bytes, 128, 0);
}
__device__ inline void load8(uint32_t address, uint32_t (&v)[8]) {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]), "=r"(v[5]), "=r"(v[6]), "=r"(v[7])
                 : "r"(address));
}
__device__ inline void store8(uint32_t address, const uint32_t (&v)[8]) {
    asm volatile("tcgen05.st.sync.aligned.32x32b.x8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};" ::"r"(address),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(v[4]), "r"(v[5]), "r"(v[6]), "r"(v[7])
                 : "memory");
}
// The warp's 32 lanes of `columns` columns to a row-major matrix, lane by lane; after and before a barrier.
__device__ inline void read_tensor(uint32_t address, int columns, float* out) {
    const int lane = threadIdx.x % 128;
    fence_after();
    for (int column = 0; column < columns; column += 8) {
        uint32_t v[8];
        load8(address + (static_cast<uint32_t>(lane / 32 * 32) << 16) + column, v);
        wait_loads();
        for (int i = 0; i < 8; ++i) out[lane * columns + column + i] = __uint_as_float(v[i]);
    }
    fence_before();
}

// D (128 x 64) = A (128 x 64) B^T (64 x 64), bf16. skip 1: the wait for the products, 2: the wait for the operands.
template <int kSwizzle, bool kAMn, bool kBMn>
__device__ void tensor_product(const CUtensorMap* a_map, const CUtensorMap* b_map, float* out, int skip) {
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ uint64_t barrier_storage[2];
    __shared__ uint32_t address_storage;
    constexpr int kWidth = kSwizzle ? kSwizzle : 16;
    const uint32_t a_smem = shared_address(shared), b_smem = a_smem + 16384;
    const uint32_t full = shared_address(&barrier_storage[0]), done = shared_address(&barrier_storage[1]);
    if (threadIdx.x < 32) tensor_alloc(shared_address(&address_storage), 64);
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        barrier_init(done, 1);
        barrier_fence();
    }
    __syncthreads();
    const uint32_t d = address_storage;
    if (threadIdx.x == 0) {
        barrier_expect(full, 24576);
        // K-major: boxes of `width` bytes along k. MN-major: along m or n.
        for (int i = 0; i < (kAMn ? 256 : 128) / kWidth; ++i) {
            tensor_load(a_smem + i * (kAMn ? 64 : 128) * kWidth, a_map, i * kWidth / 2, 0, full);
        }
        for (int i = 0; i < 128 / kWidth; ++i) tensor_load(b_smem + i * 64 * kWidth, b_map, i * kWidth / 2, 0, full);
        if (skip != 2) barrier_wait(full, 0);
        fence_after();
        for (int k = 0; k < 4; ++k) {
            product_f16(d, tile_at(a_smem, kAMn, k, 128, kSwizzle), tile_at(b_smem, kBMn, k, 64, kSwizzle),
                        shape_of(128, 64, kAMn, kBMn, 1), k != 0);
        }
        commit(done);
        if (skip == 2) barrier_wait(full, 0);
    }
    __syncwarp();
    if (skip != 1) barrier_wait(done, 0);
    read_tensor(d, 64, out);
    if (skip == 1) barrier_wait(done, 0);
    __syncthreads();
    if (threadIdx.x < 32) tensor_dealloc(d, 64);
}

}  // namespace sm100

extern "C" {

using namespace sm100;

#define PRODUCT(swizzle, a_mn, b_mn)                                                                        \
    __global__ void tensor_##swizzle##_##a_mn##b_mn(const CUtensorMap* a, const CUtensorMap* b, float* out, \
                                                    int skip) {                                             \
        tensor_product<swizzle, a_mn, b_mn>(a, b, out, skip);                                               \
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

// D (m x 32) = A (m x 32) B^T of e4m3, m 64 or 128, unswizzled, written by threads. The lanes of
// D are zeroed first. skip 1: the proxy fence.
__global__ void tensor_fp8(const uint8_t* a, const uint8_t* b, float* out, int m, int skip) {
    __shared__ __align__(128) uint8_t a_smem[128 * 32], b_smem[32 * 32];
    __shared__ uint64_t barrier_storage;
    __shared__ uint32_t address_storage;
    const uint32_t done = shared_address(&barrier_storage);
    for (int i = threadIdx.x; i < m * 32; i += 128) a_smem[i % 32 / 16 * 2048 + i / 32 * 16 + i % 16] = a[i];
    for (int i = threadIdx.x; i < 32 * 32; i += 128) b_smem[i % 32 / 16 * 512 + i / 32 * 16 + i % 16] = b[i];
    if (threadIdx.x < 32) tensor_alloc(shared_address(&address_storage), 32);
    if (threadIdx.x == 0) {
        barrier_init(done, 1);
        barrier_fence();
    }
    if (skip != 1) proxy_fence();
    __syncthreads();
    const uint32_t d = address_storage;
    const uint32_t zeros[8] = {};
    for (int column = 0; column < 32; column += 8) {
        store8(d + (static_cast<uint32_t>(threadIdx.x / 32 * 32) << 16) + column, zeros);
    }
    wait_stores();
    fence_before();
    __syncthreads();
    if (threadIdx.x == 0) {
        fence_after();
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\ntcgen05.mma.cta_group::1.kind::f8f6f4 [%0], %1, %2, %3, p;\n}\n" ::
                "r"(d),
            "l"(descriptor100(shared_address(a_smem), 2048, 128, 0)),
            "l"(descriptor100(shared_address(b_smem), 512, 128, 0)), "r"(shape_of(m, 32, false, false, 0))
            : "memory");
        commit(done);
    }
    __syncwarp();
    barrier_wait(done, 0);
    read_tensor(d, 32, out);
    __syncthreads();
    if (threadIdx.x < 32) tensor_dealloc(d, 32);
}

// D (128 x 16) = A B^T with A (128 x 16 bf16, two per word) in tensor memory; then the same added again after the first
// result was read. skip 1: wait::st before the product, 2: wait::ld (and the barrier) before the second product,
// 3: the barrier alone. 5: an mbarrier instead of it, at which one lane of each warp arrives for all; 4: the same
// without bar.warp.sync, so that the lane does not know of the other lanes' loads. 6, 7: fence::before_thread_sync of
// the stores, of the loads; 8, 9, 10: fence::after_thread_sync before the first product, the loads, the second product.
__global__ void tensor_a_in_memory(const uint32_t* a, const __nv_bfloat16* b, float* out, int skip) {
    __shared__ __align__(128) __nv_bfloat16 b_smem[16 * 16];
    __shared__ uint64_t barrier_storage, loaded_storage;
    __shared__ uint32_t address_storage;
    const uint32_t done = shared_address(&barrier_storage), loaded = shared_address(&loaded_storage);
    const int t = threadIdx.x;
    for (int i = t; i < 16 * 16; i += 128) b_smem[i % 16 / 8 * 128 + i / 16 * 8 + i % 8] = b[i];
    if (t < 32) tensor_alloc(shared_address(&address_storage), 32);
    if (t == 0) {
        barrier_init(done, 1);
        barrier_init(loaded, 4);
        barrier_fence();
    }
    proxy_fence();
    __syncthreads();
    const uint32_t d = address_storage, a_tensor = d + 16, quarter = static_cast<uint32_t>(t / 32 * 32) << 16;
    uint32_t words[8];
    for (int i = 0; i < 8; ++i) words[i] = a[t * 8 + i];
    store8(a_tensor + quarter, words);
    if (skip != 1) wait_stores();
    if (skip != 6) fence_before();
    __syncthreads();
    if (skip != 8) fence_after();
    const uint64_t b_descriptor = descriptor100(shared_address(b_smem), 256, 128, 0);
    const uint32_t shape = shape_of(128, 16, false, false, 1);
    if (t == 0) {
        product_f16_tensor_a(d, a_tensor, b_descriptor, shape, 0);
        commit(done);
    }
    __syncwarp();
    barrier_wait(done, 0);
    if (skip == 1) wait_stores();
    if (skip != 9) fence_after();
    uint32_t low[8], high[8];
    load8(d + quarter, low);
    load8(d + quarter + 8, high);
    const bool one_arrives = skip == 4 || skip == 5;
    if (skip != 2) wait_loads();
    if (skip != 7) fence_before();
    if (!one_arrives && skip != 3) __syncthreads();
    if (skip == 5) __syncwarp();
    if (one_arrives && t % 32 == 0) barrier_arrive(loaded);
    if (t == 0) {
        if (one_arrives) barrier_wait(loaded, 0);
        if (skip != 10) fence_after();
        product_f16_tensor_a(d, a_tensor, b_descriptor, shape, 1);
        commit(done);
    }
    __syncwarp();
    barrier_wait(done, 1);
    wait_loads();
    for (int i = 0; i < 8; ++i) {
        out[t * 16 + i] = __uint_as_float(low[i]);
        out[t * 16 + 8 + i] = __uint_as_float(high[i]);
    }
    read_tensor(d, 16, out + 128 * 16);
    __syncthreads();
    if (t < 32) tensor_dealloc(d, 32);
}

// What register r of each lane of a 16-lane load holds: cells are filled with 1000 lane + column. out (3 shapes, 128
// threads, 4 registers).
__global__ void tensor_shapes(uint32_t* out) {
    __shared__ uint32_t address_storage;
    if (threadIdx.x < 32) tensor_alloc(shared_address(&address_storage), 32);
    __syncthreads();
    const uint32_t base = address_storage + (static_cast<uint32_t>(threadIdx.x / 32 * 32) << 16);
    for (int column = 0; column < 32; column += 8) {
        uint32_t v[8];
        for (int i = 0; i < 8; ++i) v[i] = 1000 * threadIdx.x + column + i;
        store8(base + column, v);
    }
    wait_stores();
    uint32_t v[4];
    auto put = [&](int shape) {
        wait_loads();
        for (int i = 0; i < 4; ++i) out[(shape * 128 + threadIdx.x) * 4 + i] = v[i];
    };
    asm volatile("tcgen05.ld.sync.aligned.16x64b.x4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(base));
    put(0);
    asm volatile("tcgen05.ld.sync.aligned.16x128b.x2.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(base + (16u << 16)));
    put(1);
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x1.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(base + 8));
    put(2);
    fence_before();
    __syncthreads();
    if (threadIdx.x < 32) tensor_dealloc(address_storage, 32);
}

// D (m x 64) = A (m x 16) B^T (64 x 16) by a pair of CTAs, m 128 or 256: each CTA has half of the rows of A and of B.
// out (2, 128 lanes, columns): the tensor memory of both. skip 1: the cluster barrier before the product; 2: the CTAs
// allocate behind it, so that the product may come before the other CTA's allocation.
__global__ void __cluster_dims__(2, 1, 1)
    pair_product(const __nv_bfloat16* a, const __nv_bfloat16* b, float* out, int m, int skip) {
    __shared__ __align__(128) __nv_bfloat16 a_smem[128 * 16], b_smem[32 * 16];
    __shared__ uint64_t barrier_storage;
    __shared__ uint32_t address_storage;
    const uint32_t rank = cluster_rank(), done = shared_address(&barrier_storage);
    const int t = threadIdx.x, rows = m / 2, columns = m == 256 ? 64 : 32;
    for (int i = t; i < rows * 16; i += 128) a_smem[i % 16 / 8 * 1024 + i / 16 * 8 + i % 8] = a[rank * rows * 16 + i];
    for (int i = t; i < 32 * 16; i += 128) b_smem[i % 16 / 8 * 256 + i / 16 * 8 + i % 8] = b[rank * 32 * 16 + i];
    const auto allocate = [&] {
        if (t >= 32) return;
        asm volatile(
            "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], 64;" ::"r"(shared_address(&address_storage))
            : "memory");
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
    };
    if (skip != 2) allocate();
    if (t == 0) {
        barrier_init(done, 1);
        barrier_fence();
    }
    proxy_fence();
    __syncthreads();
    if (skip != 1) {
        cluster_arrive();
        cluster_wait();
    }
    if (skip == 2) {
        allocate();
        __syncthreads();
    }
    const uint32_t d = address_storage;
    if (rank == 0 && t == 0) {
        fence_after();
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\ntcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n}\n" ::
                "r"(d),
            "l"(descriptor100(shared_address(a_smem), 2048, 128, 0)),
            "l"(descriptor100(shared_address(b_smem), 512, 128, 0)), "r"(shape_of(m, 64, false, false, 1))
            : "memory");
        asm volatile(
            "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
                done),
            "h"(static_cast<uint16_t>(3))
            : "memory");
    }
    __syncwarp();
    barrier_wait(done, 0);
    read_tensor(d, columns, out + rank * 128 * columns);
    __syncthreads();
    if (skip == 1) return;
    cluster_arrive();
    cluster_wait();
    if (t < 32) asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, 64;" ::"r"(d) : "memory");
}

// Misuse, each an error. what 0: lanes of another warp, 1: columns that are not allocated, 2: not deallocated,
// 3: N that does not exist, 4: a descriptor of sm90, 5: a later allocation that is larger, 6: 48 columns
__global__ void tensor_misuse(int what) {
    __shared__ __align__(1024) uint8_t shared[8192];
    __shared__ uint32_t address_storage;
    if (threadIdx.x < 32) tensor_alloc(shared_address(&address_storage), what == 6 ? 48 : 32);
    __syncthreads();
    const uint32_t d = address_storage;
    uint32_t v[8] = {};
    if (what == 0) load8(d + (32u << 16), v);
    if (what == 1) load8(d + 28 + (static_cast<uint32_t>(threadIdx.x / 32 * 32) << 16), v);
    if (what == 2) return;
    if (what == 8) store8(d + (static_cast<uint32_t>(threadIdx.x / 32 * 32) << 16), v);
    const uint32_t smem = shared_address(shared);
    if (threadIdx.x == 0 && what == 3) {
        product_f16(d, descriptor100(smem, 16, 1024, 128), descriptor100(smem, 16, 1024, 128),
                    shape_of(128, 24, false, false, 1), 0);
    }
    if (threadIdx.x == 0 && what == 4) {
        product_f16(d, descriptor(smem, 16, 1024, 128), descriptor(smem, 16, 1024, 128),
                    shape_of(128, 32, false, false, 1), 0);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        if (what == 5) tensor_alloc(shared_address(&address_storage), 64);
        tensor_dealloc(d, 32);
        if (what == 7) load8(d + (static_cast<uint32_t>(threadIdx.x / 32 * 32) << 16), v);
    }
}

// Clusters of two CTAs take over those that have not started; done[cta]: the first CTA of the cluster that did its
// work. skip 1: the wait for the response; 2: asks for the place of a cluster that was not there to take over.
__global__ void __cluster_dims__(2, 1, 1) take_over(int32_t* done, int skip) {
    __shared__ __align__(16) uint32_t response[4];
    __shared__ uint64_t barrier_storage;
    const uint32_t barrier = shared_address(&barrier_storage), to = shared_address(response);
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_fence();
    }
    const uint32_t rank = cluster_rank();
    uint32_t work = blockIdx.x, valid = 1;
    for (int phase = 0; valid; phase ^= 1) {
        if (threadIdx.x == 0) {
            done[work] = static_cast<int32_t>(blockIdx.x - rank);
            barrier_expect(barrier, 16);
        }
        proxy_fence();  // the response before has been read by both CTAs
        cluster_arrive();
        cluster_wait();
        if (threadIdx.x == 0 && rank == 0) {
            asm volatile(
                "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all"
                ".b128 [%0], [%1];" ::"r"(to),
                "r"(barrier)
                : "memory");
        }
        if (skip != 1) barrier_wait(barrier, phase);
        uint32_t first = 0;
        asm volatile(
            "{\n.reg .pred p;\n.reg .b128 r;\n"
            "ld.shared.b128 r, [%2];\n"
            "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, r;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "@p clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %1, r;\n}\n"
            : "=r"(valid), "+r"(first)
            : "r"(to)
            : "memory");
        work = first + rank;
    }
    if (skip == 2) {
        asm volatile(
            "{\n.reg .b128 r;\n"
            "ld.shared.b128 r, [%1];\n"
            "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%0, _, _, _}, r;\n}\n"
            : "=r"(work)
            : "r"(to)
            : "memory");
        done[0] = static_cast<int32_t>(work);
    }
}

}  // extern "C"
