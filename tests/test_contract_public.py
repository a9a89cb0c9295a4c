"""Contract through the public functions: the same numbers and gradients by every way that a user can call."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.accuracy import assert_same_bits
from helpers.cases import Case, Inputs, make_inputs
from helpers.check import Results, run, verify
from helpers.paths import Path
from helpers.tables import for_cases
from torch.utils.flop_counter import FlopCounterMode

FORMS = ("separate", "kvpacked", "qkvpacked")
BASE = Case(lengths_q=(70, 33), lengths_k=(70, 33), heads=(2, 2), head_dims=(64, 64))
# Beside the dispatcher, and through it: a mode that wants to see the operator.
WAYS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "direct": contextlib.nullcontext,
    "operator": lambda: FlopCounterMode(display=False),
}


def _call_public(inputs: Inputs, form: str, backward: bool) -> Results:
    """Out, lse and, through autograd, the gradients of a public function; packed ones taken apart again."""
    import flash_ext

    case, given = inputs.case, inputs.keywords
    operands = [inputs.q, inputs.k, inputs.v]
    if form == "kvpacked":
        operands = [inputs.q, torch.stack(operands[1:], dim=-3)]
    elif form == "qkvpacked":
        operands = [torch.stack(operands, dim=-3)]
    operands = [x.detach().requires_grad_(backward) for x in operands]
    sinks = given.get("sinks")
    if sinks is not None:
        sinks = sinks.detach().requires_grad_(backward)
    positional: list[Any] = list(operands)
    if case.varlen and form == "qkvpacked":
        positional += [given["cu_seqlens_q"], given.get("max_seqlen_q")]
    elif case.varlen:
        positional += [given[name] for name in ("cu_seqlens_q", "cu_seqlens_k")]
        positional += [given.get(name) for name in ("max_seqlen_q", "max_seqlen_k")]
    name = "flash_attn_" + ("varlen_" if case.varlen else "") + ("" if form == "separate" else f"{form}_") + "func"
    out, lse = getattr(flash_ext, name)(
        *positional,
        softmax_scale=case.softmax_scale,
        causal=case.causal,
        window_size=case.window,
        softcap=case.softcap,
        alibi_slopes=given.get("alibi_slopes"),
        deterministic=case.deterministic,
        return_lse=True,
        seqused_q=given.get("seqused_q"),
        seqused_k=given.get("seqused_k"),
        learnable_sink=sinks,
    )
    results = Results(out.detach().contiguous(), lse.detach())
    if backward:
        leaves = [*operands, sinks] if sinks is not None else operands
        *found, last = torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))
        if sinks is None:
            found.append(last)
        else:
            results.dsinks = last
        if form == "kvpacked":
            found = [found[0], *found[1].unbind(-3)]
        elif form == "qkvpacked":
            found = list(found[0].unbind(-3))
        results.dq, results.dk, results.dv = (x.contiguous() for x in found)
    return results


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
@for_cases(
    BASE.with_(varlen=varlen, slack=slack, **options)
    for varlen in (False, True)
    for slack in ((0, 2, 0), (3, 0, 4), (3, 2, 4))
    for options in ({"causal": True, "sinks": torch.float32}, {"window": (20, 3), "softcap": 5.0, "alibi": "batch"})
    if varlen or slack == (0, 2, 0)
)
def test_public_functions(path: Path, rng: torch.Generator, case: Case, direction: str, form: str, way: str) -> None:
    """Separate, kv-packed and qkv-packed, dense and varlen: no argument is forgotten on the way, or on the way back."""
    if form == "qkvpacked":  # one cu_seqlens and one seqlen for both sides
        case = case.with_(slack=tuple(rows and 1 for rows in case.slack))
    inputs = make_inputs(case, path.device, rng)
    if form == "qkvpacked":
        _share_rows(inputs)
    with WAYS[way]():
        results = _call_public(inputs, form, direction == "backward")
    verify(inputs, results, direction)


def _share_rows(inputs: Inputs) -> None:
    """Give the keys the rows of the queries: cut the longer slack of the keys away."""
    case, keywords = inputs.case, inputs.keywords
    rows = inputs.q.shape[-3]
    if case.varlen:
        keywords["cu_seqlens_k"] = keywords["cu_seqlens_q"]
        inputs.k, inputs.v = (_by_segments(inputs, x, rows) for x in (inputs.k, inputs.v))
        for segment in inputs.segments:
            segment.k = segment.q
    else:
        inputs.k, inputs.v = inputs.k[:, :rows], inputs.v[:, :rows]
    inputs.slack_k = inputs.slack_q


def _by_segments(inputs: Inputs, x: torch.Tensor, rows: int) -> torch.Tensor:
    moved = torch.full((rows, *x.shape[1:]), torch.nan, dtype=x.dtype, device=x.device)
    for segment in inputs.segments:
        moved[segment.q] = x[segment.k]
    return moved


@pytest.mark.parametrize("form", ["separate", "kvpacked"])
@for_cases(
    BASE.with_(
        head_dims=head_dims, varlen=varlen, slack=(0, 0, 0), lengths_q=(30, 30), lengths_k=(50, 50), heads=(4, 2)
    )
    for head_dims in ((20, 20), (1, 1), (63, 63), (250, 250), (36, 36), (65, 20))
    for varlen in (False, True)
)
def test_head_dims_are_padded(path: Path, rng: torch.Generator, case: Case, direction: str, form: str) -> None:
    """Any head dim up to 256; the default scale is that of the size that the user gave."""
    if form == "kvpacked":
        case = case.with_(head_dims=(case.head_dims[0],) * 2)
    inputs = make_inputs(case, path.device, rng)
    verify(inputs, _call_public(inputs, form, direction == "backward"), direction)


@for_cases([BASE.with_(lengths_q=(70, 70), lengths_k=(90, 90), causal=True)], directions=["forward"])
def test_what_is_returned(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """out; (out, lse); (out, lse, None)."""
    import flash_ext

    inputs = make_inputs(case, path.device, rng)
    operands = inputs.q, inputs.k, inputs.v
    expected = run(inputs, direction)
    out = flash_ext.flash_attn_func(*operands, causal=True)
    assert_same_bits("out", out, expected.out)
    for length, result in (
        (2, flash_ext.flash_attn_func(*operands, causal=True, return_lse=True)),
        (3, flash_ext.flash_attn_func(*operands, causal=True, return_attn_probs=True)),
    ):
        assert isinstance(result, tuple) and len(result) == length
        assert_same_bits("out", result[0], expected.out)
        assert_same_bits("lse", result[1], expected.lse)
        assert result[2:] in ((), (None,))


@pytest.mark.needs("backward")
def test_second_derivative_is_refused(path: Path, rng: torch.Generator) -> None:
    """Never a silent zero."""
    import flash_ext

    inputs = make_inputs(BASE.with_(lengths_q=(30, 30), lengths_k=(30, 30)), path.device, rng)
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    for out in (flash_ext.flash_attn_func(q, k, v), torch.ops.flash_ext.fwd(q, k, v)[0]):
        (dq,) = torch.autograd.grad(out, q, inputs.dout.detach().requires_grad_(), create_graph=True)
        with pytest.raises((RuntimeError, NotImplementedError)):
            torch.autograd.grad(dq.sum(), k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(path: Path, rng: torch.Generator, dtype: torch.dtype) -> None:
    """fp32 operands are cast under autocast, and refused by name without."""
    import flash_ext

    inputs = make_inputs(BASE.with_(lengths_q=(70, 70), lengths_k=(90, 90), dtype=dtype), path.device, rng)
    operands = inputs.q.float(), inputs.k.float(), inputs.v.float()
    with torch.autocast(path.device.type, dtype):
        out = flash_ext.flash_attn_func(*operands)
        through_operator = torch.ops.flash_ext.fwd(*operands)[0]
    expected = run(inputs, "forward").out
    assert_same_bits("out", out, expected)
    assert_same_bits("out of the operator", through_operator, expected)
    for call in (flash_ext.flash_attn_func, torch.ops.flash_ext.fwd):
        with pytest.raises(TypeError, match=r"^flash_ext: q .*float32"):
            call(*operands)


SHARED = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs".split()
OURS = "return_lse seqused_q seqused_k learnable_sink q_descale k_descale v_descale num_splits sm_margin".split()


def test_signatures() -> None:
    """Names, order and defaults of the flash_attn package, as explicit keywords that frameworks can detect."""
    import flash_ext

    heads = {
        "flash_attn_func": ["q", "k", "v"],
        "flash_attn_kvpacked_func": ["q", "kv"],
        "flash_attn_qkvpacked_func": ["qkv"],
        "flash_attn_varlen_func": ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
        "flash_attn_varlen_kvpacked_func": ["q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
        "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen"],
    }
    defaults = {
        "dropout_p": 0.0,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "alibi_slopes": None,
        "deterministic": False,
        "return_attn_probs": False,
        "block_table": None,
        "return_lse": False,
        "seqused_q": None,
        "seqused_k": None,
        "learnable_sink": None,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        "num_splits": 0,
        "sm_margin": 0,
    }
    for name, operands in heads.items():
        parameters = inspect.signature(getattr(flash_ext, name)).parameters
        table = ["block_table"] if name == "flash_attn_varlen_func" else []
        assert list(parameters) == operands + SHARED + table + OURS, name
        for key, parameter in parameters.items():
            if key in defaults:
                assert parameter.default == defaults[key], f"{name}: {key}"
            assert parameter.kind is (parameter.KEYWORD_ONLY if key in OURS else parameter.POSITIONAL_OR_KEYWORD)


SCHEMAS = {
    "fwd": "flash_ext::fwd(Tensor q, Tensor k, Tensor v, *, {}) -> (Tensor out, Tensor lse)",
    "bwd": "flash_ext::bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, *, {}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
}
KEYWORDS = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, Tensor? block_table=None, float? softmax_scale=None, "
    "bool causal=False, SymInt window_left=-1, SymInt window_right=-1, float softcap=0., Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, float dropout_p=0., Tensor? rng_state=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, SymInt num_splits=0, SymInt sm_margin=0, bool deterministic=False"
)


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(name: str) -> None:
    """The operators' schemas are fixed; a keyword may only be added at the end."""
    import flash_ext  # noqa: F401

    schema = str(getattr(torch.ops.flash_ext, name).default._schema)
    head, tail = SCHEMAS[name].split("{}")
    assert schema.startswith(head + KEYWORDS) and schema.endswith(tail), schema


def test_later_names_do_not_exist_yet() -> None:
    """What has no implementation is not exported: feature detection by name tells the truth."""
    import flash_ext

    assert not hasattr(flash_ext, "flash_attn_with_kvcache")
    for name in ("append_kv_", "combine", "quantize_fp8"):
        assert not hasattr(torch.ops.flash_ext, name)


REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "block_table": (NotImplementedError, "block_table", {"block_table": torch.zeros(2, 1, dtype=torch.int32)}),
    "q_descale": (NotImplementedError, "q_descale", {"q_descale": torch.ones(2, 2)}),
    "k_descale": (NotImplementedError, "k_descale", {"k_descale": torch.ones(2, 2)}),
    "v_descale": (NotImplementedError, "v_descale", {"v_descale": torch.ones(2, 2)}),
    "splits": (NotImplementedError, "num_splits", {"num_splits": 2}),
    "negative splits": (ValueError, "num_splits", {"num_splits": -1}),
    "slopes with gradient": (ValueError, "alibi_slopes", {"alibi_slopes": torch.ones(2, requires_grad=True)}),
    "slopes of fp16": (TypeError, "alibi_slopes", {"alibi_slopes": torch.ones(2, dtype=torch.float16)}),
    "slopes of one head": (ValueError, "alibi_slopes", {"alibi_slopes": torch.ones(1)}),
    "sinks of three heads": (ValueError, "sinks", {"sinks": torch.ones(3)}),
    "sinks of fp64": (TypeError, "sinks", {"sinks": torch.ones(2, dtype=torch.float64)}),
    "window": (ValueError, "window_left", {"window_left": -2}),
    "NaN scale": (ValueError, "softmax_scale", {"softmax_scale": float("nan")}),
    "negative softcap": (ValueError, "softcap", {"softcap": -1.0}),
    "dropout": (ValueError, "dropout_p", {"dropout_p": 1.0}),
    "int64 lengths": (TypeError, "seqused_k", {"seqused_k": torch.ones(2, dtype=torch.int64)}),
    "one cu_seqlens": (ValueError, "cu_seqlens_k", {"cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32)}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_never_ignored(path: Path, rng: torch.Generator, name: str) -> None:
    """One error that names the argument, on every path, for what it cannot honour."""
    kind, argument, keywords = REFUSED[name]
    keywords = {
        key: value.detach().to(path.device).requires_grad_(value.requires_grad) if torch.is_tensor(value) else value
        for key, value in keywords.items()
    }
    inputs = make_inputs(BASE.with_(lengths_q=(30, 30), lengths_k=(30, 30)), path.device, rng)
    with pytest.raises(kind, match=f"^flash_ext: .*{argument}"):
        torch.ops.flash_ext.fwd(inputs.q, inputs.k, inputs.v, **keywords)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float8_e4m3fn, torch.int8])
def test_other_dtypes_are_refused(path: Path, dtype: torch.dtype) -> None:
    """Refused by name, not converted."""
    x = torch.zeros(1, 8, 2, 64, device=path.device).to(dtype)
    with pytest.raises((TypeError, NotImplementedError), match=rf"^flash_ext: q .*{dtype}"):
        torch.ops.flash_ext.fwd(x, x, x)


@pytest.mark.parametrize("axis", [0, 1])
def test_dimensions_of_2_to_31_are_refused(path: Path, axis: int) -> None:
    """Each dimension is below 2^31; offsets are not (test_contract_layout)."""
    shape = [1, 1, 2, 64]
    shape[axis] = 2**31
    x = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16, device=path.device).expand(shape)
    with pytest.raises(ValueError, match=r"^flash_ext: q .*2147483648"):
        torch.ops.flash_ext.fwd(x, x, x)


@pytest.mark.parametrize("keywords", [{"num_splits": 0}, {"num_splits": 1}, {"sm_margin": 4}, {"sm_margin": 10_000}])
def test_accepted_hints(path: Path, rng: torch.Generator, keywords: dict[str, int]) -> None:
    """num_splits 0 and 1 mean one pass, sm_margin leaves multiprocessors free: neither changes a number."""
    inputs = make_inputs(BASE.with_(lengths_q=(70, 70), lengths_k=(90, 90)), path.device, rng)
    expected = run(inputs, "forward")
    out, lse = torch.ops.flash_ext.fwd(inputs.q, inputs.k, inputs.v, **keywords)
    assert_same_bits("out", out, expected.out)
    assert_same_bits("lse", lse, expected.lse)


def test_outputs_are_prefilled_with_nan(path: Path) -> None:
    """The tests run with FLASH_EXT_POISON=1: an output that no one writes is NaN, so every test would see it."""
    from flash_ext import allocate

    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert allocate.empty((3, 5), dtype, path.device).isnan().all()
    assert (allocate.workspace(100, torch.empty(0, device=path.device)) == 0xFF).all()
