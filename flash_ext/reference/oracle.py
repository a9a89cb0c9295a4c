"""The oracle: attention and its gradients in fp64, straight from the formula of `materialised`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import materialised
from .sequences import Options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .sequences import OpKeywords

_FP64 = materialised.Arithmetic(dtype=torch.float64, operand=torch.float64)


def oracle_fwd(q: Tensor, k: Tensor, v: Tensor, **keywords: Unpack[OpKeywords]) -> tuple[Tensor, Tensor]:
    """Attention in fp64.

    Parameters
    ----------
    q, k, v : Tensor
        (batch, seqlen, heads, d), or (total, heads, d) with ``cu_seqlens_*``; any float dtype, strides and device.
    **keywords
        Those of ``torch.ops.flash_ext.fwd``.

    Returns
    -------
    out : Tensor
        fp64, like q with the head dim of v; 0 in rows outside the sequences and rows without keys.
    lse : Tensor
        fp64, (batch, heads_q, seqlen_q) or (heads_q, total_q); -inf in rows outside the sequences, and in rows without
        keys unless there is a sink.
    """
    return materialised.forward(q, k, v, Options.resolve(q, k, **keywords), _FP64)


def oracle_bwd(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, **keywords: Unpack[OpKeywords]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of attention in fp64, by explicit formulas.

    Parameters
    ----------
    dout : Tensor
        Gradient of the loss by out.
    dlse : Tensor or None
        Gradient of the loss by lse; not read where lse is -inf.
    q, k, v, **keywords
        As for `oracle_fwd`.

    Returns
    -------
    dq, dk, dv : Tensor
        fp64, like q, k, v.
    dsinks : Tensor
        fp64, (heads_q), or 0 elements without sinks.
    """
    options = Options.resolve(q, k, **keywords)
    out, lse = materialised.forward(q, k, v, options, _FP64)
    return materialised.backward(dout, dlse, q, k, v, out, lse, options, _FP64)
