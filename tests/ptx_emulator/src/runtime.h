// The stand-in for the CUDA runtime: the functions that nvcc's objects and the project's host code call, on the
// emulator instead of a GPU. Streams are synchronous; device memory is host memory.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <new>
#include <string>

#include "device_model.h"
#include "errors.h"
#include "machine.h"

namespace ptx_emulator {

// Runs f; an EmulationError becomes the thread's last error, and its text the report (also written to stderr).
template <class F>
cudaError_t guarded(F f);

cudaError_t fail(const EmulationError& error);
cudaError_t set_last_error(cudaError_t error);
cudaError_t error_code(Fault fault);
// The text of the latest failed launch, empty if its error has a different code.
std::string last_report(cudaError_t code);

// One launch from start to end. Host faults inside it (a wild global pointer) become kIllegalAddress.
void launch(const void* host_function, Dim3 grid, Dim3 block, Dim3 cluster, size_t dynamic_shared, void** arguments,
            bool programmatic);

// One launch at a time; it also guards the kernel library and what is noted of launches.
std::mutex& launch_mutex();
// For runtime_inspection.cpp: a kernel starts (no statistics yet), or has ended.
void note_launch(const std::string& kernel, const LaunchStatistics* statistics);
// A launch with counts has ended; CTAs in a line of its own before those of its instructions.
void note_counts(const std::string& kernel, const LaunchStatistics& statistics, const ExecutionCounts& counts);

// The mangled device name of a __global__ function, nullptr if it was never registered.
const char* kernel_name(const void* host_function);
// cudaFuncAttributeMaxDynamicSharedMemorySize as set for a kernel, in bytes.
int dynamic_shared_limit(const void* host_function);
DeviceModel current_device_model();

template <class F>
cudaError_t guarded(F f) {
    try {
        f();
        return cudaSuccess;
    } catch (const EmulationError& error) {
        return fail(error);
    } catch (const std::bad_alloc&) {
        return fail(EmulationError(Fault::kOutOfMemory, "the emulator itself ran out of the host's memory"));
    } catch (const std::exception& error) {
        return fail(EmulationError(Fault::kUnsupported, error.what()));
    }
}

}  // namespace ptx_emulator
