// wgmma for the values of N that cute/arch/mma_sm90_gmma.hpp leaves out (it has 8, 16, 32, 64, 96, 128, 192, 256).
#pragma once

#include <stdint.h>

#include "params.h"

namespace flash_ext::ptx {

// Eight accumulator registers: their places in the instruction, and as operands.
#define FLASH_EXT_D0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASH_EXT_D1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FLASH_EXT_D2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FLASH_EXT_D3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FLASH_EXT_D4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FLASH_EXT_D5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FLASH_EXT_D6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FLASH_EXT_D7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FLASH_EXT_D8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FLASH_EXT_D9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FLASH_EXT_D10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FLASH_EXT_OPERANDS(i)                                                                       \
    "+f"(d[8 * i]), "+f"(d[8 * i + 1]), "+f"(d[8 * i + 2]), "+f"(d[8 * i + 3]), "+f"(d[8 * i + 4]), \
        "+f"(d[8 * i + 5]), "+f"(d[8 * i + 6]), "+f"(d[8 * i + 7])

#define FLASH_EXT_D_N48 FLASH_EXT_D0 ", " FLASH_EXT_D1 ", " FLASH_EXT_D2
#define FLASH_EXT_OPERANDS_N48 FLASH_EXT_OPERANDS(0), FLASH_EXT_OPERANDS(1), FLASH_EXT_OPERANDS(2)
#define FLASH_EXT_D_N80 FLASH_EXT_D0 ", " FLASH_EXT_D1 ", " FLASH_EXT_D2 ", " FLASH_EXT_D3 ", " FLASH_EXT_D4
#define FLASH_EXT_OPERANDS_N80 \
    FLASH_EXT_OPERANDS(0), FLASH_EXT_OPERANDS(1), FLASH_EXT_OPERANDS(2), FLASH_EXT_OPERANDS(3), FLASH_EXT_OPERANDS(4)
#define FLASH_EXT_D_N112                                                                                   \
    FLASH_EXT_D0 ", " FLASH_EXT_D1 ", " FLASH_EXT_D2 ", " FLASH_EXT_D3 ", " FLASH_EXT_D4 ", " FLASH_EXT_D5 \
                 ", " FLASH_EXT_D6
#define FLASH_EXT_OPERANDS_N112                                                                                        \
    FLASH_EXT_OPERANDS(0), FLASH_EXT_OPERANDS(1), FLASH_EXT_OPERANDS(2), FLASH_EXT_OPERANDS(3), FLASH_EXT_OPERANDS(4), \
        FLASH_EXT_OPERANDS(5), FLASH_EXT_OPERANDS(6)
#define FLASH_EXT_D_N144                                                                                   \
    FLASH_EXT_D0 ", " FLASH_EXT_D1 ", " FLASH_EXT_D2 ", " FLASH_EXT_D3 ", " FLASH_EXT_D4 ", " FLASH_EXT_D5 \
                 ", " FLASH_EXT_D6 ", " FLASH_EXT_D7 ", " FLASH_EXT_D8
#define FLASH_EXT_OPERANDS_N144                                                                                        \
    FLASH_EXT_OPERANDS(0), FLASH_EXT_OPERANDS(1), FLASH_EXT_OPERANDS(2), FLASH_EXT_OPERANDS(3), FLASH_EXT_OPERANDS(4), \
        FLASH_EXT_OPERANDS(5), FLASH_EXT_OPERANDS(6), FLASH_EXT_OPERANDS(7), FLASH_EXT_OPERANDS(8)
#define FLASH_EXT_D_N160                                                                                   \
    FLASH_EXT_D0 ", " FLASH_EXT_D1 ", " FLASH_EXT_D2 ", " FLASH_EXT_D3 ", " FLASH_EXT_D4 ", " FLASH_EXT_D5 \
                 ", " FLASH_EXT_D6 ", " FLASH_EXT_D7 ", " FLASH_EXT_D8 ", " FLASH_EXT_D9
#define FLASH_EXT_OPERANDS_N160                                                                                        \
    FLASH_EXT_OPERANDS(0), FLASH_EXT_OPERANDS(1), FLASH_EXT_OPERANDS(2), FLASH_EXT_OPERANDS(3), FLASH_EXT_OPERANDS(4), \
        FLASH_EXT_OPERANDS(5), FLASH_EXT_OPERANDS(6), FLASH_EXT_OPERANDS(7), FLASH_EXT_OPERANDS(8),                    \
        FLASH_EXT_OPERANDS(9)
#define FLASH_EXT_D_N176                                                                                   \
    FLASH_EXT_D0 ", " FLASH_EXT_D1 ", " FLASH_EXT_D2 ", " FLASH_EXT_D3 ", " FLASH_EXT_D4 ", " FLASH_EXT_D5 \
                 ", " FLASH_EXT_D6 ", " FLASH_EXT_D7 ", " FLASH_EXT_D8 ", " FLASH_EXT_D9 ", " FLASH_EXT_D10
#define FLASH_EXT_OPERANDS_N176                                                                                        \
    FLASH_EXT_OPERANDS(0), FLASH_EXT_OPERANDS(1), FLASH_EXT_OPERANDS(2), FLASH_EXT_OPERANDS(3), FLASH_EXT_OPERANDS(4), \
        FLASH_EXT_OPERANDS(5), FLASH_EXT_OPERANDS(6), FLASH_EXT_OPERANDS(7), FLASH_EXT_OPERANDS(8),                    \
        FLASH_EXT_OPERANDS(9), FLASH_EXT_OPERANDS(10)

// r0 is the number of the first operand behind the accumulators (N / 2), r1 the next, and so on; b_is_mn: "1" if b is
// MN-major.
#define FLASH_EXT_WGMMA_SS(n, type, b_is_mn, r0, r1, r2)                                               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r2                                              \
                 ", 0;\n"                                                                              \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FLASH_EXT_D_N##n \
                 "}, %" #r0 ", %" #r1 ", p, 1, 1, 0, " b_is_mn ";\n}\n"                                \
                 : FLASH_EXT_OPERANDS_N##n                                                             \
                 : "l"(a), "l"(b), "r"(accumulate))
#define FLASH_EXT_WGMMA_SS_N(n, b_is_mn, r0, r1, r2)                                                         \
    if constexpr (kN == n && kType == DataType::kFloat16) FLASH_EXT_WGMMA_SS(n, "f16", b_is_mn, r0, r1, r2); \
    if constexpr (kN == n && kType == DataType::kBFloat16) FLASH_EXT_WGMMA_SS(n, "bf16", b_is_mn, r0, r1, r2)

// PTX ISA 9.7.15.5 (wgmma.mma_async). d (64 x kN, fp32) = a (64 x 16) * b (kN x 16)^T, plus d if accumulate is not 0.
// a and b are shared-memory descriptors, both K-major. Asynchronous: wgmma.fence before, commit_group and wait_group
// after.
template <DataType kType, int kN>
__device__ __forceinline__ void wgmma_m64k16_ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int32_t accumulate) {
    static_assert(kN == 80 || kN == 112 || kN == 144 || kN == 160 || kN == 176);
    FLASH_EXT_WGMMA_SS_N(80, "0", 40, 41, 42);
    FLASH_EXT_WGMMA_SS_N(112, "0", 56, 57, 58);
    FLASH_EXT_WGMMA_SS_N(144, "0", 72, 73, 74);
    FLASH_EXT_WGMMA_SS_N(160, "0", 80, 81, 82);
    FLASH_EXT_WGMMA_SS_N(176, "0", 88, 89, 90);
}

// The same with b MN-major (16 x kN, rows of kN values): d = a * b.
template <DataType kType, int kN>
__device__ __forceinline__ void wgmma_m64k16_ss_k_mn(float (&d)[kN / 2], uint64_t a, uint64_t b, int32_t accumulate) {
    static_assert(kN == 48);
    FLASH_EXT_WGMMA_SS_N(48, "1", 24, 25, 26);
}

#undef FLASH_EXT_D0
#undef FLASH_EXT_D1
#undef FLASH_EXT_D2
#undef FLASH_EXT_D3
#undef FLASH_EXT_D4
#undef FLASH_EXT_D5
#undef FLASH_EXT_D6
#undef FLASH_EXT_D7
#undef FLASH_EXT_D8
#undef FLASH_EXT_D9
#undef FLASH_EXT_D10
#undef FLASH_EXT_OPERANDS
#undef FLASH_EXT_D_N48
#undef FLASH_EXT_OPERANDS_N48
#undef FLASH_EXT_D_N80
#undef FLASH_EXT_OPERANDS_N80
#undef FLASH_EXT_D_N112
#undef FLASH_EXT_OPERANDS_N112
#undef FLASH_EXT_D_N144
#undef FLASH_EXT_OPERANDS_N144
#undef FLASH_EXT_D_N160
#undef FLASH_EXT_OPERANDS_N160
#undef FLASH_EXT_D_N176
#undef FLASH_EXT_OPERANDS_N176
#undef FLASH_EXT_WGMMA_SS
#undef FLASH_EXT_WGMMA_SS_N

}  // namespace flash_ext::ptx
