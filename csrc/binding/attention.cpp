// The checks here are those that keep a kernel inside the tensors: ranks, shapes, types and devices agree. Everything a
// user may have got wrong was refused, with a better message, by flash_ext/checks.py.
#include "binding/attention.h"

#include <float.h>
#include <math.h>

#include <string>
#include <vector>

#include "api/abi.h"
#include "binding/environment.h"
#include "binding/library.h"
#include "binding/tensor.h"

namespace py = pybind11;

namespace flash_ext {
namespace {

constexpr uintptr_t kWorkspaceAlignment = 256;  // bytes: what LaunchContext promises

py::object& allocator() {
    static auto* callable = new py::object();  // never destroyed: the interpreter may be gone by then
    return *callable;
}

// round(p * 65536): a score is kept if its 16-bit random number is at least this.
uint32_t dropout_threshold(double dropout_p) {
    if (!(dropout_p > 0)) return 0;
    return static_cast<uint32_t>(fmin(65535.0, floor(dropout_p * 65536.0 + 0.5)));
}

int32_t narrow(int64_t value, const char* name) {
    if (value < INT32_MIN || value > INT32_MAX) {
        raise_value_error(std::string(name) + "=" + std::to_string(value) + " does not fit 32 bits");
    }
    return static_cast<int32_t>(value);
}

// The nearest fp32 number; one beyond the largest becomes infinite, which a bare conversion need not give.
float to_fp32(double value) {
    return fabs(value) <= FLT_MAX ? static_cast<float>(value) : static_cast<float>(copysign(HUGE_VAL, value));
}

float narrow(double value, const char* name) {
    const float narrowed = to_fp32(value);
    if (!isfinite(narrowed) || (narrowed == 0) != (value == 0)) {
        raise_value_error(std::string(name) + "=" + std::to_string(value) + " does not fit fp32");
    }
    return narrowed;
}

DataType operand_type(const Tensor& tensor) {
    switch (tensor.type) {
        case ElementType::kFloat16:
            return DataType::kFloat16;
        case ElementType::kBFloat16:
            return DataType::kBFloat16;
        case ElementType::kFloat32:
            return DataType::kFloat32;
        case ElementType::kFloat8E4M3:
            return DataType::kFloat8E4M3;
        default:
            break;
    }
    raise_value_error(std::string(tensor.name) + " has " + element_type_name(tensor.type) +
                      "; allowed are float16 and bfloat16");
}

// One call: it reads tensors against the device of the first, holds what must outlive the launch, and launches.
class Call {
  public:
    explicit Call(std::string_view path) : library_(Library::get(path)) {}

    // The tensor that sets the device of the call.
    Tensor first(py::handle object, const char* name) {
        Tensor tensor = read_tensor(object, name);
        if (environment().emulated && tensor.device.type == Device::kCpu) {
            device_ = 0;
        } else if (tensor.device.type == Device::kCuda) {
            device_ = tensor.device.index;
        } else {
            raise_value_error(std::string(name) + " is on " + device_name(tensor.device) + "; path " + library_.path() +
                              " needs a CUDA tensor");
        }
        place_ = tensor.device;
        stream_ = current_stream(tensor);
        return tensor;
    }

    Tensor read(py::handle object, const char* name) const {
        Tensor tensor = read_tensor(object, name);
        if (tensor.device != place_) {
            raise_value_error(std::string(name) + " is on " + device_name(tensor.device) + ", the first tensor on " +
                              device_name(place_));
        }
        return tensor;
    }

    // An operand or result as a kernel wants it. `packed` is the rank of tensors without a batch dimension.
    TensorView view(const Tensor& tensor, bool packed) const {
        TensorView view = {tensor.data, 0, 0, 0};
        // The stride of a dimension of extent 1 is never multiplied by anything but 0, and may be any number; a kernel
        // that encodes it into a tensor map gets the one of a contiguous tensor.
        int64_t compact = tensor.shape[tensor.ndim - 1];
        int64_t stride[kMaxDims] = {};
        for (int i = tensor.ndim - 2; i >= 0; --i) {
            stride[i] = tensor.shape[i] == 1 ? compact : tensor.stride[i];
            compact *= tensor.shape[i];
        }
        if (!packed) view.stride_batch = stride[0];
        view.stride_row = stride[tensor.ndim - 3];
        view.stride_head = stride[tensor.ndim - 2];
        return view;
    }

    // Replaces an input that a kernel cannot read in place by a packed copy, which lives as long as the call.
    void make_launchable(Tensor* tensor) {
        if (is_launchable(*tensor)) return;
        pack(tensor);
        require_launchable(*tensor);
    }

    void make_contiguous(Tensor* tensor) {
        if (!tensor->is_contiguous()) pack(tensor);
    }

    // Replaces a result that a kernel cannot write in place by packed memory that finish() copies back.
    void make_writable(Tensor* tensor) {
        for (int i = 0; i < tensor->ndim; ++i) {
            if (tensor->shape[i] > 1 && tensor->stride[i] == 0) {
                raise_value_error(tensor->describe() + " is an expanded view: dimension " + std::to_string(i) +
                                  " has stride 0; results need memory of their own");
            }
        }
        if (is_launchable(*tensor)) return;
        const py::handle target = tensor->object;
        pack(tensor);
        require_launchable(*tensor);
        write_back_.emplace_back(target, tensor->object);
    }

    int32_t choose(Direction direction, const ForwardParams& params, uint32_t features) {
        std::string reason;
        const KernelQuery query = {direction, params.dtype, params.head_dim, params.head_dim_v, features, device_};
        const int32_t kernel = library_.choose(query, &reason);
        if (kernel < 0) raise_not_implemented(reason);
        return kernel;
    }

    // Enqueues the kernel on the current stream. Packed copies and the workspace may be freed right after: torch's
    // allocator gives their memory only to work that comes later on the same stream.
    void launch(int32_t kernel, const void* params, py::handle like) {
        LaunchContext context = make_context();
        DeviceGuard guard(library_, device_);
        py::object workspace;
        if (const int64_t size = library_.workspace(kernel, params, context); size > 0) {
            workspace = allocate(size, like, &context);
        }
        int32_t error = 0;
        {
            // Held, the GIL would be needed by every other thread while a launch waits for a full queue, loads the
            // module at its first call, or is emulated; and a host function in that queue which needs the GIL would
            // never come to run. It costs 0.07 us.
            const py::gil_scoped_release_simple release;
            error = library_.launch(kernel, params, context);
        }
        guard.restore();
        if (error != 0) {
            library_.raise_cuda_error(std::string("kernel ") + library_.kernel(kernel).name + " failed", error);
        }
        for (const auto& [target, packed] : write_back_) target.attr("copy_")(packed);
    }

    void launch_probe(const Tensor& tensor, float value) {
        const LaunchContext context = make_context();
        DeviceGuard guard(library_, device_);
        int32_t error = 0;
        {
            const py::gil_scoped_release_simple release;
            error = library_.probe(static_cast<float*>(tensor.data), tensor.count(), value, context);
        }
        guard.restore();
        if (error != 0) library_.raise_cuda_error("kernel " + library_.path() + "_probe failed", error);
    }

  private:
    // Makes the device current; back to the caller's at the end, or when an exception passes.
    class DeviceGuard {
      public:
        DeviceGuard(const Library& library, int32_t device) : library_(library), device_(device), previous_(device) {
            if (const int32_t error = library_.set_device(device_, &previous_); error != 0) {
                library_.raise_cuda_error("path " + library_.path() + " cannot use device " + std::to_string(device_),
                                          error);
            }
        }
        ~DeviceGuard() { restore(); }
        DeviceGuard(const DeviceGuard&) = delete;
        DeviceGuard& operator=(const DeviceGuard&) = delete;

        void restore() {
            if (previous_ != device_) library_.set_device(previous_, nullptr);
            previous_ = device_;
        }

      private:
        const Library& library_;
        int32_t device_, previous_;
    };

    LaunchContext make_context() const {
        return {stream_, nullptr, 0, device_, library_.device_info(device_).sm_count};
    }

    py::object allocate(int64_t size, py::handle like, LaunchContext* context) const {
        if (!allocator()) raise_runtime_error("a kernel needs a workspace before _C.set_allocator was called");
        py::object memory = allocator()(size, like);
        const Tensor tensor = read(memory, "the workspace");
        if (reinterpret_cast<uintptr_t>(tensor.data) % kWorkspaceAlignment != 0 || !tensor.is_contiguous() ||
            tensor.count() * element_size(tensor.type) < size) {
            raise_runtime_error("the allocator did not return " + std::to_string(size) + " bytes aligned to " +
                                std::to_string(kWorkspaceAlignment));
        }
        context->workspace = tensor.data;
        context->workspace_size = size;
        return memory;
    }

    void pack(Tensor* tensor) {
        held_.push_back(packed_copy(*tensor));
        *tensor = read(held_.back(), tensor->name);
    }

    static void require_launchable(const Tensor& packed) {
        if (is_launchable(packed)) return;
        raise_value_error(packed.describe() + ": " + packing_reason(packed) +
                          " even in a packed copy; head_dim must be a multiple of 8");
    }

    Library& library_;
    int32_t device_ = 0;
    Device place_;  // of the tensors: the CPU under emulation
    void* stream_ = nullptr;
    std::vector<py::object> held_;
    std::vector<std::pair<py::handle, py::handle>> write_back_;  // result, packed memory
};

// Requires a shape; -1 stands for any extent.
void require_shape(const Tensor& tensor, std::initializer_list<int64_t> shape) {
    bool fits = tensor.ndim == static_cast<int32_t>(shape.size());
    for (int i = 0; fits && i < tensor.ndim; ++i) {
        const int64_t extent = shape.begin()[i];
        fits = extent < 0 || tensor.shape[i] == extent;
    }
    if (fits) return;
    std::string text;
    for (const int64_t extent : shape) text += (text.empty() ? "" : ", ") + (extent < 0 ? "*" : std::to_string(extent));
    raise_value_error(tensor.describe() + ": (" + text + ") is needed");
}

void require_type(const Tensor& tensor, ElementType type) {
    if (tensor.type != type) {
        raise_value_error(std::string(tensor.name) + " has " + element_type_name(tensor.type) + "; " +
                          element_type_name(type) + " is needed");
    }
}

// Everything of the parameters but `out` and `lse`. q was read already.
void fill(Call& call, Tensor q, py::handle k_object, py::handle v_object, const Options& options,
          ForwardParams* params) {
    const bool varlen_q = !options.cu_seqlens_q.is_none();
    const bool varlen_k = !options.cu_seqlens_k.is_none();
    Tensor k = call.read(k_object, "k");
    Tensor v = call.read(v_object, "v");
    const auto require_rank = [](const Tensor& tensor, bool packed) {
        if (packed) {
            require_shape(tensor, {-1, -1, -1});
        } else {
            require_shape(tensor, {-1, -1, -1, -1});
        }
    };
    require_rank(q, varlen_q);
    require_rank(k, varlen_k);
    require_rank(v, varlen_k);
    require_type(k, q.type);
    require_type(v, q.type);

    Tensor cu_seqlens_q, cu_seqlens_k;
    if (varlen_q) {
        cu_seqlens_q = call.read(options.cu_seqlens_q, "cu_seqlens_q");
        require_type(cu_seqlens_q, ElementType::kInt32);
        require_shape(cu_seqlens_q, {-1});
    }
    const int64_t batch = varlen_q ? cu_seqlens_q.shape[0] - 1 : q.shape[0];
    if (batch < 0) raise_value_error("cu_seqlens_q is empty; it has batch + 1 elements");
    if (varlen_k) {
        cu_seqlens_k = call.read(options.cu_seqlens_k, "cu_seqlens_k");
        require_type(cu_seqlens_k, ElementType::kInt32);
        require_shape(cu_seqlens_k, {batch + 1});
    }

    const int64_t heads_q = q.shape[q.ndim - 2], head_dim = q.shape[q.ndim - 1];
    const int64_t heads_k = k.shape[k.ndim - 2], head_dim_v = v.shape[v.ndim - 1];
    const int64_t rows_k = k.shape[k.ndim - 3];
    if (varlen_k) {
        require_shape(k, {-1, -1, head_dim});
        require_shape(v, {rows_k, heads_k, -1});
    } else {
        require_shape(k, {batch, -1, -1, head_dim});
        require_shape(v, {batch, rows_k, heads_k, -1});
    }
    if (heads_k == 0 ? heads_q != 0 : heads_q % heads_k != 0) {
        raise_value_error("q has " + std::to_string(heads_q) + " heads, not a multiple of k's " +
                          std::to_string(heads_k));
    }

    params->dtype = operand_type(q);
    params->batch = narrow(batch, "batch");
    params->seqlen_q = narrow(q.shape[q.ndim - 3], "seqlen_q");
    params->seqlen_k = narrow(rows_k, "seqlen_k");
    params->heads_q = narrow(heads_q, "heads_q");
    params->heads_k = narrow(heads_k, "heads_k");
    params->head_dim = narrow(head_dim, "head_dim");
    params->head_dim_v = narrow(head_dim_v, "head_dim_v");

    call.make_launchable(&q);
    call.make_launchable(&k);
    call.make_launchable(&v);
    params->q = call.view(q, varlen_q);
    params->k = call.view(k, varlen_k);
    params->v = call.view(v, varlen_k);

    if (varlen_q) {
        call.make_contiguous(&cu_seqlens_q);
        params->cu_seqlens_q = static_cast<const int32_t*>(cu_seqlens_q.data);
    }
    if (varlen_k) {
        call.make_contiguous(&cu_seqlens_k);
        params->cu_seqlens_k = static_cast<const int32_t*>(cu_seqlens_k.data);
    }
    const auto read_vector = [&](py::handle object, const char* name, ElementType type, int64_t extent) -> const void* {
        if (object.is_none()) return nullptr;
        Tensor tensor = call.read(object, name);
        require_type(tensor, type);
        require_shape(tensor, {extent});
        call.make_contiguous(&tensor);
        return tensor.data;
    };
    params->seqused_q =
        static_cast<const int32_t*>(read_vector(options.seqused_q, "seqused_q", ElementType::kInt32, batch));
    params->seqused_k =
        static_cast<const int32_t*>(read_vector(options.seqused_k, "seqused_k", ElementType::kInt32, batch));
    params->dropout_threshold = dropout_threshold(options.dropout_p);
    if (params->dropout_threshold != 0) {
        if (options.rng_state.is_none()) raise_value_error("rng_state is None; dropout_p > 0 needs it");
        params->rng_state =
            static_cast<const int64_t*>(read_vector(options.rng_state, "rng_state", ElementType::kInt64, 2));
    }
    if (!options.alibi_slopes.is_none()) {
        Tensor slopes = call.read(options.alibi_slopes, "alibi_slopes");
        require_type(slopes, ElementType::kFloat32);
        const bool per_batch = slopes.ndim == 2;
        if (per_batch) {
            require_shape(slopes, {batch, heads_q});
        } else {
            require_shape(slopes, {heads_q});
        }
        if (heads_q > 1 && slopes.stride[slopes.ndim - 1] != 1) call.make_contiguous(&slopes);
        params->alibi_slopes = static_cast<const float*>(slopes.data);
        params->alibi_stride_batch = per_batch && batch > 1 ? slopes.stride[0] : 0;
    }
    params->sinks_dtype = DataType::kFloat32;
    if (!options.sinks.is_none()) {
        Tensor sinks = call.read(options.sinks, "sinks");
        require_shape(sinks, {heads_q});
        params->sinks_dtype = operand_type(sinks);
        if (params->sinks_dtype == DataType::kFloat8E4M3) raise_value_error("sinks has float8_e4m3fn");
        call.make_contiguous(&sinks);
        params->sinks = sinks.data;
    }

    params->softmax_scale =
        narrow(options.softmax_scale.value_or(1.0 / sqrt(static_cast<double>(head_dim))), "softmax_scale");
    params->softcap = narrow(options.softcap, "softcap");
    params->causal = options.causal ? 1 : 0;
    params->window_left = narrow(options.window_left, "window_left");
    params->window_right = narrow(options.window_right, "window_right");
    params->deterministic = options.deterministic ? 1 : 0;
    params->num_splits = narrow(options.num_splits, "num_splits");
    params->sm_margin = narrow(options.sm_margin, "sm_margin");
}

// out, dout and the like: shaped as q with head_dim_v.
void require_like_out(const Tensor& tensor, const ForwardParams& params, ElementType type) {
    require_type(tensor, type);
    if (params.cu_seqlens_q != nullptr) {
        require_shape(tensor, {params.seqlen_q, params.heads_q, params.head_dim_v});
    } else {
        require_shape(tensor, {params.batch, params.seqlen_q, params.heads_q, params.head_dim_v});
    }
}

void require_like_lse(const Tensor& tensor, const ForwardParams& params) {
    require_type(tensor, ElementType::kFloat32);
    if (params.cu_seqlens_q != nullptr) {
        require_shape(tensor, {params.heads_q, params.seqlen_q});
    } else {
        require_shape(tensor, {params.batch, params.heads_q, params.seqlen_q});
    }
}

// A gradient, shaped as its operand.
TensorView gradient(Call& call, py::handle object, const char* name, int64_t rows, int64_t heads, int64_t head_dim,
                    bool packed, const ForwardParams& params, ElementType type) {
    Tensor tensor = call.read(object, name);
    require_type(tensor, type);
    if (packed) {
        require_shape(tensor, {rows, heads, head_dim});
    } else {
        require_shape(tensor, {params.batch, rows, heads, head_dim});
    }
    call.make_writable(&tensor);
    return call.view(tensor, packed);
}

}  // namespace

uint32_t features_of(const Options& options) {
    const auto given = [](py::handle object) { return !object.is_none(); };
    uint32_t features = 0;
    const auto add = [&](bool asked, Feature feature) { features |= asked ? static_cast<uint32_t>(feature) : 0u; };
    add(options.causal, kFeatureCausal);
    // causal bounds the right side already
    add(options.window_left >= 0 || (options.window_right >= 0 && !options.causal), kFeatureWindow);
    add(given(options.cu_seqlens_q) || given(options.cu_seqlens_k), kFeatureVarlen);
    add(given(options.seqused_q) || given(options.seqused_k), kFeatureSeqused);
    add(given(options.sinks), kFeatureSinks);
    add(to_fp32(options.softcap) != 0, kFeatureSoftcap);
    add(given(options.alibi_slopes), kFeatureAlibi);
    add(dropout_threshold(options.dropout_p) != 0, kFeatureDropout);
    add(options.deterministic, kFeatureDeterministic);
    add(options.softmax_scale.has_value() && !(to_fp32(*options.softmax_scale) > 0), kFeatureGeneralScale);
    return features;
}

void forward(std::string_view path, py::handle q_object, py::handle k, py::handle v, py::handle out_object,
             py::handle lse_object, const Options& options) {
    Call call(path);
    ForwardParams params = {};
    const Tensor q = call.first(q_object, "q");
    fill(call, q, k, v, options, &params);
    Tensor out = call.read(out_object, "out");
    require_like_out(out, params, q.type);
    call.make_writable(&out);
    params.out = call.view(out, params.cu_seqlens_q != nullptr);
    const Tensor lse = call.read(lse_object, "lse");
    require_like_lse(lse, params);
    if (!lse.is_contiguous()) raise_value_error("lse is not contiguous");
    params.lse = static_cast<float*>(lse.data);
    call.launch(call.choose(Direction::kForward, params, features_of(options)), &params, q_object);
}

void backward(std::string_view path, py::handle dout_object, py::handle dlse_object, py::handle q_object, py::handle k,
              py::handle v, py::handle out_object, py::handle lse_object, py::handle dq, py::handle dk, py::handle dv,
              py::handle dsinks_object, const Options& options) {
    Call call(path);
    BackwardParams params = {};
    ForwardParams& attention = params.attention;
    const Tensor q = call.first(q_object, "q");
    fill(call, q, k, v, options, &attention);
    const bool varlen_q = attention.cu_seqlens_q != nullptr, varlen_k = attention.cu_seqlens_k != nullptr;

    Tensor out = call.read(out_object, "out");
    require_like_out(out, attention, q.type);
    call.make_launchable(&out);
    attention.out = call.view(out, varlen_q);
    Tensor lse = call.read(lse_object, "lse");
    require_like_lse(lse, attention);
    call.make_contiguous(&lse);
    attention.lse = static_cast<float*>(lse.data);

    Tensor dout = call.read(dout_object, "dout");
    require_like_out(dout, attention, q.type);
    call.make_launchable(&dout);
    params.dout = call.view(dout, varlen_q);
    if (!dlse_object.is_none()) {
        const Tensor dlse = call.read(dlse_object, "dlse");
        require_like_lse(dlse, attention);
        params.dlse = static_cast<const float*>(dlse.data);
        params.dlse_stride_batch = varlen_q ? 0 : dlse.stride[0];
        params.dlse_stride_head = dlse.stride[dlse.ndim - 2];
        params.dlse_stride_row = dlse.stride[dlse.ndim - 1];
    }

    params.dq = gradient(call, dq, "dq", attention.seqlen_q, attention.heads_q, attention.head_dim, varlen_q, attention,
                         q.type);
    params.dk = gradient(call, dk, "dk", attention.seqlen_k, attention.heads_k, attention.head_dim, varlen_k, attention,
                         q.type);
    params.dv = gradient(call, dv, "dv", attention.seqlen_k, attention.heads_k, attention.head_dim_v, varlen_k,
                         attention, q.type);
    if (attention.sinks != nullptr) {
        if (dsinks_object.is_none()) raise_value_error("dsinks is None; with sinks it is needed");
        const Tensor dsinks = call.read(dsinks_object, "dsinks");
        require_shape(dsinks, {attention.heads_q});
        if (operand_type(dsinks) != attention.sinks_dtype) raise_value_error("dsinks has another type than sinks");
        if (!dsinks.is_contiguous()) raise_value_error("dsinks is not contiguous");
        params.dsinks = dsinks.data;
    }
    call.launch(call.choose(Direction::kBackward, attention, features_of(options)), &params, q_object);
}

void probe(std::string_view path, py::handle object, double value) {
    Call call(path);
    const Tensor tensor = call.first(object, "tensor");
    require_type(tensor, ElementType::kFloat32);
    if (!tensor.is_contiguous()) raise_value_error("tensor is not contiguous");
    call.launch_probe(tensor, static_cast<float>(value));
}

void set_allocator(py::object callable) {
    // A process has one; replaced by tests at most.
    allocator() = std::move(callable);
}

}  // namespace flash_ext
