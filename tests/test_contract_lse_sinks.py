"""Contract: lse, its gradient, and sinks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.accuracy import assert_accurate
from helpers.cases import Case, make_inputs
from helpers.check import check, run, verify
from helpers.paths import Path
from helpers.tables import for_cases

BASE = Case(lengths_q=(70, 90), lengths_k=(100, 60), heads=(4, 2), head_dims=(64, 64))
SINK_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@for_cases(
    BASE.with_(sinks=sinks, dtype=dtype, causal=causal, varlen=varlen, dlse=dlse)
    for sinks in SINK_DTYPES
    for dtype, causal in ((torch.float16, False), (torch.bfloat16, True))
    for varlen in (False, True)
    for dlse in (False, True)
)
def test_sinks(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """A sink is one more logit of the softmax; its gradient is sum exp(sink - lse) * (dlse - rowsum(dO * O))."""
    check(path, rng, case, direction, through="autograd" if direction == "backward" else "operator")


@for_cases(
    BASE.with_(lengths_q=(50,), lengths_k=(70,), sinks=torch.float32, **options)
    for options in (
        {"softmax_scale": 0.01},
        {"softmax_scale": -1.0},
        {"softcap": 2.0},
        {"alibi": "heads"},
        {"dropout_p": 0.4},
        {"window": (0, 0)},
    )
)
def test_sinks_are_natural_units(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """A sink is neither scaled nor capped nor biased, and dropout does not touch it."""
    check(path, rng, case, direction)


@pytest.mark.needs("sinks")
@pytest.mark.parametrize("value", [-math.inf, -1e4, 60.0, 1e4])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_extreme_sinks(path: Path, rng: torch.Generator, value: float, direction: str) -> None:
    """-inf is no sink at all; a sink far above every score takes all the weight: out goes to 0, lse is the sink."""
    inputs = make_inputs(BASE.with_(sinks=torch.float32, lengths_q=(70, 70), lengths_k=(100, 100)), path.device, rng)
    inputs.keywords["sinks"] = torch.full_like(inputs.keywords["sinks"], value)
    results = run(inputs, direction)
    if value == -math.inf:
        without = {**inputs.keywords, "sinks": None}
        out, lse = torch.ops.flash_ext.fwd(inputs.q, inputs.k, inputs.v, **without)
        torch.testing.assert_close(results.out, out)
        torch.testing.assert_close(results.lse, lse)
        if results.dsinks is not None:
            assert (results.dsinks == 0).all()
    else:
        verify(inputs, results, direction)


@for_cases(
    BASE.with_(causal=causal, varlen=varlen, dtype=dtype, window=window, dropout_p=dropout_p)
    for causal in (False, True)
    for varlen in (False, True)
    for dtype, window, dropout_p in (
        (torch.float16, (-1, -1), 0.0),
        (torch.bfloat16, (10, 5), 0.0),
        (torch.bfloat16, (-1, -1), 0.3),
    )
)
def test_lse(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """lse is differentiable; where it is -inf its gradient (NaN here) is ignored; dropout does not change it."""
    check(path, rng, case, direction, through="autograd" if direction == "backward" else "operator")


@pytest.mark.needs("backward")
def test_gradient_of_lse_alone(path: Path, rng: torch.Generator) -> None:
    """A loss of lse only: dout is missing, not garbage; dv is 0."""
    inputs = make_inputs(BASE.with_(lengths_q=(70, 70), lengths_k=(90, 90)), path.device, rng)
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    _, lse = torch.ops.flash_ext.fwd(q, k, v, **inputs.keywords)
    dq, dk, dv = torch.autograd.grad(lse, (q, k, v), inputs.dlse)
    inputs.dout.zero_()
    results = run(inputs)
    verify(inputs, results, "backward")
    assert (dv == 0).all()
    torch.testing.assert_close(dq, results.dq)
    torch.testing.assert_close(dk, results.dk)


@pytest.mark.needs("backward")
def test_gradient_without_lse(path: Path, rng: torch.Generator) -> None:
    """dlse None is dlse 0, and what autograd passes when the loss does not depend on lse."""
    inputs = make_inputs(BASE.with_(lengths_q=(70, 70), lengths_k=(90, 90), dlse=False), path.device, rng)
    none = run(inputs)
    through_autograd = run(inputs, through="autograd")
    inputs.dlse = torch.zeros(none.lse.shape, device=path.device)
    zero = run(inputs)
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(getattr(zero, name), getattr(none, name))
        torch.testing.assert_close(getattr(through_autograd, name), getattr(none, name))


@pytest.mark.needs("backward")
def test_sink_by_rescaling_equals_learnable_sink(path: Path, rng: torch.Generator) -> None:
    """out * sigmoid(lse - sink), differentiated through lse, is attention with a sink: forward and every gradient."""
    case = BASE.with_(lengths_q=(70, 70), lengths_k=(90, 90), sinks=torch.float32, causal=True, dlse=False)
    if not path.supports("backward", features=case.features):
        case = case.with_(causal=False)
    inputs = make_inputs(case, path.device, rng)
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    sinks = inputs.keywords["sinks"].detach().requires_grad_()
    out, lse = torch.ops.flash_ext.fwd(q, k, v, causal=case.causal)
    scaled = out.float() * torch.sigmoid(lse - sinks[:, None]).transpose(1, 2).unsqueeze(-1)
    rescaled = torch.autograd.grad(scaled, (q, k, v, sinks), inputs.dout.float())
    learned = run(inputs)
    torch.testing.assert_close(scaled.to(out.dtype), learned.out, rtol=2**-6, atol=2e-2)
    for got, name in zip(rescaled, ("dq", "dk", "dv", "dsinks"), strict=True):
        expected = getattr(learned, name)
        torch.testing.assert_close(got, expected, rtol=3e-2, atol=4e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("halves", [(50, 50), (0, 100), (100, 0), (64, 36)])
@pytest.mark.parametrize("sinks", [False, True])
def test_merging_halves(path: Path, rng: torch.Generator, halves: tuple[int, int], sinks: bool) -> None:
    """Attention over parts of the keys, merged with lse, is attention over all; a part without keys is the identity."""
    from flash_ext import reference

    inputs = make_inputs(Case(lengths_q=(70,), lengths_k=(100,), heads=(2, 2)), path.device, rng)
    q, k, v = inputs.q, inputs.k, inputs.v
    sink: Any = {}
    if sinks and path.supports("forward", features={"sinks"}):
        sink = {"sinks": torch.ones(2, device=path.device)}
    parts = []
    for keys, keywords in ((slice(0, halves[0]), {}), (slice(halves[0], 100), sink)):
        parts.append(torch.ops.flash_ext.fwd(q, k[:, keys], v[:, keys], **keywords))
    (out1, lse1), (out2, lse2) = parts
    lse = torch.logaddexp(lse1, lse2)
    weights = [torch.exp(x - lse).transpose(1, 2).unsqueeze(-1) for x in (lse1, lse2)]
    out = weights[0] * out1.float() + weights[1] * out2.float()
    expected, expected_lse = reference.oracle_fwd(q, k, v, **sink)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-5, atol=2e-5)
    assert_accurate(
        "out",
        out.to(q.dtype),
        expected,
        reference.baseline_fwd(q, k, v, **sink)[0],
        magnitude=4 * expected.abs().amax(-1, keepdim=True),
    )
    if 0 in halves and not sink:
        whole, whole_lse = torch.ops.flash_ext.fwd(q, k, v)
        assert torch.equal(lse, whole_lse) and torch.equal(out.to(q.dtype), whole)
