// Make-believe kernels for the tests of csrc/api and csrc/binding. They run on the host and move data through the views
// they are given, so that a wrong stride or pointer shows in the result; each call is kept as JSON.
//
//   forward    out[.., h, :] = q[.., h, :] (head_dim_v of it), lse = softmax_scale
//   backward   dq = q, dk = k, dv = v, dsinks = sinks; 16-bit types only
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <atomic>
#include <string>

#include "api/abi.h"
#include "api/registry.h"
#include "cuda_runtime_api.h"

namespace {

using namespace flash_ext;

constexpr int64_t kWorkspace = 1000;  // bytes, of the backward kernels

std::atomic<int> next_error{0};
std::atomic<int> launch_milliseconds{0};
std::atomic<bool> idle{false};
thread_local std::string last_call;

class Json {
  public:
    Json& field(const char* name, int64_t value) { return raw(name, std::to_string(value)); }
    Json& field(const char* name, double value) {
        char text[64];
        snprintf(text, sizeof(text), "%.9g", value);
        return raw(name, text);
    }
    Json& field(const char* name, const char* value) { return raw(name, '"' + std::string(value) + '"'); }
    Json& field(const char* name, const void* value) {
        return raw(name, std::to_string(reinterpret_cast<uintptr_t>(value)));
    }
    Json& field(const char* name, const TensorView& view) {
        return raw(name, Json()
                             .field("data", static_cast<const void*>(view.data))
                             .field("stride_batch", view.stride_batch)
                             .field("stride_row", view.stride_row)
                             .field("stride_head", view.stride_head)
                             .text());
    }
    std::string text() const { return "{" + fields_ + "}"; }
    Json& raw(const char* name, const std::string& value) {
        fields_ += (fields_.empty() ? "\"" : ", \"") + std::string(name) + "\": " + value;
        return *this;
    }

  private:
    std::string fields_;
};

std::string describe(const ForwardParams& p) {
    return Json()
        .field("q", p.q)
        .field("k", p.k)
        .field("v", p.v)
        .field("out", p.out)
        .field("lse", static_cast<const void*>(p.lse))
        .field("cu_seqlens_q", static_cast<const void*>(p.cu_seqlens_q))
        .field("cu_seqlens_k", static_cast<const void*>(p.cu_seqlens_k))
        .field("seqused_q", static_cast<const void*>(p.seqused_q))
        .field("seqused_k", static_cast<const void*>(p.seqused_k))
        .field("alibi_slopes", static_cast<const void*>(p.alibi_slopes))
        .field("sinks", p.sinks)
        .field("rng_state", static_cast<const void*>(p.rng_state))
        .field("alibi_stride_batch", p.alibi_stride_batch)
        .field("dtype", static_cast<int64_t>(p.dtype))
        .field("sinks_dtype", static_cast<int64_t>(p.sinks_dtype))
        .field("batch", static_cast<int64_t>(p.batch))
        .field("seqlen_q", static_cast<int64_t>(p.seqlen_q))
        .field("seqlen_k", static_cast<int64_t>(p.seqlen_k))
        .field("heads_q", static_cast<int64_t>(p.heads_q))
        .field("heads_k", static_cast<int64_t>(p.heads_k))
        .field("head_dim", static_cast<int64_t>(p.head_dim))
        .field("head_dim_v", static_cast<int64_t>(p.head_dim_v))
        .field("softmax_scale", static_cast<double>(p.softmax_scale))
        .field("softcap", static_cast<double>(p.softcap))
        .field("causal", static_cast<int64_t>(p.causal))
        .field("window_left", static_cast<int64_t>(p.window_left))
        .field("window_right", static_cast<int64_t>(p.window_right))
        .field("dropout_threshold", static_cast<int64_t>(p.dropout_threshold))
        .field("deterministic", static_cast<int64_t>(p.deterministic))
        .field("num_splits", static_cast<int64_t>(p.num_splits))
        .field("sm_margin", static_cast<int64_t>(p.sm_margin))
        .text();
}

std::string describe(const BackwardParams& p) {
    return Json()
        .raw("attention", describe(p.attention))
        .field("dout", p.dout)
        .field("dlse", static_cast<const void*>(p.dlse))
        .field("dlse_stride_batch", p.dlse_stride_batch)
        .field("dlse_stride_head", p.dlse_stride_head)
        .field("dlse_stride_row", p.dlse_stride_row)
        .field("dq", p.dq)
        .field("dk", p.dk)
        .field("dv", p.dv)
        .field("dsinks", p.dsinks)
        .text();
}

void record(const char* name, const std::string& params, const LaunchContext& context) {
    int current = -1;
    cudaGetDevice(&current);
    last_call = Json()
                    .field("kernel", name)
                    .raw("params", params)
                    .field("stream", static_cast<const void*>(context.stream))
                    .field("workspace", static_cast<const void*>(context.workspace))
                    .field("workspace_size", context.workspace_size)
                    .field("device", static_cast<int64_t>(context.device))
                    .field("sm_count", static_cast<int64_t>(context.sm_count))
                    .field("current_device", static_cast<int64_t>(current))
                    .text();
}

int32_t finish() {
    const int milliseconds = launch_milliseconds.load();
    if (milliseconds > 0) {
        const timespec duration = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
        nanosleep(&duration, nullptr);
    }
    return next_error.exchange(0);
}

void copy(const TensorView& to, const TensorView& from, int32_t batch, int32_t rows, int32_t heads, int32_t head_dim) {
    for (int64_t b = 0; b < batch; ++b) {
        for (int64_t row = 0; row < rows; ++row) {
            for (int64_t head = 0; head < heads; ++head) {
                memcpy(
                    static_cast<uint16_t*>(to.data) + b * to.stride_batch + row * to.stride_row + head * to.stride_head,
                    static_cast<const uint16_t*>(from.data) + b * from.stride_batch + row * from.stride_row +
                        head * from.stride_head,
                    sizeof(uint16_t) * static_cast<size_t>(head_dim));
            }
        }
    }
}

int64_t no_workspace(const void*, const LaunchContext*) {
    return 0;
}

int64_t some_workspace(const void*, const LaunchContext*) {
    return kWorkspace;
}

extern const KernelInfo kKernels[];

template <int kIndex>
int32_t launch_forward(const void* params, const LaunchContext* context) {
    if (idle) return cudaSuccess;
    const ForwardParams& p = *static_cast<const ForwardParams*>(params);
    record(kKernels[kIndex].name, describe(p), *context);
    const int32_t sequences = p.cu_seqlens_q == nullptr ? p.batch : 1;
    copy(p.out, p.q, sequences, p.seqlen_q, p.heads_q, p.head_dim_v < p.head_dim ? p.head_dim_v : p.head_dim);
    const int64_t rows = static_cast<int64_t>(sequences) * p.heads_q * p.seqlen_q;
    for (int64_t i = 0; i < rows; ++i) p.lse[i] = p.softmax_scale;
    return finish();
}

template <int kIndex>
int32_t launch_backward(const void* params, const LaunchContext* context) {
    if (idle) return cudaSuccess;
    const BackwardParams& p = *static_cast<const BackwardParams*>(params);
    const ForwardParams& a = p.attention;
    record(kKernels[kIndex].name, describe(p), *context);
    memset(context->workspace, 0, kWorkspace);
    copy(p.dq, a.q, a.cu_seqlens_q == nullptr ? a.batch : 1, a.seqlen_q, a.heads_q, a.head_dim);
    copy(p.dk, a.k, a.cu_seqlens_k == nullptr ? a.batch : 1, a.seqlen_k, a.heads_k, a.head_dim);
    copy(p.dv, a.v, a.cu_seqlens_k == nullptr ? a.batch : 1, a.seqlen_k, a.heads_k, a.head_dim_v);
    if (p.dsinks != nullptr) {
        const size_t size = a.sinks_dtype == DataType::kFloat32 ? 4 : 2;
        memcpy(p.dsinks, a.sinks, size * static_cast<size_t>(a.heads_q));
    }
    return finish();
}

constexpr uint32_t kPlain =
    kFeatureCausal | kFeatureWindow | kFeatureVarlen | kFeatureSeqused | kFeatureSinks | kFeatureDeterministic;
constexpr uint32_t kRich = kPlain | kFeatureSoftcap | kFeatureAlibi | kFeatureDropout | kFeatureGeneralScale;

const KernelInfo kKernels[] = {
    {FLASH_EXT_PATH_NAME "_forward_bf16_d256x256_m128n64_plain", FLASH_EXT_PATH_NAME, Direction::kForward,
     DataType::kBFloat16, 256, 256, 128, 64, 2, 4, kPlain, 196608, &no_workspace, &launch_forward<0>},
    {FLASH_EXT_PATH_NAME "_forward_bf16_d256x256_m64n64_plain", FLASH_EXT_PATH_NAME, Direction::kForward,
     DataType::kBFloat16, 256, 256, 64, 64, 2, 4, kPlain, 131072, &no_workspace, &launch_forward<1>},
    {FLASH_EXT_PATH_NAME "_forward_bf16_d64x64_m128n128_plain", FLASH_EXT_PATH_NAME, Direction::kForward,
     DataType::kBFloat16, 64, 64, 128, 128, 2, 4, kPlain, 49152, &no_workspace, &launch_forward<2>},
    {FLASH_EXT_PATH_NAME "_forward_bf16_d64x64_m128n128_rich", FLASH_EXT_PATH_NAME, Direction::kForward,
     DataType::kBFloat16, 64, 64, 128, 128, 2, 4, kRich, 49152, &no_workspace, &launch_forward<3>},
    {FLASH_EXT_PATH_NAME "_forward_bf16_d128x128_m128n128_plain", FLASH_EXT_PATH_NAME, Direction::kForward,
     DataType::kBFloat16, 128, 128, 128, 128, 2, 4, kPlain, 98304, &no_workspace, &launch_forward<4>},
    {FLASH_EXT_PATH_NAME "_forward_bf16_d128x128_m128n128_rich", FLASH_EXT_PATH_NAME, Direction::kForward,
     DataType::kBFloat16, 128, 128, 128, 128, 2, 4, kRich, 98304, &no_workspace, &launch_forward<5>},
    {FLASH_EXT_PATH_NAME "_forward_bf16_d128x128_m128n64_plain", FLASH_EXT_PATH_NAME, Direction::kForward,
     DataType::kBFloat16, 128, 128, 128, 64, 2, 4, kPlain, 65536, &no_workspace, &launch_forward<6>},
    {FLASH_EXT_PATH_NAME "_forward_bf16_d128x128_m128n64_rich", FLASH_EXT_PATH_NAME, Direction::kForward,
     DataType::kBFloat16, 128, 128, 128, 64, 2, 4, kRich, 65536, &no_workspace, &launch_forward<7>},
    {FLASH_EXT_PATH_NAME "_forward_bf16_d192x128_m128n64_plain", FLASH_EXT_PATH_NAME, Direction::kForward,
     DataType::kBFloat16, 192, 128, 128, 64, 2, 4, kPlain, 114688, &no_workspace, &launch_forward<8>},
    {FLASH_EXT_PATH_NAME "_forward_fp16_d64x64_m128n128_plain", FLASH_EXT_PATH_NAME, Direction::kForward,
     DataType::kFloat16, 64, 64, 128, 128, 2, 4, kPlain, 49152, &no_workspace, &launch_forward<9>},
    {FLASH_EXT_PATH_NAME "_backward_bf16_d128x128_m64n128_rich", FLASH_EXT_PATH_NAME, Direction::kBackward,
     DataType::kBFloat16, 128, 128, 64, 128, 2, 4, kRich, 131072, &some_workspace, &launch_backward<10>},
};

}  // namespace

namespace flash_ext {

// The widest tile stands first, and the one for masked calls behind the one for others: order alone must not decide.
const RegistryEntry kRegistry[] = {
    {&kKernels[0], When::kAlways}, {&kKernels[1], When::kAlways},  {&kKernels[2], When::kAlways},
    {&kKernels[3], When::kAlways}, {&kKernels[4], When::kFull},    {&kKernels[5], When::kFull},
    {&kKernels[6], When::kMasked}, {&kKernels[7], When::kMasked},  {&kKernels[8], When::kAlways},
    {&kKernels[9], When::kAlways}, {&kKernels[10], When::kAlways},
};
const int32_t kRegistryCount = static_cast<int32_t>(sizeof(kRegistry) / sizeof(kRegistry[0]));
const char* const kBuildInfo = "{\"version\": \"fake\", \"commit\": \"none\", \"compiler\": \"host\"}";

int32_t probe(float* data, int64_t count, float value, const LaunchContext* context) {
    record(FLASH_EXT_PATH_NAME "_probe", "{}", *context);
    for (int64_t i = 0; i < count; ++i) data[i] = value;
    return finish();
}

}  // namespace flash_ext

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

// JSON of the calling thread's last launch.
FAKE_EXPORT const char* fake_last_call() {
    return last_call.c_str();
}
// The next launch of any thread returns this cudaError_t.
FAKE_EXPORT void fake_fail_next(int error) {
    next_error = error;
}
// How long every launch sleeps.
FAKE_EXPORT void fake_set_launch_milliseconds(int milliseconds) {
    launch_milliseconds = milliseconds;
}
FAKE_EXPORT void fake_set_device(int device) {
    cudaSetDevice(device);
}
FAKE_EXPORT int fake_get_device() {
    int device = -1;
    cudaGetDevice(&device);
    return device;
}
// Every launch returns at once and leaves no record: what remains is the binding's own time.
FAKE_EXPORT void fake_set_idle(int value) {
    idle = value != 0;
}
