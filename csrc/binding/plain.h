// The short way of a forward call: arguments that are certainly fit are recognised, and served, in one call.
#pragma once

#include <pybind11/pybind11.h>
#include <stdint.h>

#include <string_view>

#include "api/abi.h"

namespace flash_ext {

// Runs the forward pass and returns (out, lse), or returns None without having done anything. None says nothing about
// the call: flash_ext/checks.py then looks at it and flash_ext/dispatch.py serves it. `options` are the keywords of the
// operator that are not at their default; `deterministic` is added to them.
pybind11::object plain_forward(pybind11::handle q, pybind11::handle k, pybind11::handle v, pybind11::dict options,
                               bool deterministic);

// Tells plain_forward which path serves calls of this kind; flash_ext/selection.py decides. `device` is the CUDA
// ordinal, -1 for CPU tensors (under emulation). Other kinds are none of its business.
void set_plain_path(std::string_view path, DataType dtype, int32_t device, int32_t head_dim, int32_t head_dim_v,
                    uint32_t features);

// callable(q, head_dim_v, *lse_shape) -> (out, lse), both new and contiguous.
void set_output_allocator(pybind11::object allocator);

}  // namespace flash_ext
