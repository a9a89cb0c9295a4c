"""``torch.ops.flash_ext.fwd`` and ``bwd`` with everything in PyTorch that looks at operators.

Compilers, exporters, fake tensors, tracers, counters and checkpointing see both operators and get right results; what
is not supported is refused by name. The numbers themselves are the contract tests' business: here two ways to the same
kernel must give the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from helpers.accuracy import assert_same_bits
from helpers.cases import Case, Inputs, make_inputs
from helpers.check import run
from helpers.paths import Path
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import flash_ext
from flash_ext import ops

# What is tested is between PyTorch and the kernels, and takes hundreds of launches.
pytestmark = [pytest.mark.large("emulated"), pytest.mark.needs("backward")]

fwd, bwd = torch.ops.flash_ext.fwd.default, torch.ops.flash_ext.bwd.default

# Two ways to the same kernel are compared bit by bit, so the gradients must not depend on the order of atomics.
DENSE = Case(
    lengths_q=(9, 9), lengths_k=(13, 13), heads=(4, 2), head_dims=(32, 16), deterministic=True, causal=True, dlse=True
)
VARLEN = DENSE.with_(lengths_q=(4, 0, 7), lengths_k=(6, 3, 9), varlen=True, slack=(2, 0, 3))
CASES = {
    "dense": DENSE,
    "heads_first": DENSE.with_(layouts=(("q", "heads_first"), ("k", "heads_first"), ("dout", "heads_first"))),
    "sliced": DENSE.with_(layouts=(("q", "sliced_rows"), ("v", "sliced_dim"), ("dlse", "every_second"))),
    "expanded": DENSE.with_(layouts=(("q", "expanded_batch"), ("k", "expanded_heads"), ("dout", "expanded_batch"))),
    "varlen": VARLEN,
    "varlen_heads_first": VARLEN.with_(layouts=(("q", "heads_first"), ("v", "heads_first"))),
    "varlen_sliced": VARLEN.with_(layouts=(("k", "sliced_rows"), ("dout", "sliced_dim"))),
    "window": DENSE.with_(causal=False, window=(2, 3)),
    "softcap": DENSE.with_(softcap=5.0, magnitude=2.0),
    "alibi": DENSE.with_(alibi="heads"),
    "alibi_batch": VARLEN.with_(alibi="batch"),
    "sinks": DENSE.with_(sinks=torch.float32),
    "sinks_bf16": VARLEN.with_(sinks=torch.bfloat16),
    "seqused": DENSE.with_(slack=(0, 2, 0)),
    "varlen_seqused": VARLEN.with_(slack=(0, 2, 0)),
    "dropout": DENSE.with_(dropout_p=0.3),
    "scale": DENSE.with_(softmax_scale=0.3),
    "no_dlse": DENSE.with_(dlse=False),
    "fp16": DENSE.with_(dtype=torch.float16),
}
cases = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaves_of(inputs: Inputs) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v (and sinks, if there are any) that require gradients, and the keywords that hold these sinks."""
    leaves = [tensor.detach().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
    keywords = dict(inputs.keywords)
    if "sinks" in keywords:
        keywords["sinks"] = keywords["sinks"].detach().requires_grad_()
        leaves.append(keywords["sinks"])
    return leaves, keywords


def gradients(inputs: Inputs, results: tuple[Tensor, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Of the leaves, with the case's dout and dlse for ``(out, lse)``."""
    if inputs.dlse is None:
        return list(torch.autograd.grad(results[0], leaves, inputs.dout))
    return list(torch.autograd.grad(results, leaves, (inputs.dout, inputs.dlse)))


_dense_function: Callable[..., Any] = flash_ext.flash_attn_func
_varlen_function: Callable[..., Any] = flash_ext.flash_attn_varlen_func


def public(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
    """The public function for keywords of the operators."""
    keywords["window_size"] = (keywords.pop("window_left", -1), keywords.pop("window_right", -1))
    keywords["learnable_sink"] = keywords.pop("sinks", None)
    function = _varlen_function if "cu_seqlens_q" in keywords else _dense_function
    out, lse = function(q, k, v, return_lse=True, **keywords)
    return out, lse


def assert_all_same(names: str, got: Any, expected: Any) -> None:
    for name, one, other in zip(names.split(), got, expected, strict=False):
        assert_same_bits(name, one, other)


# ---------------------------------------------------------------------------------------------------------------------
# The operators themselves.


@cases
def test_opcheck_forward(path: Path, rng: torch.Generator, case: Case) -> None:
    """Schema, fake, autograd registration and AOT dispatch with dynamic shapes, by torch's own judge."""
    inputs = make_inputs(case, path.device, rng)
    leaves, keywords = leaves_of(inputs)
    opcheck(fwd, tuple(leaves[:3]), keywords)


@cases
def test_opcheck_backward(path: Path, rng: torch.Generator, case: Case) -> None:
    inputs = make_inputs(case, path.device, rng)
    out, lse = fwd(inputs.q, inputs.k, inputs.v, **inputs.keywords)
    opcheck(bwd, (inputs.dout, inputs.dlse, inputs.q, inputs.k, inputs.v, out, lse), inputs.keywords)


@cases
def test_outputs_are_fresh_and_contiguous(path: Path, rng: torch.Generator, case: Case) -> None:
    """Whatever the strides of the inputs; and never memory of an input."""
    inputs = make_inputs(case, path.device, rng)
    results = run(inputs, "backward")
    given = [inputs.q, inputs.k, inputs.v, inputs.dout, *(x for x in inputs.keywords.values() if isinstance(x, Tensor))]
    memory = {tensor.untyped_storage().data_ptr() for tensor in given}
    returned = [results.out, results.lse, results.dq, results.dk, results.dv, results.dsinks]
    for tensor, like in zip(returned[2:5], (inputs.q, inputs.k, inputs.v), strict=True):
        assert tensor is not None and tensor.shape == like.shape and tensor.dtype == like.dtype
    storages = [tensor.untyped_storage().data_ptr() for tensor in returned if tensor is not None and tensor.numel()]
    assert len(storages) == len(set(storages)) and not memory & set(storages)
    assert all(tensor is not None and tensor.is_contiguous() for tensor in returned)
    dsinks, sinks = results.dsinks, inputs.keywords.get("sinks")
    assert dsinks is not None
    if sinks is None:
        assert dsinks.shape == (0,) and dsinks.dtype is torch.float32
    else:
        assert dsinks.shape == sinks.shape and dsinks.dtype is sinks.dtype


@cases
def test_autograd_passes_every_argument_on(path: Path, rng: torch.Generator, case: Case) -> None:
    """An argument that autograd forgets would give gradients of another attention; lse's gradient counts too."""
    inputs = make_inputs(case, path.device, rng)
    direct = run(inputs, "backward")
    through_autograd = run(inputs, "backward", through="autograd")
    names = "out lse dq dk dv dsinks"
    for name in names.split():
        got, expected = getattr(through_autograd, name), getattr(direct, name)
        if name != "dsinks" or "sinks" in inputs.keywords:
            assert_same_bits(name, got, expected)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items() if not case.dropout_p])
def test_public_function_is_the_operator(path: Path, rng: torch.Generator, case: Case) -> None:
    """The direct way past the dispatcher gives the operator's bits, forward and backward."""
    inputs = make_inputs(case, path.device, rng)
    leaves, keywords = leaves_of(inputs)
    assert ops.is_plain_eager(leaves[:3], keywords)
    expected = fwd(*leaves[:3], **keywords)
    expected_gradients = gradients(inputs, expected, leaves)
    got = public(*leaves[:3], **keywords)
    assert_all_same("out lse", got, expected)
    assert_all_same("dq dk dv dsinks", gradients(inputs, got, leaves), expected_gradients)
    with torch.no_grad():
        got = public(*leaves[:3], **keywords)
    assert_all_same("out lse", got, expected)
    assert not got[0].requires_grad


@pytest.mark.parametrize("wanted", ["out", "lse"])
def test_only_one_of_the_outputs_has_a_gradient(path: Path, rng: torch.Generator, wanted: str) -> None:
    case = CASES["sinks"]
    inputs = make_inputs(case, path.device, rng)
    leaves, keywords = leaves_of(inputs)
    out, lse = fwd(*leaves[:3], **keywords)
    assert inputs.dlse is not None
    incoming = {"out": (inputs.dout, None), "lse": (torch.zeros_like(out), inputs.dlse)}[wanted]
    expected = bwd(*incoming, *(leaf.detach() for leaf in leaves[:3]), out.detach(), lse.detach(), **keywords)
    output, gradient = {"out": (out, inputs.dout), "lse": (lse, inputs.dlse)}[wanted]
    got = torch.autograd.grad(output, leaves, gradient)
    assert_all_same("dq dk dv dsinks", got, expected)
    assert any(tensor.abs().max() > 0 for tensor in got)


@pytest.mark.parametrize("wanted", [0, 1, 2, 3])
def test_one_input_requires_a_gradient(path: Path, rng: torch.Generator, wanted: int) -> None:
    inputs = make_inputs(CASES["sinks"], path.device, rng)
    leaves, keywords = leaves_of(inputs)
    everything = gradients(inputs, fwd(*leaves[:3], **keywords), leaves)
    alone = [leaf.detach() for leaf in leaves]
    alone[wanted].requires_grad_()
    keywords["sinks"] = alone[3]
    for function in (fwd, public):
        (got,) = gradients(inputs, function(*alone[:3], **keywords), [alone[wanted]])
        assert_same_bits("gradient", got, everything[wanted])


def test_nothing_requires_a_gradient(path: Path, rng: torch.Generator) -> None:
    inputs = make_inputs(DENSE, path.device, rng)
    for function in (fwd, public):
        out, lse = function(inputs.q, inputs.k, inputs.v, **inputs.keywords)
        assert out.grad_fn is None and lse.grad_fn is None
        with torch.inference_mode():
            assert function(inputs.q, inputs.k, inputs.v, **inputs.keywords)[0].is_inference()


@pytest.mark.parametrize("name", ["q", "cu_seqlens_k"])
def test_change_in_place_before_the_backward_is_an_error(path: Path, rng: torch.Generator, name: str) -> None:
    """Silently wrong gradients otherwise; options that are tensors are watched too."""
    inputs = make_inputs(VARLEN, path.device, rng)
    for function in (fwd, public):
        leaves, keywords = leaves_of(inputs)
        q = leaves[0] * 1
        keywords["cu_seqlens_k"] = keywords["cu_seqlens_k"].clone()
        out, _ = function(q, *leaves[1:3], **keywords)
        {"q": q.detach(), **keywords}[name].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, leaves[1], inputs.dout)


def test_saved_tensor_hooks_see_every_tensor(path: Path, rng: torch.Generator) -> None:
    """Offloading of activations packs what the backward needs, options included."""
    inputs = make_inputs(VARLEN.with_(alibi="heads", sinks=torch.float32), path.device, rng)
    leaves, keywords = leaves_of(inputs)
    expected = gradients(inputs, fwd(*leaves[:3], **keywords), leaves)
    for function in (fwd, public):
        packed: list[Tensor] = []

        def pack(tensor: Tensor, packed: list[Tensor] = packed) -> int:
            packed.append(tensor.detach().clone())
            return len(packed) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
            out, lse = function(*leaves[:3], **keywords)
        assert len(packed) >= 3 + 2 + 4  # q, k, v; out, lse; cu_seqlens of both, slopes, sinks
        assert_all_same("dq dk dv dsinks", gradients(inputs, (out, lse), leaves), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Fakes.


@cases
def test_fakes_have_the_shapes_strides_and_dtypes_of_results(path: Path, rng: torch.Generator, case: Case) -> None:
    inputs = make_inputs(case, path.device, rng)
    results = run(inputs, "backward")
    mode = FakeTensorMode()

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, Tensor) else value

    keywords = {name: fake(value) for name, value in inputs.keywords.items()}
    with mode:
        q, k, v = fake(inputs.q), fake(inputs.k), fake(inputs.v)
        out, lse = fwd(q, k, v, **keywords)
        grads = bwd(fake(inputs.dout), fake(inputs.dlse), q, k, v, out, lse, **keywords)
        keywords.pop("rng_state", None)
        also = public(q, k, v, **keywords)
    real = (results.out, results.lse, results.dq, results.dk, results.dv, results.dsinks)
    for one, other in zip((out, lse, *grads, *also), (*real, *real[:2]), strict=True):
        assert isinstance(one, FakeTensor) and other is not None
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert one.device == other.device


def test_public_function_under_fake_tensor_mode_of_another_device() -> None:
    """No GPU is needed to know the shapes of a call on one; a fake must never reach a kernel."""
    with FakeTensorMode():
        q = torch.empty(2, 128, 8, 64, dtype=torch.float16, device="cuda")
        out, lse = flash_ext.flash_attn_func(q, q, q, 0.1, return_lse=True)
    assert isinstance(out, FakeTensor) and out.device.type == "cuda" and out.shape == q.shape
    assert lse.shape == (2, 8, 128)


def test_gradients_under_fake_tensor_mode(path: Path) -> None:
    with FakeTensorMode():
        qkv = torch.empty(2, 128, 3, 8, 60, dtype=torch.float16, device=path.device, requires_grad=True)
        out = flash_ext.flash_attn_qkvpacked_func(qkv, 0.1)
        out.sum().backward()
    assert isinstance(out, FakeTensor) and out.shape == (2, 128, 8, 60)
    assert isinstance(qkv.grad, FakeTensor) and qkv.grad.shape == qkv.shape


def test_meta_device() -> None:
    q = torch.empty(2, 128, 8, 64, dtype=torch.float16, device="meta", requires_grad=True)
    out, lse = flash_ext.flash_attn_func(q, q, q, causal=True, return_lse=True)
    out.sum().backward()
    assert out.is_meta and lse.shape == (2, 8, 128) and q.grad is not None and q.grad.is_meta


def test_fakes_refuse_what_the_operators_refuse() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 128, 8, 64, dtype=torch.float16)
        with pytest.raises(ValueError, match="flash_ext: k has head_dim 32"):
            fwd(q, q[..., :32], q)
        with pytest.raises(TypeError, match="flash_ext: q has dtype torch.float32"):
            flash_ext.flash_attn_func(q.float(), q.float(), q.float())


def test_lengths_that_are_unknown_while_tracing(path: Path) -> None:
    """The total of packed tokens often comes from ``nonzero``: no size may be compared with it to decide anything."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        mask = mode.from_tensor(torch.ones(3, 8, dtype=torch.bool, device=path.device))
        indices = mask.flatten().nonzero().flatten()
        total = indices.shape[0]
        hidden = torch.empty(24, 4, 32, dtype=torch.bfloat16, device=path.device).index_select(0, indices)
        cu_seqlens = torch.empty(4, dtype=torch.int32, device=path.device)
        out, lse = fwd(hidden, hidden, hidden, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=8)
    assert str(total).startswith("u"), "a size that nobody knows yet"
    assert out.shape == (total, 4, 32) and lse.shape == (4, total)


# ---------------------------------------------------------------------------------------------------------------------
# Compilers and exporters.


def _compiled_agrees(
    path: Path, rng: torch.Generator, case: Case, backend: str, dynamic: bool, lengths: tuple[int, ...] = ()
) -> None:
    """One compiled function, called with one shape after the other; the gradients too."""
    inputs = make_inputs(case, path.device, rng)
    names = [name for name, value in inputs.keywords.items() if isinstance(value, Tensor) and name != "rng_state"]
    plain = {name: value for name, value in inputs.keywords.items() if name not in (*names, "rng_state", "dropout_p")}

    def attention(operands: list[Tensor], tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        q, k, v = operands[:3]
        out, lse = public(q, k, v, **tensors, **plain)
        return out * 2, lse

    compiled = torch.compile(attention, backend=backend, fullgraph=True, dynamic=dynamic)
    for length in (0, *lengths):
        if length:
            inputs = make_inputs(case.with_(lengths_q=(length, length)), path.device, rng)
        leaves, keywords = leaves_of(inputs)
        tensors = {name: keywords[name] for name in names}
        expected = attention(leaves[:3], tensors)
        got = compiled(leaves[:3], tensors)
        assert_all_same("out lse", got, expected)
        assert_all_same("dq dk dv dsinks", gradients(inputs, got, leaves), gradients(inputs, expected, leaves))


@cases
def test_compile_fullgraph(path: Path, rng: torch.Generator, case: Case) -> None:
    _compiled_agrees(path, rng, case, "aot_eager", dynamic=False)


@pytest.mark.parametrize("name", ["dense", "heads_first", "sliced", "sinks"])
def test_compile_with_dynamic_shapes(path: Path, rng: torch.Generator, name: str) -> None:
    _compiled_agrees(path, rng, CASES[name], "aot_eager", dynamic=True, lengths=(11, 30))


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("gcc")), reason="inductor needs a C++ compiler")
@pytest.mark.timeout(240)  # the C++ compiler, on a busy machine
def test_compile_with_inductor(path: Path, rng: torch.Generator) -> None:
    with contextlib.ExitStack() as stack:
        if hasattr(torch._inductor.config, "cpp_cache_precompile_headers"):  # longer than the compilation itself
            stack.enter_context(torch._inductor.config.patch(cpp_cache_precompile_headers=False))
        _compiled_agrees(path, rng, CASES["expanded"], "inductor", dynamic=True)


def test_compile_recompiles_at_most_once_for_other_lengths(path: Path, rng: torch.Generator) -> None:
    """The checks must not pin sizes: torch's default goes dynamic at the second shape and stays."""
    compiled_graphs = []

    def backend(graph: Any, example: Any) -> Any:
        compiled_graphs.append(graph)
        return graph

    compiled = torch.compile(flash_ext.flash_attn_func, backend=backend, fullgraph=True)
    for length in (9, 12, 17, 40, 33):
        inputs = make_inputs(DENSE.with_(lengths_q=(length, length)), path.device, rng)
        compiled(inputs.q, inputs.k, inputs.v)
    assert len(compiled_graphs) == 2


def test_compile_draws_the_dropout_mask_as_eager_does(path: Path, rng: torch.Generator) -> None:
    inputs = make_inputs(DENSE, path.device, rng)
    leaves, _ = leaves_of(inputs)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flash_ext.flash_attn_func(q, k, v, 0.5, return_lse=True, deterministic=True)

    results = []
    for function in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(5)
        first, second = function(*leaves), function(*leaves)
        assert not torch.equal(first[0], second[0]), "both calls dropped the same scores"
        results.append((*first, *gradients(inputs, first, leaves)))
    assert_all_same("out lse dq dk dv", results[1], results[0])


def test_compile_packed_functions_with_padding(path: Path) -> None:
    qkv = torch.randn(2, 9, 3, 4, 12, dtype=torch.bfloat16, device=path.device, requires_grad=True)

    def attention(qkv: Tensor) -> Tensor:
        return flash_ext.flash_attn_qkvpacked_func(qkv, causal=True, deterministic=True)

    got, expected = torch.compile(attention, backend="aot_eager", fullgraph=True)(qkv), attention(qkv)
    assert_same_bits("out", got, expected)
    dout = torch.randn_like(got)
    assert_all_same("dqkv", torch.autograd.grad(got, qkv, dout), torch.autograd.grad(expected, qkv, dout))


def test_compile_between_padded_and_packed(path: Path) -> None:
    """unpad_input, attention and pad_input in one graph: a number of tokens that is unknown while compiling."""
    hidden = torch.randn(3, 8, 4, 32, dtype=torch.bfloat16, device=path.device, requires_grad=True)
    mask = torch.arange(8, device=path.device) < torch.tensor([[3], [8], [1]], device=path.device)

    def attention(hidden: Tensor, mask: Tensor) -> Tensor:
        packed, indices, cu_seqlens, max_seqlen, _ = flash_ext.unpad_input(hidden, mask)
        out = flash_ext.flash_attn_varlen_func(
            packed, packed, packed, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True, deterministic=True
        )
        return flash_ext.pad_input(out, indices, 3, 8)

    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        got = torch.compile(attention, backend="aot_eager", fullgraph=True)(hidden, mask)
        expected = attention(hidden, mask)
        assert_same_bits("out", got, expected)
        dout = torch.randn_like(got)
        assert_all_same("dhidden", torch.autograd.grad(got, hidden, dout), torch.autograd.grad(expected, hidden, dout))


@pytest.mark.skipif(not hasattr(compiled_autograd, "_enable"), reason="torch 2.4 has another")
def test_compiled_autograd(path: Path, rng: torch.Generator) -> None:
    """The backward of an eager forward, compiled: separate and packed."""
    inputs = make_inputs(DENSE, path.device, rng)
    leaves, keywords = leaves_of(inputs)
    expected = gradients(inputs, public(*leaves, **keywords), leaves)
    qkv = torch.randn(2, 9, 3, 4, 16, dtype=torch.bfloat16, device=path.device, requires_grad=True)
    (expected_packed,) = torch.autograd.grad(flash_ext.flash_attn_qkvpacked_func(qkv, deterministic=True).sum(), qkv)
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        for leaf, gradient in zip(leaves, expected, strict=True):
            leaf.grad = None
            assert gradient.shape == leaf.shape
        out, lse = public(*leaves, **keywords)
        torch.autograd.backward((out, lse), (inputs.dout, inputs.dlse))
        flash_ext.flash_attn_qkvpacked_func(qkv, deterministic=True).sum().backward()
    assert_all_same("dq dk dv", [leaf.grad for leaf in leaves], expected)
    assert qkv.grad is not None
    assert_same_bits("dqkv", qkv.grad, expected_packed)


class Attention(torch.nn.Module):
    """For torch.export."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_ext.flash_attn_func(q, k, v, causal=True)
        assert isinstance(out, Tensor)
        return out


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_export(path: Path, rng: torch.Generator, strict: bool, dynamic: bool) -> None:
    inputs = make_inputs(DENSE, path.device, rng)
    shapes = {"q": {1: torch.export.Dim("seqlen_q", min=2, max=4096)}, "k": None, "v": None} if dynamic else None
    program = torch.export.export(Attention(), (inputs.q, inputs.k, inputs.v), strict=strict, dynamic_shapes=shapes)
    assert [node.target for node in program.graph.nodes].count(fwd) == 1
    for length in (9, 21) if dynamic else (9,):
        inputs = make_inputs(DENSE.with_(lengths_q=(length, length)), path.device, rng)
        got = program.module()(inputs.q, inputs.k, inputs.v)
        assert_same_bits("out", got, Attention()(inputs.q, inputs.k, inputs.v))


class Differentiated(torch.nn.Module):
    """Both operators, for torch.export."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        out, lse = fwd(q, k, v, **tensors, **self.options)
        return (out, lse, *bwd(out, lse, q, k, v, out, lse, **tensors, **self.options))


class Public(Differentiated):
    """The public function, for torch.export."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return public(q, k, v, **tensors, **self.options)


def _resized(case: Case, batch: int, length_q: int, length_k: int) -> Case:
    return case.with_(lengths_q=(length_q,) * batch, lengths_k=(length_k,) * batch)


# Packed, alibi_batch and seqused have the batch in tensors of their own.
UNBOUNDED = {
    "dense": DENSE.with_(slack=(0, 2, 0)),
    "varlen": VARLEN.with_(lengths_q=(5, 5), lengths_k=(6, 6), slack=(0, 0, 0), alibi="batch"),
}


@pytest.mark.parametrize("module", [Public, Differentiated])
@pytest.mark.parametrize("name", UNBOUNDED)
@pytest.mark.parametrize(
    "kind",
    [
        "Dim",
        *(
            pytest.param(
                hint, marks=pytest.mark.skipif(not hasattr(torch.export.Dim, hint), reason="torch 2.4 has none")
            )
            for hint in ("DYNAMIC", "AUTO")
        ),
    ],
)
def test_export_with_unbounded_batch_and_lengths(
    path: Path, rng: torch.Generator, kind: str, name: str, module: type[Differentiated]
) -> None:
    """No check may bound a dimension: what is too large is refused when the program runs."""
    case = _resized(UNBOUNDED[name], 2, 9, 13)
    inputs = make_inputs(case, path.device, rng)
    tensors = {key: value for key, value in inputs.keywords.items() if isinstance(value, Tensor)}
    options = {key: value for key, value in inputs.keywords.items() if not isinstance(value, Tensor)}

    dims: dict[str, Any] = {}

    def dim(of: str) -> Any:
        if kind != "Dim":
            return getattr(torch.export.Dim, kind)
        return dims.setdefault(of, torch.export.Dim(of))

    rows_q, rows_k = ({0: dim(f"{of}_{side}")} for of, side in (("total", "q"), ("total", "k")))
    if not case.varlen:
        rows_q, rows_k = ({0: dim("batch"), 1: dim(f"seqlen_{side}")} for side in "qk")
    of_tensors = {key: {0: dim("batch_and_1" if key.startswith("cu_seqlens") else "batch")} for key in tensors}
    if case.varlen and kind == "Dim":  # the slopes have the length of cu_seqlens less one: two dimensions cannot say so
        del tensors["alibi_slopes"], of_tensors["alibi_slopes"]
    program = torch.export.export(
        module(**options),
        (inputs.q, inputs.k, inputs.v, tensors),
        dynamic_shapes={"q": rows_q, "k": rows_k, "v": rows_k, "tensors": of_tensors},
        strict=False,
    )
    ranges = [(bounds.lower, bounds.upper) for bounds in program.range_constraints.values()]
    assert ranges and all(upper > 2**31 for _, upper in ranges), ranges
    for batch, length_q, length_k in ((2, 9, 13), (3, 21, 8), (5, 2, 70)):
        inputs = make_inputs(_resized(case, batch, length_q, length_k), path.device, rng)
        given = {key: inputs.keywords[key] for key in tensors}
        arguments = (inputs.q, inputs.k, inputs.v, given)
        assert_all_same("out lse dq dk dv", program.module()(*arguments), module(**options)(*arguments))


@pytest.mark.parametrize("name", UNBOUNDED)
@pytest.mark.parametrize("through_operator", [False, True])
def test_compile_with_a_dynamic_batch(path: Path, rng: torch.Generator, name: str, through_operator: bool) -> None:
    """Batch and lengths marked as dynamic, forward and backward: one compilation serves all."""
    compilations = CompileCounterWithBackend("aot_eager")
    case = UNBOUNDED[name].with_(alibi=None)

    def attention(operands: list[Tensor], tensors: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        q, k, v = operands
        if through_operator:
            out, lse = fwd(q, k, v, **tensors, **options)
            return out, lse
        return public(q, k, v, **tensors, **options)

    compiled = torch.compile(attention, backend=compilations, fullgraph=True)
    for batch, length_q, length_k in ((2, 9, 13), (3, 21, 8), (5, 2, 70)):
        inputs = make_inputs(_resized(case, batch, length_q, length_k), path.device, rng)
        leaves, keywords = leaves_of(inputs)
        tensors = {key: value for key, value in keywords.items() if isinstance(value, Tensor)}
        options = {key: value for key, value in keywords.items() if not isinstance(value, Tensor)}
        options |= dict.fromkeys(set(options) & {"max_seqlen_q", "max_seqlen_k"}, 1000)  # no matter of compilation here
        for leaf in leaves[:3]:
            torch._dynamo.mark_dynamic(leaf, [0] if case.varlen else [0, 1])
        for tensor in tensors.values():
            torch._dynamo.mark_dynamic(tensor, 0)
        expected = attention(leaves[:3], tensors, options)
        got = compiled(leaves[:3], tensors, options)
        assert_all_same("out lse", got, expected)
        assert_all_same("dq dk dv", gradients(inputs, got, leaves), gradients(inputs, expected, leaves))
    assert compilations.frame_count == 1


# ---------------------------------------------------------------------------------------------------------------------
# Tracers and modes.


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx(path: Path, rng: torch.Generator, tracing_mode: Any, pre_dispatch: bool) -> None:
    inputs = make_inputs(DENSE, path.device, rng)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return public(q, k, v, **inputs.keywords)

    graph = make_fx(attention, tracing_mode=tracing_mode, pre_dispatch=pre_dispatch)(inputs.q, inputs.k, inputs.v)
    assert [node.target for node in graph.graph.nodes].count(fwd) == 1
    assert_all_same("out lse", graph(inputs.q, inputs.k, inputs.v), attention(inputs.q, inputs.k, inputs.v))


def test_make_fx_traces_the_backward(path: Path, rng: torch.Generator) -> None:
    inputs = make_inputs(DENSE, path.device, rng)
    leaves, keywords = leaves_of(inputs)

    def step(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return gradients(inputs, public(q, k, v, **keywords), [q, k, v])

    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves)
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(fwd) == 1 and targets.count(bwd) == 1
    assert_all_same("dq dk dv", graph(*leaves), step(*leaves))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_jit_trace_records_the_operator(path: Path, rng: torch.Generator) -> None:
    """The direct way would leave an allocation without a kernel in the graph."""
    inputs = make_inputs(DENSE, path.device, rng)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return public(q, k, v)[0]

    traced = torch.jit.trace(attention, (inputs.q, inputs.k, inputs.v), check_trace=False)
    assert "flash_ext::fwd" in str(traced.graph)
    other = make_inputs(DENSE, path.device, rng)
    assert_same_bits("out", traced(other.q, other.k, other.v), attention(other.q, other.k, other.v))


class Recorder(TorchDispatchMode):
    """Which operators pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_both_operators(path: Path, rng: torch.Generator) -> None:
    """Around the forward, around the backward alone, and around both."""
    inputs = make_inputs(DENSE, path.device, rng)
    leaves, keywords = leaves_of(inputs)
    expected = gradients(inputs, public(*leaves, **keywords), leaves)
    with Recorder() as around_forward:
        out, lse = public(*leaves, **keywords)
    with Recorder() as around_backward:
        got = gradients(inputs, (out, lse), leaves)
    assert [around_forward.seen.count(fwd), around_forward.seen.count(bwd)] == [1, 0]
    assert [around_backward.seen.count(fwd), around_backward.seen.count(bwd)] == [0, 1]
    assert_all_same("dq dk dv", got, expected)
    qkv = torch.randn(2, 9, 3, 4, 16, dtype=torch.bfloat16, device=path.device, requires_grad=True)
    with Recorder() as around_both:
        flash_ext.flash_attn_qkvpacked_func(qkv).sum().backward()
    assert [around_both.seen.count(fwd), around_both.seen.count(bwd)] == [1, 1]
    assert around_both.seen.count(torch.ops.aten.stack.default) == 1, "one stack makes the gradient of qkv"


def test_plain_eager_calls_pass_the_dispatcher_by(path: Path, rng: torch.Generator) -> None:
    """The public function shows no operator to the profiler, the operator does: the two ways are the two ways."""
    inputs = make_inputs(DENSE, path.device, rng)

    def recorded(function: Callable[..., Any]) -> set[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            function(inputs.q, inputs.k, inputs.v)
        return {event.key for event in profile.key_averages()}

    assert "flash_ext::fwd" in recorded(fwd)
    assert "flash_ext::fwd" not in recorded(flash_ext.flash_attn_func)


class Wrapped(torch.Tensor):
    """A tensor subclass, whatever for."""


def test_a_subclass_goes_through_the_operator(path: Path, rng: torch.Generator) -> None:
    inputs = make_inputs(DENSE, path.device, rng)
    q = inputs.q.as_subclass(Wrapped)
    assert not ops.is_plain_eager((q, inputs.k, inputs.v), {})
    assert not ops.is_plain_eager((inputs.q, inputs.k, inputs.v), {"sinks": torch.zeros(4).as_subclass(Wrapped)})
    assert ops.is_plain_eager((torch.nn.Parameter(inputs.q), inputs.k, inputs.v), {"sinks": torch.zeros(4)})
    out = flash_ext.flash_attn_func(q, inputs.k, inputs.v)
    assert isinstance(out, Wrapped)
    expected = flash_ext.flash_attn_func(inputs.q, inputs.k, inputs.v)
    assert isinstance(expected, Tensor)
    assert_same_bits("out", out.as_subclass(torch.Tensor), expected)


def test_flop_counter(path: Path, rng: torch.Generator) -> None:
    """torch's convention: 2 per multiply-add, masks count in full, the backward has 5 products for the forward's 2."""
    inputs = make_inputs(DENSE, path.device, rng)
    leaves, keywords = leaves_of(inputs)
    with FlopCounterMode(display=False) as counter:
        gradients(inputs, public(*leaves, **keywords), leaves)
    scores = 2 * 4 * 9 * 13
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.flash_ext.fwd] == 2 * scores * (32 + 16)
    assert counts[torch.ops.flash_ext.bwd] == 2 * scores * (3 * 32 + 2 * 16)


def test_flop_counter_agrees_with_scaled_dot_product_attention() -> None:
    q = torch.empty(2, 128, 8, 64, dtype=torch.float16, device="meta", requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        flash_ext.flash_attn_func(q, q, q, causal=True).sum().backward()
    shape = (2, 8, 128, 64)
    torchs = sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape)
    assert counter.get_total_flops() == torchs


def test_flop_counter_of_packed_sequences(path: Path, rng: torch.Generator) -> None:
    """From cu_seqlens where they can be read, from the hints where they cannot."""
    inputs = make_inputs(VARLEN.with_(slack=(0, 0, 0)), path.device, rng)
    with FlopCounterMode(display=False) as counter:
        public(inputs.q, inputs.k, inputs.v, **inputs.keywords)
    assert counter.get_total_flops() == 2 * 4 * (4 * 6 + 0 * 3 + 7 * 9) * (32 + 16)
    meta = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in inputs.keywords.items()}
    with FlopCounterMode(display=False) as counter:
        public(inputs.q.to("meta"), inputs.k.to("meta"), inputs.v.to("meta"), **meta)
    assert counter.get_total_flops() == 2 * 4 * (3 * 7 * 9) * (32 + 16)
    del meta["max_seqlen_k"]
    with FlopCounterMode(display=False) as counter:
        fwd(inputs.q.to("meta"), inputs.k.to("meta"), inputs.v.to("meta"), **meta)
    assert counter.get_total_flops() == 2 * 4 * (11 * 18) * (32 + 16)


@pytest.mark.skipif(not hasattr(torch.utils.checkpoint, "CheckpointPolicy"), reason="torch 2.4 has none")
@pytest.mark.parametrize("keep", [True, False])
def test_selective_checkpointing(path: Path, rng: torch.Generator, keep: bool) -> None:
    """The policy decides whether the attention is computed again in the backward; the gradients are the same."""
    inputs = make_inputs(DENSE, path.device, rng)
    leaves, keywords = leaves_of(inputs)
    expected = gradients(inputs, public(*leaves, **keywords), leaves)

    policies = torch.utils.checkpoint.CheckpointPolicy

    def policy(context: Any, operator: Any, *arguments: Any, **more: Any) -> torch.utils.checkpoint.CheckpointPolicy:
        return policies.MUST_SAVE if operator == fwd and keep else policies.PREFER_RECOMPUTE

    contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, policy)
    attention = functools.partial(public, **keywords)
    out, lse = checkpoint(attention, *leaves, use_reentrant=False, context_fn=contexts)
    with Recorder() as recorder:
        got = gradients(inputs, (out, lse), leaves)
    assert recorder.seen.count(fwd) == (0 if keep else 1)
    assert_all_same("dq dk dv", got, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_dropout(path: Path, rng: torch.Generator, reentrant: bool) -> None:
    """The recomputation draws the same mask, since torch puts its generator back."""
    inputs = make_inputs(DENSE, path.device, rng)
    leaves, _ = leaves_of(inputs)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_ext.flash_attn_func(q * 1, k, v, 0.5, deterministic=True)
        assert isinstance(out, Tensor)
        return out

    found = []
    for function in (attention, functools.partial(checkpoint, attention, use_reentrant=reentrant)):
        for leaf in leaves:
            leaf.grad = None
        torch.manual_seed(7)
        function(*leaves).backward(inputs.dout)
        found.append([leaf.grad for leaf in leaves])
    assert_all_same("dq dk dv", found[1], found[0])


@pytest.mark.parametrize("function", [fwd, public])
def test_operator_and_public_function_under_autocast(path: Path, function: Callable[..., Any]) -> None:
    """As scaled_dot_product_attention: float32 and the other half type are cast to autocast's; gradients come back."""
    q, k, v = (torch.randn(2, 5, 4, 16, device=path.device, requires_grad=True) for _ in range(3))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(path.device.type, dtype=dtype):
            out, lse = function(q, k, v, deterministic=True)
            mixed, _ = function(q.to(torch.bfloat16), k.to(torch.float16), v, deterministic=True)
        assert out.dtype is dtype and lse.dtype is torch.float32 and mixed.dtype is dtype
        halves = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v)]
        expected = fwd(*halves, deterministic=True)
        assert_all_same("out lse", (out, lse), expected)
        dout = torch.randn_like(out)
        got = torch.autograd.grad(out, (q, k, v), dout)
        assert all(gradient.dtype is torch.float32 for gradient in got)
        wanted = torch.autograd.grad(expected[0], halves, dout)
        assert_all_same("dq dk dv", got, [gradient.float() for gradient in wanted])
    with pytest.raises(TypeError, match="flash_ext: q has dtype torch.float32"):
        function(q, k, v)
    with torch.autocast(path.device.type, dtype=torch.bfloat16), torch.autocast(path.device.type, enabled=False):
        with pytest.raises(TypeError, match="flash_ext: q has dtype torch.float32"):
            function(q, k, v)


def test_autocast_leaves_float64_to_be_refused(path: Path) -> None:
    q = torch.randn(2, 5, 4, 16, device=path.device, dtype=torch.float64)
    for function in (fwd, public):
        with torch.autocast(path.device.type, dtype=torch.bfloat16):
            with pytest.raises(TypeError, match="flash_ext: q has dtype torch.float64"):
                function(q, q, q)


def test_compile_under_autocast(path: Path) -> None:
    q, k, v = (torch.randn(2, 5, 4, 16, device=path.device, requires_grad=True) for _ in range(3))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(path.device.type, dtype=torch.bfloat16):
            out = flash_ext.flash_attn_func(q, k, v, deterministic=True)
        assert isinstance(out, Tensor)
        return out

    got, expected = torch.compile(attention, backend="aot_eager", fullgraph=True)(q, k, v), attention(q, k, v)
    assert_same_bits("out", got, expected)
    dout = torch.randn_like(got)
    assert_all_same(
        "dq dk dv", torch.autograd.grad(got, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout)
    )


# ---------------------------------------------------------------------------------------------------------------------
# What is refused by name.


def _vmap(function: Callable[..., Any], q: Tensor) -> Any:
    return torch.func.vmap(lambda one: function(one, q, q))(q[None])


def _functional_grad(function: Callable[..., Any], q: Tensor) -> Any:
    return torch.func.grad(lambda one: function(one, q, q)[0].sum())(q)


def _vjp(function: Callable[..., Any], q: Tensor) -> Any:
    return torch.func.vjp(lambda one: function(one, q, q)[0], q)


def _jacrev(function: Callable[..., Any], q: Tensor) -> Any:
    return torch.func.jacrev(lambda one: function(one, q, q)[0])(q)


def _jvp(function: Callable[..., Any], q: Tensor) -> Any:
    return torch.func.jvp(lambda one: function(one, q, q)[0], (q,), (q,))


def _jvp_with_gradient(function: Callable[..., Any], q: Tensor) -> Any:
    other = q.clone().requires_grad_()
    return torch.func.jvp(lambda one: function(one, other, q)[0], (q,), (q,))


def _dual_number(function: Callable[..., Any], q: Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return function(q, torch.autograd.forward_ad.make_dual(q, q), q)


def _batched_gradients(function: Callable[..., Any], q: Tensor) -> Any:
    leaf = q.clone().requires_grad_()
    out = function(leaf, q, q)[0]
    return torch.autograd.grad(
        out, leaf, torch.ones(3, *out.shape, dtype=out.dtype, device=q.device), is_grads_batched=True
    )


def _double_backward(function: Callable[..., Any], q: Tensor) -> Any:
    leaf = q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf, q, q)[0].float().square().sum(), leaf, create_graph=True)
    return torch.autograd.grad(gradient.float().sum(), leaf)


def _gradient_penalty(function: Callable[..., Any], q: Tensor) -> Any:
    """The incoming gradient is a constant: the dependence on q itself must not be lost in silence."""
    leaf = q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf, q, q)[0].sum(), leaf, create_graph=True)
    gradient.float().square().sum().backward()


REFUSED = [
    (_vmap, "vmap"),
    (_functional_grad, "torch.func transforms"),
    (_vjp, "torch.func transforms"),
    (_jacrev, "torch.func transforms"),
    (_jvp, "forward-mode AD"),
    (_jvp_with_gradient, "forward-mode AD"),
    (_dual_number, "forward-mode AD"),
    (_batched_gradients, "vmap"),
    (_double_backward, "second derivative"),
    (_gradient_penalty, "second derivative"),
]


@pytest.mark.parametrize(("attempt", "says"), REFUSED, ids=[attempt.__name__[1:] for attempt, _ in REFUSED])
@pytest.mark.parametrize("function", [fwd, public], ids=["operator", "public"])
def test_refused_by_name(path: Path, attempt: Any, says: str, function: Callable[..., Any]) -> None:
    q = torch.randn(2, 5, 4, 16, dtype=torch.bfloat16, device=path.device)
    with pytest.raises(NotImplementedError, match=f"^flash_ext: .*{says}.*; expected "):
        attempt(function, q)


def test_double_backward_of_the_other_ways_is_refused(path: Path, rng: torch.Generator) -> None:
    """Of bwd called by hand, of a packed tensor, and of sinks."""
    inputs = make_inputs(CASES["sinks"], path.device, rng)
    leaves, keywords = leaves_of(inputs)
    out, lse = (tensor.detach() for tensor in fwd(*leaves[:3], **keywords))
    by_hand = bwd(inputs.dout, None, *leaves[:3], out, lse, **keywords)
    assert all(gradient.requires_grad for gradient in by_hand)
    through = fwd(*leaves[:3], **keywords)[0].float().square().sum()
    (dsinks,) = torch.autograd.grad(through, leaves[3], create_graph=True)
    qkv = torch.randn(2, 5, 3, 4, 16, dtype=torch.bfloat16, device=path.device, requires_grad=True)
    (dqkv,) = torch.autograd.grad(flash_ext.flash_attn_qkvpacked_func(qkv).sum(), qkv, create_graph=True)
    for gradient in (*by_hand, dsinks, dqkv):
        with pytest.raises(NotImplementedError, match="^flash_ext: a second derivative"):
            gradient.float().sum().backward(retain_graph=True)


def test_create_graph_alone_is_fine(path: Path, rng: torch.Generator) -> None:
    """Some optimisers ask for a graph and use first derivatives only: those are the same."""
    inputs = make_inputs(CASES["sinks"], path.device, rng)
    leaves, keywords = leaves_of(inputs)
    expected = gradients(inputs, public(*leaves[:3], **keywords), leaves)
    out, lse = public(*leaves[:3], **keywords)
    got = torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse), create_graph=True)
    assert_all_same("dq dk dv dsinks", got, expected)
