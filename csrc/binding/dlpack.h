// The part of DLPack 1.3 that the binding reads: its C exchange API, which a tensor type offers as a capsule named
// "dlpack_exchange_api" in the attribute __dlpack_c_exchange_api__. Names and layout are those of the specification
// (https://dmlc.github.io/dlpack/latest/c_api.html); function pointers never called here have no parameters.
#pragma once

#include <stdint.h>

namespace flash_ext::dlpack {

constexpr uint32_t kMajorVersion = 1;  // a struct of another major version may have another layout
constexpr const char* kCapsuleName = "dlpack_exchange_api";
constexpr const char* kTypeAttribute = "__dlpack_c_exchange_api__";

enum DLDeviceType : int32_t { kDLCPU = 1, kDLCUDA = 2 };

struct DLDevice {
    DLDeviceType device_type;
    int32_t device_id;
};

enum DLDataTypeCode : uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLFloat8_e4m3fn = 10 };

struct DLDataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct DLTensor {
    void* data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t* shape;
    int64_t* strides;  // in elements; may be nullptr for a compact row-major tensor
    uint64_t byte_offset;
};

struct DLPackVersion {
    uint32_t major;
    uint32_t minor;
};

struct DLPackExchangeAPIHeader {
    DLPackVersion version;
    DLPackExchangeAPIHeader* prev_api;
};

struct DLPackExchangeAPI {
    DLPackExchangeAPIHeader header;
    void (*managed_tensor_allocator)();
    void (*managed_tensor_from_py_object_no_sync)();
    void (*managed_tensor_to_py_object_no_sync)();
    // Shape and strides of `out` belong to the tensor. May be nullptr. 0, or -1 with a Python exception set.
    int (*dltensor_from_py_object_no_sync)(void* py_object, DLTensor* out);
    // The producer's current stream on that device. 0, or -1 with a Python exception set.
    int (*current_work_stream)(DLDeviceType device_type, int32_t device_id, void** out_current_stream);
};

}  // namespace flash_ext::dlpack
