// One instance of CUTLASS's attention examples as a library. FLASH_EXT_EXAMPLE is the example cut before its own main,
// which would instantiate all of its kernels, with FlashExtRunner for a specialization of its FwdRunner or BwdRunner:
// inputs, launch and the comparison with the example's reference.
#include <cstdlib>
#include <string>

// The kernels under test run as the environment says; those that fill the inputs and the reference, which are slow and
// nobody's concern here, under one schedule and without the checker.
inline void flash_ext_examine(bool on) {
    static const char* const names[] = {"FLASH_EXT_EMULATOR_SCHEDULE", "FLASH_EXT_EMULATOR_CHECK",
                                        "FLASH_EXT_EMULATOR_FORMS"};
    static const char* const quick[] = {"eager", "0", ""};
    static std::string asked[3];
    for (int i = 0; i < 3; ++i) {
        if (!on) {
            const char* value = std::getenv(names[i]);
            asked[i] = value ? value : "";
        }
        setenv(names[i], on ? asked[i].c_str() : quick[i], 1);
    }
}

// Stands around the example's launch.
template <class Launch>
auto flash_ext_launch(Launch launch) {
    flash_ext_examine(true);
    const auto status = launch();
    flash_ext_examine(false);
    return status;
}

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
