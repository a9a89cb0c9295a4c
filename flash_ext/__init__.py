"""Exact attention for PyTorch: hand-written CUDA kernels for each GPU generation behind one interface.

Public functions take the arguments of the ``flash_attn`` package; ``torch.ops.flash_ext.fwd`` and ``.bwd`` are the
operators below them. `explain` says which kernel a call would run and why.
"""

from ._version import __version__
from .dispatch import build_info, explain, kernels
from .interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .padding import pad_input, unpad_input

__all__ = [
    "__version__",
    "build_info",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "kernels",
    "pad_input",
    "unpad_input",
]
