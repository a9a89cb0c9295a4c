"""The yardstick itself: the accuracy rule must pass right results and fail wrong ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.accuracy import assert_accurate, assert_lse, assert_same_bits, ulp
from torch import Tensor

DTYPES = [torch.float16, torch.bfloat16]
_TILE = 64


def _inputs(rng: torch.Generator, dtype: torch.dtype, rows: int = 200, keys: int = 200) -> tuple[Tensor, ...]:
    q, dout = (torch.randn(1, rows, 2, 64, generator=rng).to(dtype) for _ in range(2))
    k, v = (torch.randn(1, keys, 2, 64, generator=rng).to(dtype) for _ in range(2))
    return q, k, v, dout


def _kernel_like(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = True) -> tuple[Tensor, Tensor]:
    """Out and lse as a kernel gets them, with other roundings than the baseline's.

    Tiles of keys, powers of two, P not normalised before it is rounded, one division at the end.
    """
    dtype = q.dtype
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    rows, keys = q.shape[2], k.shape[2]
    scores = q @ k.transpose(2, 3) * (scale * math.log2(math.e))
    if causal:
        seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        scores = scores.masked_fill(~seen, -torch.inf)
    maximum = torch.full((*q.shape[:3], 1), -torch.inf)
    total, out = torch.zeros_like(maximum), torch.zeros(*q.shape[:3], v.shape[3])
    for first in range(0, keys, _TILE):
        tile = scores[..., first : first + _TILE]
        new = torch.maximum(maximum, tile.amax(-1, keepdim=True))
        p = torch.exp2(tile - new)
        rescale = torch.exp2(maximum - new)
        total = total * rescale + p.sum(-1, keepdim=True)
        out = out * rescale + p.to(dtype).float() @ v[:, :, first : first + _TILE]
        maximum = new
    lse = (maximum + total.log2()).squeeze(-1) * math.log(2.0)
    return (out / total).transpose(1, 2).to(dtype), lse


def _references(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> tuple[Tensor, Tensor, Tensor]:
    from flash_ext import reference

    out, lse = reference.oracle_fwd(q, k, v, **keywords)
    return out, reference.baseline_fwd(q, k, v, **keywords)[0], lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_right_results_pass(rng: torch.Generator, dtype: torch.dtype, rows: int) -> None:
    """What an honest kernel rounds differently is within the rule."""
    for _ in range(10):
        q, k, v, _ = _inputs(rng, dtype, rows, rows)
        out, baseline, lse = _references(q, k, v, causal=True)
        got, got_lse = _kernel_like(q, k, v, 0.125)
        assert_accurate("out", got, out, baseline)
        assert_lse(got_lse, lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_scale_fails(rng: torch.Generator, dtype: torch.dtype) -> None:
    """A softmax scale wrong by 1 % is an error in out, in lse and in every gradient."""
    from flash_ext import reference

    q, k, v, dout = _inputs(rng, dtype)
    out, baseline, lse = _references(q, k, v, softmax_scale=0.125)
    wrong, wrong_lse = _kernel_like(q, k, v, 0.125 * 1.01, causal=False)
    with pytest.raises(AssertionError, match="out: not accurate"):
        assert_accurate("out", wrong, out, baseline)
    with pytest.raises(AssertionError, match="lse: off by"):
        assert_lse(wrong_lse, lse)
    right = reference.oracle_bwd(dout, None, q, k, v, softmax_scale=0.125)
    ours = reference.baseline_bwd(dout, None, q, k, v, baseline, lse.float(), softmax_scale=0.125)
    off = reference.oracle_bwd(dout, None, q, k, v, softmax_scale=0.125 * 1.01)
    for name, truth, base, got in zip(("dq", "dk"), right[:2], ours[:2], off[:2], strict=True):
        assert_accurate(name, truth.to(dtype), truth, base)
        with pytest.raises(AssertionError, match=f"{name}: not accurate"):
            assert_accurate(name, got.to(dtype), truth, base)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_off_by_one_fails(rng: torch.Generator, dtype: torch.dtype) -> None:
    """One key too many in every row."""
    q, k, v, _ = _inputs(rng, dtype)
    out, baseline, lse = _references(q, k, v, window_right=0)
    wrong, _, wrong_lse = _references(q, k, v, window_right=1)
    with pytest.raises(AssertionError, match="out: not accurate"):
        assert_accurate("out", wrong.to(dtype), out, baseline)
    with pytest.raises(AssertionError, match="lse: off by"):
        assert_lse(wrong_lse.float(), lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_dropped_row_fails(rng: torch.Generator, dtype: torch.dtype, value: float) -> None:
    """One row that was never written, or one element; the report names it."""
    q, k, v, _ = _inputs(rng, dtype)
    out, baseline, lse = _references(q, k, v)
    wrong = out.to(dtype)
    wrong[0, 137, 1] = value
    with pytest.raises(AssertionError, match=r"\[0, 137, 1"):
        assert_accurate("out", wrong, out, baseline)
    wrong_lse = lse.float()
    wrong_lse[0, 1, 137] = value
    with pytest.raises(AssertionError, match=r"\[0, 1, 137\]"):
        assert_lse(wrong_lse, lse)


def test_shape_and_empty() -> None:
    """A result of another shape fails even if it is empty."""
    empty = torch.empty(0, 4)
    assert_accurate("out", empty, empty.double(), empty)
    with pytest.raises(AssertionError, match="shape"):
        assert_accurate("out", torch.empty(1, 4), empty.double(), empty)


def test_bits_are_compared() -> None:
    """NaN equals itself, 0 does not equal -0."""
    x = torch.tensor([math.nan, 0.0, 1.0])
    assert_same_bits("x", x.clone(), x)
    with pytest.raises(AssertionError, match=r"at \[1\]"):
        assert_same_bits("x", torch.tensor([math.nan, -0.0, 1.0]), x)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_ulp(dtype: torch.dtype) -> None:
    """The spacing of numbers, down to the subnormal ones."""
    info = torch.finfo(dtype)
    magnitudes = torch.tensor([0.0, info.smallest_normal, 0.75, 1.0, 1.5, 2.0], dtype=torch.float64)
    smallest = info.smallest_normal * info.eps
    expected = torch.tensor([smallest, smallest, info.eps / 2, info.eps, info.eps, 2 * info.eps], dtype=torch.float64)
    assert torch.equal(ulp(magnitudes, dtype), expected)
