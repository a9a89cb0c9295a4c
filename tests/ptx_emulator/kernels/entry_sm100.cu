// The kernels of sm100.cu by name.
#include "launch.cuh"
#include "sm100.cu"

namespace {

const Entry kEntries[] = {
#define ENTRY(name) {#name, reinterpret_cast<const void*>(&name)}
#define PRODUCTS(swizzle)                                                                     \
    ENTRY(tensor_##swizzle##_00), ENTRY(tensor_##swizzle##_01), ENTRY(tensor_##swizzle##_10), \
        ENTRY(tensor_##swizzle##_11)
    PRODUCTS(0),          PRODUCTS(32),        PRODUCTS(64),
    PRODUCTS(128),        ENTRY(tensor_fp8),   ENTRY(tensor_a_in_memory),
    ENTRY(tensor_shapes), ENTRY(pair_product), ENTRY(tensor_misuse),
    ENTRY(take_over),
#undef PRODUCTS
#undef ENTRY
};

}  // namespace

FLASH_EXT_TEST_LAUNCH(kEntries)
