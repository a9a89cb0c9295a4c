"""Arguments of the public functions as callers write them, and as the operators take them.

Other libraries' numbers become Python's, and a bound beyond 32 bits the largest that the kernels know; anything else
stays as it is, for `flash_ext.checks` to refuse by name.
"""

from __future__ import annotations

import numbers
import sys
from typing import Any

import torch

from .checks import MAX_INT32, check_bool, refusal

__all__ = ["bound", "check_result_form", "flag", "is_tensor_hint", "number", "window_bounds"]

_is_compiling = torch.compiler.is_compiling


def number(value: Any) -> Any:
    """Other libraries' integers and reals (NumPy's) as Python's."""
    kind = type(value)
    if kind is int or kind is float or kind is bool:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    try:
        return float(value) if isinstance(value, numbers.Real) else value
    except OverflowError:  # a fraction
        return value


def bound(value: Any) -> Any:
    """A bound of a window or of a length: beyond 32 bits it says no more, since no sequence is longer.

    While a compiler traces, a comparison would make a guard; the operators then do the same when the call runs.
    """
    value = number(value)
    if type(value) is int and not _is_compiling() and value > MAX_INT32:
        return MAX_INT32
    return value


def flag(value: Any) -> Any:
    """NumPy's bool as Python's."""
    numpy = sys.modules.get("numpy")
    return bool(value) if numpy is not None and isinstance(value, numpy.bool_) else value


def is_tensor_hint(value: Any) -> bool:
    """Whether max_seqlen is a 0-dimensional integer tensor: as good as None, since reading it would synchronise."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.ndim == 0 and not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)


def window_bounds(window_size: Any) -> tuple[Any, Any]:
    """Left and right of ``window_size``; raises `TypeError` unless it is a pair."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise refusal(TypeError, "window_size", f"is {window_size!r:.80}", "a pair of integers (left, right)")
    return window_size[0], window_size[1]


def check_result_form(return_attn_probs: Any, return_lse: Any) -> None:
    """Raise unless both are bools, and not both True."""
    check_bool("return_attn_probs", return_attn_probs)
    check_bool("return_lse", return_lse)
    if return_attn_probs and return_lse:
        raise refusal(ValueError, "return_lse", "is True with return_attn_probs=True", "one of the two")
