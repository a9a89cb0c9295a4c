"""Run a case on the path under test and hold the results against the contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from .accuracy import assert_accurate, assert_lse, ulp
from .cases import Case, Inputs, Segment, make_inputs, visible
from .paths import Path

__all__ = ["Results", "check", "dense_keywords", "run", "verify"]

_GRADIENTS = ("dq", "dk", "dv")
_LARGEST_MASK = 1 << 22  # visible keys are counted by hand up to this many scores


@dataclass
class Results:
    """What the operators returned; the gradients are None after a forward alone."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsinks: Tensor | None = None


def check(path: Path, rng: torch.Generator, case: Case, direction: str, *, through: str = "operator") -> None:
    """Fresh inputs, one call (two with ``backward``), everything the contract says of any call.

    Parameters
    ----------
    path : Path
        The path under test.
    rng : torch.Generator
        Source of the inputs.
    case : Case
        What to call.
    direction : str
        ``forward`` verifies out and lse; ``backward`` runs both and verifies the gradients.
    through : str
        ``operator``: torch.ops.flash_ext.fwd and bwd; ``autograd``: torch.ops.flash_ext.fwd and torch.autograd.
    """
    inputs = make_inputs(case, path.device, rng)
    results = run(inputs, direction, through=through)
    verify(inputs, results, direction)


def run(inputs: Inputs, direction: str = "backward", *, through: str = "operator") -> Results:
    """Call the operators; fail if they write into their inputs or anything beside them."""
    with _fixed_order(inputs.case.deterministic):
        return _run(inputs, direction, through)


@contextmanager
def _fixed_order(deterministic: bool) -> Iterator[None]:
    """Let the emulator report sums of floats in no fixed order."""
    if not deterministic:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASH_EXT_EMULATOR_DETERMINISTIC", "1")
        yield


def _run(inputs: Inputs, direction: str, through: str) -> Results:
    inputs.guards.freeze()
    if direction == "forward":
        results = Results(*torch.ops.flash_ext.fwd(inputs.q, inputs.k, inputs.v, **inputs.keywords))
    elif through == "operator":
        out, lse = torch.ops.flash_ext.fwd(inputs.q, inputs.k, inputs.v, **inputs.keywords)
        kept = out.clone(), lse.clone()
        gradients = torch.ops.flash_ext.bwd(
            inputs.dout, inputs.dlse, inputs.q, inputs.k, inputs.v, out, lse, **inputs.keywords
        )
        assert torch.equal(out, kept[0]) or out.isnan().any(), "the backward wrote into out"
        assert torch.equal(lse, kept[1]) or lse.isnan().any(), "the backward wrote into lse"
        results = Results(out, lse, *gradients)
    else:
        results = _run_autograd(inputs)
    if inputs.q.is_cuda:
        torch.cuda.synchronize()
    inputs.guards.check()
    return results


def _run_autograd(inputs: Inputs) -> Results:
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    keywords = dict(inputs.keywords)
    if inputs.case.sinks is not None:
        keywords["sinks"] = keywords["sinks"].detach().requires_grad_()
        leaves.append(keywords["sinks"])
    out, lse = torch.ops.flash_ext.fwd(*leaves[:3], **keywords)
    outputs, gradients = [out], [inputs.dout]
    if inputs.dlse is not None:
        outputs.append(lse)
        gradients.append(inputs.dlse)
    dq, dk, dv, *dsinks = torch.autograd.grad(outputs, leaves, gradients)
    return Results(out.detach(), lse.detach(), dq, dk, dv, dsinks[0] if dsinks else None)


def dense_keywords(inputs: Inputs, segment: Segment) -> dict[str, Any]:
    """The keywords of a call on one sequence alone, without cu_seqlens and seqused; no dropout."""
    keywords = {
        name: value
        for name, value in inputs.keywords.items()
        if not name.startswith(("cu_seqlens", "seqused", "max_seqlen"))
    }
    slopes = keywords.get("alibi_slopes")
    if slopes is not None and slopes.dim() == 2:
        keywords["alibi_slopes"] = slopes[segment.index]
    return keywords


@dataclass
class _Truth:
    """Oracle and baseline of some rows: a sequence as a dense batch of one, or a whole dense batch."""

    segment: Segment | None  # None: the whole call
    q: tuple[Any, ...]
    k: tuple[Any, ...]
    lse: tuple[Any, ...]
    tensors: dict[str, Tensor]
    keywords: dict[str, Any]

    @property
    def label(self) -> str:
        """What to add to the name of a result."""
        return "" if self.segment is None else f" of sequence {self.segment.index}"


def _truths(inputs: Inputs) -> list[_Truth]:
    """Cut a call into calls without varlen and seqused, each sequence by itself: what the results must equal.

    Dropout depends on the index of the sequence, so such a batch stays whole and relies on the oracle's own varlen.
    """
    case = inputs.case
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": inputs.dout}
    if inputs.dlse is not None:
        named["dlse"] = inputs.dlse
    uniform = not case.varlen and not case.uses_seqused
    if case.dropout_p > 0 or (uniform and case.alibi != "batch"):
        everything = (Ellipsis,)
        return [_Truth(None, everything, everything, everything, named, dict(inputs.keywords))]
    truths = []
    for segment in inputs.segments:
        index = {"q": segment.q, "k": segment.k, "v": segment.k, "dout": segment.q, "dlse": segment.lse}
        alone = {name: tensor[index[name]].unsqueeze(0) for name, tensor in named.items()}
        truths.append(
            _Truth(
                segment,
                segment.q,
                segment.k,
                segment.lse,
                alone,
                dense_keywords(inputs, segment),
            )
        )
    return truths


def verify(inputs: Inputs, results: Results, direction: str) -> None:
    """Raise AssertionError unless the results keep the contract."""
    from flash_ext import reference

    _check_form(inputs, results, direction)
    _check_slack(inputs, results, direction)
    _check_blind_rows(inputs, results)

    case = inputs.case
    sinks = inputs.keywords.get("sinks")
    dsinks, dsinks_baseline, dsinks_terms = (
        torch.zeros(case.heads[0], dtype=torch.float64, device=inputs.q.device) for _ in range(3)
    )
    for truth in _truths(inputs):
        q, k, v, dout = (truth.tensors[name] for name in ("q", "k", "v", "dout"))
        dlse = truth.tensors.get("dlse")
        single = Ellipsis if truth.segment is None else 0
        out, lse = reference.oracle_fwd(q, k, v, **truth.keywords)
        float_sinks = {} if sinks is None else {"sinks": sinks.float()}
        baseline_keywords = truth.keywords | float_sinks
        out_baseline, lse_baseline = reference.baseline_fwd(q, k, v, **baseline_keywords)
        if direction == "forward":
            assert_accurate("out" + truth.label, results.out[truth.q], out[single], out_baseline[single])
            assert_lse(results.lse[truth.lse], lse[single])
            continue
        expected = reference.oracle_bwd(dout, dlse, q, k, v, **truth.keywords)
        baseline = reference.baseline_bwd(dout, dlse, q, k, v, out_baseline, lse_baseline, **baseline_keywords)
        terms = _gradient_terms(inputs, truth, out)
        for name, of, baseline_of in zip(_GRADIENTS, expected[:3], baseline[:3], strict=True):
            got = getattr(results, name)[truth.q if name == "dq" else truth.k]
            magnitude = torch.where(of.isfinite(), of.abs(), 0.0).amax(-1, keepdim=True) if of.numel() else of
            norm = 0.0
            if name in terms and of.numel():
                rows, norm = terms[name]
                magnitude = torch.maximum(magnitude, rows)
            assert_accurate(
                name + truth.label, got, of[single], baseline_of[single], magnitude=magnitude[single], norm=norm
            )
        if sinks is not None:
            dsinks += expected[3]
            dsinks_baseline += baseline[3]
            dsinks_terms += _sink_terms(sinks, truth, out, lse, case)
    if direction == "backward" and sinks is not None:
        assert results.dsinks is not None
        coarser = max(sinks.dtype, case.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        assert_accurate(
            "dsinks",
            results.dsinks,
            dsinks,
            dsinks_baseline.to(sinks.dtype),
            dtype=coarser,
            magnitude=torch.maximum(dsinks.abs(), dsinks_terms.sqrt()),
        )


def _gradient_terms(inputs: Inputs, truth: _Truth, out: Tensor) -> dict[str, tuple[Tensor, float]]:
    """What an ulp of O changes in dq and dk, over ulp: in each row, (..., rows, heads, 1), and the norm over all.

    dS = P * (dP - D) with D = rowsum(dO * O), and O was rounded to the type: D is off by about an ulp of O times |dO|,
    row i of dQ by that times sum_j P_ij K_j, dK by that times P_ij Q_i summed over i. Where dP and D cancel, as they do
    for a row with one key, an ulp of what is left would allow nothing, and a baseline of few rows may be exact.
    Large calls get nothing: there the baseline has enough rows.
    """
    case = inputs.case
    if case.scores * case.heads[0] > _LARGEST_MASK:
        return {}
    q, k, dout = (truth.tensors[name] for name in ("q", "k", "dout"))
    of_dq = torch.zeros((*q.shape[:-1], 1), dtype=torch.float64, device=q.device)
    of_dk = torch.zeros((*k.shape[:-1], 1), dtype=torch.float64, device=q.device)
    norms = [0.0, 0.0]
    pieces: list[tuple[Segment, tuple[Any, ...], tuple[Any, ...]]]
    if truth.segment is not None:
        pieces = [(truth.segment, (0,), (0,))]
    else:
        pieces = [(segment, segment.q, segment.k) for segment in inputs.segments]
    for segment, rows, keys in pieces:
        if case.lengths_q[segment.index] and case.lengths_k[segment.index]:
            keywords = dense_keywords(inputs, segment) | {"dropout_p": 0.0, "rng_state": None}
            p = _probabilities(q[rows], k[keys], keywords)
            of_dq[rows], of_dk[keys], *found = _row_terms(
                p, q[rows].double(), k[keys].double(), dout[rows].double(), out[rows]
            )
            norms = [max(pair) for pair in zip(norms, found, strict=True)]
    scale = abs(case.scale)
    return {"dq": (scale * of_dq, scale * norms[0]), "dk": (scale * of_dk, scale * norms[1])}


def _probabilities(q: Tensor, k: Tensor, keywords: dict[str, Any]) -> Tensor:
    """P of one sequence, (heads_k, group * rows, keys) fp64: attention over the rows of an identity matrix."""
    from flash_ext import reference

    keys, heads_k, _ = k.shape
    identity = torch.eye(keys, dtype=k.dtype, device=k.device)[:, None, :].expand(keys, heads_k, keys)
    p, _ = reference.oracle_fwd(q[None], k[None], identity[None], **keywords)
    return p[0].transpose(0, 1).reshape(heads_k, -1, keys)


def _row_terms(p: Tensor, q: Tensor, k: Tensor, dout: Tensor, out: Tensor) -> tuple[Tensor, Tensor, float, float]:
    """The terms of one sequence, over ulp and scale: (rows, heads_q, 1), (keys, heads_k, 1) and the two norms."""
    heads_k = k.shape[1]
    d_error = (dout.norm(dim=-1) * out.abs().amax(-1)).transpose(0, 1).reshape(heads_k, -1, 1)
    p, d_error, q, k = (x.nan_to_num(0.0, 0.0, 0.0) for x in (p, d_error, q, k))
    weighted_keys = (p @ k.transpose(0, 1)) * d_error  # (heads_k, group * rows, head_dim)
    queries = q.transpose(0, 1).reshape(heads_k, -1, q.shape[-1])
    of_dk = ((p * d_error).square().transpose(1, 2) @ queries.square()).sqrt().amax(-1, keepdim=True)
    of_dq = weighted_keys.abs().amax(-1).reshape(q.shape[1], q.shape[0], 1).transpose(0, 1)
    norm_dq = weighted_keys.norm(dim=-1).max()
    norm_dk = (p.norm(dim=-1) * d_error.squeeze(-1) * queries.norm(dim=-1)).max()
    return of_dq, of_dk.transpose(0, 1), float(norm_dq), float(norm_dk)


def _sink_terms(sinks: Tensor, truth: _Truth, out: Tensor, lse: Tensor, case: Case) -> Tensor:
    """(heads_q) sum of squares of the terms of dsinks, each as large as its parts before they cancel.

    A sink's gradient is one number summed over all rows; the errors of the terms do not shrink when the sum does.
    """
    dout, dlse = truth.tensors["dout"].double(), truth.tensors.get("dlse")
    parts = dout.norm(dim=-1) * out.abs().amax(-1)  # (..., rows, heads)
    parts = parts.transpose(-1, -2)
    if dlse is not None:
        parts = parts + dlse.double().abs()
    weight = torch.exp(sinks.double()[:, None] - lse)
    terms = torch.where(lse.isfinite(), (weight * parts).square(), 0.0).nan_to_num(0.0, 0.0, 0.0)
    heads_first = terms if case.varlen and truth.segment is None else terms.transpose(0, 1)
    return heads_first.reshape(case.heads[0], -1).sum(1)


def _check_form(inputs: Inputs, results: Results, direction: str) -> None:
    """Shapes, dtypes, fresh contiguous memory."""
    case = inputs.case
    q, k, v = inputs.q, inputs.k, inputs.v
    heads_q = case.heads[0]
    lse_shape = (heads_q, q.shape[0]) if case.varlen else (q.shape[0], heads_q, q.shape[1])
    expected = {"out": ((*q.shape[:-1], v.shape[-1]), case.dtype), "lse": (lse_shape, torch.float32)}
    if direction == "backward":
        expected |= {"dq": (q.shape, case.dtype), "dk": (k.shape, case.dtype), "dv": (v.shape, case.dtype)}
        if case.sinks is not None:
            expected["dsinks"] = ((heads_q,), case.sinks)
        elif results.dsinks is not None:  # autograd returns none
            expected["dsinks"] = ((0,), torch.float32)
    seen: dict[int, str] = {
        x.untyped_storage().data_ptr(): name
        for name, x in (("q", q), ("k", k), ("v", v), ("dout", inputs.dout), ("dlse", inputs.dlse))
        if x is not None and x.numel()
    }
    for name, (shape, dtype) in expected.items():
        tensor = getattr(results, name)
        assert tuple(tensor.shape) == tuple(shape), f"{name}: shape {tuple(tensor.shape)}, expected {tuple(shape)}"
        assert tensor.dtype == dtype, f"{name}: {tensor.dtype}, expected {dtype}"
        assert tensor.is_contiguous(), f"{name}: strides {tensor.stride()}, expected contiguous"
        assert tensor.device == q.device, f"{name}: on {tensor.device}, expected {q.device}"
        if tensor.numel():
            address = tensor.untyped_storage().data_ptr()
            assert address not in seen, f"{name} shares its memory with {seen[address]}"
            seen[address] = name


def _check_slack(inputs: Inputs, results: Results, direction: str) -> None:
    """Rows outside the sequences: 0, and -inf in lse."""
    slack_q, slack_k = inputs.slack_q, inputs.slack_k
    rows_lse = results.lse.movedim(-2, -1)[slack_q]  # (rows, heads)
    assert (rows_lse == -torch.inf).all(), f"lse is not -inf outside the sequences: {rows_lse.unique().tolist()[:8]}"
    checked = [("out", slack_q)]
    if direction == "backward":
        checked += [("dq", slack_q), ("dk", slack_k), ("dv", slack_k)]
    for name, slack in checked:
        rows = getattr(results, name)[slack]
        wrong = rows != 0
        bad_rows = int(wrong.flatten(1).any(1).sum()) if wrong.numel() else 0
        assert not bad_rows, (
            f"{name} is not 0 outside the sequences: {int(wrong.sum())} elements in {bad_rows} of "
            f"{rows.shape[0]} rows, such as {rows[wrong][0].item()}"
        )


def _check_blind_rows(inputs: Inputs, results: Results) -> None:
    """Rows of a sequence that see no key: out and dq exactly 0, lse -inf or the sink's logit."""
    case = inputs.case
    if case.scores > _LARGEST_MASK:
        return
    for segment in inputs.segments:
        blind = ~visible(case, segment.index, inputs.q.device).any(1)
        if not blind.any():
            continue
        of = f"of the rows without keys of sequence {segment.index}"
        assert (results.out[segment.q][blind] == 0).all(), f"out {of} is not 0"
        lse = results.lse[segment.lse][:, blind]
        if case.sinks is None:
            assert (lse == -torch.inf).all(), f"lse {of} is not -inf: {lse.unique().tolist()[:8]}"
        else:
            sinks = inputs.keywords["sinks"].double()[:, None].expand(lse.shape)
            assert ((lse.double() - sinks).abs() <= 4 * ulp(sinks.abs(), torch.float32)).all(), f"lse {of} is no sink"
        if results.dq is not None:
            assert (results.dq[segment.q][blind] == 0).all(), f"dq {of} is not 0"
