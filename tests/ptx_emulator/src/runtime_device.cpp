// Devices, streams, events and memory of the stand-in.
#include <cstdlib>
#include <cstring>

#include "runtime.h"

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
    *pointer = std::aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
    return set_last_error(*pointer ? cudaSuccess : cudaErrorMemoryAllocation);
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
// Plausible numbers: nothing here is limited by device memory.
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    *free_bytes = *total_bytes = size_t{8} << 30;
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    std::memmove(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    std::memset(to, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
    return cudaMemset(to, value, bytes);
}
cudaError_t cudaMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height, cudaStream_t) {
    for (size_t row = 0; row < height; ++row) std::memset(static_cast<char*>(to) + row * pitch, value, width);
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    *attributes = cudaPointerAttributes{};
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = attributes->hostPointer = const_cast<void*>(pointer);
    return cudaSuccess;
}
}
