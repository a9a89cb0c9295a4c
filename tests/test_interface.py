"""The public functions: their signatures, the forms of their results, packed tensors, padding, dropout, autocast."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.accuracy import assert_same_bits
from helpers.paths import Path
from torch import Tensor
from torch.nn.functional import pad

import flash_ext
from flash_ext import dispatch, reference
from flash_ext.padding import index_first_axis

# What is tested is above the kernels.
pytestmark = [pytest.mark.large("emulated"), pytest.mark.needs("backward", "dropout", "sinks", "varlen", "softcap")]

Calls = dict[str, list[dict[str, Any]]]

# For calls whose arguments come from a list or a dict.
_DENSE: Callable[..., Any] = flash_ext.flash_attn_func
_VARLEN: Callable[..., Any] = flash_ext.flash_attn_varlen_func


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Records what reaches dispatch, which then does its work."""
    recorded: Calls = {"forward": [], "backward": []}

    def record(direction: str, names: tuple[str, ...]) -> None:
        original = getattr(dispatch, direction)

        def recording(*tensors: Any, **options: Any) -> Any:
            results = original(*tensors, **options)
            recorded[direction].append({**dict(zip(names, tensors, strict=True)), **options, "results": results})
            return results

        monkeypatch.setattr(dispatch, direction, recording)

    plain = dispatch.plain_forward

    def recording_plain(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], deterministic: bool) -> Any:
        results = plain(q, k, v, options, deterministic)
        if results is not None:
            mode = {"deterministic": True} if deterministic else {}
            recorded["forward"].append({"q": q, "k": k, "v": v, **options, **mode, "results": results})
        return results

    monkeypatch.setattr(dispatch, "plain_forward", recording_plain)
    record("forward", ("q", "k", "v"))
    record("backward", ("dout", "dlse", "q", "k", "v", "out", "lse"))
    yield recorded


def _random(path: Path, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=path.device, requires_grad=grad)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _cu_seqlens(path: Path, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=path.device)


# ---------------------------------------------------------------------------------------------------------------------
# Signatures.

_COMMON: dict[str, Any] = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
_MORE: dict[str, Any] = {
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
_CU = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
# As flash_attn 2.8 has them: names without a default, then the shared ones with theirs.
_SIGNATURES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "flash_attn_func": (["q", "k", "v"], _COMMON),
    "flash_attn_varlen_func": (["q", "k", "v", *_CU], {**_COMMON, "block_table": None}),
    "flash_attn_qkvpacked_func": (["qkv"], _COMMON),
    "flash_attn_kvpacked_func": (["q", "kv"], _COMMON),
    "flash_attn_varlen_qkvpacked_func": (["qkv", "cu_seqlens", "max_seqlen"], _COMMON),
    "flash_attn_varlen_kvpacked_func": (["q", "kv", *_CU], _COMMON),
}


@pytest.mark.parametrize("name", _SIGNATURES)
def test_signature_is_that_of_flash_attn(name: str) -> None:
    """Frameworks look for features with inspect.signature, and callers pass the shared arguments by position."""
    required, defaults = _SIGNATURES[name]
    parameters = inspect.signature(getattr(flash_ext, name)).parameters
    shared = {key: value for key, value in parameters.items() if value.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    own = {key: value for key, value in parameters.items() if value.kind is inspect.Parameter.KEYWORD_ONLY}
    assert (
        list(shared) == [*required, *defaults]
        and list(own) == list(_MORE)
        and len(shared) + len(own) == len(parameters)
    )
    assert all(shared[key].default is inspect.Parameter.empty for key in required)
    for key, default in {**defaults, **_MORE}.items():
        assert parameters[key].default == default and type(parameters[key].default) is type(default)


@pytest.mark.parametrize("name", ["unpad_input", "pad_input"])
def test_padding_helpers_have_the_signatures_of_bert_padding(name: str) -> None:
    expected = {
        "unpad_input": ["hidden_states", "attention_mask", "unused_mask"],
        "pad_input": ["hidden_states", "indices", "batch", "seqlen"],
    }
    assert list(inspect.signature(getattr(flash_ext, name)).parameters) == expected[name]


def test_operators_have_the_schemas_of_the_interface() -> None:
    keywords = (
        "*, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, "
        "SymInt? max_seqlen_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, Tensor? block_table=None, "
        "float? softmax_scale=None, bool causal=False, SymInt window_left=-1, SymInt window_right=-1, "
        "float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, float dropout_p=0., Tensor? rng_state=None, "
        "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, SymInt num_splits=0, "
        "SymInt sm_margin=0, bool deterministic=False)"
    )
    assert str(torch.ops.flash_ext.fwd.default._schema) == (
        f"flash_ext::fwd(Tensor q, Tensor k, Tensor v, {keywords} -> (Tensor out, Tensor lse)"
    )
    assert str(torch.ops.flash_ext.bwd.default._schema) == (
        "flash_ext::bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        f"{keywords} -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
    )


def test_public_names() -> None:
    assert {*_SIGNATURES, "pad_input", "unpad_input", "explain", "kernels", "build_info"} <= set(flash_ext.__all__)
    for name in flash_ext.__all__:
        assert getattr(flash_ext, name) is not None
        if not name.startswith("__"):
            assert inspect.getdoc(getattr(flash_ext, name)), f"{name} has no docstring"


# ---------------------------------------------------------------------------------------------------------------------
# Results.


def test_forms_of_the_result(path: Path) -> None:
    q = _random(path, 2, 9, 4, 32)
    out = flash_ext.flash_attn_func(q, q, q)
    assert isinstance(out, Tensor) and out.shape == q.shape
    out_lse = flash_ext.flash_attn_func(q, q, q, return_lse=True)
    assert len(out_lse) == 2 and out_lse[1].shape == (2, 4, 9) and out_lse[1].dtype is torch.float32
    three = flash_ext.flash_attn_func(q, q, q, return_attn_probs=True)
    assert len(three) == 3 and three[2] is None
    for one in (out_lse[0], three[0]):
        assert_same_bits("out", one, out)
    assert_same_bits("lse", three[1], out_lse[1])


def test_shared_arguments_by_position(path: Path, calls: Calls) -> None:
    """As code written for flash_attn passes them."""
    q = _random(path, 2, 9, 4, 32)
    slopes = torch.rand(4, device=path.device)
    flash_ext.flash_attn_func(q, q, q, 0.0, 0.3, True, (3, 0), 2.0, slopes, True, False)
    cu = _cu_seqlens(path, 0, 4, 18)
    flat = q.flatten(0, 1)
    flash_ext.flash_attn_varlen_func(flat, flat, flat, cu, cu, 14, 14, 0.0, 0.3, True, (3, 0), 2.0, slopes, True, False)
    flash_ext.flash_attn_varlen_func(flat, flat, flat, cu, cu, 14, 14, 0.0, 0.3, True, (3, 0), 2.0, slopes, True, False)
    for call in calls["forward"]:
        assert (call["softmax_scale"], call["causal"], call["window_left"], call["window_right"]) == (0.3, True, 3, 0)
        assert (call["softcap"], call["deterministic"]) == (2.0, True) and call["alibi_slopes"] is slopes
    assert calls["forward"][1]["cu_seqlens_q"] is cu and calls["forward"][1]["max_seqlen_k"] == 14


def test_numbers_of_other_libraries(path: Path, calls: Calls) -> None:
    numpy = pytest.importorskip("numpy")
    q = _random(path, 2, 9, 4, 32, grad=False)
    flash_ext.flash_attn_func(
        q,
        q,
        q,
        softmax_scale=numpy.float32(0.5),
        window_size=(numpy.int64(3), -1),
        softcap=numpy.float64(2),
        sm_margin=1,
    )
    _DENSE(q, q, q, softmax_scale=1, softcap=0, dropout_p=0, window_size=[-1, -1])
    first, second = calls["forward"]
    assert type(first["softmax_scale"]) is float and type(first["window_left"]) is int and first["sm_margin"] == 1
    assert (first["softmax_scale"], first["window_left"], first["softcap"]) == (0.5, 3, 2.0)
    assert second["softmax_scale"] == 1.0 and second.get("softcap", 0.0) == 0.0


def test_max_seqlen_may_be_a_tensor_that_nobody_reads(path: Path, calls: Calls) -> None:
    """Some callers compute it on the device; a read would synchronise, and a hint is not worth that."""
    flat, cu = _random(path, 18, 4, 32), _cu_seqlens(path, 0, 4, 18)
    longest = cu.diff().max()
    got = _VARLEN(flat, flat, flat, cu, cu, longest, longest)
    assert_same_bits("out", got, flash_ext.flash_attn_varlen_func(flat, flat, flat, cu, cu, 14, 14))
    assert calls["forward"][0].get("max_seqlen_q") is None and calls["forward"][0].get("max_seqlen_k") is None


def test_a_window_wider_than_anything_is_no_window(path: Path) -> None:
    q = _random(path, 2, 9, 4, 32)
    wide = flash_ext.flash_attn_func(q, q, q, window_size=(2**40, 9))
    assert_same_bits("out", wide, flash_ext.flash_attn_func(q, q, q))
    wide = torch.ops.flash_ext.fwd(q, q, q, window_left=2**40, window_right=2**33, causal=True)[0]
    assert_same_bits("out", wide, flash_ext.flash_attn_func(q, q, q, causal=True))


def test_learnable_sink_and_lse_get_gradients(path: Path) -> None:
    """Against the fp64 oracle."""
    q, k, v = (_random(path, 2, 9, heads, 32) for heads in (4, 2, 2))
    sink = torch.randn(4, device=path.device, requires_grad=True)
    out, lse = flash_ext.flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), (q, k, v, sink), (dout, dlse))
    inputs = [tensor.detach().double() for tensor in (q, k, v)]
    options: dict[str, Any] = {"causal": True, "sinks": sink.detach()}
    truth = reference.oracle_fwd(*inputs, **options)
    expected = reference.oracle_bwd(dout, dlse, *inputs, **options)
    for one, other in zip((out, lse, *got), (*truth, *expected), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=2e-2, atol=2e-2)
    assert got[3].abs().max() > 0.05


def test_deterministic_mode_of_torch_implies_deterministic(path: Path, calls: Calls) -> None:
    q = _random(path, 2, 9, 4, 32)
    flash_ext.flash_attn_func(q, q, q).sum().backward()
    torch.use_deterministic_algorithms(True)
    flash_ext.flash_attn_func(q, q, q).sum().backward()
    torch.ops.flash_ext.fwd(q, q, q)[0].sum().backward()
    torch.use_deterministic_algorithms(False)
    flash_ext.flash_attn_func(q, q, q, deterministic=True).sum().backward()
    for direction in ("forward", "backward"):
        assert [call.get("deterministic", False) for call in calls[direction]] == [False, True, True, True]


# ---------------------------------------------------------------------------------------------------------------------
# Head dims that are no multiple of 8.


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(12, 12), (4, 4), (7, 20), (20, 16), (16, 3), (65, 65), (255, 1)])
def test_other_head_dims_are_padded(path: Path, head_dim: int, head_dim_v: int) -> None:
    """As by hand, with the scale of the size that was given; gradients have the sizes that were given."""
    q, k = (_random(path, 2, 9, heads, head_dim) for heads in (4, 2))
    v = _random(path, 2, 9, 2, head_dim_v)
    options: dict[str, Any] = {"causal": True, "deterministic": True, "return_lse": True}
    out, lse = flash_ext.flash_attn_func(q, k, v, **options)
    padded = [pad(tensor.detach(), (0, -tensor.shape[-1] % 8)).requires_grad_() for tensor in (q, k, v)]
    expected, expected_lse = _DENSE(*padded, softmax_scale=head_dim**-0.5, **options)
    assert out.shape == (2, 9, 4, head_dim_v)
    assert_same_bits("out", out, expected[..., :head_dim_v])
    assert_same_bits("lse", lse, expected_lse)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), dout)
    wanted = torch.autograd.grad(expected, padded, pad(dout, (0, -head_dim_v % 8)))
    for name, one, other, like in zip(("dq", "dk", "dv"), got, wanted, (q, k, v), strict=True):
        assert one.shape == like.shape
        assert_same_bits(name, one, other[..., : like.shape[-1]])
    truth = reference.oracle_fwd(
        *(tensor.detach().double() for tensor in padded), causal=True, softmax_scale=head_dim**-0.5
    )
    torch.testing.assert_close(lse.double(), truth[1].double(), rtol=1e-4, atol=1e-4)


def test_scale_of_padded_head_dims_can_be_given(path: Path) -> None:
    q = _random(path, 2, 9, 4, 12)
    assert_same_bits(
        "out", flash_ext.flash_attn_func(q, q, q, softmax_scale=1 / math.sqrt(12)), flash_ext.flash_attn_func(q, q, q)
    )


# ---------------------------------------------------------------------------------------------------------------------
# Packed tensors.

_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "sink": {"learnable_sink": True},
    "window": {"window_size": (3, 1), "softcap": 3.0},
}


def _packed(path: Path, parts: int, varlen: bool, head_dim: int) -> tuple[list[Tensor], list[Tensor], list[Any]]:
    """The packed arguments, q, k, v apart (sharing nothing), and what comes after them in the varlen functions."""
    rows = (18,) if varlen else (2, 9)
    packed = _random(path, *rows, parts, 4 if parts == 3 else 2, head_dim)
    given = [packed] if parts == 3 else [_random(path, *rows, 4, head_dim), packed]
    apart = [tensor.detach().clone().requires_grad_() for tensor in (*given[:-1], *packed.unbind(-3))]
    cu = _cu_seqlens(path, 0, 5, 18)
    if not varlen:
        return given, apart, []
    return given, apart, [cu, 13] if parts == 3 else [cu, cu, 13, 13]


_PACKED_FUNCTIONS: dict[tuple[int, bool], Callable[..., Any]] = {
    (3, False): flash_ext.flash_attn_qkvpacked_func,
    (2, False): flash_ext.flash_attn_kvpacked_func,
    (3, True): flash_ext.flash_attn_varlen_qkvpacked_func,
    (2, True): flash_ext.flash_attn_varlen_kvpacked_func,
}


@pytest.mark.parametrize("variant", _VARIANTS)
@pytest.mark.parametrize("head_dim", [32, 20])
@pytest.mark.parametrize(("parts", "varlen"), _PACKED_FUNCTIONS, ids=lambda value: str(value))
@pytest.mark.parametrize("way", ["direct", "operator"])
def test_packed_is_separate(
    path: Path, calls: Calls, parts: int, varlen: bool, head_dim: int, variant: str, way: str
) -> None:
    """The same bits; on the direct way without a copy of the operands or of the gradients."""
    given, apart, lengths = _packed(path, parts, varlen, head_dim)
    options: dict[str, Any] = {**_VARIANTS[variant], "deterministic": True, "return_lse": True}
    leaves = [*given]
    if "learnable_sink" in options:
        options["learnable_sink"] = torch.randn(4, device=path.device, requires_grad=True)
        leaves.append(options["learnable_sink"])
        apart = [*apart, options["learnable_sink"]]
    separate_lengths = [lengths[0], lengths[0], lengths[1], lengths[1]] if varlen and parts == 3 else lengths
    expected = (_VARLEN if varlen else _DENSE)(*apart[:3], *separate_lengths, **options)
    incoming = [torch.randn_like(tensor) for tensor in expected]
    wanted = torch.autograd.grad(expected, apart, incoming)
    wanted_packed = [*wanted[: 3 - parts], torch.stack(wanted[3 - parts : 3], -3), *wanted[3:]]

    calls["forward"].clear()
    calls["backward"].clear()
    function = _PACKED_FUNCTIONS[parts, varlen]
    if way == "operator":
        with torch.utils.flop_counter.FlopCounterMode(display=False):
            got = function(*given, *lengths, **options)
            found = torch.autograd.grad(got, leaves, incoming)
    else:
        got = function(*given, *lengths, **options)
        found = torch.autograd.grad(got, leaves, incoming)
    for name, one, other in zip(("out", "lse"), got, expected, strict=True):
        assert_same_bits(name, one, other)
    for number, (one, other) in enumerate(zip(found, wanted_packed, strict=True)):
        assert_same_bits(f"gradient {number}", one, other)

    if way == "direct" and head_dim == 32:
        (forward,), (backward,) = calls["forward"], calls["backward"]
        operands = [forward[name] for name in "qkv"[3 - parts :]]
        assert {_storage(tensor) for tensor in operands} == {_storage(given[-1])}
        written = [backward[name] for name in ("dq", "dk", "dv")[3 - parts :]]
        assert {_storage(tensor) for tensor in written} == {_storage(found[len(given) - 1])}
        with torch.no_grad():
            function(*given, *lengths, **options)
        assert {_storage(calls["forward"][-1][name]) for name in "qkv"[3 - parts :]} == {_storage(given[-1])}


def test_gradient_of_a_packed_view(path: Path) -> None:
    """qkv as a projection makes it, permuted: its gradient goes through the views."""
    hidden = _random(path, 3, 2, 9, 4, 32)
    qkv = hidden.permute(1, 2, 0, 3, 4)
    out = flash_ext.flash_attn_qkvpacked_func(qkv, deterministic=True)
    dout = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, hidden, dout)
    q, k, v = hidden.unbind(0)
    (expected,) = torch.autograd.grad(flash_ext.flash_attn_func(q, k, v, deterministic=True), hidden, dout)
    assert_same_bits("gradient", got, expected)


def test_packed_where_only_lse_is_used(path: Path) -> None:
    qkv = _random(path, 2, 9, 3, 4, 32)
    _, lse = flash_ext.flash_attn_qkvpacked_func(qkv, return_lse=True, deterministic=True)
    (got,) = torch.autograd.grad(lse.sum(), qkv)
    assert got[:, :, 2].abs().max() == 0 and got[:, :, 0].abs().max() > 0


# ---------------------------------------------------------------------------------------------------------------------
# Dropout.


def _drop(q: Tensor, dropout_p: float = 0.5, **options: Any) -> Any:
    return _DENSE(q, q, q, dropout_p, deterministic=True, **options)


def test_dropout_is_drawn_from_torchs_generator(path: Path, calls: Calls) -> None:
    q = _random(path, 2, 33, 4, 32)
    torch.manual_seed(3)
    first, second = _drop(q), _drop(q)
    torch.manual_seed(3)
    again = _drop(q)
    assert_same_bits("out", again, first)
    assert not torch.equal(first, second)
    states = [call["rng_state"] for call in calls["forward"]]
    assert all(state.shape == (2,) and state.dtype is torch.int64 and state.device == q.device for state in states)
    assert torch.equal(states[0], states[2]) and not torch.equal(states[0], states[1])


def test_the_backward_drops_what_the_forward_dropped(path: Path, calls: Calls) -> None:
    q, k, v = (_random(path, 2, 33, 4, 32) for _ in range(3))
    out = _DENSE(q, k, v, 0.5, deterministic=True)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), dout)
    state = calls["forward"][0]["rng_state"]
    keywords: dict[str, Any] = {"dropout_p": 0.5, "rng_state": state, "deterministic": True}
    tensors = [tensor.detach() for tensor in (q, k, v)]
    expected_out, lse = torch.ops.flash_ext.fwd(*tensors, **keywords)
    assert_same_bits("out", out, expected_out)
    expected = torch.ops.flash_ext.bwd(dout, None, *tensors, expected_out, lse, **keywords)
    for name, one, other in zip(("dq", "dk", "dv"), got, expected, strict=False):
        assert_same_bits(name, one, other)


def test_dropout_is_the_same_through_the_operator(path: Path) -> None:
    """Under a mode the state is drawn in the mode's sight, from the same generator."""
    q = _random(path, 2, 33, 4, 32)
    torch.manual_seed(4)
    expected = _drop(q)
    torch.manual_seed(4)
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        got = _drop(q)
    assert_same_bits("out", got, expected)


def test_without_dropout_nothing_is_drawn(path: Path) -> None:
    q = _random(path, 2, 9, 4, 32)
    generator_state = torch.cuda.get_rng_state if q.is_cuda else torch.get_rng_state
    before = generator_state()
    for dropout_p in (0.0, 0):
        _drop(q, dropout_p).sum().backward()
        with torch.utils.flop_counter.FlopCounterMode(display=False):
            _drop(q, dropout_p)
    assert torch.equal(generator_state(), before)
    _drop(q)
    assert not torch.equal(generator_state(), before)


# ---------------------------------------------------------------------------------------------------------------------
# Autocast (the operator's is in test_operators.py).


@pytest.mark.parametrize(("parts", "varlen"), _PACKED_FUNCTIONS, ids=lambda value: str(value))
def test_packed_functions_under_autocast(path: Path, parts: int, varlen: bool) -> None:
    given, _, lengths = _packed(path, parts, varlen, 20)
    floats = [tensor.detach().float().requires_grad_() for tensor in given]
    function = _PACKED_FUNCTIONS[parts, varlen]
    with torch.autocast(path.device.type, dtype=torch.bfloat16):
        out = function(*floats, *lengths, deterministic=True)
    expected = function(*given, *lengths, deterministic=True)
    assert_same_bits("out", out, expected)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, floats, dout)
    for one, other in zip(got, torch.autograd.grad(expected, given, dout), strict=True):
        assert_same_bits("gradient", one, other.float())


def test_autocast_leaves_sinks_and_slopes_in_float32(path: Path) -> None:
    q = torch.randn(2, 9, 4, 32, device=path.device)
    sink, slopes = torch.randn(4, device=path.device, requires_grad=True), torch.rand(4, device=path.device)
    with torch.autocast(path.device.type, dtype=torch.bfloat16):
        out = flash_ext.flash_attn_func(q, q, q, learnable_sink=sink, alibi_slopes=slopes)
    half = q.to(torch.bfloat16)
    assert_same_bits("out", out, flash_ext.flash_attn_func(half, half, half, learnable_sink=sink, alibi_slopes=slopes))
    out.sum().backward()
    assert sink.grad is not None and sink.grad.dtype is torch.float32


# ---------------------------------------------------------------------------------------------------------------------
# Between padded and packed.


def _mask(path: Path, seqlen: int, *lengths: int) -> Tensor:
    return torch.arange(seqlen, device=path.device) < torch.tensor(lengths, device=path.device)[:, None]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.uint8])
def test_unpad_input(path: Path, dtype: torch.dtype) -> None:
    hidden = _random(path, 4, 6, 2, 8)
    mask = _mask(path, 6, 3, 0, 6, 1)
    packed, indices, cu_seqlens, max_seqlen, used = flash_ext.unpad_input(hidden, mask.to(dtype))
    assert torch.equal(packed, hidden[mask]) and packed.is_contiguous()
    assert indices.tolist() == [0, 1, 2, 12, 13, 14, 15, 16, 17, 18] and indices.dtype is torch.int64
    assert cu_seqlens.tolist() == [0, 3, 3, 9, 10] and cu_seqlens.dtype is torch.int32
    assert max_seqlen == 6 and type(max_seqlen) is int
    assert used.tolist() == [3, 0, 6, 1] and used.dtype is torch.int32
    for places in (indices, indices.int()):
        assert torch.equal(flash_ext.pad_input(packed, places, 4, 6), hidden * mask[..., None, None])
        assert torch.equal(index_first_axis(hidden.flatten(0, 1), places), packed)


def test_unpad_input_with_unused_places(path: Path) -> None:
    """Places that are kept but hold no token: cu_seqlens counts them, used_seqlens does not."""
    hidden = _random(path, 2, 6, 8)
    mask, places = _mask(path, 6, 3, 1), _mask(path, 6, 5, 2)
    packed, indices, cu_seqlens, max_seqlen, used = flash_ext.unpad_input(hidden, mask, places & ~mask)
    assert torch.equal(packed, hidden[places]) and indices.tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert cu_seqlens.tolist() == [0, 5, 7] and max_seqlen == 5 and used.tolist() == [3, 1]


def test_left_padding_and_holes(path: Path) -> None:
    hidden = _random(path, 2, 4, 8)
    mask = torch.tensor([[0, 0, 1, 1], [1, 0, 1, 0]], device=path.device)
    packed, indices, cu_seqlens, _, _ = flash_ext.unpad_input(hidden, mask)
    assert indices.tolist() == [2, 3, 4, 6] and cu_seqlens.tolist() == [0, 2, 4]
    assert torch.equal(flash_ext.pad_input(packed, indices, 2, 4), hidden * mask[..., None])


def test_padding_helpers_are_differentiable(path: Path) -> None:
    hidden = torch.randn(3, 5, 2, 4, device=path.device, dtype=torch.float64, requires_grad=True)
    mask = _mask(path, 5, 3, 0, 5)

    def around(hidden: Tensor) -> Tensor:
        packed, indices, *_ = flash_ext.unpad_input(hidden, mask)
        return flash_ext.pad_input(packed.sin(), indices, 3, 5)

    assert torch.autograd.gradcheck(around, (hidden,))
    (gradient,) = torch.autograd.grad(around(hidden).sum(), hidden)
    assert gradient[~mask].abs().max() == 0


def test_nothing_to_pack(path: Path) -> None:
    for batch, seqlen in ((2, 4), (0, 4), (2, 0)):
        hidden = _random(path, batch, seqlen, 8)
        mask = torch.zeros(batch, seqlen, dtype=torch.bool, device=path.device)
        packed, indices, cu_seqlens, max_seqlen, _ = flash_ext.unpad_input(hidden, mask)
        assert packed.shape == (0, 8) and cu_seqlens.tolist() == [0] * (batch + 1) and max_seqlen == 0
        assert torch.equal(flash_ext.pad_input(packed, indices, batch, seqlen), torch.zeros_like(hidden))


def test_attention_over_a_padded_batch(path: Path) -> None:
    """What the helpers are for: each sequence as if it were alone."""
    hidden = _random(path, 3, 9, 4, 32, grad=False)
    lengths = (4, 9, 1)
    packed, indices, cu_seqlens, max_seqlen, _ = flash_ext.unpad_input(hidden, _mask(path, 9, *lengths))
    out = flash_ext.flash_attn_varlen_func(
        packed, packed, packed, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True
    )
    padded = flash_ext.pad_input(out, indices, 3, 9)
    for row, length in enumerate(lengths):
        alone = hidden[row : row + 1, :length]
        assert_same_bits(
            "out", padded[row : row + 1, :length], flash_ext.flash_attn_func(alone, alone, alone, causal=True)
        )
        assert padded[row, length:].abs().sum() == 0


def test_padding_helpers_refuse() -> None:
    hidden, mask = torch.zeros(2, 4, 8), torch.zeros(2, 4, dtype=torch.bool)
    with pytest.raises(TypeError, match="flash_ext: hidden_states is list .*expected a torch.Tensor"):
        flash_ext.unpad_input([1], mask)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="flash_ext: attention_mask has dtype torch.float32; expected bool or an integer"
    ):
        flash_ext.unpad_input(hidden, mask.float())
    with pytest.raises(ValueError, match=r"flash_ext: attention_mask has shape \(2, 5\); expected .*\(2, 4\)"):
        flash_ext.unpad_input(hidden, torch.zeros(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"flash_ext: unused_mask has shape \(4,\); expected .*\(2, 4\)"):
        flash_ext.unpad_input(hidden, mask, mask[0])
    with pytest.raises(ValueError, match=r"flash_ext: indices has shape \(3,\); expected \(2,\)"):
        flash_ext.pad_input(hidden[0, :2], torch.zeros(3, dtype=torch.int64), 2, 4)
