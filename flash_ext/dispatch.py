"""From checked arguments to an implementation: the kernels of one path, or the cpu path.

`forward` and `backward` take the keywords of ``torch.ops.flash_ext.fwd`` and ``bwd``, already checked by
`flash_ext.checks`; `flash_ext.selection` says which path serves a call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_ext import _C, allocate, reference
from flash_ext.checks import lse_shape_of
from flash_ext.degenerate import backward_of_nothing, forward_of_nothing, is_degenerate
from flash_ext.explanation import Explanation, build_info, explain, kernels
from flash_ext.selection import path_of, uses_reference

__all__ = ["Explanation", "backward", "build_info", "explain", "forward", "kernels", "plain_forward"]

_C.set_allocator(allocate.workspace)
_C.set_output_allocator(allocate.outputs)


#: ``plain_forward(q, k, v, options, deterministic)``: check and compute in one call if the arguments are certainly fit
#: and the path is known from an earlier call; None: nothing was done, and nothing is said of the arguments.
plain_forward = _C.plain_forward


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    sm_margin: int = 0,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute attention; the arguments have passed `flash_ext.checks.check_forward`.

    Parameters
    ----------
    q, k, v : Tensor
        (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with ``cu_seqlens``; any strides.
    **keywords
        Those of ``torch.ops.flash_ext.fwd``.

    Returns
    -------
    out : Tensor
        Like q with the head_dim of v; new and contiguous.
    lse : Tensor
        (batch, heads_q, seqlen_q), or (heads_q, total_q) with ``cu_seqlens_q``; fp32.

    Raises
    ------
    NotImplementedError
        No built kernel can serve the call on this device.
    RuntimeError
        A library cannot be loaded, or CUDA reports an error.
    """
    if uses_reference(q):
        return reference.fwd(
            q, k, v,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            seqused_q=seqused_q, seqused_k=seqused_k, block_table=block_table,
            softmax_scale=softmax_scale, causal=causal, window_left=window_left, window_right=window_right,
            softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p, rng_state=rng_state,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, num_splits=num_splits,
            sm_margin=sm_margin, deterministic=deterministic,
        )  # fmt: skip
    # max_seqlen_* are hints that no kernel needs; the arguments of later releases were refused by the checks.
    features = _C.features(
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, sinks,
        softmax_scale, causal, window_left, window_right, softcap, dropout_p, deterministic,
    )  # fmt: skip
    head_dim_v = v.shape[-1]
    path = path_of("forward", q, q.shape[-1], head_dim_v, features)
    out, lse = allocate.outputs(q, head_dim_v, *lse_shape_of(q))
    if is_degenerate(q, k, cu_seqlens_q):
        forward_of_nothing(q, out, lse, cu_seqlens_q, seqused_q, sinks)
        return out, lse
    _C.forward(
        path, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, sinks, rng_state,
        softmax_scale, causal, window_left, window_right, softcap, dropout_p, num_splits, sm_margin, deterministic,
    )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    sm_margin: int = 0,
    deterministic: bool = False,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients; the arguments have passed `flash_ext.checks.check_backward`.

    Parameters
    ----------
    dout : Tensor
        Like out.
    dlse : Tensor or None
        Like lse; None: the loss does not depend on lse.
    q, k, v, out, lse : Tensor
        Arguments and results of the forward; any strides.
    dq, dk, dv : Tensor, optional
        Where to write: like q, k and v, with memory of their own, any strides. Each that is missing is allocated.
    **keywords
        Those of ``torch.ops.flash_ext.bwd``.

    Returns
    -------
    dq, dk, dv : Tensor
        Those given, or new contiguous ones.
    dsinks : Tensor
        Like sinks, or (0) fp32 without sinks.

    Raises
    ------
    NotImplementedError, RuntimeError
        As `forward`.
    """
    if uses_reference(q):
        *gradients, dsinks = reference.bwd(
            dout, dlse, q, k, v, out, lse,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            seqused_q=seqused_q, seqused_k=seqused_k, block_table=block_table,
            softmax_scale=softmax_scale, causal=causal, window_left=window_left, window_right=window_right,
            softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p, rng_state=rng_state,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, num_splits=num_splits,
            sm_margin=sm_margin, deterministic=deterministic,
        )  # fmt: skip
        dq, dk, dv = (
            gradient if target is None else target.copy_(gradient)
            for target, gradient in zip((dq, dk, dv), gradients, strict=True)
        )
        return dq, dk, dv, dsinks
    features = _C.features(
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, sinks,
        softmax_scale, causal, window_left, window_right, softcap, dropout_p, deterministic,
    )  # fmt: skip
    path = path_of("backward", q, q.shape[-1], v.shape[-1], features)
    dq = allocate.empty_like(q) if dq is None else dq
    dk = allocate.empty_like(k) if dk is None else dk
    dv = allocate.empty_like(v) if dv is None else dv
    if sinks is None:
        dsinks = allocate.empty((0,), torch.float32, q.device)
    else:
        dsinks = allocate.empty_like(sinks)
    if is_degenerate(q, k, cu_seqlens_q):
        backward_of_nothing(dlse, q, lse, dq, dk, dv, dsinks, cu_seqlens_q, seqused_q)
        return dq, dk, dv, dsinks
    _C.backward(
        path, dout, dlse, q, k, v, out, lse, dq, dk, dv, dsinks,
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, sinks, rng_state,
        softmax_scale, causal, window_left, window_right, softcap, dropout_p, num_splits, sm_margin, deterministic,
    )  # fmt: skip
    return dq, dk, dv, dsinks
