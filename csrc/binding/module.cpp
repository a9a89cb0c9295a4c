// flash_ext._C: what Python sees of the kernels. flash_ext/_C.pyi has the types.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "api/abi.h"
#include "api/gpus.h"
#include "api/names.h"
#include "binding/attention.h"
#include "binding/build_info.h"
#include "binding/environment.h"
#include "binding/library.h"
#include "binding/plain.h"
#include "binding/tensor.h"

namespace py = pybind11;

namespace flash_ext {
namespace {

py::dict kernel_dict(const KernelInfo& kernel) {
    py::list features;
    for (const FeatureName& entry : kFeatureNames) {
        if ((kernel.features & entry.feature) != 0) features.append(entry.name);
    }
    py::dict result;
    result["name"] = kernel.name;
    result["path"] = kernel.path;
    result["direction"] = direction_name(kernel.direction);
    result["dtype"] = data_type_name(kernel.dtype);
    result["head_dim"] = kernel.head_dim;
    result["head_dim_v"] = kernel.head_dim_v;
    result["block_m"] = kernel.block_m;
    result["block_n"] = kernel.block_n;
    result["stages"] = kernel.stages;
    result["warps"] = kernel.warps;
    result["shared_memory"] = kernel.shared_memory;
    result["features"] = features;
    return result;
}

Direction direction_from(std::string_view name) {
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
        if (name == direction_name(direction)) return direction;
    }
    raise_value_error("direction='" + std::string(name) + "'; allowed are forward and backward");
}

DataType data_type_from(std::string_view name) {
    for (const DataTypeName& entry : kDataTypeNames) {
        if (name == entry.name) return entry.dtype;
    }
    raise_value_error("dtype='" + std::string(name) + "'; allowed are fp16, bf16, fp32 and fp8");
}

py::object choose(std::string_view path, std::string_view direction, std::string_view dtype, int32_t head_dim,
                  int32_t head_dim_v, uint32_t features, int32_t device) {
    Library& library = Library::get(path);
    const KernelQuery query = {
        direction_from(direction), data_type_from(dtype), head_dim, head_dim_v, features, device};
    std::string reason;
    const int32_t kernel = library.choose(query, &reason);
    if (kernel < 0) return py::str(reason);
    return kernel_dict(library.kernel(kernel));
}

py::list kernels(std::string_view path) {
    const Library& library = Library::get(path);
    py::list result;
    for (int32_t i = 0; i < library.kernel_count(); ++i) result.append(kernel_dict(library.kernel(i)));
    return result;
}

py::dict device_info(std::string_view path, int32_t device) {
    const DeviceInfo& info = Library::get(path).device_info(device);
    py::dict result;
    result["compute_capability"] = py::make_tuple(info.compute_capability_major, info.compute_capability_minor);
    result["sm_count"] = info.sm_count;
    result["shared_memory"] = info.shared_memory_optin;
    result["name"] = info.name;
    return result;
}

py::dict parse_json(const char* text) {
    return py::module_::import("json").attr("loads")(text);
}

py::dict build_info() {
    py::dict result = parse_json(kModuleBuildInfo);
    result["abi_version"] = kAbiVersion;
    return result;
}

py::dict library_build_info(std::string_view path) {
    return parse_json(Library::get(path).build_info());
}

py::dict tensor_info(py::handle object) {
    const Tensor tensor = read_tensor(object, "tensor");
    py::tuple shape(tensor.ndim), stride(tensor.ndim);
    for (int i = 0; i < tensor.ndim; ++i) {
        shape[static_cast<size_t>(i)] = tensor.shape[i];
        stride[static_cast<size_t>(i)] = tensor.stride[i];
    }
    py::dict result;
    result["data_ptr"] = reinterpret_cast<uintptr_t>(tensor.data);
    result["shape"] = shape;
    result["stride"] = stride;
    result["dtype"] = element_type_name(tensor.type);
    result["device"] = device_name(tensor.device);
    result["stream"] = reinterpret_cast<uintptr_t>(current_stream(tensor));
    result["dlpack"] = reads_through_dlpack(object);
    return result;
}

}  // namespace
}  // namespace flash_ext

PYBIND11_MODULE(_C, m) {
    using namespace flash_ext;
    m.doc() = "The compiled kernels of flash_ext, one library per path, loaded when first needed.";

    m.def(
        "configure",
        [](std::string library_dir, bool emulated, bool use_dlpack, int32_t block_m, int32_t block_n, int32_t sm_count,
           int32_t max_shared_memory) {
            environment() = {
                std::move(library_dir), emulated, use_dlpack, {block_m, block_n, sm_count, max_shared_memory}};
        },
        py::kw_only(), py::arg("library_dir"), py::arg("emulated"), py::arg("use_dlpack"), py::arg("block_m"),
        py::arg("block_n"), py::arg("sm_count"), py::arg("max_shared_memory"),
        "Sets what the environment says; libraries and tensor types that are known already keep what they had.");
    m.def("force_tile", &Library::force_tile, py::arg("block_m"), py::arg("block_n"),
          "Only kernels with this tile from now on, of query rows and key rows; 0, 0: any. FLASH_EXT_TILE does it at "
          "import; this is for tests that go from one tile to the next.");
    m.def(
        "forward",
        [](std::string_view path, py::handle q, py::handle k, py::handle v, py::handle out, py::handle lse,
           py::handle cu_seqlens_q, py::handle cu_seqlens_k, py::handle seqused_q, py::handle seqused_k,
           py::handle alibi_slopes, py::handle sinks, py::handle rng_state, std::optional<double> softmax_scale,
           bool causal, int64_t window_left, int64_t window_right, double softcap, double dropout_p, int64_t num_splits,
           int64_t sm_margin, bool deterministic) {
            forward(path, q, k, v, out, lse,
                    {cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, sinks, rng_state, softmax_scale,
                     causal, window_left, window_right, softcap, dropout_p, num_splits, sm_margin, deterministic});
        },
        "Enqueues the forward pass on torch's current stream; writes out and lse.");
    m.def(
        "backward",
        [](std::string_view path, py::handle dout, py::handle dlse, py::handle q, py::handle k, py::handle v,
           py::handle out, py::handle lse, py::handle dq, py::handle dk, py::handle dv, py::handle dsinks,
           py::handle cu_seqlens_q, py::handle cu_seqlens_k, py::handle seqused_q, py::handle seqused_k,
           py::handle alibi_slopes, py::handle sinks, py::handle rng_state, std::optional<double> softmax_scale,
           bool causal, int64_t window_left, int64_t window_right, double softcap, double dropout_p, int64_t num_splits,
           int64_t sm_margin, bool deterministic) {
            backward(path, dout, dlse, q, k, v, out, lse, dq, dk, dv, dsinks,
                     {cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, sinks, rng_state, softmax_scale,
                      causal, window_left, window_right, softcap, dropout_p, num_splits, sm_margin, deterministic});
        },
        "Enqueues the backward pass on torch's current stream; writes dq, dk, dv and dsinks.");
    m.def(
        "features",
        [](py::handle cu_seqlens_q, py::handle cu_seqlens_k, py::handle seqused_q, py::handle seqused_k,
           py::handle alibi_slopes, py::handle sinks, std::optional<double> softmax_scale, bool causal,
           int64_t window_left, int64_t window_right, double softcap, double dropout_p, bool deterministic) {
            return features_of({cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, sinks, py::none(),
                                softmax_scale, causal, window_left, window_right, softcap, dropout_p, 0, 0,
                                deterministic});
        },
        "The features a call with these arguments asks of a kernel, as bits of FEATURES.");
    m.def("plain_forward", &plain_forward,
          "Runs a forward call whose arguments are certainly fit and returns (out, lse); None: ask flash_ext.checks.");
    m.def(
        "set_plain_path",
        [](std::string_view path, std::string_view dtype, int32_t device, int32_t head_dim, int32_t head_dim_v,
           uint32_t features) { set_plain_path(path, data_type_from(dtype), device, head_dim, head_dim_v, features); },
        "Tells plain_forward which path serves such calls; device -1: CPU tensors.");
    m.def("set_output_allocator", &set_output_allocator,
          "Sets callable(q, head_dim_v, *lse_shape), which allocates (out, lse) for plain_forward.");
    m.def("probe", &probe, "Fills an fp32 tensor with a value through the path's probe kernel.");
    m.def("choose", &choose, "The kernel that serves such a call, or the reason why none does.");
    m.def("kernels", &kernels, "The kernels built into a path's library, in the order of the table.");
    m.def("available_paths", &available_paths, "The paths whose library file exists, most specific first.");
    m.def("library_dir", &library_dir, "Where the libraries are looked for.");
    m.def("library_file", &library_file, "The file of a path's library, whether or not it exists.");
    m.def("device_info", &device_info, "The device as a path's library sees it.");
    m.def(
        "path_serves",
        [](std::string_view path, int32_t major, int32_t minor) { return path_serves(path, major, minor); },
        "True if the path has machine code for GPUs of this compute capability.");
    m.def("path_gpus", [](std::string_view path) { return path_gpus(path); }, "The compute capabilities, in words.");
    m.def("build_info", &build_info, "How this module was built.");
    m.def("library_build_info", &library_build_info, "How a path's library was built.");
    m.def("set_allocator", &set_allocator, "Sets callable(nbytes, like), which allocates workspaces.");
    m.def(
        "packing_reason", [](py::handle tensor) { return packing_reason(read_tensor(tensor, "tensor")); },
        "Why a kernel cannot use the operand where it lies, '' if it can.");
    m.def("tensor_info", &tensor_info, "A tensor as the binding sees it.");

    py::dict features;
    for (const FeatureName& entry : kFeatureNames) features[entry.name] = entry.feature;
    m.attr("FEATURES") = features;
    py::dict arguments;
    for (const FeatureName& entry : kFeatureNames) arguments[entry.name] = entry.argument;
    m.attr("FEATURE_ARGUMENTS") = arguments;
    py::list paths;
    for (const std::string_view path : kPaths) paths.append(py::str(path.data(), path.size()));
    m.attr("PATHS") = py::tuple(paths);
}
