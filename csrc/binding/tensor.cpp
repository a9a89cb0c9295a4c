#include "binding/tensor.h"

#include <vector>

#include "binding/dlpack.h"
#include "binding/environment.h"

namespace py = pybind11;

namespace flash_ext {
namespace {

constexpr int64_t kAlignment = 16;  // bytes: one cp.async, one row of a tensor map

[[noreturn]] void raise(PyObject* type, const std::string& message) {
    PyErr_SetString(type, ("flash_ext: " + message).c_str());
    throw py::error_already_set();
}

// The exchange API of a tensor type, nullptr if it has none that can be used. Types are few and live long: a list,
// searched from the front, each with a reference so that its address is not used again. Guarded by the GIL.
const dlpack::DLPackExchangeAPI* exchange_api(PyTypeObject* type) {
    struct Entry {
        PyTypeObject* type;
        const dlpack::DLPackExchangeAPI* api;
    };
    static auto* cache = new std::vector<Entry>();  // never destroyed: the interpreter may be gone by then
    for (const Entry& entry : *cache) {
        if (entry.type == type) return entry.api;
    }
    const dlpack::DLPackExchangeAPI* api = nullptr;
    if (environment().use_dlpack) {
        const py::object capsule = py::getattr(reinterpret_cast<PyObject*>(type), dlpack::kTypeAttribute, py::none());
        if (PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsuleName)) {
            api = static_cast<const dlpack::DLPackExchangeAPI*>(
                PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
            if (api->header.version.major != dlpack::kMajorVersion || api->dltensor_from_py_object_no_sync == nullptr) {
                api = nullptr;
            }
        }
    }
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    cache->push_back({type, api});
    return api;
}

ElementType element_type(dlpack::DLDataType dtype) {
    if (dtype.lanes != 1) return ElementType::kOther;
    switch (dtype.code << 8 | dtype.bits) {
        case dlpack::kDLFloat << 8 | 16:
            return ElementType::kFloat16;
        case dlpack::kDLBfloat << 8 | 16:
            return ElementType::kBFloat16;
        case dlpack::kDLFloat << 8 | 32:
            return ElementType::kFloat32;
        case dlpack::kDLFloat8_e4m3fn << 8 | 8:
            return ElementType::kFloat8E4M3;
        case dlpack::kDLInt << 8 | 32:
            return ElementType::kInt32;
        case dlpack::kDLInt << 8 | 64:
            return ElementType::kInt64;
        case dlpack::kDLUInt << 8 | 8:
            return ElementType::kUInt8;
        default:
            return ElementType::kOther;
    }
}

void read_through_dlpack(const dlpack::DLPackExchangeAPI& api, Tensor* tensor) {
    dlpack::DLTensor source;
    if (api.dltensor_from_py_object_no_sync(tensor->object.ptr(), &source) != 0) throw py::error_already_set();
    tensor->data = source.data == nullptr ? nullptr : static_cast<char*>(source.data) + source.byte_offset;
    tensor->ndim = source.ndim;
    tensor->type = element_type(source.dtype);
    switch (source.device.device_type) {
        case dlpack::kDLCPU:
            tensor->device = {Device::kCpu, 0};
            break;
        case dlpack::kDLCUDA:
            tensor->device = {Device::kCuda, source.device.device_id};
            break;
        default:
            tensor->device = {Device::kOther, 0};
    }
    if (source.ndim > kMaxDims) return;
    int64_t compact = 1;
    for (int i = source.ndim - 1; i >= 0; --i) {
        tensor->shape[i] = source.shape[i];
        tensor->stride[i] = source.strides == nullptr ? compact : source.strides[i];
        compact *= source.shape[i];
    }
}

// torch's dtypes are singletons: compared by address.
ElementType element_type(py::handle dtype) {
    struct Entry {
        PyObject* dtype;
        ElementType type;
    };
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<std::vector<Entry>> storage;
    const std::vector<Entry>& entries =
        storage
            .call_once_and_store_result([] {
                const py::module_ torch = py::module_::import("torch");
                std::vector<Entry> result;
                const auto add = [&](const char* name, ElementType type) {
                    if (!py::hasattr(torch, name)) return;  // fp8 is younger
                    result.push_back({torch.attr(name).cast<py::object>().release().ptr(), type});
                };
                add("float16", ElementType::kFloat16);
                add("bfloat16", ElementType::kBFloat16);
                add("float32", ElementType::kFloat32);
                add("float8_e4m3fn", ElementType::kFloat8E4M3);
                add("int32", ElementType::kInt32);
                add("int64", ElementType::kInt64);
                add("uint8", ElementType::kUInt8);
                return result;
            })
            .get_stored();
    for (const Entry& entry : entries) {
        if (entry.dtype == dtype.ptr()) return entry.type;
    }
    return ElementType::kOther;
}

void read_through_attributes(Tensor* tensor) {
    const py::handle object = tensor->object;
    const py::tuple shape = object.attr("shape");
    const py::tuple stride = object.attr("stride")();
    tensor->data = reinterpret_cast<void*>(object.attr("data_ptr")().cast<uintptr_t>());
    tensor->ndim = static_cast<int32_t>(shape.size());
    tensor->type = element_type(object.attr("dtype"));
    if (object.attr("is_cuda").cast<bool>()) {
        tensor->device = {Device::kCuda, object.attr("get_device")().cast<int32_t>()};
    } else if (object.attr("is_cpu").cast<bool>()) {
        tensor->device = {Device::kCpu, 0};
    }
    if (tensor->ndim > kMaxDims) return;
    for (int i = 0; i < tensor->ndim; ++i) {
        tensor->shape[i] = shape[static_cast<size_t>(i)].cast<int64_t>();
        tensor->stride[i] = stride[static_cast<size_t>(i)].cast<int64_t>();
    }
}

bool is_aligned(int64_t bytes) {
    return bytes % kAlignment == 0;
}

}  // namespace

void raise_value_error(const std::string& message) {
    raise(PyExc_ValueError, message);
}
void raise_not_implemented(const std::string& message) {
    raise(PyExc_NotImplementedError, message);
}
void raise_runtime_error(const std::string& message) {
    raise(PyExc_RuntimeError, message);
}

int64_t element_size(ElementType type) {
    switch (type) {
        case ElementType::kFloat16:
        case ElementType::kBFloat16:
            return 2;
        case ElementType::kFloat32:
        case ElementType::kInt32:
            return 4;
        case ElementType::kInt64:
            return 8;
        case ElementType::kFloat8E4M3:
        case ElementType::kUInt8:
            return 1;
        case ElementType::kOther:
            break;
    }
    return 0;
}

const char* element_type_name(ElementType type) {
    switch (type) {
        case ElementType::kFloat16:
            return "float16";
        case ElementType::kBFloat16:
            return "bfloat16";
        case ElementType::kFloat32:
            return "float32";
        case ElementType::kFloat8E4M3:
            return "float8_e4m3fn";
        case ElementType::kInt32:
            return "int32";
        case ElementType::kInt64:
            return "int64";
        case ElementType::kUInt8:
            return "uint8";
        case ElementType::kOther:
            break;
    }
    return "another type";
}

std::string device_name(Device device) {
    switch (device.type) {
        case Device::kCpu:
            return "cpu";
        case Device::kCuda:
            return "cuda:" + std::to_string(device.index);
        case Device::kOther:
            break;
    }
    return "another kind of device";
}

int64_t Tensor::count() const {
    int64_t result = 1;
    for (int i = 0; i < ndim; ++i) result *= shape[i];
    return result;
}

bool Tensor::is_contiguous() const {
    int64_t expected = 1;
    for (int i = ndim - 1; i >= 0; --i) {
        if (shape[i] != 1 && stride[i] != expected) return count() == 0;
        expected *= shape[i];
    }
    return true;
}

std::string Tensor::describe() const {
    std::string text = std::string(name) + " of shape (";
    for (int i = 0; i < ndim; ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
    return text + (ndim == 1 ? ",)" : ")");
}

bool reads_through_dlpack(py::handle object) {
    return exchange_api(Py_TYPE(object.ptr())) != nullptr;
}

Tensor read_tensor(py::handle object, const char* name) {
    Tensor tensor;
    tensor.object = object;
    tensor.name = name;
    if (const dlpack::DLPackExchangeAPI* api = exchange_api(Py_TYPE(object.ptr())); api != nullptr) {
        read_through_dlpack(*api, &tensor);
    } else {
        read_through_attributes(&tensor);
    }
    if (tensor.ndim > kMaxDims) {
        raise_value_error(std::string(name) + " has " + std::to_string(tensor.ndim) + " dimensions; at most " +
                          std::to_string(kMaxDims) + " are allowed");
    }
    if (tensor.data == nullptr && tensor.count() != 0) {
        raise_runtime_error(tensor.describe() +
                            " has no memory (a fake or functional tensor?); call torch.ops.flash_ext");
    }
    return tensor;
}

void* current_stream(const Tensor& tensor) {
    if (tensor.device.type != Device::kCuda) return nullptr;
    if (const dlpack::DLPackExchangeAPI* api = exchange_api(Py_TYPE(tensor.object.ptr())); api != nullptr) {
        void* stream = nullptr;
        if (api->current_work_stream(dlpack::kDLCUDA, tensor.device.index, &stream) != 0) {
            throw py::error_already_set();
        }
        return stream;
    }
    const py::object stream = py::module_::import("torch").attr("cuda").attr("current_stream")(tensor.device.index);
    return reinterpret_cast<void*>(stream.attr("cuda_stream").cast<uintptr_t>());
}

bool is_launchable(const Tensor& tensor) {
    const int64_t size = element_size(tensor.type);
    const int last = tensor.ndim - 1;
    if (!is_aligned(static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.data)))) return false;
    if (tensor.shape[last] != 1 && tensor.stride[last] != 1) return false;
    for (int i = 0; i < last; ++i) {
        if (tensor.shape[i] > 1 && !is_aligned(tensor.stride[i] * size)) return false;
    }
    return true;
}

std::string packing_reason(const Tensor& tensor) {
    if (tensor.ndim == 0 || is_launchable(tensor)) return "";
    const int last = tensor.ndim - 1;
    if (tensor.shape[last] != 1 && tensor.stride[last] != 1) {
        return "its last dimension is not contiguous (stride " + std::to_string(tensor.stride[last]) + ")";
    }
    for (int i = 0; i < last; ++i) {
        const int64_t bytes = tensor.stride[i] * element_size(tensor.type);
        if (tensor.shape[i] > 1 && !is_aligned(bytes)) {
            return "the stride of dimension " + std::to_string(i) + ", " + std::to_string(bytes) +
                   " bytes, is not a multiple of 16";
        }
    }
    return "its address is not a multiple of 16 bytes";
}

py::object packed_copy(const Tensor& tensor) {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> storage;
    const py::object& contiguous =
        storage
            .call_once_and_store_result(
                [] { return py::module_::import("torch").attr("contiguous_format").cast<py::object>(); })
            .get_stored();
    return tensor.object.attr("detach")().attr("clone")(py::arg("memory_format") = contiguous);
}

}  // namespace flash_ext
