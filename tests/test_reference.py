"""The oracle against attention written out naively, the cpu path against the oracle, dropout against Philox."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from helpers.accuracy import assert_accurate, assert_lse, assert_same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flash_ext import allocate, reference
from flash_ext.reference.dropout import dropout_rescale, keep_mask, philox4x32
from flash_ext.reference.products import product_of_visible
from flash_ext.reference.sequences import Options
from flash_ext.reference.tiles import padded_length, units

Keywords = dict[str, Any]
T = TypeVar("T")
HEADS_Q, HEADS_K = 4, 2
BATCH = 3

# ---------------------------------------------------------------------------------------------------------------------
# Options: each alone, then together. A function of the random numbers gives the keywords.


def _slopes(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=rng)


def _state(rng: torch.Generator) -> Tensor:
    return torch.randint(-(2**62), 2**62, (2,), generator=rng)


OPTIONS: dict[str, Callable[[torch.Generator], Keywords]] = {
    "plain": lambda rng: {},
    "causal": lambda rng: {"causal": True},
    "scale": lambda rng: {"softmax_scale": 0.7},
    "negative_scale": lambda rng: {"softmax_scale": -0.4, "causal": True},
    "zero_scale": lambda rng: {"softmax_scale": 0.0},
    "window": lambda rng: {"window_left": 4, "window_right": 2},
    "window_left": lambda rng: {"window_left": 3},
    "window_right": lambda rng: {"window_right": 0},
    "window_causal": lambda rng: {"window_left": 0, "window_right": 7, "causal": True},
    "softcap": lambda rng: {"softcap": 1.5},
    "softcap_negative_scale": lambda rng: {"softcap": 2.0, "softmax_scale": -0.9},
    "alibi": lambda rng: {"alibi_slopes": _slopes(rng, HEADS_Q)},
    "alibi_batch": lambda rng: {"alibi_slopes": _slopes(rng, BATCH, HEADS_Q), "causal": True},
    "sinks": lambda rng: {"sinks": torch.randn(HEADS_Q, generator=rng)},
    "sinks_causal": lambda rng: {"sinks": torch.randn(HEADS_Q, generator=rng), "causal": True},
    "dropout": lambda rng: {"dropout_p": 0.3, "rng_state": _state(rng)},
    "everything": lambda rng: {
        "causal": True,
        "window_left": 9,
        "softcap": 3.0,
        "softmax_scale": 0.5,
        "alibi_slopes": _slopes(rng, BATCH, HEADS_Q),
        "sinks": torch.randn(HEADS_Q, generator=rng),
        "dropout_p": 0.25,
        "rng_state": _state(rng),
    },
}
# (queries, keys) of each sequence: more keys, fewer keys, none of either.
LENGTHS: dict[str, list[tuple[int, int]]] = {
    "more_keys": [(5, 12)] * BATCH,
    "fewer_keys": [(12, 5)] * BATCH,
    "ragged": [(7, 11), (9, 2), (1, 6)],
    "empty": [(6, 0), (0, 5), (3, 1)],
}
FORMS = ["dense", "packed"]


def _offsets(lengths: list[int], slack: int) -> Tensor:
    return torch.tensor(list(itertools.accumulate(lengths, initial=slack)), dtype=torch.int32)


def _place(rows: list[Tensor], form: str, slack: int = 2) -> tuple[Tensor, Keywords, list[Any]]:
    """The sequences' rows in one tensor with NaN around them, the lengths, and where each sequence lies."""
    lengths = [len(x) for x in rows]
    if form == "packed":
        offsets = _offsets(lengths, slack)
        x = rows[0].new_full((int(offsets[-1]) + slack, *rows[0].shape[1:]), math.nan)
        places: list[Any] = [slice(int(a), int(b)) for a, b in itertools.pairwise(offsets)]
        named = {"cu_seqlens": offsets}
    else:
        x = rows[0].new_full((len(rows), max(lengths) + slack, *rows[0].shape[1:]), math.nan)
        places = [(index, slice(0, length)) for index, length in enumerate(lengths)]
        named = {"seqused": torch.tensor(lengths, dtype=torch.int32)}
    for place, values in zip(places, rows, strict=True):
        x[place] = values
    return x, named, places


class Problem:
    """Random sequences, alone and placed in one tensor among NaN."""

    def __init__(
        self,
        rng: torch.Generator,
        lengths: list[tuple[int, int]],
        form: str,
        dtype: torch.dtype = torch.float64,
        head_dims: tuple[int, int] = (8, 16),
    ) -> None:
        d, d_v = head_dims

        def random(rows: int, heads: int, width: int) -> Tensor:
            return torch.randn(rows, heads, width, generator=rng, dtype=torch.float64).to(dtype)

        self.lengths = lengths
        self.each_q = [random(sq, HEADS_Q, d) for sq, _ in lengths]
        self.each_k = [random(sk, HEADS_K, d) for _, sk in lengths]
        self.each_v = [random(sk, HEADS_K, d_v) for _, sk in lengths]
        self.each_dout = [random(sq, HEADS_Q, d_v) for sq, _ in lengths]
        self.each_dlse = [random(sq, HEADS_Q, 1) for sq, _ in lengths]
        self.q, named_q, self.rows = _place(self.each_q, form)
        self.k, named_k, self.keys = _place(self.each_k, form)
        self.v = _place(self.each_v, form)[0]
        self.dout = _place(self.each_dout, form)[0]
        self.dlse = _place(self.each_dlse, form)[0].squeeze(-1).transpose(-1, -2)
        self.keywords = {f"{name}_q": x for name, x in named_q.items()} | {
            f"{name}_k": x for name, x in named_k.items()
        }

    def of_rows(self, statistic: Tensor, index: int) -> Tensor:
        """(rows, heads) of one sequence from lse or dlse."""
        return statistic.transpose(-1, -2)[self.rows[index]]

    def assert_slack(self, result: Tensor, places: list[Any], value: float) -> None:
        """Everything outside the sequences holds `value`."""
        outside = torch.ones(result.shape, dtype=torch.bool)
        for place in places:
            outside[place] = False
        assert (result[outside] == value).all()


# ---------------------------------------------------------------------------------------------------------------------
# Naive attention: loops over positions for the mask, autograd for the gradients, integers for the dropout bits.


def _naive_philox(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(7):
        high0, low0 = divmod(0xD2511F53 * counter[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * counter[2], 2**32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def _naive_number(state: list[int], batch: int, head: int, row: int, key: int) -> int:
    """The 16-bit number of one score, from the documented formula."""
    key64 = (state[0] % 2**64) ^ ((state[1] * 0x9E3779B97F4A7C15) % 2**64)
    words = _naive_philox([key // 32 * 4 + key % 8 // 2, row, batch, head], [key64 % 2**32, key64 // 2**32])
    element = key // 8 % 4 * 2 + key % 2
    return words[element // 2] >> (16 * (element % 2)) & 0xFFFF


def _naive_attention(q: Tensor, k: Tensor, v: Tensor, index: int, keywords: Keywords) -> tuple[Tensor, Tensor]:
    """Out (rows, heads, d_v) and lse (rows, heads) of one sequence, differentiable, score by score."""
    sq, heads, d = q.shape
    sk = k.shape[0]
    scale = keywords.get("softmax_scale", 1 / math.sqrt(d))
    cap = keywords.get("softcap", 0.0)
    left, right = keywords.get("window_left", -1), keywords.get("window_right", -1)
    sinks, slopes = keywords.get("sinks"), keywords.get("alibi_slopes")
    threshold = math.floor(keywords.get("dropout_p", 0.0) * 65536 + 0.5)
    out_rows, lse_rows = [], []
    for i, head in itertools.product(range(sq), range(heads)):
        kv_head = head * k.shape[1] // heads
        scores, kept, values = [], [], []
        for j in range(sk):
            diagonal = i + sk - sq
            if keywords.get("causal", False) and j > diagonal:
                continue
            if (left != -1 and j < diagonal - left) or (right != -1 and j > diagonal + right):
                continue
            score = scale * (q[i, head] * k[j, kv_head]).sum()
            if cap > 0:
                score = cap * torch.tanh(score / cap)
            if slopes is not None:
                slope = slopes[head] if slopes.dim() == 1 else slopes[index, head]
                score = score - slope.double() * abs(diagonal - j)
            scores.append(score)
            values.append(v[j, kv_head])
            if threshold:
                number = _naive_number(keywords["rng_state"].tolist(), index, head, i, j)
                kept.append(65536 / (65536 - threshold) if number >= threshold else 0.0)
        logits = scores + ([] if sinks is None else [sinks[head].double()])
        if not logits:
            out_rows.append(v.new_zeros(v.shape[-1]))
            lse_rows.append(v.new_full((), -math.inf))
            continue
        lse = torch.logsumexp(torch.stack(logits), 0)
        out = v.new_zeros(v.shape[-1])
        for position, (score, value) in enumerate(zip(scores, values, strict=True)):
            out = out + torch.exp(score - lse) * (kept[position] if threshold else 1.0) * value
        out_rows.append(out)
        lse_rows.append(lse)
    if not out_rows:
        return q.new_zeros(0, heads, v.shape[-1]), q.new_zeros(0, heads)
    return torch.stack(out_rows).view(sq, heads, -1), torch.stack(lse_rows).view(sq, heads)


@pytest.mark.parametrize(
    ("lengths", "form"),
    [("more_keys", "dense"), ("fewer_keys", "packed"), ("ragged", "dense"), ("ragged", "packed"), ("empty", "packed")],
)
@pytest.mark.parametrize("options", OPTIONS)
def test_oracle_is_naive_attention(rng: torch.Generator, options: str, lengths: str, form: str) -> None:
    """Results and gradients of the oracle are those of attention written out score by score under autograd."""
    keywords = OPTIONS[options](rng)
    problem = Problem(rng, LENGTHS[lengths], form)
    q, k, v, dout, dlse = problem.q, problem.k, problem.v, problem.dout, problem.dlse
    out, lse = reference.oracle_fwd(q, k, v, **keywords, **problem.keywords)
    gradients = reference.oracle_bwd(dout, dlse, q, k, v, **keywords, **problem.keywords)
    assert {x.dtype for x in (out, lse, *gradients)} == {torch.float64}

    dsinks = torch.zeros(HEADS_Q, dtype=torch.float64)
    for index in range(BATCH):
        leaves = [x[index].clone().requires_grad_() for x in (problem.each_q, problem.each_k, problem.each_v)]
        if "sinks" in keywords:
            leaves.append(keywords["sinks"].double().requires_grad_())
        naive = keywords | ({"sinks": leaves[3]} if "sinks" in keywords else {})
        expected_out, expected_lse = _naive_attention(leaves[0], leaves[1], leaves[2], index, naive)
        torch.testing.assert_close(out[problem.rows[index]], expected_out.detach())
        torch.testing.assert_close(problem.of_rows(lse, index), expected_lse.detach())
        loss = (expected_out * problem.each_dout[index]).sum()
        finite = expected_lse.isfinite()
        loss = loss + (expected_lse[finite] * problem.each_dlse[index].squeeze(-1)[finite]).sum()
        if not loss.requires_grad:
            expected = [torch.zeros_like(x) for x in leaves]
        else:
            expected = list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
        for name, got, place, want in zip(
            ("dq", "dk", "dv"), gradients, (problem.rows, problem.keys, problem.keys), expected, strict=False
        ):
            torch.testing.assert_close(got[place[index]], want, msg=f"{name} of sequence {index} is not autograd's")
        if "sinks" in keywords:
            dsinks += expected[3]
    if "sinks" in keywords:
        torch.testing.assert_close(gradients[3], dsinks)
    else:
        assert gradients[3].numel() == 0

    problem.assert_slack(out, problem.rows, 0.0)
    problem.assert_slack(lse.transpose(-1, -2), problem.rows, -math.inf)
    for gradient, places in zip(gradients[:3], (problem.rows, problem.keys, problem.keys), strict=True):
        problem.assert_slack(gradient, places, 0.0)


class _Oracle(torch.autograd.Function):
    """The oracle as a differentiable function, for gradcheck's finite differences."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, keywords: Keywords) -> Any:
        ctx.save_for_backward(q, k, v)
        ctx.keywords = keywords if sinks is None else keywords | {"sinks": sinks}
        return reference.oracle_fwd(q, k, v, **ctx.keywords)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        dq, dk, dv, dsinks = reference.oracle_bwd(dout, dlse, *ctx.saved_tensors, **ctx.keywords)
        return dq, dk, dv, dsinks if "sinks" in ctx.keywords else None, None


@pytest.mark.parametrize("options", OPTIONS)
def test_oracle_gradients_are_finite_differences(rng: torch.Generator, options: str) -> None:
    """The explicit formulas agree with finite differences of the oracle's own forward."""
    keywords = OPTIONS[options](rng)
    sinks = keywords.pop("sinks", None)
    if sinks is not None:
        sinks = sinks.double().requires_grad_()

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_()

    q, k, v = leaf(BATCH, 4, HEADS_Q, 3), leaf(BATCH, 6, HEADS_K, 3), leaf(BATCH, 6, HEADS_K, 2)
    arguments: Any = (q, k, v, sinks, keywords)
    assert torch.autograd.gradcheck(_Oracle.apply, arguments, fast_mode=True)


# ---------------------------------------------------------------------------------------------------------------------
# The baseline.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_baseline_is_the_standard_computation(rng: torch.Generator, dtype: torch.dtype) -> None:
    """Softmax in fp32, P and dS rounded to the type, fp32 products, one rounding, as plain operations spell it."""
    q, k, v, dout = (torch.randn(1, 48, 1, 32, generator=rng).to(dtype) for _ in range(4))
    out, lse = reference.baseline_fwd(q, k, v)
    dq, dk, dv, _ = reference.baseline_bwd(dout, None, q, k, v, out, lse)
    assert {x.dtype for x in (out, dq, dk, dv)} == {dtype} and lse.dtype == torch.float32

    queries, keys, values, gradient = (x[0, :, 0].float() for x in (q, k, v, dout))
    scale = 1 / math.sqrt(32)
    p = torch.softmax(queries @ keys.T * scale, dim=-1)
    expected = p.to(dtype).float() @ values
    ds = p * (gradient @ values.T - (gradient * expected.to(dtype).float()).sum(-1, keepdim=True))
    ds = ds.to(dtype).float()
    for got, want in (
        (out, expected),
        (dq, ds @ keys * scale),
        (dk, ds.T @ queries * scale),
        (dv, p.to(dtype).float().T @ gradient),
    ):
        # Another order of fp32 operations may tip a rounding, not more.
        same = got[0, :, 0] == want.to(dtype)
        assert same.float().mean() > 0.97
        torch.testing.assert_close(got[0, :, 0].float(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# The cpu path.

# Lengths on both sides of a tile's 128 rows and keys.
LONG = {
    "more_keys": [(130, 300)] * BATCH,
    "fewer_keys": [(270, 140)] * BATCH,
    "ragged": [(129, 257), (0, 40), (200, 1)],
    "tiny": [(1, 1), (3, 0), (2, 17)],
}
_WIDE_WINDOW = {"window_left": 10, "window_right": 33}


def _cpu_keywords(rng: torch.Generator, options: str) -> Keywords:
    keywords = OPTIONS[options](rng)
    return keywords | {
        key: value for key, value in _WIDE_WINDOW.items() if key in keywords and options != "window_causal"
    }


@pytest.mark.parametrize(("dtype", "form"), [(torch.float16, "dense"), (torch.bfloat16, "packed")])
@pytest.mark.parametrize("lengths", LONG)
@pytest.mark.parametrize("options", OPTIONS)
def test_cpu_path_keeps_the_accuracy_rule(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, options: str, lengths: str, form: str
) -> None:
    """Every option, tiles cut everywhere, NaN around the sequences and in the memory of the outputs."""
    monkeypatch.setattr(allocate, "POISON", True)
    keywords = _cpu_keywords(rng, options)
    problem = Problem(rng, LONG[lengths], form, dtype, head_dims=(40, 24))
    keywords |= problem.keywords
    arguments = (problem.q, problem.k, problem.v)
    dlse = problem.dlse.float()
    out, lse = reference.fwd(*arguments, **keywords)
    truth, truth_lse = reference.oracle_fwd(*arguments, **keywords)
    baseline, baseline_lse = reference.baseline_fwd(*arguments, **keywords)
    assert out.is_contiguous() and lse.is_contiguous()
    assert_accurate("out", out, truth, baseline)
    assert_lse(lse, truth_lse)
    assert_lse(baseline_lse, truth_lse)

    got = reference.bwd(problem.dout, dlse, *arguments, out, lse, **keywords)
    want = reference.oracle_bwd(problem.dout, dlse, *arguments, **keywords)
    bound = reference.baseline_bwd(problem.dout, dlse, *arguments, baseline, baseline_lse, **keywords)
    # A row's gradient is a difference of terms of the size of this problem's gradients: an ulp of those is allowed.
    for name, a, b, c in zip(("dq", "dk", "dv"), got, want, bound, strict=False):
        assert a.is_contiguous() and a.dtype == dtype
        assert_accurate(name, a, b, c, magnitude=b.abs().amax())
    assert got[3].shape == ((HEADS_Q,) if "sinks" in keywords else (0,)) and got[3].dtype == torch.float32
    if "sinks" in keywords:
        torch.testing.assert_close(got[3].double(), want[3], rtol=1e-2, atol=8 * torch.finfo(dtype).eps * 20)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_go_where_they_are_asked(rng: torch.Generator, form: str) -> None:
    """Strided views take the gradients of dense and packed calls; nothing beside them is written."""
    problem = Problem(rng, [(20, 20), (3, 3), (140, 140)], form, torch.bfloat16, head_dims=(8, 8))
    keywords = problem.keywords | {"causal": True}
    arguments = (problem.q, problem.k, problem.v)
    out, lse = reference.fwd(*arguments, **keywords)
    expected = reference.bwd(problem.dout, None, *arguments, out, lse, **keywords)
    buffers = [torch.full((*x.shape[:-1], 3, x.shape[-1]), 7.0, dtype=x.dtype) for x in arguments]
    dq, dk, dv = (buffer[..., 1, :] for buffer in buffers)
    got = reference.bwd(problem.dout, None, *arguments, out, lse, dq=dq, dk=dk, dv=dv, **keywords)
    for view, result, want, buffer in zip((dq, dk, dv), got, expected, buffers, strict=False):
        assert result is view
        assert_same_bits("gradient", view, want)
        assert (buffer[..., 0, :] == 7).all() and (buffer[..., 2, :] == 7).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_depend_on_the_own_sequence_alone(rng: torch.Generator, threads: int) -> None:
    """A sequence's results and gradients have the bits that it has alone, whatever is batched with it, NaN included."""

    def pick(*values: T) -> T:
        return values[int(torch.randint(len(values), (), generator=rng))]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for options in ("plain", "causal", "window", "softcap", "alibi", "sinks_causal"):
            span = pick(range(4), range(41), range(151), range(301))
            if options in ("causal", "window"):  # in step, but their diagonals enter and leave tiles of 128 elsewhere
                span = range(257, 321)
            lengths = [(pick(*span), pick(*span)) for _ in range(pick(5, 12))]
            problem = Problem(rng, lengths, "packed", torch.bfloat16, (pick(8, 24, 64, 192), pick(8, 40, 128)))
            for index, (_, sk) in enumerate(lengths):
                if sk and index % 4 == 1:
                    problem.v[problem.keys[index]][-1] = math.nan
            keywords = _cpu_keywords(rng, options)
            packed = keywords | problem.keywords
            q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
            out, lse = reference.fwd(q, k, v, **packed)
            gradients = reference.bwd(dout, None, q, k, v, out, lse, **packed)
            for rows, keys in zip(problem.rows, problem.keys, strict=True):
                alone = (q[rows][None], k[keys][None], v[keys][None])
                out_alone, lse_alone = reference.fwd(*alone, **keywords)
                assert_same_bits("out", out_alone[0], out[rows])
                assert_same_bits("lse", lse_alone[0], lse[:, rows])
                gradients_alone = reference.bwd(dout[rows][None], None, *alone, out_alone, lse_alone, **keywords)
                for name, a, b, place in zip(
                    ("dq", "dk", "dv"), gradients_alone, gradients, (rows, keys, keys), strict=False
                ):
                    assert_same_bits(name, a[0], b[place])
    finally:
        torch.set_num_threads(before)


def test_same_bits_on_every_run(rng: torch.Generator) -> None:
    """Forward, backward and dsinks repeat their bits."""
    problem = Problem(rng, LONG["ragged"], "packed", torch.float16)
    keywords = OPTIONS["everything"](rng) | problem.keywords
    arguments = (problem.q, problem.k, problem.v)
    runs = []
    for _ in range(5):
        out, lse = reference.fwd(*arguments, **keywords)
        runs.append((out, lse, *reference.bwd(problem.dout, None, *arguments, out, lse, **keywords)))
    for run in runs[1:]:
        for x, first in zip(run, runs[0], strict=True):
            assert_same_bits("result", x, first)


# ---------------------------------------------------------------------------------------------------------------------
# NaN and Inf.


def test_product_of_visible_is_the_sum_over_seen_entries(rng: torch.Generator) -> None:
    """Against a loop, with every kind of value and weight."""
    values = torch.tensor([0.0, 1.0, -2.0, math.nan, math.inf, -math.inf])
    for _ in range(20):
        x = values[torch.randint(6, (7, 5), generator=rng)].double()
        weights = torch.randint(-1, 2, (4, 7), generator=rng).double()
        seen = torch.rand(4, 7, generator=rng) < 0.4
        got = product_of_visible(weights.masked_fill(~seen, 0.0), seen, x)
        for m, n in itertools.product(range(4), range(5)):
            expected = sum((weights[m, j] * x[j, n] for j in range(7) if seen[m, j]), torch.tensor(0.0).double())
            torch.testing.assert_close(got[m, n], expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("operand", ["q", "k", "v", "dout"])
def test_specials_reach_those_that_see_them(rng: torch.Generator, operand: str, special: float) -> None:
    """A NaN or Inf inside a sequence shows, in the cpu path as in the oracle, and stays with the rows that see it."""
    keywords: Keywords = {"causal": True, "window_left": 30}
    tensors = {name: torch.randn(1, 150, 1, 16, generator=rng).bfloat16() for name in ("q", "k", "v", "dout")}
    tensors[operand][0, 70, 0, 3] = special
    q, k, v, dout = tensors.values()
    out, lse = reference.fwd(q, k, v, **keywords)
    truth, _ = reference.oracle_fwd(q, k, v, **keywords)
    assert_same_bits("where out is not finite", ~out.isfinite(), ~truth.isfinite())
    if operand != "dout":
        assert not out[0, 70:].isfinite().all()
    first, stop = (70, 71) if operand == "q" else (70, 101)
    assert out[0, :first].isfinite().all() and out[0, stop:].isfinite().all()

    got = reference.bwd(dout, None, q, k, v, out, lse, **keywords)
    want = reference.oracle_bwd(dout, None, q, k, v, **keywords)
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=False):
        assert_same_bits(f"where {name} is not finite", ~a.isfinite(), ~b.isfinite())
    assert not all(x.isfinite().all() for x in got[:3])


def test_zero_scale_hides_no_nan() -> None:
    """0 * NaN is NaN: BLAS with a factor of 0 would not read its operands."""
    q, k, v = (torch.ones(1, 128, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    q[0, 1] = math.nan
    out, lse = reference.fwd(q, k, v, softmax_scale=0.0)
    assert out[0, 1].isnan().all() and lse[0, 0, 1].isnan()
    assert (out[0, [0, 2, 3]] == 1).all()


def test_ignored_gradients_are_not_read() -> None:
    """Where lse is -inf its gradient may be NaN; a row that has only a sink passes its dlse on to the sink."""
    q, k = torch.ones(1, 3, 1, 8).half(), torch.ones(1, 1, 1, 8).half()  # rows 0 and 1 see no key
    dlse = torch.tensor([[[math.nan, math.nan, 1.0]]])
    for sinks in (None, torch.tensor([-math.inf])):
        out, lse = reference.fwd(q, k, k, causal=True, sinks=sinks)
        assert lse[0, 0].tolist()[:2] == [-math.inf] * 2
        for gradients in (
            reference.bwd(q, dlse, q, k, k, out, lse, causal=True, sinks=sinks),
            reference.oracle_bwd(q, dlse, q, k, k, causal=True, sinks=sinks),
        ):
            assert all(x.isfinite().all() for x in gradients)
    sinks = torch.tensor([0.5])
    out, lse = reference.fwd(q, k, k, causal=True, sinks=sinks)
    assert lse[0, 0].tolist()[:2] == [0.5, 0.5] and (out[0, :2] == 0).all()
    dlse = torch.tensor([[[2.0, 3.0, 0.0]]])
    dsinks = reference.bwd(torch.zeros_like(out), dlse, q, k, k, out, lse, causal=True, sinks=sinks)[3]
    assert dsinks.tolist() == [5.0]


# ---------------------------------------------------------------------------------------------------------------------
# Bad lengths, speed and memory.


@pytest.mark.parametrize(
    ("offsets", "used"),
    [([0, 50, 20, 30], None), ([-5, 7, 900, 12], None), ([2**31 - 1, 0, 10, 20], None), ([0, 5, 9, 20], [-3, 99, 4])],
)
def test_bad_lengths_are_clamped(rng: torch.Generator, offsets: list[int], used: list[int] | None) -> None:
    """No access outside the tensors and no error: lengths beyond the buffers, descending or negative are cut."""
    q, k, v = (torch.randn(20, 2, 8, generator=rng).bfloat16() for _ in range(3))
    lengths = None if used is None else torch.tensor(used, dtype=torch.int32)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    keywords: Keywords = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "causal": True}
    keywords |= {"seqused_q": lengths, "seqused_k": lengths}
    out, lse = reference.fwd(q, k, v, **keywords)
    gradients = reference.bwd(out, None, q, k, v, out, lse, **keywords)
    assert all(x.isfinite().all() for x in (out, *gradients))
    oracle, _ = reference.oracle_fwd(q, k, v, **keywords)
    assert oracle.isfinite().all()


def test_many_short_sequences_run_in_step(rng: torch.Generator) -> None:
    """The work is cut into few units: 20,000 sequences of up to 16 rows do not make 20,000 loops."""
    lengths = torch.randint(1, 17, (20000,), generator=rng)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    x = torch.empty(int(cu_seqlens[-1]), 2, 8, dtype=torch.bfloat16)
    options = Options.resolve(x, x, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    cut = list(units(options, 2, 2, lambda padded_q, padded_k: 16 * padded_k))
    assert sorted(itertools.chain.from_iterable(unit.sequences for unit in cut)) == list(range(20000))
    assert len(cut) < 50
    for length in range(1, 2000):
        assert length <= padded_length(length) < 2 * length


class _LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and x._base is None:
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


def test_memory_is_linear() -> None:
    """No tensor grows with the product of the lengths."""
    x = torch.randn(1, 4096, 1, 8).bfloat16()
    with _LargestTensor() as largest:
        out, lse = reference.fwd(x, x, x, causal=True)
        reference.bwd(x, None, x, x, x, out, lse, causal=True)
    assert largest.elements <= 4096 * 128


def test_shared_keys_are_not_copied_whole() -> None:
    """Keys expanded over the batch, rows and query heads that share them cost no memory beyond their tiles."""
    keys = 1 << 16
    q = torch.randn(2, 1, 64, 8).bfloat16()
    k = torch.randn(1, 1, 1, 8).bfloat16().expand(2, keys, 1, 8)
    with _LargestTensor() as largest:
        out, lse = reference.fwd(q, k, k)
    assert largest.elements <= keys  # of keys * 8 per sequence and head
    torch.testing.assert_close(out, k[:, :1].expand_as(out))
    assert lse.isfinite().all()


def test_autocast_and_dtype_defaults_change_nothing(rng: torch.Generator) -> None:
    """The products stay fp32 under autocast, and no result depends on torch's default dtype."""
    q, k, v = (torch.randn(1, 40, 2, 16, generator=rng).bfloat16() for _ in range(3))
    out, lse = reference.fwd(q, k, v)
    expected = (out, lse, *reference.bwd(v, None, q, k, v, out, lse))
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, lse = reference.fwd(q, k, v)
            got = (out, lse, *reference.bwd(v, None, q, k, v, out, lse))
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(got, expected, strict=True):
        assert_same_bits("result", a, b)


@pytest.mark.parametrize(
    ("keywords", "error", "named"),
    [
        ({"block_table": torch.zeros(1, 1, dtype=torch.int32)}, NotImplementedError, "block_table"),
        ({"q_descale": torch.ones(1)}, NotImplementedError, "q_descale"),
        ({"num_splits": 2}, NotImplementedError, "num_splits=2"),
        ({"dropout_p": 0.1}, ValueError, "rng_state"),
        ({"casual": True}, TypeError, "casual"),
    ],
)
def test_what_is_not_computed_is_refused(keywords: Keywords, error: type[Exception], named: str) -> None:
    """By the oracle and the cpu path, by name."""
    x = torch.ones(1, 1, 1, 8, dtype=torch.float16)
    for function in (reference.fwd, reference.oracle_fwd, reference.baseline_fwd):
        with pytest.raises(error, match=named):
            function(x, x, x, **keywords)


# ---------------------------------------------------------------------------------------------------------------------
# Dropout.


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123's kat_vectors, philox4x32 with 7 rounds
        ((0,) * 4, (0,) * 2, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    """The published answers, from the tensor implementation and from this file's integers."""
    words = philox4x32(tuple(torch.tensor(word) for word in counter), (torch.tensor(key[0]), torch.tensor(key[1])))
    assert tuple(int(word) for word in words) == expected
    assert tuple(_naive_philox(list(counter), list(key))) == expected


def test_dropout_mask_is_the_documented_function(rng: torch.Generator) -> None:
    """Every bit of a small mask from the formula in integers, for states with either sign."""
    for _ in range(4):
        state, p = _state(rng), float(torch.rand((), generator=rng))
        threshold = reference.dropout_threshold(p)
        mask = reference.dropout_mask(state, p, 2, 3, 3, 75)
        assert mask.shape == (2, 3, 3, 75) and mask.dtype == torch.bool
        for index in itertools.product(*map(range, mask.shape)):
            assert bool(mask[index]) == (_naive_number(state.tolist(), *index) >= threshold)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        *(({"dropout_p": p}, ValueError, f"dropout_p is {p}; expected a number in [0, 1)") for p in (1.5, 1.0, -0.1)),
        ({"dropout_p": math.nan}, ValueError, "dropout_p is nan"),
        ({"dropout_p": "half"}, TypeError, "dropout_p is 'half' (str)"),
        ({"rng_state": None}, TypeError, "rng_state is NoneType (None); expected a torch.Tensor"),
        ({"rng_state": torch.zeros(2)}, TypeError, "rng_state has dtype torch.float32; expected torch.int64"),
        ({"rng_state": torch.zeros(3, dtype=torch.int64)}, ValueError, "rng_state has shape (3,); expected shape (2)"),
        ({"heads": -1}, ValueError, "heads is -1; expected an integer of at least 0"),
        ({"seqlen_k": 3.0}, TypeError, "seqlen_k is 3.0 (float); expected an integer"),
    ],
)
def test_dropout_mask_refuses(changes: dict[str, Any], error: type[Exception], says: str) -> None:
    good = {"rng_state": torch.zeros(2, dtype=torch.int64), "dropout_p": 0.5}
    good |= dict.fromkeys(("batch", "heads", "seqlen_q", "seqlen_k"), 2)
    assert reference.dropout_mask(**good).shape == (2, 2, 2, 2)  # type: ignore[arg-type]
    with pytest.raises(error, match=re.escape(f"flash_ext: {says}")):
        reference.dropout_mask(**{**good, **changes})


def test_blocks_of_the_mask_are_cut_from_the_whole(rng: torch.Generator) -> None:
    """A tile's bits do not depend on where the tile begins."""
    state = _state(rng)
    whole = reference.dropout_mask(state, 0.5, 4, 3, 40, 200)
    threshold = reference.dropout_threshold(0.5)
    for _ in range(30):
        first, count = int(torch.randint(0, 190, (), generator=rng)), int(torch.randint(1, 11, (), generator=rng))
        batch, heads = torch.tensor([3, 1]), torch.tensor([2])
        rows = torch.arange(int(torch.randint(0, 39, (), generator=rng)), 40)
        block = keep_mask(state, threshold, batch, heads, rows, first, count)
        assert torch.equal(block, whole[batch][:, heads][:, :, rows][..., first : first + count])


@pytest.mark.parametrize("p", [0.0, 0.001, 0.1, 0.5, 0.9])
def test_dropout_drops_its_share(rng: torch.Generator, p: float) -> None:
    """The share kept is the probability at 16 bits, in every batch, head, row and key; neighbours are independent."""
    shape = (4, 4, 128, 512)
    mask = reference.dropout_mask(_state(rng), p, *shape).double()
    keep = 1 / dropout_rescale(reference.dropout_threshold(p))
    assert abs(keep - (1 - p)) <= 0.5 / 65536
    deviation = math.sqrt(keep * (1 - keep))
    for dims in ((), (0,), (1,), (2,), (3,)):
        share = mask.mean(dim=[dim for dim in range(4) if dim not in dims])
        allowed = 6 * deviation * math.sqrt(share.numel() / mask.numel())
        assert (share - keep).abs().max() <= allowed
    for dim, shift in itertools.product(range(4), (1, 2)):
        product = (mask - keep) * (mask.roll(shift, dim) - keep)
        assert product.mean().abs() <= 6 * deviation**2 / math.sqrt(mask.numel())
    other = reference.dropout_mask(_state(rng), p, *shape).double()
    assert ((mask - keep) * (other - keep)).mean().abs() <= 6 * deviation**2 / math.sqrt(mask.numel())


def test_dropout_threshold() -> None:
    """Rounded to 16 bits, and never all dropped."""
    assert [reference.dropout_threshold(p) for p in (0.0, 0.5, 1e-9, 1 / 65536, 0.999999)] == [0, 32768, 0, 1, 65535]
