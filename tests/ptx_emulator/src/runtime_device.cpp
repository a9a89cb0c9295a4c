// Devices, streams, events and memory of the stand-in.
#include <cstdlib>
#include <cstring>

#include "host_faults.h"
#include "runtime.h"

namespace ptx_emulator {

namespace {

constexpr size_t kDeviceMemory = size_t{8} << 30;

// Runs f, which follows the caller's pointers.
cudaError_t touch_memory(const char* what, size_t bytes, const std::function<void()>& f) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(launch_mutex());
        void* address = nullptr;
        if (survives_faults(f, &address)) return;
        raise(Fault::kInvalidArgument, "%s of %zu bytes touches %p, where no memory is", what, bytes, address);
    });
}

}  // namespace

}  // namespace ptx_emulator

using namespace ptx_emulator;

extern "C" {

// ---- devices: there is one
cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    return set_last_error(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    if (device != 0) return set_last_error(cudaErrorInvalidDevice);
    return guarded([&] {
        const DeviceModel model = current_device_model();
        switch (attribute) {
            case cudaDevAttrComputeCapabilityMajor:
                *value = model.major;
                break;
            case cudaDevAttrComputeCapabilityMinor:
                *value = model.minor;
                break;
            case cudaDevAttrMultiProcessorCount:
                *value = static_cast<int>(model.sm_count);
                break;
            case cudaDevAttrMaxSharedMemoryPerBlockOptin:
                *value = static_cast<int>(model.shared_per_cta);
                break;
            case cudaDevAttrMaxSharedMemoryPerBlock:
                *value = 48 * 1024;
                break;
            case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
                *value = static_cast<int>(model.shared_per_sm);
                break;
            case cudaDevAttrReservedSharedMemoryPerBlock:
                *value = static_cast<int>(model.shared_reserved);
                break;
            case cudaDevAttrMaxThreadsPerBlock:
                *value = 1024;
                break;
            case cudaDevAttrMaxThreadsPerMultiProcessor:
                *value = static_cast<int>(model.threads_per_sm);
                break;
            case cudaDevAttrMaxBlocksPerMultiprocessor:
                *value = static_cast<int>(model.ctas_per_sm);
                break;
            case cudaDevAttrWarpSize:
                *value = 32;
                break;
            case cudaDevAttrClusterLaunch:
                *value = model.major >= 9;
                break;
            default:
                raise(Fault::kUnsupported, "device attribute %d", static_cast<int>(attribute));
        }
    });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (device != 0) return set_last_error(cudaErrorInvalidDevice);
    return guarded([&] {
        const DeviceModel model = current_device_model();
        *properties = cudaDeviceProp{};
        std::strncpy(properties->name, model.name.c_str(), sizeof properties->name - 1);
        properties->major = model.major;
        properties->minor = model.minor;
        properties->multiProcessorCount = static_cast<int>(model.sm_count);
        properties->sharedMemPerBlock = 48 * 1024;
        properties->sharedMemPerBlockOptin = model.shared_per_cta;
        properties->sharedMemPerMultiprocessor = model.shared_per_sm;
        properties->reservedSharedMemPerBlock = model.shared_reserved;
        properties->maxThreadsPerBlock = 1024;
        properties->maxThreadsPerMultiProcessor = static_cast<int>(model.threads_per_sm);
        properties->maxBlocksPerMultiProcessor = static_cast<int>(model.ctas_per_sm);
        properties->warpSize = 32;
    });
}

cudaError_t cudaDeviceSynchronize() {
    return cudaSuccess;
}
// Larger than any the headers ask for: code that works around old drivers must not do so here.
cudaError_t cudaDriverGetVersion(int* version) {
    *version = 20000;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

// ---- streams and events: everything has happened when a call returns
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    *stream = nullptr;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    return cudaStreamCreate(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) {
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
    *event = nullptr;
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    return cudaEventCreate(event);
}
cudaError_t cudaEventDestroy(cudaEvent_t) {
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) {
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
    *milliseconds = 0.0f;
    return cudaSuccess;
}

// ---- memory
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    *pointer = nullptr;
    return guarded([&] {
        if (bytes <= kDeviceMemory) *pointer = std::aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
        if (!*pointer) {
            raise(Fault::kOutOfMemory, "cudaMalloc of %zu bytes, the device has %zu", bytes, kDeviceMemory);
        }
    });
}
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
    return cudaMalloc(pointer, bytes);
}
cudaError_t cudaFree(void* pointer) {
    std::free(pointer);
    return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) {
    return cudaFree(pointer);
}
// A plausible number: it limits a single allocation, their sum is limited by the host alone.
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    *free_bytes = *total_bytes = kDeviceMemory;
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    return touch_memory("cudaMemcpy", bytes, [&] { std::memmove(to, from, bytes); });
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    return touch_memory("cudaMemset", bytes, [&] { std::memset(to, value, bytes); });
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
    return cudaMemset(to, value, bytes);
}
cudaError_t cudaMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height, cudaStream_t) {
    return touch_memory("cudaMemset2D", width * height, [&] {
        for (size_t row = 0; row < height; ++row) std::memset(static_cast<char*>(to) + row * pitch, value, width);
    });
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    *attributes = cudaPointerAttributes{};
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = attributes->hostPointer = const_cast<void*>(pointer);
    return cudaSuccess;
}
}
