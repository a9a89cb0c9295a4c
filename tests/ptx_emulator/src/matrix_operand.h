// Operands of wgmma and tcgen05.mma in shared memory: matrix descriptors and canonical layouts (PTX ISA 9.7.15.5.1.2,
// 9.7.16.4; the figures' contents after cute/atom/mma_traits_sm90_gmma.hpp).
//
// K of one instruction is 32 bytes, two chunks of 16. With T = elements in 16 bytes and W = bytes of the swizzle:
//
//   K-major   no swizzle   8 rows of 16 bytes lie together; next 8 rows at stride, next chunk of K at leading
//             swizzle W    rows of W bytes, 8 of them lie together; next 8 rows at stride
//   MN-major  no swizzle   8 k of 16 bytes (T elements) lie together; next T elements at stride, next 8 k at leading
//             swizzle W    8 k of W bytes lie together; next W bytes of elements at leading, next 8 k at stride
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checker.h"
#include "tensor_map.h"
#include "types.h"

namespace ptx_emulator {

struct MatrixDescriptor {
    uint32_t start = 0, leading = 0, stride = 0;  // bytes
    Swizzle swizzle = Swizzle::kNone;
};

// Throw kIllegalInstruction for reserved values and for starts that do not fit the swizzle's pattern.
MatrixDescriptor wgmma_descriptor(uint64_t bits);
MatrixDescriptor tcgen05_descriptor(uint64_t bits);

enum class ElementType : uint8_t { kF16, kBf16, kE4m3, kE5m2, kTf32 };

const char* name_of(ElementType type);

constexpr uint32_t element_size(ElementType type) {
    return type == ElementType::kTf32 ? 4 : type == ElementType::kF16 || type == ElementType::kBf16 ? 2 : 1;
}

// T elements, 16 bytes, to fp32.
void widen_chunk(ElementType type, const uint8_t* data, float* values);
float widen_element(ElementType type, const uint8_t* data);

struct MatrixOperand {
    MatrixDescriptor descriptor;
    ElementType type = ElementType::kBf16;
    bool mn_major = false;
    uint32_t first = 0, count = 0;  // rows (M of A, N of B) that are read

    // Depth of one instruction: K.
    uint32_t depth() const { return 32 / element_size(type); }
    // values[row][k], of the async proxy's view of the CTA's shared memory.
    void load(Cta& cta, float* values) const;
    // Tells the checker of all reads.
    void record(Checker& checker, const AsyncAgent& agent, Cta& cta) const;
    // "MN-major, swizzle 128, several panels": which parts of the layout it exercises.
    std::string form() const;

  private:
    // Calls f(offset in shared memory, row, k) for each chunk of 16 bytes; T rows or T k from there.
    template <class F>
    void for_chunks(F f) const;
};

// d[m][n] = a[m][k] b[n][k] (+ d), rows of d `pitch` apart. m is a multiple of 4, n of 8, k is 8, 16 or 32.
void multiply_accumulate(const float* a, const float* b, float* d, uint32_t m, uint32_t n, uint32_t k, uint32_t pitch,
                         bool accumulate);

}  // namespace ptx_emulator
