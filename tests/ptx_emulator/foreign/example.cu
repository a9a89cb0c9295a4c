// One of CUTLASS's examples as a library: FLASH_EXT_EXAMPLE names its file, main becomes flash_ext_test_main.
// With FLASH_EXT_EXAMINE its text has flash_ext_launch around the launch of the kernel under test.
#include "examine.h"

#define main flash_ext_example_main
#include FLASH_EXT_EXAMPLE
#undef main

// Whether main takes char** or const char**.
template <class Words>
static int flash_ext_call(int (*example_main)(int, Words), int count, char** arguments) {
    return example_main(count, const_cast<Words>(arguments));
}

extern "C" __attribute__((visibility("default"))) int flash_ext_test_main(int count, char** arguments) {
#ifdef FLASH_EXT_EXAMINE
    flash_ext_examine(false);
#endif
    return flash_ext_call(flash_ext_example_main, count, arguments);
}
