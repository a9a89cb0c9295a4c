// Tensor memory as the sm100 kernels use it: 128 lanes of 512 columns of 32 bits, a row of a tile per lane, and a warp
// that reaches lanes 32 (w % 4) to 32 (w % 4) + 31 alone. An address is lane << 16 | column.
#pragma once

#include <stdint.h>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm100.hpp>
#include <utility>

namespace flash_ext::sm100 {

// All of it is allocated: the allocation begins at lane 0, column 0, for there is no other place, and addresses are
// constants.
constexpr int kTensorMemoryColumns = 512;

// The address of the calling warp's own lanes.
__device__ __forceinline__ uint32_t own_lanes(uint32_t tmem, int warp) {
    return tmem + (static_cast<uint32_t>(warp % 4 * 32) << 16);
}

template <int kColumns>
struct ColumnCopy;
template <>
struct ColumnCopy<32> {
    using Load = cute::SM100::TMEM::LOAD::SM100_TMEM_LOAD_32dp32b32x;
    using Store = cute::SM100::TMEM::STORE::SM100_TMEM_STORE_32dp32b32x;
};
template <>
struct ColumnCopy<16> {
    using Load = cute::SM100::TMEM::LOAD::SM100_TMEM_LOAD_32dp32b16x;
    using Store = cute::SM100::TMEM::STORE::SM100_TMEM_STORE_32dp32b16x;
};

// A thread's row of kColumns columns, asynchronously: the values are there after wait_loads().
template <int kColumns>
__device__ __forceinline__ void load_columns(uint32_t* values, uint32_t tmem) {
    [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
        ColumnCopy<kColumns>::Load::copy(tmem, values[kIndex]...);
    }(std::make_index_sequence<kColumns>{});
}

template <int kColumns>
__device__ __forceinline__ void store_columns(uint32_t tmem, const uint32_t* values) {
    [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
        ColumnCopy<kColumns>::Store::copy(values[kIndex]..., tmem);
    }(std::make_index_sequence<kColumns>{});
}

// All loads, all stores of the calling thread are done.
__device__ __forceinline__ void wait_loads() {
    cutlass::arch::fence_view_async_tmem_load();
}
__device__ __forceinline__ void wait_stores() {
    cutlass::arch::fence_view_async_tmem_store();
}

}  // namespace flash_ext::sm100
