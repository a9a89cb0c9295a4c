// The product of CUTLASS's wgmma_tma_sm90 tutorial, whose own main only measures it. C (m x n, columns) = A B^T, fp16.
#define main flash_ext_example_main
#include "cute/tutorial/hopper/wgmma_tma_sm90.cu"
#undef main

// transposed: the tutorial's 'T' and 'N' form (K-major operands), else 'N' and 'T' (MN-major ones).
extern "C" __attribute__((visibility("default"))) int flash_ext_test_product(int transposed, int m, int n, int k,
                                                                             const void* a, const void* b, void* c) {
    using Half = cute::half_t;
    gemm(transposed ? 'T' : 'N', transposed ? 'N' : 'T', m, n, k, Half(1.0f), static_cast<const Half*>(a),
         transposed ? k : m, static_cast<const Half*>(b), transposed ? k : n, Half(0.0f), static_cast<Half*>(c), m);
    return static_cast<int>(cudaGetLastError());
}
