// Errors of the stand-in: codes, names and the latest report.
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "runtime.h"

namespace ptx_emulator {

namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaError_t report_code = cudaSuccess;
thread_local std::string report_text, string_buffer;

struct ErrorText {
    cudaError_t code;
    const char* name;
    const char* text;
};

constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidPtx, "cudaErrorInvalidPtx", "a PTX JIT compilation failed"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
    {cudaErrorIllegalInstruction, "cudaErrorIllegalInstruction", "an illegal instruction was encountered"},
    {cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorSymbolNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

}  // namespace

cudaError_t error_code(Fault fault) {
    switch (fault) {
        case Fault::kInvalidPtx:
            return cudaErrorInvalidPtx;
        case Fault::kMissingKernel:
            return cudaErrorInvalidDeviceFunction;
        case Fault::kInvalidConfiguration:
            return cudaErrorInvalidConfiguration;
        case Fault::kIllegalAddress:
            return cudaErrorIllegalAddress;
        case Fault::kMisalignedAddress:
            return cudaErrorMisalignedAddress;
        case Fault::kIllegalInstruction:
            return cudaErrorIllegalInstruction;
        case Fault::kDeadlock:
            return cudaErrorLaunchTimeout;
        case Fault::kHazard:
            return cudaErrorLaunchFailure;
        case Fault::kTrap:
            return cudaErrorAssert;
        case Fault::kInvalidArgument:
            return cudaErrorInvalidValue;
        case Fault::kOutOfMemory:
            return cudaErrorMemoryAllocation;
        case Fault::kUnsupported:
            return cudaErrorNotSupported;
    }
    return cudaErrorUnknown;
}

cudaError_t set_last_error(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

cudaError_t fail(const EmulationError& error) {
    report_code = error_code(error.fault());
    report_text = error.what();
    const char* quiet = std::getenv("FLASH_EXT_EMULATOR_QUIET");
    if (!quiet || !*quiet) std::fprintf(stderr, "PTX emulator: %s\n", report_text.c_str());
    return set_last_error(report_code);
}

std::string last_report(cudaError_t code) {
    return code == report_code ? report_text : std::string();
}

}  // namespace ptx_emulator

using namespace ptx_emulator;

extern "C" {

cudaError_t cudaGetLastError() {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError() {
    return last_error;
}

const char* cudaGetErrorName(cudaError_t error) {
    for (const ErrorText& known : kErrors) {
        if (known.code == error) return known.name;
    }
    return "cudaErrorUnknown";
}

// With the report of the thread's latest failure when that had this code.
const char* cudaGetErrorString(cudaError_t error) {
    const char* text = "unknown error";
    for (const ErrorText& known : kErrors) {
        if (known.code == error) text = known.text;
    }
    const std::string report = error == cudaSuccess ? "" : last_report(error);
    if (report.empty()) return text;
    string_buffer = std::string(text) + "; PTX emulator: " + report;
    return string_buffer.c_str();
}
}
