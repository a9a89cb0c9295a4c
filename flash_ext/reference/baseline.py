"""The accuracy baseline: the standard computation in the inputs' type, which tests measure a path's errors against.

Matrix products in the type with fp32 accumulation (on a CPU: exact products of upcast operands), softmax in fp32, P and
dS rounded to the type before they meet a product, every result rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import materialised
from .sequences import Options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .sequences import OpKeywords


def baseline_fwd(q: Tensor, k: Tensor, v: Tensor, **keywords: Unpack[OpKeywords]) -> tuple[Tensor, Tensor]:
    """Attention as the baseline computes it.

    Parameters
    ----------
    q, k, v, **keywords
        As for `flash_ext.reference.oracle_fwd`, fp16 or bf16.

    Returns
    -------
    out : Tensor
        In the dtype of q.
    lse : Tensor
        fp32.
    """
    arithmetic = materialised.Arithmetic(dtype=torch.float32, operand=q.dtype)
    out, lse = materialised.forward(q, k, v, Options.resolve(q, k, **keywords), arithmetic)
    return out.to(q.dtype), lse


def baseline_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    **keywords: Unpack[OpKeywords],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients as the baseline computes them, from the results of `baseline_fwd`.

    Parameters
    ----------
    dout, dlse, q, k, v, out, lse, **keywords
        As for ``torch.ops.flash_ext.bwd``, fp16 or bf16.

    Returns
    -------
    dq, dk, dv : Tensor
        In the dtypes of q, k, v.
    dsinks : Tensor
        In the dtype of sinks, or 0 elements in fp32 without.
    """
    options = Options.resolve(q, k, **keywords)
    arithmetic = materialised.Arithmetic(dtype=torch.float32, operand=q.dtype)
    dq, dk, dv, dsinks = materialised.backward(dout, dlse, q, k, v, out, lse, options, arithmetic)
    if options.sinks is not None:
        dsinks = dsinks.to(options.sinks.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks
