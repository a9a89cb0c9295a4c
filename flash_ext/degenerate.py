"""Problems without queries, keys or sequences: nothing to launch, but results that the contract defines.

Nothing here reads a device value on the host, so that such a call can be captured in a CUDA graph like any other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["backward_of_nothing", "forward_of_nothing", "is_degenerate"]


def is_degenerate(q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None) -> bool:
    """Whether there is no query row, no key row or no sequence at all, by the shapes alone."""
    return q.numel() == 0 or k.numel() == 0 or (cu_seqlens_q is not None and cu_seqlens_q.shape[0] == 1)


def _rows_in_sequences(q: Tensor, cu_seqlens_q: Tensor | None, seqused_q: Tensor | None) -> Tensor:
    """Which query rows belong to a sequence: bool (batch, 1, seqlen_q), or (1, total_q) when packed."""
    rows = torch.arange(q.shape[-3], device=q.device, dtype=torch.int32)
    if cu_seqlens_q is None:
        if seqused_q is None:
            return torch.ones((q.shape[0], 1, q.shape[1]), dtype=torch.bool, device=q.device)
        return (rows < seqused_q[:, None])[:, None]
    batch = cu_seqlens_q.shape[0] - 1
    if batch == 0:
        return torch.zeros((1, q.shape[0]), dtype=torch.bool, device=q.device)
    sequence = torch.searchsorted(cu_seqlens_q, rows, right=True) - 1
    inside = (sequence >= 0) & (sequence < batch)
    sequence = sequence.clamp(0, batch - 1)
    if seqused_q is not None:
        inside &= rows - cu_seqlens_q[sequence] < seqused_q[sequence]
    return inside[None]


def forward_of_nothing(
    q: Tensor, out: Tensor, lse: Tensor, cu_seqlens_q: Tensor | None, seqused_q: Tensor | None, sinks: Tensor | None
) -> None:
    """Write the results of a degenerate forward: out is 0 and lse -inf, or the sink in rows of a sequence."""
    out.zero_()
    lse.fill_(-math.inf)
    if sinks is not None and lse.numel() > 0:
        inside = _rows_in_sequences(q, cu_seqlens_q, seqused_q)
        lse.copy_(torch.where(inside, sinks.float()[:, None], lse))


def backward_of_nothing(
    dlse: Tensor | None,
    q: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dsinks: Tensor,
    cu_seqlens_q: Tensor | None,
    seqused_q: Tensor | None,
) -> None:
    """Write the gradients of a degenerate call: all 0, but a sink's, which is the sum of dlse where lse is the sink."""
    for gradient in (dq, dk, dv, dsinks):
        gradient.zero_()
    if dlse is None or dsinks.numel() == 0 or lse.numel() == 0:
        return
    visible = _rows_in_sequences(q, cu_seqlens_q, seqused_q) & (lse != -math.inf)
    heads = lse.ndim - 2
    dsinks.copy_(torch.where(visible, dlse, 0.0).sum([dim for dim in range(lse.ndim) if dim != heads]))
