// From Python arguments to parameter structs, and the launch.
#pragma once

#include <pybind11/pybind11.h>
#include <stdint.h>

#include <optional>
#include <string_view>

#include "params.h"

namespace flash_ext {

// What forward and backward have in common after the tensors of their own: the keywords of the operators. Tensors are
// None where absent.
struct Options {
    pybind11::handle cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, sinks, rng_state;
    std::optional<double> softmax_scale;  // absent: 1 / sqrt(head_dim)
    bool causal;
    int64_t window_left, window_right;
    double softcap, dropout_p;
    int64_t num_splits, sm_margin;
    bool deterministic;
};

// What a call asks of a kernel: bitwise or of Feature. The one place that decides it.
uint32_t features_of(const Options& options);

void forward(std::string_view path, pybind11::handle q, pybind11::handle k, pybind11::handle v, pybind11::handle out,
             pybind11::handle lse, const Options& options);

// dq, dk, dv are written where they lie, or through a packed temporary; dlse, sinks and dsinks may be None.
void backward(std::string_view path, pybind11::handle dout, pybind11::handle dlse, pybind11::handle q,
              pybind11::handle k, pybind11::handle v, pybind11::handle out, pybind11::handle lse, pybind11::handle dq,
              pybind11::handle dk, pybind11::handle dv, pybind11::handle dsinks, const Options& options);

// Fills an fp32 tensor with a value through the path's probe kernel.
void probe(std::string_view path, pybind11::handle tensor, double value);

// callable(nbytes, like) -> uint8 tensor of nbytes on like's device, its address a multiple of 256.
void set_allocator(pybind11::object allocator);

}  // namespace flash_ext
