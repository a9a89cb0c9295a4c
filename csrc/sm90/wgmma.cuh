// Warpgroup matrix products of the sm90 kernels: the instruction for a type and an N, and the descriptors of tiles in
// panels (panel.cuh).
#pragma once

#include <stdint.h>

#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "params.h"
#include "ptx/wgmma.cuh"
#include "sm90/panel.cuh"

namespace flash_ext::sm90 {

// cute's instruction for D of 64 x kN: Ss has both operands in shared memory, both K-major; SsMn likewise, both
// MN-major; SsKMn likewise, B alone MN-major; Rs has A in registers and B MN-major, RsK B K-major. None where cute's
// base header has no such N.
template <DataType kType, int kN>
struct CuteWgmma {
    static constexpr bool kExists = false;
};
#define FLASH_EXT_CUTE_WGMMA(n, data_type, name)                                                                     \
    template <>                                                                                                      \
    struct CuteWgmma<DataType::data_type, n> {                                                                       \
        static constexpr bool kExists = true;                                                                        \
        using Ss =                                                                                                   \
            cute::SM90::GMMA::MMA_64x##n##x16_##name##_SS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>;   \
        using SsMn =                                                                                                 \
            cute::SM90::GMMA::MMA_64x##n##x16_##name##_SS<cute::SM90::GMMA::Major::MN, cute::SM90::GMMA::Major::MN>; \
        using SsKMn =                                                                                                \
            cute::SM90::GMMA::MMA_64x##n##x16_##name##_SS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::MN>;  \
        using Rs =                                                                                                   \
            cute::SM90::GMMA::MMA_64x##n##x16_##name##_RS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::MN>;  \
        using RsK =                                                                                                  \
            cute::SM90::GMMA::MMA_64x##n##x16_##name##_RS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>;   \
    };
#define FLASH_EXT_CUTE_WGMMA_TYPES(n)            \
    FLASH_EXT_CUTE_WGMMA(n, kFloat16, F32F16F16) \
    FLASH_EXT_CUTE_WGMMA(n, kBFloat16, F32BF16BF16)
FLASH_EXT_CUTE_WGMMA_TYPES(32)
FLASH_EXT_CUTE_WGMMA_TYPES(64)
FLASH_EXT_CUTE_WGMMA_TYPES(96)
FLASH_EXT_CUTE_WGMMA_TYPES(128)
FLASH_EXT_CUTE_WGMMA_TYPES(192)
FLASH_EXT_CUTE_WGMMA_TYPES(256)
#undef FLASH_EXT_CUTE_WGMMA_TYPES
#undef FLASH_EXT_CUTE_WGMMA

// d (64 x kN) = a (64 x 16) b^T (kN x 16), or += with accumulate. Asynchronous.
template <DataType kType, int kN>
__device__ __forceinline__ void multiply_ss(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
    if constexpr (CuteWgmma<kType, kN>::kExists) {
        const auto scale = accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
        [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
            CuteWgmma<kType, kN>::Ss::fma(a, b, d[kIndex]..., scale);
        }(std::make_index_sequence<kN / 2>{});
    } else {
        ptx::wgmma_m64k16_ss<kType, kN>(d, a, b, accumulate);
    }
}

// d (64 x kN) = a^T (16 x 64) b (16 x kN), rows of 64 and of kN values, or += with accumulate. Asynchronous.
template <DataType kType, int kN>
__device__ __forceinline__ void multiply_ss_mn(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
    static_assert(CuteWgmma<kType, kN>::kExists);
    const auto scale = accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
    [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
        CuteWgmma<kType, kN>::SsMn::fma(a, b, d[kIndex]..., scale);
    }(std::make_index_sequence<kN / 2>{});
}

// d (64 x kN) = a (64 x 16) b (16 x kN, rows of kN values), or += with accumulate. Asynchronous.
template <DataType kType, int kN>
__device__ __forceinline__ void multiply_ss_k_mn(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
    if constexpr (CuteWgmma<kType, kN>::kExists) {
        const auto scale = accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
        [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
            CuteWgmma<kType, kN>::SsKMn::fma(a, b, d[kIndex]..., scale);
        }(std::make_index_sequence<kN / 2>{});
    } else {
        ptx::wgmma_m64k16_ss_k_mn<kType, kN>(d, a, b, accumulate);
    }
}

// d (64 x kN) = a (64 x 16, packed pairs in registers) b (16 x kN, rows of kN values), or += with accumulate.
// Asynchronous.
template <DataType kType, int kN>
__device__ __forceinline__ void multiply_rs(float (&d)[kN / 2], const uint32_t* a, uint64_t b, bool accumulate = true) {
    static_assert(CuteWgmma<kType, kN>::kExists);
    const auto scale = accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
    [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
        CuteWgmma<kType, kN>::Rs::fma(a[0], a[1], a[2], a[3], b, d[kIndex]..., scale);
    }(std::make_index_sequence<kN / 2>{});
}

// d (64 x kN) = a (64 x 16, packed pairs in registers) b^T (kN x 16, K-major), or += with accumulate. Asynchronous.
template <DataType kType, int kN>
__device__ __forceinline__ void multiply_rs_k(float (&d)[kN / 2], const uint32_t* a, uint64_t b, bool accumulate) {
    static_assert(CuteWgmma<kType, kN>::kExists);
    const auto scale = accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
    [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
        CuteWgmma<kType, kN>::RsK::fma(a[0], a[1], a[2], a[3], b, d[kIndex]..., scale);
    }(std::make_index_sequence<kN / 2>{});
}

// Keeps the compiler from moving uses of registers that a product in flight reads or writes over this point.
template <class T, int kCount>
__device__ __forceinline__ void fence_operand(T (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(registers[i]);
}

// PTX ISA 9.7.15.5.1 (matrix descriptor). leading_bytes: from a panel to the next where the operand is MN-major; a
// K-major one has no use for it, for its 16 columns never leave a panel.
__device__ __forceinline__ uint64_t panel_descriptor(uint32_t address_smem, uint32_t leading_bytes) {
    cute::GmmaDescriptor descriptor;
    descriptor.bitfield.start_address_ = address_smem >> 4;
    descriptor.bitfield.leading_byte_offset_ = leading_bytes >> 4;
    descriptor.bitfield.stride_byte_offset_ = kSwizzleRows * kPanelRowBytes >> 4;
    descriptor.bitfield.layout_type_ = 1;  // 128-byte swizzle
    return descriptor.desc_;
}

}  // namespace flash_ext::sm90
