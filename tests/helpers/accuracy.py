"""The accuracy rule of the numerical contract, and a report that says where a result is wrong.

Baseline: the same attention with matrix products in the type and fp32 accumulation, softmax in fp32, P rounded to the
type, out rounded once. Against the fp64 oracle a result's maximum error may be twice the baseline's and its root mean
square error 1.25 times the baseline's, each plus one ulp at the row's magnitude.

How "plus one ulp" is read: for the maximum, every element may be off by 2 x the baseline's largest error + one ulp of
its own row. For the root mean square, one ulp in *one* element, sqrt(n) * RMS <= 1.25 * sqrt(n) * RMS(baseline) + ulp:
the allowance covers the chance of few elements and fades as n grows. An ulp added to the RMS itself would be several
times the rounding error it bounds, and a softmax scale wrong by 1 % would pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["LSE_TOLERANCE", "MAX_FACTOR", "RMS_FACTOR", "assert_accurate", "assert_lse", "assert_same_bits", "ulp"]

MAX_FACTOR = 2.0
RMS_FACTOR = 1.25
LSE_TOLERANCE = 2e-5
_ROWS_SHOWN = 5


def ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbouring numbers of ``dtype`` at each (non-negative) magnitude, fp64."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(magnitude.double())
    smallest = info.smallest_normal * info.eps
    return torch.where(magnitude > 0, info.eps * torch.exp2(exponent.double() - 1), smallest).clamp_min(smallest)


def _describe(index: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(i) for i in index) + "]"


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for extent in reversed(shape):
        index.append(flat % extent)
        flat //= extent
    return tuple(reversed(index))


def _where(bad: Tensor) -> str:
    """Which rows (all dimensions but the last) hold bad elements: how many, and the first and last of them."""
    rows = bad.any(-1) if bad.dim() > 1 else bad
    indices = rows.nonzero().tolist()
    shown = ", ".join(_describe(tuple(i)) for i in indices[:_ROWS_SHOWN])
    tail = f", ... {_describe(tuple(indices[-1]))}" if len(indices) > _ROWS_SHOWN else ""
    return (
        f"{int(bad.sum())} of {bad.numel()} elements in {len(indices)} of {rows.numel()} rows of shape "
        f"{tuple(rows.shape)}: {shown}{tail}"
    )


def _assert_same_specials(name: str, got: Tensor, oracle: Tensor) -> None:
    """NaN exactly where the oracle has NaN, and the same infinities."""
    __tracebackhide__ = True
    bad = (got.isnan() != oracle.isnan()) | ((got != oracle) & (got.isinf() | oracle.isinf()) & ~oracle.isnan())
    if bad.any():
        first = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: NaN or Inf in the wrong place; {_where(bad)}; at {_describe(first)} got "
            f"{got[first].item()}, expected {oracle[first].item()}"
        )


def assert_accurate(
    name: str,
    got: Tensor,
    oracle: Tensor,
    baseline: Tensor,
    *,
    dtype: torch.dtype | None = None,
    magnitude: Tensor | None = None,
    norm: float = 0.0,
) -> None:
    """Raise AssertionError, with where it is worst, unless ``got`` keeps the accuracy rule.

    Parameters
    ----------
    name : str
        What is compared: ``out``, ``dq``, ...
    got : torch.Tensor
        (..., D), the result under test.
    oracle : torch.Tensor
        The same shape in fp64, the truth.
    baseline : torch.Tensor
        The same shape, what an implementation in the type gives.
    dtype : torch.dtype, optional
        The type whose ulp is allowed; default: of ``got``.
    magnitude : torch.Tensor, optional
        (..., 1) or broadcastable, the magnitude at which the ulp is taken where the row's own largest element is no
        measure of the terms it was summed from; default: the largest magnitude of each row of ``oracle``.
    norm : float
        Root of the sum of squares over all elements that one ulp somewhere in an intermediate result is multiplied to;
        0 where an ulp changes one element.
    """
    __tracebackhide__ = True
    if got.shape != oracle.shape or baseline.shape != oracle.shape:
        raise AssertionError(
            f"{name}: shape {tuple(got.shape)}, expected {tuple(oracle.shape)} (baseline {tuple(baseline.shape)})"
        )
    if got.numel() == 0:
        return
    dtype = dtype or got.dtype
    truth = oracle.double()
    _assert_same_specials(name, got, truth)
    finite = truth.isfinite()
    zero = truth.new_zeros(())
    error = torch.where(finite, (got.double() - truth).abs(), zero)
    baseline_error = torch.where(finite & baseline.isfinite(), (baseline.double() - truth).abs(), zero)
    if magnitude is None:
        magnitude = torch.where(finite, truth.abs(), zero).amax(-1, keepdim=True)
    one_ulp = ulp(magnitude, dtype).expand_as(error)

    worst_baseline = baseline_error.max()
    allowed = MAX_FACTOR * worst_baseline + one_ulp
    bad = error > allowed
    rms, rms_baseline = error.square().mean().sqrt(), baseline_error.square().mean().sqrt()
    largest_ulp = torch.maximum(one_ulp.max(), ulp(truth.new_tensor(norm), dtype))
    rms_allowed = RMS_FACTOR * rms_baseline + largest_ulp / math.sqrt(error.numel())
    if not bad.any() and rms <= rms_allowed:
        return
    at = _unravel(int((error / allowed).argmax()), error.shape)
    lines = [
        f"{name}: not accurate ({dtype}, shape {tuple(got.shape)})",
        f"  max error {error.max():.3e}, of the baseline {worst_baseline:.3e} "
        f"(allowed {MAX_FACTOR:g} x + one ulp); rms {rms:.3e}, of the baseline {rms_baseline:.3e} "
        f"(allowed {rms_allowed:.3e})",
        f"  worst at {_describe(at)}: got {got[at].item():.9g}, oracle {truth[at].item():.9g}, baseline "
        f"{baseline[at].item():.9g}, error {error[at]:.3e} = {error[at] / one_ulp[at]:.2f} ulp, "
        f"allowed {allowed[at]:.3e}",
    ]
    if bad.any():
        lines.append(f"  over the maximum: {_where(bad)}")
    raise AssertionError("\n".join(lines))


def assert_lse(got: Tensor, oracle: Tensor) -> None:
    """Raise AssertionError unless ``got`` is fp32 and within 2e-5 * max(1, \\|lse\\|) of the oracle, -inf exactly."""
    __tracebackhide__ = True
    if got.dtype != torch.float32 or got.shape != oracle.shape:
        raise AssertionError(f"lse: {got.dtype} {tuple(got.shape)}, expected torch.float32 {tuple(oracle.shape)}")
    if got.numel() == 0:
        return
    truth = oracle.double()
    _assert_same_specials("lse", got, truth)
    finite = truth.isfinite()
    zero = truth.new_zeros(())
    error = torch.where(finite, (got.double() - truth).abs(), zero)
    bad = error > LSE_TOLERANCE * torch.where(finite, truth.abs(), zero).clamp_min(1.0)
    if bad.any():
        at = _unravel(int(error.argmax()), error.shape)
        raise AssertionError(
            f"lse: off by {error[at]:.3e} at {_describe(at)}: got {got[at].item():.9g}, oracle {truth[at].item():.9g}; "
            f"{_where(bad)}"
        )


def assert_same_bits(name: str, got: Tensor, expected: Tensor) -> None:
    """Raise AssertionError unless both tensors hold the same bits (NaN payloads and the sign of zero included)."""
    __tracebackhide__ = True
    if got.dtype != expected.dtype or got.shape != expected.shape:
        raise AssertionError(
            f"{name}: {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
        )
    if got.numel() == 0:
        return
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    bad = got.contiguous().view(integer) != expected.contiguous().view(integer)
    if bad.any():
        first = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: bits differ; {_where(bad)}; at {_describe(first)} got {got[first].item()!r}, "
            f"expected {expected[first].item()!r}"
        )
