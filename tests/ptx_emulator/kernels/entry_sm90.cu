// The kernels of sm90.cu by name.
#include "launch.cuh"
#include "sm90.cu"

namespace {

const Entry kEntries[] = {
#define ENTRY(name) {#name, reinterpret_cast<const void*>(&name)}
#define PRODUCTS(swizzle)                                                                        \
    ENTRY(product_##swizzle##_00), ENTRY(product_##swizzle##_01), ENTRY(product_##swizzle##_10), \
        ENTRY(product_##swizzle##_11)
    PRODUCTS(0),
    PRODUCTS(32),
    PRODUCTS(64),
    PRODUCTS(128),
    ENTRY(product_fp8),
    ENTRY(product_registers),
    ENTRY(bulk_ring),
    ENTRY(box_and_back),
    ENTRY(copies_on_barrier),
    ENTRY(pair_exchange),
    ENTRY(store_then_add),
    ENTRY(write_to_ended),
    ENTRY(move_registers),
    ENTRY(primary_grid),
    ENTRY(dependent_grid),
    ENTRY(barrier_deadlock),
    ENTRY(misuse),
    ENTRY(one_lane_waits),
    ENTRY(bulk_exchange),
    ENTRY(product_and_read),
#undef PRODUCTS
#undef ENTRY
};

}  // namespace

FLASH_EXT_TEST_LAUNCH(kEntries)
