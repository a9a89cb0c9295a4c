// One of CUTLASS's examples as a library: FLASH_EXT_EXAMPLE names its file, main becomes flash_ext_test_main.
#define main flash_ext_example_main
#include FLASH_EXT_EXAMPLE
#undef main

extern "C" __attribute__((visibility("default"))) int flash_ext_test_main(int count, char** arguments) {
    return flash_ext_example_main(count, arguments);
}
