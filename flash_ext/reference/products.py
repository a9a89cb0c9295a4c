"""Matrix products that keep NaN and Inf to the rows that see them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def product_of_visible(weights: Tensor, seen: Tensor, values: Tensor) -> Tensor:
    """``weights @ values`` summed over seen entries only, as if the others were not there.

    A plain product turns the weight 0 of an unseen NaN or Inf into NaN. Here finite values take the plain product; the
    others are added by kind, so that a seen infinity stays one and infinities of both signs, or one of weight 0, give
    NaN.

    Parameters
    ----------
    weights : Tensor
        (..., m, n), 0 where not seen.
    seen : Tensor
        bool, (..., m, n).
    values : Tensor
        (..., n, d).

    Returns
    -------
    Tensor
        (..., m, d).
    """
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return weights @ values
    dtype = weights.dtype
    result = weights @ values.masked_fill(~finite, 0.0)
    positive, negative, zero = ((seen & sign).to(dtype) for sign in (weights > 0, weights < 0, weights == 0))
    plus, minus, nan = ((values == math.inf).to(dtype), (values == -math.inf).to(dtype), values.isnan().to(dtype))
    to_plus = positive @ plus + negative @ minus > 0
    to_minus = positive @ minus + negative @ plus > 0
    to_nan = seen.to(dtype) @ nan + zero @ (plus + minus) > 0
    nothing = torch.zeros((), dtype=dtype, device=values.device)
    for reached, value in ((to_plus, math.inf), (to_minus, -math.inf), (to_nan, math.nan)):
        result = result + torch.where(reached, value, nothing)
    return result
