// A CUDA runtime of two make-believe GPUs. FAKE_CC=9.0 sets their compute capability, FAKE_DEVICES=0 takes them away.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_runtime_api.h"

namespace {

int device_count() {
    const char* text = getenv("FAKE_DEVICES");
    return text == nullptr ? 2 : atoi(text);
}

thread_local int current_device = 0;

}  // namespace

cudaError_t cudaGetDeviceCount(int* count) {
    *count = device_count();
    return *count == 0 ? cudaErrorNoDevice : cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    if (device_count() == 0) return cudaErrorNoDevice;
    if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
    int major = 0, minor = 0;
    const char* text = getenv("FAKE_CC");
    sscanf(text == nullptr ? FAKE_DEFAULT_CC : text, "%d.%d", &major, &minor);
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor:
            *value = major;
            break;
        case cudaDevAttrComputeCapabilityMinor:
            *value = minor;
            break;
        case cudaDevAttrMultiProcessorCount:
            *value = 132;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = 232448;
            break;
    }
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    snprintf(properties->name, sizeof(properties->name), "Fake GPU %d", device);
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetLastError() {
    return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaErrorNoDevice:
            return "cudaErrorNoDevice";
        case cudaErrorInvalidDevice:
            return "cudaErrorInvalidDevice";
        case cudaErrorIllegalAddress:
            return "cudaErrorIllegalAddress";
        default:
            return "cudaErrorUnknown";
    }
}

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaErrorNoDevice:
            return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice:
            return "invalid device ordinal";
        case cudaErrorIllegalAddress:
            return "an illegal memory access was encountered";
        default:
            return "unknown error";
    }
}
