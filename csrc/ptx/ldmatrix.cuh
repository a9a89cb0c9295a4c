// ldmatrix: four 8x8 matrices of 16-bit elements from shared memory into one warp's registers.
#pragma once

#include <stdint.h>

namespace flash_ext::ptx {

// PTX ISA 9.7.14.5.15 (ldmatrix), .x4. Lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, aligned) and
// receives elements (l / 4, 2 * (l % 4) + {0, 1}) of each matrix.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t row_smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(row_smem)
                 : "memory");
}

// The same, .trans: each matrix arrives transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t row_smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(row_smem)
                 : "memory");
}

}  // namespace flash_ext::ptx
