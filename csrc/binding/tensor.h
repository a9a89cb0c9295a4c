// Python tensors as the binding sees them: pointer, shape, strides, type and device, without a torch header.
#pragma once

#include <pybind11/pybind11.h>
#include <stdint.h>

#include <string>

namespace flash_ext {

constexpr int kMaxDims = 4;

enum class ElementType : int32_t { kFloat16, kBFloat16, kFloat32, kFloat8E4M3, kInt32, kInt64, kUInt8, kOther };

int64_t element_size(ElementType type);
const char* element_type_name(ElementType type);

struct Device {
    enum Type : int32_t { kCpu, kCuda, kOther } type = kOther;
    int32_t index = 0;  // CUDA ordinal; 0 for the CPU

    bool operator==(const Device& other) const { return type == other.type && index == other.index; }
    bool operator!=(const Device& other) const { return !(*this == other); }
};

std::string device_name(Device device);

// One tensor argument; object is borrowed from the caller. Strides count elements.
struct Tensor {
    pybind11::handle object;
    const char* name = "";  // of the argument, for messages
    void* data = nullptr;
    int32_t ndim = 0;
    ElementType type = ElementType::kOther;
    Device device;
    int64_t shape[kMaxDims] = {};
    int64_t stride[kMaxDims] = {};

    int64_t count() const;
    bool is_contiguous() const;
    // "k of shape (2, 128, 4, 64)"
    std::string describe() const;
};

// Reads a tensor through the DLPack exchange API of its type, or through its attributes where the type has none or
// FLASH_EXT_NO_DLPACK=1. Raises what reading raises, ValueError for more than kMaxDims dimensions, and RuntimeError for
// a tensor that has elements but no memory (a FakeTensor).
Tensor read_tensor(pybind11::handle object, const char* name);

// True if tensors of this type are read through the DLPack exchange API.
bool reads_through_dlpack(pybind11::handle object);

// The current stream (cudaStream_t) of torch on the device of this tensor; nullptr for a CPU tensor.
void* current_stream(const Tensor& tensor);

// Why a kernel cannot read or write the operand where it lies, "" if it can: the last dimension must be contiguous, the
// address a multiple of 16 bytes, every other stride a multiple of 16 bytes (0 included). The stride of a dimension of
// extent 1 does not matter.
std::string packing_reason(const Tensor& tensor);

// The same question without the text, for the hot path.
bool is_launchable(const Tensor& tensor);

// A contiguous copy of the tensor in fresh memory, on the current stream, outside autograd.
pybind11::object packed_copy(const Tensor& tensor);

[[noreturn]] void raise_value_error(const std::string& message);
[[noreturn]] void raise_not_implemented(const std::string& message);
[[noreturn]] void raise_runtime_error(const std::string& message);

}  // namespace flash_ext
