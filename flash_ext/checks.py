"""Checks of every argument of the operators: one clear error, before anything is allocated or drawn.

`check_forward` and `check_backward` are called by the operators, by their fakes and by the direct way of the public
functions alike, so they take real tensors, FakeTensors and symbolic sizes. They look at types, dtypes, devices, shapes
and numbers, never at device memory, with one exception: ``FLASH_EXT_CHECK=1`` (read once, at import) also validates the
values of ``cu_seqlens`` and ``seqused`` with a synchronisation.

An error is a `TypeError` (wrong Python type, dtype or kind of tensor), a `ValueError` (wrong value, shape, device or a
conflict of arguments) or a `NotImplementedError` (an argument of the interface that nothing serves yet). Its message
reads ``flash_ext: <argument> <what it is>; expected <what is allowed>``.

Cost: the common calls, dense or packed without a rare option, are recognised by one expression and leave early: after
1.7 us (dense) and 2.6 us (packed), on one core of a 2-core x86-64 server with Python 3.11 and torch 2.13, measured by::

    python -m timeit -s "import torch; from flash_ext.checks import check_forward as check" \\
        -s "q = torch.randn(2, 64, 4, 64, dtype=torch.bfloat16)" \\
        "check(q, q, q, causal=True, window_left=-1, window_right=-1, softcap=0.0, dropout_p=0.0)"
"""

from __future__ import annotations

import functools
import itertools
import numbers
import warnings
from typing import Any

import torch

from flash_ext import environment

__all__ = [
    "DTYPES",
    "LARGEST_MAGNITUDE",
    "MAX_HEAD_DIM",
    "MAX_INT32",
    "SMALLEST_MAGNITUDE",
    "VALIDATE",
    "check_backward",
    "check_bool",
    "check_forward",
    "check_operand",
    "check_probability",
    "check_size",
    "check_tensor",
    "holds_values",
    "lse_shape_of",
    "refusal",
]

VALIDATE: bool = environment.CHECK

#: dtypes of q, k and v.
DTYPES = (torch.float16, torch.bfloat16)
_SINK_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FLOAT8_DTYPES = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)

_EXACT_TENSORS = (torch.Tensor, torch.nn.Parameter)
_STRIDED, _INT32 = torch.strided, torch.int32
MAX_HEAD_DIM = 256
MAX_INT32 = 2**31 - 1  # also the largest extent of a dimension
#: softmax_scale and softcap, where they are not 0: fp32's normal numbers, with room for the factors of the kernels. As
#: in csrc/binding/plain.cpp.
SMALLEST_MAGNITUDE, LARGEST_MAGNITUDE = 1.2e-38, 1e38


def refusal(kind: type[Exception], argument: str, got: str, expected: str) -> Exception:
    """The error about one argument, in the form that all of them have."""
    return kind(f"flash_ext: {argument} {got}; expected {expected}")


def _shape(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))


def _text(value: Any) -> str:
    """``repr`` on one line, cut; an integer may have too many digits to be printed at all."""
    try:
        return " ".join(repr(value).split())[:80]
    except ValueError:
        return f"an integer of {value.bit_length()} bits"


def _holds(condition: Any) -> bool:
    """A comparison of sizes; of unknown (unbacked) symbolic ones a run-time assertion of the traced graph."""
    if condition is True or condition is False:
        return condition
    if isinstance(condition, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import expect_true

        return expect_true(condition)
    return bool(condition)


# ---------------------------------------------------------------------------------------------------------------------
# Single arguments.


def check_tensor(name: str, value: Any) -> None:
    """Raise `TypeError` unless ``value`` is a plain strided tensor, or something that stands for one."""
    if not isinstance(value, torch.Tensor):
        raise refusal(TypeError, name, f"is {type(value).__name__} ({_text(value)})", "a torch.Tensor")
    if value.is_nested:
        raise refusal(TypeError, name, "is a nested tensor", "a strided tensor (with cu_seqlens for ragged batches)")
    if value.layout is not torch.strided:
        raise refusal(TypeError, name, f"has layout {value.layout}", "a strided (dense) tensor, layout torch.strided")


def check_bool(name: str, value: Any) -> None:
    """Raise `TypeError` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise refusal(TypeError, name, f"is {_text(value)} ({type(value).__name__})", "a bool, True or False")


def _check_int(name: str, value: Any, lowest: int, allowed: str, highest: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)):
        raise refusal(TypeError, name, f"is {_text(value)} ({type(value).__name__})", allowed)
    if not _holds(value >= lowest) or (highest is not None and not _holds(value <= highest)):  # type: ignore[operator]
        raise refusal(ValueError, name, f"is {_text(value)}", allowed)


def _check_real(name: str, value: Any, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, torch.SymFloat, torch.SymInt)):
        raise refusal(TypeError, name, f"is {_text(value)} ({type(value).__name__})", allowed)


def _is_fp32(value: Any) -> bool:
    """Whether fp32 holds a number, with room for the factors of the kernels; False for NaN.

    Of a symbolic one True: a comparison would make a guard of it, and the checks see the number when the call runs.
    """
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return True
    return value == 0 or SMALLEST_MAGNITUDE <= abs(value) <= LARGEST_MAGNITUDE


def check_probability(dropout_p: Any) -> None:
    """Raise unless ``dropout_p`` is a number in [0, 1)."""
    allowed = "a number in [0, 1): the probability that a score is dropped"
    _check_real("dropout_p", dropout_p, allowed)
    if not 0.0 <= dropout_p < 1.0:  # NaN fails both comparisons
        raise refusal(ValueError, "dropout_p", f"is {_text(dropout_p)}", allowed)


def check_size(name: str, value: Any, allowed: str = "an integer of at least 0") -> None:
    """Raise unless ``value`` is an integer from 0 up."""
    _check_int(name, value, 0, allowed)


def _check_same_device(name: str, tensor: torch.Tensor, q: torch.Tensor) -> None:
    if tensor.device != q.device:
        raise refusal(ValueError, name, f"is on {tensor.device}", f"the device of q, {q.device}")


def _check_int32_vector(name: str, tensor: Any, length: Any, what: str, q: torch.Tensor) -> None:
    """cu_seqlens and seqused: 1-D contiguous int32 on q's device; ``length`` None: at least one element."""
    check_tensor(name, tensor)
    if tensor.dtype is not torch.int32:
        raise refusal(TypeError, name, f"has dtype {tensor.dtype}", f"torch.int32, shape {what}")
    if tensor.ndim != 1:
        raise refusal(ValueError, name, f"has shape {_shape(tensor)}", f"shape {what}")
    if not _holds(tensor.shape[0] >= 1 if length is None else tensor.shape[0] == length):
        raise refusal(ValueError, name, f"has shape {_shape(tensor)}", f"shape {what}")
    _check_same_device(name, tensor, q)
    if not tensor.is_contiguous():
        raise refusal(ValueError, name, f"has stride {tensor.stride()}", "a contiguous tensor")


def check_operand(name: str, tensor: Any) -> None:
    """Raise unless ``tensor`` is of a kind and dtype that q, k and v may have."""
    check_tensor(name, tensor)
    dtype = tensor.dtype
    if dtype in DTYPES:
        return
    if dtype in _FLOAT8_DTYPES:
        raise NotImplementedError(
            f"flash_ext: {name} has dtype {dtype}: fp8 attention is not available yet; "
            "expected torch.float16 or torch.bfloat16"
        )
    hint = " (under torch.autocast float32 inputs are cast)" if dtype is torch.float32 else ""
    raise refusal(TypeError, name, f"has dtype {dtype}", f"torch.float16 or torch.bfloat16{hint}")


# ---------------------------------------------------------------------------------------------------------------------
# The whole call.


def _are_plain_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rank: int) -> bool:
    """Whether q, k and v of this rank are certainly fit. False says nothing: `_check_operands` then decides."""
    if type(q) not in _EXACT_TENSORS or type(k) not in _EXACT_TENSORS or type(v) not in _EXACT_TENSORS:
        return False
    dtype = q.dtype
    if dtype not in DTYPES or k.dtype is not dtype or v.dtype is not dtype:
        return False
    try:
        if rank == 4:
            batch, seqlen_q, heads_q, head_dim = q.shape
            batch_k, seqlen_k, heads_k, head_dim_k = k.shape
            batch_v, seqlen_v, heads_v, head_dim_v = v.shape
        else:
            batch = batch_k = batch_v = 0
            seqlen_q, heads_q, head_dim = q.shape
            seqlen_k, heads_k, head_dim_k = k.shape
            seqlen_v, heads_v, head_dim_v = v.shape
    except (ValueError, RuntimeError):  # another rank; a nested tensor
        return False
    if type(batch) is not int or type(seqlen_q) is not int or type(seqlen_k) is not int:
        return False  # symbolic: a comparison would make a guard
    if batch != batch_k or head_dim != head_dim_k or heads_k == 0 or heads_q == 0 or heads_q % heads_k:
        return False
    if batch_v != batch_k or seqlen_v != seqlen_k or heads_v != heads_k:
        return False
    if head_dim & 7 or head_dim_v & 7 or not (0 < head_dim <= MAX_HEAD_DIM and 0 < head_dim_v <= MAX_HEAD_DIM):
        return False
    if batch > MAX_INT32 or seqlen_q > MAX_INT32 or seqlen_k > MAX_INT32 or heads_q > MAX_INT32:
        return False
    device = q.device
    return (
        k.device == device
        and v.device == device
        and q.layout is _STRIDED
        and k.layout is _STRIDED
        and v.layout is _STRIDED
    )


def _are_plain_cu_seqlens(cu_seqlens_q: Any, cu_seqlens_k: Any, q: torch.Tensor) -> bool:
    """Whether both are certainly fit. False says nothing: `_check_cu_seqlens` then decides."""
    if type(cu_seqlens_q) is not torch.Tensor or type(cu_seqlens_k) is not torch.Tensor:
        return False
    if cu_seqlens_q.layout is not _STRIDED or cu_seqlens_k.layout is not _STRIDED:
        return False
    shape = cu_seqlens_q.shape
    device = q.device
    return (
        len(shape) == 1
        and shape[0] > 0
        and cu_seqlens_k.shape == shape
        and cu_seqlens_q.dtype is _INT32
        and cu_seqlens_k.dtype is _INT32
        and cu_seqlens_q.device == device
        and cu_seqlens_k.device == device
        and cu_seqlens_q.is_contiguous()
        and cu_seqlens_k.is_contiguous()
    )


def _check_operands(q: Any, k: Any, v: Any, varlen: bool) -> None:
    check_operand("q", q)
    for name, tensor in (("k", k), ("v", v)):
        check_operand(name, tensor)
        if tensor.dtype is not q.dtype:
            raise refusal(TypeError, name, f"has dtype {tensor.dtype}", f"the dtype of q, {q.dtype}")
        _check_same_device(name, tensor, q)

    rows = "total_{}" if varlen else "batch, seqlen_{}"
    for name, tensor, side in (("q", q, "q"), ("k", k, "k"), ("v", v, "k")):
        if tensor.ndim != (3 if varlen else 4):
            hint = " with cu_seqlens_q and cu_seqlens_k" if varlen else " (or, with cu_seqlens, packed sequences)"
            expected = f"({rows.format(side)}, heads_{side}, head_dim)"
            raise refusal(ValueError, name, f"has shape {_shape(tensor)}", f"shape {expected}{hint}")
        for extent in tensor.shape:
            # A symbolic one is looked at when the call runs: the limit is no reason to bound a dimension of an export.
            if not isinstance(extent, torch.SymInt) and extent > MAX_INT32:
                raise refusal(ValueError, name, f"has shape {_shape(tensor)}", "each dimension below 2^31")
        if not _holds(tensor.shape[-2] >= 1):
            raise refusal(ValueError, name, f"has shape {_shape(tensor)} with 0 heads", "at least 1 head")
        head_dim = tensor.shape[-1]
        if not (_holds(head_dim >= 8) and _holds(head_dim <= MAX_HEAD_DIM) and _holds(head_dim % 8 == 0)):
            raise refusal(
                ValueError,
                name,
                f"has head_dim {head_dim} (shape {_shape(tensor)})",
                f"a multiple of 8 from 8 to {MAX_HEAD_DIM} (the public functions pad other sizes up to it)",
            )

    if not varlen and not _holds(k.shape[0] == q.shape[0]):
        raise refusal(ValueError, "k", f"has batch {k.shape[0]} (shape {_shape(k)})", f"the batch of q, {q.shape[0]}")
    if not _holds(k.shape[-1] == q.shape[-1]):
        raise refusal(ValueError, "k", f"has head_dim {k.shape[-1]}", f"the head_dim of q, {q.shape[-1]}")
    if not all(_holds(v_extent == k_extent) for v_extent, k_extent in zip(v.shape[:-1], k.shape[:-1], strict=True)):
        expected = f"the shape of k but for head_dim, {(*k.shape[:-1], 'head_dim_v')}".replace("'", "")
        raise refusal(ValueError, "v", f"has shape {_shape(v)}", expected)
    if not _holds(q.shape[-2] % k.shape[-2] == 0):
        raise refusal(ValueError, "q", f"has {q.shape[-2]} heads", f"a multiple of the {k.shape[-2]} heads of k and v")


def _check_cu_seqlens(cu_seqlens_q: Any, cu_seqlens_k: Any, q: torch.Tensor) -> None:
    for name, given, other in (
        ("cu_seqlens_k", cu_seqlens_k, "cu_seqlens_q"),
        ("cu_seqlens_q", cu_seqlens_q, "cu_seqlens_k"),
    ):
        if given is None:
            raise refusal(ValueError, name, f"is None while {other} is given", "both (packed sequences) or neither")
    _check_int32_vector("cu_seqlens_q", cu_seqlens_q, None, "(batch + 1)", q)
    _check_int32_vector("cu_seqlens_k", cu_seqlens_k, None, "(batch + 1)", q)
    if not _holds(cu_seqlens_k.shape[0] == cu_seqlens_q.shape[0]):
        raise refusal(
            ValueError,
            "cu_seqlens_k",
            f"has length {cu_seqlens_k.shape[0]}",
            f"the length of cu_seqlens_q, batch + 1 = {cu_seqlens_q.shape[0]}",
        )


def _check_alibi_slopes(alibi_slopes: Any, q: torch.Tensor, batch: Any) -> None:
    check_tensor("alibi_slopes", alibi_slopes)
    heads = q.shape[-2]
    allowed = f"shape (heads_q) = ({heads}) or (batch, heads_q) = ({batch}, {heads})"
    if alibi_slopes.dtype is not torch.float32:
        raise refusal(TypeError, "alibi_slopes", f"has dtype {alibi_slopes.dtype}", f"torch.float32, {allowed}")
    shape = alibi_slopes.shape
    if not (
        (len(shape) == 1 and _holds(shape[0] == heads))
        or (len(shape) == 2 and _holds(shape[0] == batch) and _holds(shape[1] == heads))
    ):
        raise refusal(ValueError, "alibi_slopes", f"has shape {_shape(alibi_slopes)}", allowed)
    _check_same_device("alibi_slopes", alibi_slopes, q)
    if alibi_slopes.requires_grad:
        raise refusal(
            ValueError,
            "alibi_slopes",
            "has requires_grad=True, but ALiBi slopes get no gradient",
            "requires_grad=False (pass alibi_slopes.detach())",
        )


def _check_sinks(sinks: Any, q: torch.Tensor) -> None:
    name = "sinks (learnable_sink)"
    check_tensor(name, sinks)
    if sinks.dtype not in _SINK_DTYPES:
        raise refusal(TypeError, name, f"has dtype {sinks.dtype}", "torch.float32, torch.float16 or torch.bfloat16")
    if not (sinks.ndim == 1 and _holds(sinks.shape[0] == q.shape[-2])):
        raise refusal(ValueError, name, f"has shape {_shape(sinks)}", f"shape (heads_q) = ({q.shape[-2]})")
    _check_same_device(name, sinks, q)


def _check_rng_state(rng_state: Any, dropout_p: float, q: torch.Tensor) -> None:
    if rng_state is None:
        if dropout_p > 0.0:
            raise refusal(
                ValueError, "rng_state", f"is None while dropout_p is {dropout_p}", "an int64 tensor of shape (2)"
            )
        return
    check_tensor("rng_state", rng_state)
    if dropout_p == 0.0:
        raise refusal(ValueError, "rng_state", f"is given while dropout_p is {dropout_p}", "dropout_p above 0, or None")
    if rng_state.dtype is not torch.int64:
        raise refusal(TypeError, "rng_state", f"has dtype {rng_state.dtype}", "torch.int64, shape (2)")
    if not (rng_state.ndim == 1 and _holds(rng_state.shape[0] == 2)):
        raise refusal(ValueError, "rng_state", f"has shape {_shape(rng_state)}", "shape (2)")
    _check_same_device("rng_state", rng_state, q)
    if not rng_state.is_contiguous():
        raise refusal(ValueError, "rng_state", f"has stride {rng_state.stride()}", "a contiguous tensor")


def _check_reserved(block_table: Any, q_descale: Any, k_descale: Any, v_descale: Any, num_splits: Any) -> None:
    """What the interface names already and a later release will serve."""
    if block_table is not None:
        raise NotImplementedError("flash_ext: block_table is given: paged keys are not available yet; expected None")
    for name, value in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        if value is not None:
            raise NotImplementedError(f"flash_ext: {name} is given: fp8 attention is not available yet; expected None")
    _check_int("num_splits", num_splits, 0, "an integer of at least 0 (0 and 1: one pass over the keys)")
    if not _holds(num_splits <= 1):
        raise NotImplementedError(
            f"flash_ext: num_splits is {_text(num_splits)}: splitting the keys is not available yet; "
            "expected 0 or 1 (one pass over the keys)"
        )


_FP32 = f"0 or a magnitude from {SMALLEST_MAGNITUDE} to {LARGEST_MAGNITUDE}"


def _check_numbers(
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    softmax_scale: Any,
    causal: Any,
    window_left: Any,
    window_right: Any,
    softcap: Any,
    sm_margin: Any,
    deterministic: Any,
) -> None:
    for name, hint in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if hint is not None:
            _check_int(name, hint, 0, "None or an integer of at least 0 (a hint)")
    if softmax_scale is not None:
        allowed = f"None (1 / sqrt(head_dim)) or a finite number that fp32 holds: {_FP32}"
        _check_real("softmax_scale", softmax_scale, allowed)
        if not _is_fp32(softmax_scale):
            raise refusal(ValueError, "softmax_scale", f"is {_text(softmax_scale)}", allowed)
    check_bool("causal", causal)
    for name, bound in (("window_left (window_size[0])", window_left), ("window_right (window_size[1])", window_right)):
        _check_int(name, bound, -1, "an integer of at least -1 (-1: unbounded, 0: a bound of no key on that side)")
    allowed = f"a finite number of at least 0 (0: no capping) that fp32 holds: {_FP32}"
    _check_real("softcap", softcap, allowed)
    if not (_is_fp32(softcap) and softcap >= 0.0):
        raise refusal(ValueError, "softcap", f"is {_text(softcap)}", allowed)
    if softmax_scale is not None and softcap > 0.0 and abs(softmax_scale) > LARGEST_MAGNITUDE * softcap:
        got = f"is {_text(softcap)} with softmax_scale {_text(softmax_scale)}"
        raise refusal(ValueError, "softcap", got, f"softmax_scale / softcap of at most {LARGEST_MAGNITUDE}")
    allowed = f"an integer of at least 0 (multiprocessors left free) and at most {MAX_INT32}"
    _check_int("sm_margin", sm_margin, 0, allowed, MAX_INT32)
    check_bool("deterministic", deterministic)


def check_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    sm_margin: int = 0,
    deterministic: bool = False,
) -> None:
    """Raise one error unless these are arguments of ``torch.ops.flash_ext.fwd`` that its contract covers.

    Parameters
    ----------
    q, k, v : torch.Tensor
        (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with ``cu_seqlens_q`` and ``cu_seqlens_k``.
    **keywords
        Those of the operator, see `flash_ext.ops`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        See the module's docstring.
    """
    if (
        seqused_q is None
        and seqused_k is None
        and block_table is None
        and (
            softmax_scale is None
            or (type(softmax_scale) is float and SMALLEST_MAGNITUDE <= softmax_scale <= LARGEST_MAGNITUDE)
        )
        and (causal is True or causal is False)
        and type(window_left) is int
        and window_left >= -1
        and type(window_right) is int
        and window_right >= -1
        and type(softcap) is float
        and softcap == 0.0
        and alibi_slopes is None
        and sinks is None
        and type(dropout_p) is float
        and dropout_p == 0.0
        and rng_state is None
        and q_descale is None
        and k_descale is None
        and v_descale is None
        and type(num_splits) is int
        and num_splits == 0
        and type(sm_margin) is int
        and sm_margin == 0
        and (deterministic is False or deterministic is True)
        and (max_seqlen_q is None or (type(max_seqlen_q) is int and max_seqlen_q >= 0))
        and (max_seqlen_k is None or (type(max_seqlen_k) is int and max_seqlen_k >= 0))
    ):
        if cu_seqlens_q is None and cu_seqlens_k is None:
            if _are_plain_operands(q, k, v, 4):
                return
        elif not VALIDATE and _are_plain_operands(q, k, v, 3) and _are_plain_cu_seqlens(cu_seqlens_q, cu_seqlens_k, q):
            return

    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    _check_operands(q, k, v, varlen)
    if varlen:
        _check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, q)
    _check_reserved(block_table, q_descale, k_descale, v_descale, num_splits)
    _check_numbers(
        max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_left, window_right, softcap, sm_margin, deterministic
    )
    check_probability(dropout_p)

    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    for name, seqused in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if seqused is not None:
            _check_int32_vector(name, seqused, batch, f"(batch) = ({batch})", q)
    if alibi_slopes is not None:
        _check_alibi_slopes(alibi_slopes, q, batch)
    if sinks is not None:
        _check_sinks(sinks, q)
    _check_rng_state(rng_state, dropout_p, q)

    if VALIDATE:
        _validate(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)


def _is_plain_like(tensor: Any, shape: tuple[int, ...], dtype: torch.dtype, q: torch.Tensor) -> bool:
    """Whether a tensor of the backward is certainly fit. False says nothing: `check_backward` then decides."""
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype is dtype
        and tensor.shape == shape
        and tensor.layout is torch.strided
        and tensor.device == q.device
    )


def check_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    **options: Any,
) -> None:
    """Raise one error unless these are arguments of ``torch.ops.flash_ext.bwd`` that its contract covers.

    Parameters
    ----------
    dout, out : torch.Tensor
        Like q with the head_dim of v, in q's dtype; any strides.
    dlse : torch.Tensor or None
        Like lse.
    q, k, v
        As for `check_forward`.
    lse : torch.Tensor
        (batch, heads_q, seqlen_q), or (heads_q, total_q) with ``cu_seqlens_q``; fp32.
    **options
        The keywords of the operator, as for `check_forward`.
    """
    check_forward(q, k, v, **options)
    out_shape = (*q.shape[:-1], v.shape[-1])
    lse_shape = lse_shape_of(q)
    if (
        _is_plain_like(dout, out_shape, q.dtype, q)
        and _is_plain_like(out, out_shape, q.dtype, q)
        and _is_plain_like(lse, lse_shape, torch.float32, q)
        and (dlse is None or _is_plain_like(dlse, lse_shape, torch.float32, q))
    ):
        return
    arguments: list[tuple[str, Any, tuple[Any, ...], torch.dtype]] = [
        ("dout", dout, out_shape, q.dtype),
        ("out", out, out_shape, q.dtype),
        ("lse", lse, lse_shape, torch.float32),
    ]
    if dlse is not None:
        arguments.append(("dlse", dlse, lse_shape, torch.float32))
    for name, tensor, shape, dtype in arguments:
        check_tensor(name, tensor)
        if tensor.dtype is not dtype:
            raise refusal(TypeError, name, f"has dtype {tensor.dtype}", f"{dtype}")
        if tensor.ndim != len(shape) or not all(_holds(a == b) for a, b in zip(tensor.shape, shape, strict=True)):
            raise refusal(ValueError, name, f"has shape {_shape(tensor)}", f"shape {shape}")
        _check_same_device(name, tensor, q)


def lse_shape_of(q: torch.Tensor) -> tuple[Any, ...]:
    """Shape of lse: (batch, heads_q, seqlen_q), or (heads_q, total_q) for packed q of rank 3."""
    if q.ndim == 3:
        return q.shape[1], q.shape[0]
    return q.shape[0], q.shape[2], q.shape[1]


# ---------------------------------------------------------------------------------------------------------------------
# FLASH_EXT_CHECK=1: what lies in device memory.


@functools.cache
def _warn_while_capturing() -> None:
    warnings.warn(
        "flash_ext: FLASH_EXT_CHECK=1 is skipped while a stream is capturing: values cannot be read then",
        RuntimeWarning,
        stacklevel=2,
    )


def holds_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be read here: it is no stand-in (fake, meta), and wraps no other tensor.

    What it wraps comes to the checks again, when the call reaches an operator's backend kernel.
    """
    return (
        type(tensor).__torch_dispatch__ is _NO_TORCH_DISPATCH
        and not tensor.is_meta
        and not torch._is_functional_tensor(tensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


_NO_TORCH_DISPATCH = torch.Tensor.__torch_dispatch__


def _values(tensor: torch.Tensor) -> list[int]:
    with torch._C.DisableTorchFunctionSubclass():
        values: list[int] = tensor.tolist()
    return values


def _validate(q: Any, k: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_q: Any, seqused_k: Any) -> None:
    tensors = [tensor for tensor in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k) if tensor is not None]
    if not tensors or not all(map(holds_values, (q, k, *tensors))):
        return
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        _warn_while_capturing()
        return
    for side, operand, cu_seqlens, seqused in (("q", q, cu_seqlens_q, seqused_q), ("k", k, cu_seqlens_k, seqused_k)):
        if cu_seqlens is None:
            lengths = [operand.shape[1]] * operand.shape[0]
        else:
            starts = _values(cu_seqlens)
            lengths = [stop - start for start, stop in itertools.pairwise(starts)]
            if starts[0] < 0 or starts[-1] > operand.shape[0] or any(length < 0 for length in lengths):
                expected = f"ascending values from 0 to at most total_{side} = {operand.shape[0]}"
                raise refusal(ValueError, f"cu_seqlens_{side}", f"is {starts}", expected)
        if seqused is not None:
            used = _values(seqused)
            if any(not 0 <= rows <= length for rows, length in zip(used, lengths, strict=True)):
                raise refusal(ValueError, f"seqused_{side}", f"is {used}", f"values from 0 to the lengths {lengths}")
