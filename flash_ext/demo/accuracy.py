"""Forward and backward at a few sizes against the fp64 oracle.

The bound is the one of the project's numerical contract. The baseline computes attention in the same type the standard
way (fp32 accumulation and softmax, P rounded once); against the oracle, the largest error of a result may be twice the
baseline's plus one unit in the last place, its root mean square error 1.25 times the baseline's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import flash_ext
from flash_ext.reference import baseline, oracle_bwd, oracle_fwd

MAX_FACTOR = 2.0
RMS_FACTOR = 1.25
LSE_TOLERANCE = 2e-5


@dataclass(frozen=True)
class Problem:
    """One attention call, forward and backward.

    Attributes
    ----------
    label : str
        For the table.
    lengths_q, lengths_k : tuple of int
        Query and key length of each sequence.
    heads_q, heads_k, head_dim : int
    dtype : torch.dtype
    packed : bool
        Whether the sequences are packed (varlen) rather than a dense batch of equal lengths.
    options : dict
        Keywords of the public function.
    """

    label: str
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads_q: int
    heads_k: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    packed: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> str:
        """Sizes for the table: sequences, queries x keys, heads, head dim, dtype."""
        heads = f"{self.heads_q}" if self.heads_q == self.heads_k else f"{self.heads_q}/{self.heads_k}"
        if self.packed:
            size = f"lengths {', '.join(map(str, self.lengths_q))}"
        else:
            size = f"{len(self.lengths_q)} x {self.lengths_q[0]} x {self.lengths_k[0]}"
        return f"{size}, {heads} heads, d {self.head_dim}, {'bf16' if self.dtype == torch.bfloat16 else 'fp16'}"


PROBLEMS = (
    Problem("dense", (256,) * 2, (256,) * 2, 4, 4, 64),
    Problem("causal", (300,) * 2, (300,) * 2, 4, 4, 128, options={"causal": True}),
    Problem("causal, more keys", (129,), (385,), 4, 4, 64, torch.float16, options={"causal": True}),
    Problem("grouped heads", (200,) * 2, (200,) * 2, 8, 2, 128, options={"causal": True}),
    Problem("sliding window", (384,), (384,), 4, 4, 96, options={"window_size": (100, 20)}),
    Problem("head dim 256", (160,), (160,), 2, 2, 256, torch.float16),
    Problem("odd head dim", (100,), (140,), 2, 2, 72),
    Problem("varlen", (17, 128, 1, 255), (17, 128, 1, 255), 4, 4, 64, packed=True, options={"causal": True}),
    Problem("varlen, grouped", (33, 90, 200), (33, 90, 200), 8, 2, 128, torch.float16, packed=True),
)


@dataclass(frozen=True)
class Check:
    """One result of a problem against its bound: errors and whether they are within it."""

    name: str
    error: float
    allowed: float
    within: bool


@dataclass(frozen=True)
class Outcome:
    """The checks of a problem; ``refusal`` says why some are missing (no kernel serves them), else it is empty."""

    problem: Problem
    checks: tuple[Check, ...]
    refusal: str = ""

    @property
    def within(self) -> bool:
        return all(check.within for check in self.checks)


def run_problems(device: torch.device) -> Iterator[Outcome]:
    """Runs every problem on a device, one at a time."""
    for seed, problem in enumerate(PROBLEMS):
        checks: list[Check] = []
        refusal = ""
        try:
            for check in _check(problem, device, seed):
                checks.append(check)
        except NotImplementedError as error:
            refusal = str(error)
        yield Outcome(problem, tuple(checks), refusal)


def make_tensors(problem: Problem, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """q, k, v of a problem, standard normal, and the packing keywords of the operators (empty for a dense batch)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(lengths: tuple[int, ...], heads: int) -> Tensor:
        size = (sum(lengths),) if problem.packed else (len(lengths), lengths[0])
        tensor = torch.randn(*size, heads, problem.head_dim, generator=generator)
        return tensor.to(device=device, dtype=problem.dtype).requires_grad_()

    q = normal(problem.lengths_q, problem.heads_q)
    k, v = normal(problem.lengths_k, problem.heads_k), normal(problem.lengths_k, problem.heads_k)
    packing: dict[str, Any] = {}
    if problem.packed:
        for name, lengths in (("q", problem.lengths_q), ("k", problem.lengths_k)):
            bounds = torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32, device=device)
            packing[f"cu_seqlens_{name}"] = bounds
            packing[f"max_seqlen_{name}"] = max(lengths)
    return q, k, v, packing


def call_public(problem: Problem, q: Tensor, k: Tensor, v: Tensor, packing: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The call a user would write; returns out and lse."""
    if problem.packed:
        return flash_ext.flash_attn_varlen_func(q, k, v, **packing, **problem.options, return_lse=True)
    return flash_ext.flash_attn_func(q, k, v, **problem.options, return_lse=True)


def _operator_options(problem: Problem) -> dict[str, Any]:
    """The public function's options as keywords of the operators, which oracle and baseline take."""
    options = dict(problem.options)
    left, right = options.pop("window_size", (-1, -1))
    return {**options, "window_left": left, "window_right": right}


def _check(problem: Problem, device: torch.device, seed: int) -> Iterator[Check]:
    q, k, v, packing = make_tensors(problem, device, seed)
    out, lse = call_public(problem, q, k, v, packing)
    keywords = {**packing, **_operator_options(problem)}
    with torch.no_grad():
        oracle_out, oracle_lse = oracle_fwd(q, k, v, **keywords)
        base_out, base_lse = baseline.baseline_fwd(q, k, v, **keywords)
    yield _compare("out", out.detach(), oracle_out, base_out)
    yield _compare_lse(lse.detach(), oracle_lse)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1000 + seed)).to(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    with torch.no_grad():
        truth = oracle_bwd(dout, None, q, k, v, **keywords)
        base = baseline.baseline_bwd(dout, None, q, k, v, base_out, base_lse, **keywords)
    for name, got, oracle_gradient, base_gradient in zip(("dq", "dk", "dv"), gradients, truth, base, strict=False):
        yield _compare(name, got, oracle_gradient, base_gradient)


def unit_in_the_last_place(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of ``dtype`` at each magnitude (>= 0)."""
    _, exponent = torch.frexp(magnitude.double())
    spacing = torch.ldexp(torch.full_like(magnitude, torch.finfo(dtype).eps, dtype=torch.float64), exponent - 1)
    return spacing.clamp_min(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)


def _compare(name: str, got: Tensor, truth: Tensor, base: Tensor) -> Check:
    """A result against the oracle; errors relative to what is allowed, the larger of maximum and RMS is reported."""
    error, base_error = (got.double() - truth).abs(), (base.double() - truth).abs()
    ulp = unit_in_the_last_place(truth.abs().amax(-1, keepdim=True), got.dtype)
    allowed = MAX_FACTOR * base_error.max() + ulp
    rms, base_rms = error.square().mean().sqrt(), base_error.square().mean().sqrt()
    # One unit in one element, which fades in the mean.
    rms_allowed = RMS_FACTOR * base_rms + ulp.max() / math.sqrt(error.numel())
    # Written so that NaN is out of bounds.
    within = bool((error <= allowed).all()) and bool(rms <= rms_allowed)
    return Check(name, float(error.max()), float(allowed.min()), within)


def _compare_lse(got: Tensor, truth: Tensor) -> Check:
    same_infinities = torch.equal(got.isinf(), truth.isinf())
    finite = truth.isfinite()
    error = (got.double() - truth)[finite].abs()
    within = same_infinities and bool((error <= LSE_TOLERANCE * truth[finite].abs().clamp_min(1.0)).all())
    return Check("lse", float(error.max()) if error.numel() else 0.0, LSE_TOLERANCE, within)
