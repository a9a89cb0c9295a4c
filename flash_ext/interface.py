"""The public functions: names, order and defaults of the shared arguments are those of the ``flash_attn`` package.

Each function turns its arguments into the keywords of the operators and goes one of two ways (`flash_ext.ops` draws
them): past the dispatcher in plain eager mode, else through ``torch.ops.flash_ext.fwd``. Packed forms take strided
views of the caller's tensor, never a copy. ``benchmarks/host_overhead.py`` measures what a call costs the host.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import pad

from . import _C
from .arguments import bound, check_result_form, flag, is_tensor_hint, number, window_bounds
from .checks import (
    DTYPES,
    MAX_HEAD_DIM,
    check_forward,
    check_operand,
    check_probability,
    check_tensor,
    holds_values,
    refusal,
)
from .ops import (
    KV_PACKED,
    PACKED_DIM,
    QKV_PACKED,
    SEPARATE,
    Attention,
    Options,
    any_autocast,
    autocast_operands,
    fwd,
    is_plain_eager,
    refuse_transforms,
    run_forward,
    run_plain_forward,
    unpack,
    wants_gradient,
)
from .selection import path_of, uses_reference

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]

# out, (out, lse) or (out, lse, None), as return_lse and return_attn_probs say.
Result = Any

_OPERAND_NAMES = {SEPARATE: ("q", "k", "v"), KV_PACKED: ("q", "kv"), QKV_PACKED: ("qkv",)}
_is_compiling = torch.compiler.is_compiling


def _check_packed(name: str, tensor: Any, parts: int, rank: int) -> None:
    """qkv and kv: their own name in the error, not that of a view of them."""
    if not _is_compiling():
        check_tensor(name, tensor)
        if tensor.dtype not in DTYPES and not any_autocast():
            check_operand(name, tensor)
    elif not isinstance(tensor, torch.Tensor):  # its dtype shows in the operator's fake
        raise refusal(TypeError, name, f"is {type(tensor).__name__}", "a torch.Tensor")
    if tensor.ndim != rank or tensor.shape[PACKED_DIM] != parts:
        rows = "batch, seqlen" if rank == 5 else "total"
        expected = f"shape ({rows}, {parts}, heads, head_dim)"
        raise refusal(ValueError, name, f"has shape {tuple(tensor.shape)}", expected)


def _check_both_cu_seqlens(cu_seqlens_q: Any, cu_seqlens_k: Any, name: str | None = None) -> None:
    """Without cu_seqlens the operator would take a batch of rank 4 for a dense one."""
    for own_name, value in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if value is None:
            raise refusal(TypeError, name or own_name, "is None", "a torch.int32 tensor of shape (batch + 1)")


def _pad_head_dims(packing: int, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The caller's tensors with zeros up to the next multiple of 8 in the last dimension; 256 is the most."""
    if not _is_compiling():
        for name, tensor in zip(_OPERAND_NAMES[packing], tensors, strict=True):
            check_tensor(name, tensor)
            if tensor.dtype is not torch.float32:  # that one may be for autocast; of others not all can be padded
                check_operand(name, tensor)
    if packing != QKV_PACKED:
        q, k = tensors[0], tensors[1]
        if q.shape[-1] != k.shape[-1]:  # padding could hide it
            name = _OPERAND_NAMES[packing][1]
            raise refusal(ValueError, name, f"has head_dim {k.shape[-1]}", f"the head_dim of q, {q.shape[-1]}")
    return tuple(pad(tensor, (0, -tensor.shape[-1] % 8)) for tensor in tensors)


def _draw_rng_state(q: torch.Tensor) -> torch.Tensor:
    """Two numbers from torch's generator of the device; the dropout mask is a function of them."""
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=q.device)


def _check_served(q: torch.Tensor, v: torch.Tensor, options: Options) -> None:
    """Raise what `dispatch.forward` would raise where no kernel can do what the call asks for."""
    if uses_reference(q):
        return
    get = options.get
    deterministic = get("deterministic", False) or torch.are_deterministic_algorithms_enabled()
    features = _C.features(
        get("cu_seqlens_q"), get("cu_seqlens_k"), get("seqused_q"), get("seqused_k"), get("alibi_slopes"),
        get("sinks"), get("softmax_scale"), get("causal", False), get("window_left", -1), get("window_right", -1),
        get("softcap", 0.0), get("dropout_p", 0.0), deterministic,
    )  # fmt: skip
    path_of("forward", q, q.shape[-1], v.shape[-1], features)


def _with_rng_state(operands: tuple[torch.Tensor, ...], options: Options, plain: bool) -> Options:
    """Check everything, so that a refused call leaves the generator as it was; then draw, if there is dropout."""
    dropout_p = options.get("dropout_p", 0.0)
    check_probability(dropout_p)
    q, k, v = operands
    check_forward(q, k, v, **{**options, "dropout_p": 0.0})
    if dropout_p == 0.0:
        return options
    if not plain:
        refuse_transforms(operands, options)
    if wants_gradient(operands, options.get("sinks")):
        for name, tensor in zip("qkv", operands, strict=True):
            if tensor.is_inference():  # autograd would refuse to keep it, later
                expected = (
                    "a normal tensor where a gradient is recorded (a clone made outside of inference_mode is one)"
                )
                raise refusal(ValueError, name, "is an inference tensor", expected)
    if plain or holds_values(q):
        _check_served(q, v, options)
    return {**options, "rng_state": _draw_rng_state(q)}


_TENSOR_OPTIONS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "alibi_slopes", "sinks")
_INT_OPTIONS = ("max_seqlen_q", "max_seqlen_k", "window_left", "window_right", "num_splits", "sm_margin")
_FLOAT_OPTIONS = ("softmax_scale", "softcap", "dropout_p")


def _check_types(packing: int, tensors: tuple[torch.Tensor, ...], options: Options) -> None:
    """For what is traced: the schema of the operator would convert some arguments, and refuse others in its own words.

    Their values are left to the operator's fake.
    """
    for name, value in zip(_OPERAND_NAMES[packing], tensors, strict=True):
        if not isinstance(value, torch.Tensor):
            raise refusal(TypeError, name, f"is {type(value).__name__}", "a torch.Tensor")
    for name, value in options.items():
        if name in _TENSOR_OPTIONS:
            fits, expected = isinstance(value, torch.Tensor), "a torch.Tensor or None"
        elif name in _INT_OPTIONS:
            fits, expected = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool), "an integer"
        elif name in _FLOAT_OPTIONS:
            numeric = isinstance(value, (int, float, torch.SymInt, torch.SymFloat))
            fits, expected = numeric and not isinstance(value, bool), "a number"
        elif name in ("causal", "deterministic"):
            fits, expected = isinstance(value, bool), "a bool, True or False"
        else:  # refused by the operator's fake, whatever it is
            fits, expected = True, ""
        if not fits:
            name = {"sinks": "sinks (learnable_sink)"}.get(name, name)
            raise refusal(TypeError, name, f"is {type(value).__name__}", expected)


def _cast_by_autocast(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """What the operator's Autocast kernel would do, before the checks, and of a packed tensor in one piece."""
    device_type = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else ""
    if device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type):
        return autocast_operands(tensors, device_type)
    return tensors


def _any_attention(
    packing: int, tensors: tuple[torch.Tensor, ...], options: Options, plain: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` of any call, or the error that it deserves; ``plain`` is what `is_plain_eager` said."""
    head_dim_v = 0  # that of out, once it is padded
    if _is_compiling():
        _check_types(packing, tensors, options)
    try:
        head_dim, last = tensors[0].size(-1), tensors[-1].size(-1)
    except (AttributeError, IndexError, RuntimeError, TypeError):
        head_dim = last = 0  # no tensor (NumPy's size is a number), of no rank, or nested: for the checks to say
    if (head_dim % 8 or last % 8) and head_dim <= MAX_HEAD_DIM and last <= MAX_HEAD_DIM:
        tensors = _pad_head_dims(packing, tensors)
        head_dim_v = last
        if "softmax_scale" not in options:  # not setdefault, which torch 2.4 cannot trace
            options["softmax_scale"] = 1.0 / math.sqrt(head_dim)

    if _is_compiling():  # the operator's fake checks
        q, k, v = unpack(packing, tensors)
        if options.get("dropout_p", 0.0) > 0.0:
            options["rng_state"] = _draw_rng_state(q)
        out, lse = fwd(q, k, v, **options)
    elif plain:
        if "dropout_p" in options:
            options = _with_rng_state(unpack(packing, tensors), options, plain=True)
        sinks = options.get("sinks")
        if wants_gradient(tensors, sinks):
            out, lse = Attention.apply(options, packing, True, sinks, *tensors)
        else:
            q, k, v = unpack(packing, tensors)
            out, lse = run_forward(q, k, v, options)
    else:
        tensors = _cast_by_autocast(tensors)
        q, k, v = unpack(packing, tensors)
        options = _with_rng_state((q, k, v), options, plain=False)
        out, lse = fwd(q, k, v, **options)
    return (out[..., :head_dim_v] if head_dim_v else out), lse


def _attention(
    packing: int,
    tensors: tuple[torch.Tensor, ...],
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    block_table: torch.Tensor | None,
    return_lse: bool,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    learnable_sink: torch.Tensor | None,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    num_splits: int,
    sm_margin: int,
) -> Result:
    """What the public functions share; ``tensors`` are q, k, v or q, kv or qkv, as ``packing`` says."""
    if return_attn_probs is not False or return_lse is not False:
        return_attn_probs, return_lse = flag(return_attn_probs), flag(return_lse)
        check_result_form(return_attn_probs, return_lse)
    window_left, window_right = window_bounds(window_size)

    # Only what is not at its default, or not of its type: passing 22 keywords down three times would take 3 us.
    options: Options = {}
    if cu_seqlens_q is not None:
        options["cu_seqlens_q"] = cu_seqlens_q
    if cu_seqlens_k is not None:
        options["cu_seqlens_k"] = cu_seqlens_k
    if max_seqlen_q is not None and not is_tensor_hint(max_seqlen_q):
        options["max_seqlen_q"] = bound(max_seqlen_q)
    if max_seqlen_k is not None and not is_tensor_hint(max_seqlen_k):
        options["max_seqlen_k"] = bound(max_seqlen_k)
    if seqused_q is not None:
        options["seqused_q"] = seqused_q
    if seqused_k is not None:
        options["seqused_k"] = seqused_k
    if block_table is not None:
        options["block_table"] = block_table
    if softmax_scale is not None:
        options["softmax_scale"] = softmax_scale if type(softmax_scale) is float else number(softmax_scale)
    if causal is not False:
        options["causal"] = causal if causal is True else flag(causal)
    if type(window_left) is not int or window_left != -1:
        options["window_left"] = bound(window_left)
    if type(window_right) is not int or window_right != -1:
        options["window_right"] = bound(window_right)
    if type(softcap) is not float or softcap != 0.0:
        options["softcap"] = number(softcap)
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    if learnable_sink is not None:
        options["sinks"] = learnable_sink
    if type(dropout_p) is not float or dropout_p != 0.0:
        options["dropout_p"] = number(dropout_p)
    if q_descale is not None:
        options["q_descale"] = q_descale
    if k_descale is not None:
        options["k_descale"] = k_descale
    if v_descale is not None:
        options["v_descale"] = v_descale
    if type(num_splits) is not int or num_splits != 0:
        options["num_splits"] = number(num_splits)
    if type(sm_margin) is not int or sm_margin != 0:
        options["sm_margin"] = number(sm_margin)
    if deterministic is not False:
        options["deterministic"] = deterministic if deterministic is True else flag(deterministic)

    plain = not _is_compiling() and is_plain_eager(tensors, options)
    results = None
    if plain and packing == SEPARATE and not wants_gradient(tensors):
        q, k, v = tensors
        results = run_plain_forward(q, k, v, options)  # most calls need nothing else
    out, lse = _any_attention(packing, tensors, options, plain) if results is None else results
    if return_attn_probs:
        return out, lse, None
    return (out, lse) if return_lse else out


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    sm_margin: int = 0,
) -> Result:
    """Exact attention over a dense batch.

    Query i sees key j as if the ends of both sequences were aligned: with ``causal`` the keys up to
    ``i + seqlen_k - seqlen_q``, with ``window_size=(left, right)`` those from ``i + seqlen_k - seqlen_q - left`` to
    ``i + seqlen_k - seqlen_q + right``; both together intersect. A query that sees no key gets ``out`` 0 and ``lse``
    -inf.

    Parameters
    ----------
    q : torch.Tensor
        (batch, seqlen_q, heads_q, head_dim), fp16 or bf16, any strides; no copy is made if the last dimension is
        contiguous and the other strides are multiples of 16 bytes. ``head_dim`` is at most 256; one that is no multiple
        of 8 is padded with zeros.
    k : torch.Tensor
        (batch, seqlen_k, heads_k, head_dim). ``heads_q`` must be a multiple of ``heads_k``: consecutive query heads
        share a key head (GQA, MQA).
    v : torch.Tensor
        (batch, seqlen_k, heads_k, head_dim_v).
    dropout_p : float, default 0.0
        Probability in [0, 1) that a score is dropped; 0 in evaluation. The mask's seed is drawn from torch's generator
        of the device.
    softmax_scale : float, optional
        Multiplies q.k; by default 1 / sqrt(head_dim).
    causal : bool, default False
    window_size : (int, int), default (-1, -1)
        Keys seen to the left and to the right of the diagonal; -1 is unbounded, 0 a real bound.
    softcap : float, default 0.0
        Scores become ``softcap * tanh(score / softcap)``; 0 leaves them.
    alibi_slopes : torch.Tensor, optional
        (heads_q) or (batch, heads_q), fp32: ``slope * |i + seqlen_k - seqlen_q - j|`` is subtracted from the score.
        Gets no gradient: ``requires_grad`` is refused.
    deterministic : bool, default False
        The same bits on every run, in the backward too (the forward always gives them). torch's deterministic mode
        implies it.
    return_attn_probs : bool, default False
        Return ``(out, lse, None)``, as ``flash_attn`` does without dropout; the probabilities are never made.
    return_lse : bool, default False
        Return ``(out, lse)``.
    seqused_q, seqused_k : torch.Tensor, optional
        (batch), int32: how many rows of each sequence count. Rows after them may hold anything; ``out`` is 0 there.
    learnable_sink : torch.Tensor, optional
        (heads_q), fp32, fp16 or bf16: a logit per head that takes part in the softmax without a value. Differentiable.
    q_descale, k_descale, v_descale : torch.Tensor, optional
        Reserved for fp8: refused.
    num_splits : int, default 0
        0 or 1: one pass over the keys; more is refused.
    sm_margin : int, default 0
        Multiprocessors that persistent kernels leave free.

    Returns
    -------
    out : torch.Tensor
        (batch, seqlen_q, heads_q, head_dim_v), in the dtype of q.
    lse : torch.Tensor
        (batch, heads_q, seqlen_q), fp32: natural logarithm of the sum of exponentials of the visible scores, and of the
        sink; dropout does not change it. Differentiable. Only with ``return_lse`` or ``return_attn_probs``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        For an argument outside of the above; nothing has been computed or drawn then.

    Notes
    -----
    Under ``torch.autocast`` q, k and v are cast to its dtype; otherwise float32 is refused. First derivatives in
    reverse mode only. Algorithms: FlashAttention-2 (arXiv 2307.08691), -3 (2407.08608) and -4, by GPU; see
    `flash_ext.explain`.
    """
    return _attention(
        SEPARATE,
        (q, k, v),
        None,
        None,
        None,
        None,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        None,
        return_lse,
        seqused_q,
        seqused_k,
        learnable_sink,
        q_descale,
        k_descale,
        v_descale,
        num_splits,
        sm_margin,
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    return_lse: bool = False,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    sm_margin: int = 0,
) -> Result:
    """Exact attention over sequences of different lengths, packed without padding.

    Parameters
    ----------
    q : torch.Tensor
        (total_q, heads_q, head_dim), fp16 or bf16: sequence after sequence.
    k : torch.Tensor
        (total_k, heads_k, head_dim).
    v : torch.Tensor
        (total_k, heads_k, head_dim_v).
    cu_seqlens_q, cu_seqlens_k : torch.Tensor
        (batch + 1), int32, ascending, on the device: sequence b owns the rows from ``cu_seqlens[b]`` to before
        ``cu_seqlens[b + 1]``. Values are not read on the host; bad ones give wrong rows, never an access outside of the
        tensors (``FLASH_EXT_CHECK=1`` validates them). Rows outside of all sequences may hold anything; ``out`` is 0
        there.
    max_seqlen_q, max_seqlen_k : int or None
        Hints: an upper bound of the lengths, or None. They never shorten a sequence. A 0-dimensional integer tensor,
        which ``cu_seqlens.diff().max()`` gives, is accepted too and not read.
    block_table : torch.Tensor, optional
        Reserved for paged keys: refused.

    Other Parameters
    ----------------
    The others are those of `flash_attn_func`, with seqlen_q and seqlen_k the lengths of each sequence.

    Returns
    -------
    out : torch.Tensor
        (total_q, heads_q, head_dim_v), in the dtype of q.
    lse : torch.Tensor
        (heads_q, total_q), fp32. Only with ``return_lse`` or ``return_attn_probs``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `flash_attn_func`.
    """
    _check_both_cu_seqlens(cu_seqlens_q, cu_seqlens_k)
    return _attention(
        SEPARATE,
        (q, k, v),
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        block_table,
        return_lse,
        seqused_q,
        seqused_k,
        learnable_sink,
        q_descale,
        k_descale,
        v_descale,
        num_splits,
        sm_margin,
    )


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    sm_margin: int = 0,
) -> Result:
    """`flash_attn_func` for q, k and v in one tensor (self-attention with as many key as query heads).

    Works on strided views, without a copy; in plain eager mode the gradients are written straight into one packed
    tensor.

    Parameters
    ----------
    qkv : torch.Tensor
        (batch, seqlen, 3, heads, head_dim), fp16 or bf16.

    Other Parameters
    ----------------
    The others are those of `flash_attn_func`.

    Returns
    -------
    out : torch.Tensor
        (batch, seqlen, heads, head_dim).
    lse : torch.Tensor
        (batch, heads, seqlen), fp32. Only with ``return_lse`` or ``return_attn_probs``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `flash_attn_func`.
    """
    _check_packed("qkv", qkv, 3, 5)
    return _attention(
        QKV_PACKED,
        (qkv,),
        None,
        None,
        None,
        None,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        None,
        return_lse,
        seqused_q,
        seqused_k,
        learnable_sink,
        q_descale,
        k_descale,
        v_descale,
        num_splits,
        sm_margin,
    )


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    sm_margin: int = 0,
) -> Result:
    """`flash_attn_func` for k and v in one tensor.

    Works on strided views, without a copy; in plain eager mode the gradients are written straight into one packed
    tensor.

    Parameters
    ----------
    q : torch.Tensor
        (batch, seqlen_q, heads_q, head_dim), fp16 or bf16.
    kv : torch.Tensor
        (batch, seqlen_k, 2, heads_k, head_dim).

    Other Parameters
    ----------------
    The others are those of `flash_attn_func`.

    Returns
    -------
    out : torch.Tensor
        (batch, seqlen_q, heads_q, head_dim).
    lse : torch.Tensor
        (batch, heads_q, seqlen_q), fp32. Only with ``return_lse`` or ``return_attn_probs``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `flash_attn_func`.
    """
    _check_packed("kv", kv, 2, 5)
    return _attention(
        KV_PACKED,
        (q, kv),
        None,
        None,
        None,
        None,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        None,
        return_lse,
        seqused_q,
        seqused_k,
        learnable_sink,
        q_descale,
        k_descale,
        v_descale,
        num_splits,
        sm_margin,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    sm_margin: int = 0,
) -> Result:
    """`flash_attn_varlen_func` for q, k and v in one tensor (self-attention with as many key as query heads).

    Works on strided views, without a copy; in plain eager mode the gradients are written straight into one packed
    tensor.

    Parameters
    ----------
    qkv : torch.Tensor
        (total, 3, heads, head_dim), fp16 or bf16.
    cu_seqlens : torch.Tensor
        (batch + 1), int32, as for `flash_attn_varlen_func`.
    max_seqlen : int or None
        A hint.

    Other Parameters
    ----------------
    The others are those of `flash_attn_func`.

    Returns
    -------
    out : torch.Tensor
        (total, heads, head_dim).
    lse : torch.Tensor
        (heads, total), fp32. Only with ``return_lse`` or ``return_attn_probs``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `flash_attn_func`.
    """
    _check_packed("qkv", qkv, 3, 4)
    _check_both_cu_seqlens(cu_seqlens, cu_seqlens, "cu_seqlens")
    return _attention(
        QKV_PACKED,
        (qkv,),
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        None,
        return_lse,
        seqused_q,
        seqused_k,
        learnable_sink,
        q_descale,
        k_descale,
        v_descale,
        num_splits,
        sm_margin,
    )


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    sm_margin: int = 0,
) -> Result:
    """`flash_attn_varlen_func` for k and v in one tensor.

    Works on strided views, without a copy; in plain eager mode the gradients are written straight into one packed
    tensor.

    Parameters
    ----------
    q : torch.Tensor
        (total_q, heads_q, head_dim), fp16 or bf16.
    kv : torch.Tensor
        (total_k, 2, heads_k, head_dim).
    cu_seqlens_q, cu_seqlens_k : torch.Tensor
        (batch + 1), int32, as for `flash_attn_varlen_func`.
    max_seqlen_q, max_seqlen_k : int or None
        Hints.

    Other Parameters
    ----------------
    The others are those of `flash_attn_func`.

    Returns
    -------
    out : torch.Tensor
        (total_q, heads_q, head_dim).
    lse : torch.Tensor
        (heads_q, total_q), fp32. Only with ``return_lse`` or ``return_attn_probs``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `flash_attn_func`.
    """
    _check_packed("kv", kv, 2, 4)
    _check_both_cu_seqlens(cu_seqlens_q, cu_seqlens_k)
    return _attention(
        KV_PACKED,
        (q, kv),
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        None,
        return_lse,
        seqused_q,
        seqused_k,
        learnable_sink,
        q_descale,
        k_descale,
        v_descale,
        num_splits,
        sm_margin,
    )
