// The parameters of every launch: plain data that crosses the C ABI between the binding and a path's library.
//
// Nothing here knows torch, Python or a GPU generation. Strides count elements, not bytes, and are 64-bit, as is every
// offset made of them. Pointers are device pointers unless a comment says otherwise.
#pragma once

#include <stdint.h>

namespace flash_ext {

// Raised by one whenever a struct of this file or a function of api/abi.h changes its meaning or layout.
constexpr int32_t kAbiVersion = 1;

enum class DataType : int32_t { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2, kFloat8E4M3 = 3 };

enum class Direction : int32_t { kForward = 0, kBackward = 1, kProbe = 2 };

// What a call asks of a kernel beyond plain dense attention. A kernel of csrc/kernels.toml names those it can do.
enum Feature : uint32_t {
    kFeatureCausal = 1u << 0,
    kFeatureWindow = 1u << 1,
    kFeatureVarlen = 1u << 2,
    kFeatureSeqused = 1u << 3,
    kFeatureSinks = 1u << 4,
    kFeatureSoftcap = 1u << 5,
    kFeatureAlibi = 1u << 6,
    kFeatureDropout = 1u << 7,
    kFeatureDeterministic = 1u << 8,
    kFeatureGeneralScale = 1u
        << 9,  // softmax_scale <= 0: the row maximum of the raw scores is not that of the scaled ones
};

// One operand or result of shape (batch, rows, heads, head_dim), or (total, heads, head_dim) when the sequences are
// packed (then stride_batch is 0 and unused). The last dimension is contiguous; any other stride may be 0 (expanded).
struct TensorView {
    void* data;
    int64_t stride_batch;
    int64_t stride_row;
    int64_t stride_head;
};

// Forward attention; also the part of a backward call that describes the attention it is the gradient of.
struct ForwardParams {
    TensorView q;    // (batch, seqlen_q, heads_q, head_dim) or (total_q, heads_q, head_dim), dtype
    TensorView k;    // (batch, seqlen_k, heads_k, head_dim) or (total_k, heads_k, head_dim), dtype
    TensorView v;    // (batch, seqlen_k, heads_k, head_dim_v) or (total_k, heads_k, head_dim_v), dtype
    TensorView out;  // like q with head_dim_v, dtype
    float* lse;      // (batch, heads_q, seqlen_q), or (heads_q, total_q) when cu_seqlens_q is set; fp32, natural log

    const int32_t* cu_seqlens_q;  // (batch + 1), ascending; nullptr: dense queries
    const int32_t* cu_seqlens_k;  // (batch + 1), ascending; nullptr: dense keys
    const int32_t* seqused_q;     // (batch), how many of a sequence's query rows count; nullptr: all
    const int32_t* seqused_k;     // (batch), how many of a sequence's key rows count; nullptr: all
    const float* alibi_slopes;    // (heads_q) or (batch, heads_q); nullptr: no bias
    const void* sinks;            // (heads_q), sinks_dtype, natural-unit logits; nullptr: no sink
    const int64_t* rng_state;     // (2): seed and offset of the dropout mask; nullptr: no dropout

    int64_t alibi_stride_batch;  // elements between the slopes of two batches; 0: one row of slopes for all
    DataType dtype;              // of q, k, v and out
    DataType sinks_dtype;        // fp32, fp16 or bf16

    int32_t batch;       // sequences
    int32_t seqlen_q;    // query rows per sequence (dense), or total_q (varlen)
    int32_t seqlen_k;    // key rows per sequence (dense), or total_k (varlen)
    int32_t heads_q;     // a multiple of heads_k
    int32_t heads_k;     // key/value heads
    int32_t head_dim;    // of q and k, the caller's, at most the kernel's
    int32_t head_dim_v;  // of v and out, the caller's, at most the kernel's

    float softmax_scale;   // multiplies q.k
    float softcap;         // score = softcap * tanh(scaled / softcap); 0: none
    int32_t causal;        // 1: key j is visible to row i only if j <= i + sk - sq
    int32_t window_left;   // j >= i + sk - sq - window_left; -1: unbounded
    int32_t window_right;  // j <= i + sk - sq + window_right; -1: unbounded
    uint32_t
        dropout_threshold;  // a score is kept if its 16-bit number is >= this: round(dropout_p * 65536); 0: no dropout

    int32_t deterministic;  // 1: the same bits on every run
    int32_t num_splits;     // 0 and 1: one pass over the keys
    int32_t sm_margin;      // SMs that a persistent kernel leaves free
};

// Backward attention. `attention.out` and `attention.lse` are the forward's results, read here.
struct BackwardParams {
    ForwardParams attention;
    TensorView dout;            // like out, dtype
    const float* dlse;          // like lse; nullptr: the loss does not depend on lse
    int64_t dlse_stride_batch;  // elements; (batch, heads_q, seqlen_q), or (heads_q, total_q) with 0 here
    int64_t dlse_stride_head;
    int64_t dlse_stride_row;
    TensorView dq;  // like q, dtype
    TensorView dk;  // like k, dtype
    TensorView dv;  // like v, dtype
    void* dsinks;   // (heads_q), sinks_dtype; nullptr without sinks
};

// What the host tells a launcher beside the parameters.
struct LaunchContext {
    void* stream;            // cudaStream_t
    void* workspace;         // device memory, 256-byte aligned, at least what the kernel's workspace function asked for
    int64_t workspace_size;  // bytes
    int32_t device;          // CUDA ordinal, already current
    int32_t sm_count;        // of that device, after FLASH_EXT_SM_COUNT
};

}  // namespace flash_ext
