// One instance of CUTLASS's attention examples as a library. FLASH_EXT_EXAMPLE is the example cut before its own main,
// which would instantiate all of its kernels, with FlashExtRunner for a specialization of its FwdRunner or BwdRunner:
// inputs, launch and the comparison with the example's reference.
#include "examine.h"

#include FLASH_EXT_EXAMPLE

extern "C" __attribute__((visibility("default"))) int flash_ext_test_main(int count, char const** arguments) {
    flash_ext_examine(false);
    Options options;
    options.parse(count, arguments);
    options.iterations = 0;
    options.verify = true;
    cutlass::KernelHardwareInfo hardware;
    hardware.device_id = 0;
    hardware.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(0);
    FlashExtRunner runner;
    const bool verified = runner.run(options, hardware).verified;
    std::cout << (verified ? "Execution is successful" : "Execution is wrong") << std::endl;
    return verified ? 0 : 1;
}
