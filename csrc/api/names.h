// The names of features, types and directions as csrc/kernels.toml and the Python layer spell them, and as the
// arguments of the public functions that ask for them.
#pragma once

#include <stdint.h>

#include "params.h"

namespace flash_ext {

struct FeatureName {
    uint32_t feature;
    const char* name;      // in csrc/kernels.toml
    const char* argument;  // what a user wrote to ask for it
};

constexpr FeatureName kFeatureNames[] = {
    {kFeatureCausal, "causal", "causal"},
    {kFeatureWindow, "window", "window_size"},
    {kFeatureVarlen, "varlen", "cu_seqlens"},
    {kFeatureSeqused, "seqused", "seqused"},
    {kFeatureSinks, "sinks", "learnable_sink"},
    {kFeatureSoftcap, "softcap", "softcap"},
    {kFeatureAlibi, "alibi", "alibi_slopes"},
    {kFeatureDropout, "dropout", "dropout_p"},
    {kFeatureDeterministic, "deterministic", "deterministic"},
    {kFeatureGeneralScale, "general_scale", "softmax_scale <= 0"},
};

struct DataTypeName {
    DataType dtype;
    const char* name;
};

constexpr DataTypeName kDataTypeNames[] = {
    {DataType::kFloat16, "fp16"},
    {DataType::kBFloat16, "bf16"},
    {DataType::kFloat32, "fp32"},
    {DataType::kFloat8E4M3, "fp8"},
};

constexpr const char* data_type_name(DataType dtype) {
    for (const DataTypeName& entry : kDataTypeNames) {
        if (entry.dtype == dtype) return entry.name;
    }
    return "unknown";
}

constexpr const char* direction_name(Direction direction) {
    switch (direction) {
        case Direction::kForward:
            return "forward";
        case Direction::kBackward:
            return "backward";
        case Direction::kProbe:
            return "probe";
    }
    return "unknown";
}

}  // namespace flash_ext
