"""The libraries that are measured, each through its public PyTorch function with default arguments.

Every provider gets the same tensors, ``(batch, seqlen, heads, head_dim)`` or packed ``(total, heads, head_dim)``, and
returns its output in the same layout. PyTorch's functions want ``(batch, heads, seqlen, head_dim)``: they get a
transposed view, which their kernels read without a copy.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext
from flash_ext.bench import results
from flash_ext.bench.rows import Row

Call = Callable[[], Tensor]


@dataclass
class Inputs:
    """The tensors of one row.

    Attributes
    ----------
    q, k, v : Tensor
        ``(batch, seqlen, heads, head_dim)``, or ``(total, heads, head_dim)`` if ``cu_seqlens`` is given.
    dout : Tensor
        Gradient of the output, like q.
    cu_seqlens : Tensor or None
        ``(batch + 1)``, int32: where each packed sequence begins and the last one ends.
    lengths : tuple of int
        Length of each sequence.
    causal : bool
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens: Tensor | None
    lengths: tuple[int, ...]
    causal: bool

    @property
    def grouped(self) -> bool:
        """Several query heads share a key/value head."""
        return self.q.shape[-2] != self.k.shape[-2]


def make_inputs(row: Row, device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Inputs:
    """Standard normal tensors for a row, the same ones on every run with the same PyTorch."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int) -> Tensor:
        size = (sum(row.lengths),) if row.packed else (row.batch, row.lengths[0])
        return torch.randn(*size, heads, row.head_dim, device=device, dtype=dtype, generator=generator)

    q, k, v, dout = normal(row.heads_q), normal(row.heads_k), normal(row.heads_k), normal(row.heads_q)
    for tensor in (q, k, v):
        tensor.requires_grad_(requires_grad)
    cu_seqlens = None
    if row.packed:
        ends = torch.tensor((0, *row.lengths)).cumsum(0)
        cu_seqlens = ends.to(device=device, dtype=torch.int32)
    return Inputs(q, k, v, dout, cu_seqlens, row.lengths, row.causal)


@dataclass(frozen=True)
class Provider:
    """One library.

    Attributes
    ----------
    name : str
        In recordings, tables and plots.
    bind : callable
        Takes `Inputs` and returns the call to time. Raises what the library raises if it cannot serve them, or
        `NotImplementedError` if it has no function for them.
    context : callable
        Makes the context in which the call runs.
    """

    name: str
    bind: Callable[[Inputs], Call]
    context: Callable[[], AbstractContextManager[object]] = nullcontext


def _bind_flash_ext(x: Inputs, **options: Any) -> Call:
    options["causal"] = x.causal
    if x.cu_seqlens is None:
        return lambda: flash_ext.flash_attn_func(x.q, x.k, x.v, **options)
    ends, longest = x.cu_seqlens, max(x.lengths)
    return lambda: flash_ext.flash_attn_varlen_func(x.q, x.k, x.v, ends, ends, longest, longest, **options)


def _bind_sdpa(x: Inputs) -> Call:
    """`torch.nn.functional.scaled_dot_product_attention`; packed sequences as a nested tensor of jagged layout."""
    grouped: dict[str, Any] = {"enable_gqa": True} if x.grouped else {}
    if x.cu_seqlens is None:
        q, k, v = (tensor.transpose(1, 2) for tensor in (x.q, x.k, x.v))
        return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=x.causal, **grouped).transpose(1, 2)

    offsets = x.cu_seqlens.long()
    shortest, longest = min(x.lengths), max(x.lengths)

    def nested(tensor: Tensor) -> Tensor:
        # Known lengths spare the call a read of the offsets on the host.
        jagged = torch.nested.nested_tensor_from_jagged(tensor, offsets, min_seqlen=shortest, max_seqlen=longest)
        return jagged.transpose(1, 2)

    nested_q, nested_k, nested_v = nested(x.q), nested(x.k), nested(x.v)
    return lambda: (
        functional.scaled_dot_product_attention(nested_q, nested_k, nested_v, is_causal=x.causal, **grouped)
        .transpose(1, 2)
        .values()
    )


def _bind_torch_varlen(x: Inputs) -> Call:
    """`torch.nn.attention.varlen.varlen_attn` (PyTorch 2.10 and later), FlashAttention-2 underneath."""
    if x.cu_seqlens is None:
        return _bind_sdpa(x)
    try:
        varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return _bind_sdpa(x)
    longest = max(x.lengths)
    # 2.10 spelled the causal mask as a flag, later versions as a window.
    causal: dict[str, Any] = {}
    if x.causal:
        flag = "is_causal" in inspect.signature(varlen_attn).parameters
        causal = {"is_causal": True} if flag else {"window_size": (-1, 0)}
    if x.grouped:
        causal["enable_gqa"] = True
    return lambda: varlen_attn(x.q, x.k, x.v, x.cu_seqlens, x.cu_seqlens, longest, longest, **causal)


def _bind_fa3(x: Inputs) -> Call:
    """FlashAttention-3's Python package. Some of its releases return (out, lse), some out."""
    library = importlib.import_module("flash_attn_interface")

    def first(result: Any) -> Tensor:
        return result[0] if isinstance(result, tuple) else result

    if x.cu_seqlens is None:
        return lambda: first(library.flash_attn_func(x.q, x.k, x.v, causal=x.causal))
    longest = max(x.lengths)
    return lambda: first(
        library.flash_attn_varlen_func(x.q, x.k, x.v, x.cu_seqlens, x.cu_seqlens, longest, longest, causal=x.causal)
    )


def _with_backend(backend: SDPBackend) -> Callable[[], AbstractContextManager[object]]:
    return lambda: sdpa_kernel(backend)


FLASH_EXT = Provider("flash_ext", _bind_flash_ext)
DETERMINISTIC = Provider("flash_ext", functools.partial(_bind_flash_ext, deterministic=True))
DEFAULT = Provider(results.DEFAULT, _bind_flash_ext)
TORCH_FA2 = Provider("fa2", _bind_torch_varlen, _with_backend(SDPBackend.FLASH_ATTENTION))
TORCH_CUDNN = Provider("cudnn", _bind_sdpa, _with_backend(SDPBackend.CUDNN_ATTENTION))
TORCH_SDPA = Provider("sdpa", _bind_sdpa)
FA3 = Provider("fa3", _bind_fa3)

# What the names in recordings stand for.
LABELS = {
    "flash_ext": "flash_ext",
    results.DEFAULT: "flash_ext, not deterministic",
    "fa2": "FlashAttention-2 (PyTorch)",
    "cudnn": "cuDNN (PyTorch)",
    "sdpa": "SDPA (PyTorch, CPU)",
    "fa3": "FlashAttention-3",
}


def providers_for(device_type: str) -> list[Provider]:
    """flash_ext first, then what it is compared with on this kind of device."""
    if device_type != "cuda":
        return [FLASH_EXT, TORCH_SDPA]
    fa3 = [FA3] if importlib.util.find_spec("flash_attn_interface") else []
    return [FLASH_EXT, TORCH_FA2, TORCH_CUDNN, *fa3]


def reference_for(device_type: str, path: str) -> str:
    """The provider that ratios are taken to.

    cuDNN comes with every PyTorch for CUDA. The sm80 path is compared with FlashAttention-2, which runs the same
    instructions; a machine without a GPU has PyTorch's own CPU kernel.
    """
    if device_type != "cuda":
        return TORCH_SDPA.name
    return TORCH_FA2.name if path == "sm80" else TORCH_CUDNN.name
