"""Matrix products that keep NaN and Inf to the rows that see them.

A plain product turns the weight 0 of an entry that is not there (a masked key, a row past the end) into NaN when it
meets a NaN or Inf. Here a product is split in two: finite values take the plain product, `special_terms` adds the
others by kind, for seen entries only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def are_finite(values: Tensor) -> bool:
    """False if a value is NaN or infinite; rarely also for finite values whose sum overflows. Reads the device."""
    return bool(torch.isfinite(values.sum()))


def without_specials(values: Tensor) -> Tensor:
    """`values` with 0 for each NaN and Inf."""
    return values.masked_fill(~torch.isfinite(values), 0.0)


def special_terms(weights: Tensor, seen: Tensor, values: Tensor) -> Tensor:
    """What the NaN and Inf of `values` add to ``weights @ values``.

    Parameters
    ----------
    weights : Tensor
        (..., m, n).
    seen : Tensor
        bool, (..., m, n).
    values : Tensor
        (..., n, d).

    Returns
    -------
    Tensor
        (..., m, d): 0 where no special value is seen, an infinity where those of one sign are, NaN where both are, or
        one with the weight 0, or a NaN.
    """
    dtype = weights.dtype
    positive, negative, zero = ((seen & sign).to(dtype) for sign in (weights > 0, weights < 0, weights == 0))
    plus, minus, nan = (kind.to(dtype) for kind in (values == math.inf, values == -math.inf, values.isnan()))
    to_plus = positive @ plus + negative @ minus > 0
    to_minus = positive @ minus + negative @ plus > 0
    to_nan = seen.to(dtype) @ nan + zero @ (plus + minus) > 0
    nothing = torch.zeros((), dtype=dtype, device=values.device)
    terms = torch.where(to_plus, math.inf, nothing) + torch.where(to_minus, -math.inf, nothing)
    return terms.masked_fill(to_nan, math.nan)


def product_of_visible(weights: Tensor, seen: Tensor, values: Tensor) -> Tensor:
    """``weights @ values`` summed over seen entries only, as if the others were not there.

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
    if are_finite(values):
        return weights @ values
    return weights @ without_specials(values) + special_terms(weights, seen, values)
