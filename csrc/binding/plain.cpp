// What is plain: q, k, v (and cu_seqlens) are exactly torch.Tensor or Parameter, strided and with memory, agree in
// every way that flash_ext/checks.py asks for, and are not empty; no option but the common ones; and the path is known
// from an earlier call. Everything else is left to Python, whose checks know the words for it.
#include "binding/plain.h"

#include <math.h>

#include <string>
#include <utility>
#include <vector>

#include "api/gpus.h"
#include "binding/attention.h"
#include "binding/tensor.h"

namespace py = pybind11;

namespace flash_ext {
namespace {

constexpr int64_t kMaxHeadDim = 256;
// As SMALLEST_MAGNITUDE and LARGEST_MAGNITUDE in flash_ext/checks.py.
constexpr double kSmallestMagnitude = 1.2e-38, kLargestMagnitude = 1e38;

// A kind of call and the path that serves it. Kinds are few: a list, searched from the front. Guarded by the GIL.
struct Route {
    ElementType type;
    int32_t device, head_dim, head_dim_v;
    uint32_t features;
    std::string_view path;  // of kPaths

    bool is_for(const Route& other) const {
        return head_dim == other.head_dim && features == other.features && type == other.type &&
               device == other.device && head_dim_v == other.head_dim_v;
    }
};

std::vector<Route>& routes() {
    static auto* list = new std::vector<Route>();  // never destroyed: the interpreter may be gone by then
    return *list;
}

py::object& output_allocator() {
    static auto* callable = new py::object();  // never destroyed, as above
    return *callable;
}

// Exactly torch.Tensor or torch.nn.Parameter, with an exchange API. What a subclass makes of a call is not known here.
bool is_plain_tensor(py::handle object) {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<std::pair<PyTypeObject*, PyTypeObject*>> storage;
    const auto& [tensor, parameter] =
        storage
            .call_once_and_store_result([] {
                const py::module_ torch = py::module_::import("torch");
                const auto type = [](py::object object) {
                    return reinterpret_cast<PyTypeObject*>(object.release().ptr());
                };
                return std::pair(type(torch.attr("Tensor")), type(torch.attr("nn").attr("Parameter")));
            })
            .get_stored();
    PyTypeObject* const type = Py_TYPE(object.ptr());
    return (type == tensor || type == parameter) && reads_through_dlpack(object);
}

bool read_bool(py::handle value, bool* result) {
    *result = value.ptr() == Py_True;
    return *result || value.ptr() == Py_False;
}

// An int (no bool, no NumPy integer) from `lowest` up; what does not fit 32 bits means INT32_MAX.
bool read_int(py::handle value, int64_t lowest, int64_t* result) {
    if (!PyLong_CheckExact(value.ptr())) return false;
    int overflow = 0;
    *result = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    if (overflow > 0 || *result > INT32_MAX) *result = INT32_MAX;
    return overflow >= 0 && *result >= lowest;
}

// A float that flash_ext/checks.py accepts as softmax_scale, by the same bounds: 0, or what fp32 holds with room for
// the factors of the kernels. NaN is outside.
bool read_fp32(py::handle value, double* result) {
    if (!PyFloat_CheckExact(value.ptr())) return false;
    *result = PyFloat_AS_DOUBLE(value.ptr());
    const double magnitude = fabs(*result);
    return magnitude == 0 || (magnitude >= kSmallestMagnitude && magnitude <= kLargestMagnitude);
}

// False for an option, or a value of it, that is not plain.
bool read_option(std::string_view name, py::handle value, Options* options) {
    int64_t integer = 0;
    double real = 0;
    if (name == "causal") return read_bool(value, &options->causal);
    if (name == "window_left") return read_int(value, -1, &options->window_left);
    if (name == "window_right") return read_int(value, -1, &options->window_right);
    if (name == "deterministic") return read_bool(value, &options->deterministic);
    if (name == "dropout_p" || name == "softcap") return read_fp32(value, &real) && real == 0;
    if (name == "num_splits" || name == "sm_margin") return read_int(value, 0, &integer) && integer == 0;
    if (value.is_none()) return true;
    if (name == "softmax_scale") {
        options->softmax_scale = 0;
        return read_fp32(value, &*options->softmax_scale);
    }
    if (name == "max_seqlen_q" || name == "max_seqlen_k") return read_int(value, 0, &integer);  // hints
    if (name == "cu_seqlens_q") options->cu_seqlens_q = value;
    if (name == "cu_seqlens_k") options->cu_seqlens_k = value;
    return name == "cu_seqlens_q" || name == "cu_seqlens_k";
}

bool read_options(py::dict dict, Options* options) {
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict.ptr(), &position, &key, &value)) {
        Py_ssize_t length = 0;
        const char* const name = PyUnicode_AsUTF8AndSize(key, &length);
        if (name == nullptr) throw py::error_already_set();
        if (!read_option({name, static_cast<size_t>(length)}, value, options)) return false;
    }
    return true;
}

bool are_plain_operands(const Tensor& q, const Tensor& k, const Tensor& v, int rank) {
    if (q.ndim != rank || k.ndim != rank || v.ndim != rank) return false;
    if ((q.type != ElementType::kFloat16 && q.type != ElementType::kBFloat16) || k.type != q.type || v.type != q.type) {
        return false;
    }
    if (q.device.type == Device::kOther || k.device != q.device || v.device != q.device) return false;
    for (int i = 0; i < rank; ++i) {
        if (q.shape[i] < 1 || k.shape[i] < 1 || q.shape[i] > INT32_MAX || k.shape[i] > INT32_MAX) return false;
        if (i < rank - 1 && v.shape[i] != k.shape[i]) return false;
    }
    if (rank == 4 && k.shape[0] != q.shape[0]) return false;
    const int64_t head_dim = q.shape[rank - 1], head_dim_v = v.shape[rank - 1];
    if (k.shape[rank - 1] != head_dim || q.shape[rank - 2] % k.shape[rank - 2] != 0) return false;
    return head_dim % 8 == 0 && head_dim <= kMaxHeadDim && head_dim_v % 8 == 0 && head_dim_v >= 8 &&
           head_dim_v <= kMaxHeadDim;
}

bool are_plain_cu_seqlens(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, const Tensor& q) {
    const auto is_plain = [&](const Tensor& tensor) {
        return tensor.type == ElementType::kInt32 && tensor.ndim == 1 && tensor.device == q.device &&
               tensor.is_contiguous();
    };
    return is_plain(cu_seqlens_q) && is_plain(cu_seqlens_k) && cu_seqlens_q.shape[0] > 1 &&
           cu_seqlens_k.shape[0] == cu_seqlens_q.shape[0];
}

// Reads q and head_dim_v, if the tensors are plain.
bool read_operands(py::handle q_object, py::handle k_object, py::handle v_object, const Options& options, Tensor* q,
                   int64_t* head_dim_v) {
    if (!is_plain_tensor(q_object) || !is_plain_tensor(k_object) || !is_plain_tensor(v_object)) return false;
    const bool packed = !options.cu_seqlens_q.is_none();
    if (options.cu_seqlens_k.is_none() == packed) return false;
    try {
        *q = read_tensor(q_object, "q");
        const Tensor v = read_tensor(v_object, "v");
        if (!are_plain_operands(*q, read_tensor(k_object, "k"), v, packed ? 3 : 4)) return false;
        *head_dim_v = v.shape[v.ndim - 1];
        if (!packed) return true;
        return is_plain_tensor(options.cu_seqlens_q) && is_plain_tensor(options.cu_seqlens_k) &&
               are_plain_cu_seqlens(read_tensor(options.cu_seqlens_q, "cu_seqlens_q"),
                                    read_tensor(options.cu_seqlens_k, "cu_seqlens_k"), *q);
    } catch (const py::error_already_set&) {  // sparse, nested, functional, ...
        return false;
    }
}

ElementType element_type(DataType dtype) {
    if (dtype == DataType::kFloat16) return ElementType::kFloat16;
    return dtype == DataType::kBFloat16 ? ElementType::kBFloat16 : ElementType::kOther;
}

}  // namespace

py::object plain_forward(py::handle q_object, py::handle k_object, py::handle v_object, py::dict options_dict,
                         bool deterministic) {
    const py::handle none = Py_None;
    Options options = {none, none, none, none, none, none, none, {}, false, -1, -1, 0, 0, 0, 0, false};
    if (!read_options(options_dict, &options)) return py::none();
    options.deterministic |= deterministic;
    Tensor q;
    int64_t head_dim_v = 0;
    if (!read_operands(q_object, k_object, v_object, options, &q, &head_dim_v)) return py::none();

    Route wanted = {q.type,
                    q.device.type == Device::kCuda ? q.device.index : -1,
                    static_cast<int32_t>(q.shape[q.ndim - 1]),
                    static_cast<int32_t>(head_dim_v),
                    features_of(options),
                    {}};
    for (const Route& route : routes()) {
        if (!route.is_for(wanted)) continue;
        wanted.path = route.path;
        break;
    }
    if (wanted.path.empty()) return py::none();

    // The callable may let other threads run: nothing of `routes()` is held across it.
    const py::object outputs = q.ndim == 3
                                   ? output_allocator()(q_object, head_dim_v, q.shape[1], q.shape[0])
                                   : output_allocator()(q_object, head_dim_v, q.shape[0], q.shape[2], q.shape[1]);
    if (!PyTuple_CheckExact(outputs.ptr()) || PyTuple_GET_SIZE(outputs.ptr()) != 2) {
        raise_runtime_error("the allocator of outputs did not return (out, lse)");
    }
    forward(wanted.path, q_object, k_object, v_object, PyTuple_GET_ITEM(outputs.ptr(), 0),
            PyTuple_GET_ITEM(outputs.ptr(), 1), options);
    return outputs;
}

void set_plain_path(std::string_view path, DataType dtype, int32_t device, int32_t head_dim, int32_t head_dim_v,
                    uint32_t features) {
    Route added = {element_type(dtype), device, head_dim, head_dim_v, features, {}};
    for (const std::string_view known : kPaths) {
        if (known == path) added.path = known;
    }
    if (added.path.empty()) raise_value_error("path='" + std::string(path) + "' has no kernels");
    for (const Route& route : routes()) {
        if (route.is_for(added)) return;  // always the same answer
    }
    routes().push_back(added);
}

void set_output_allocator(py::object callable) {
    output_allocator() = std::move(callable);
}

}  // namespace flash_ext
