"""Every argument that is wrong is refused: one clear error, of the right kind, before anything is computed or drawn.

The tensors are on the CPU and nothing is launched, so these tests ask for no path; the same checks stand in front of
every path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from helpers.paths import Path
from hypothesis import given
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import flash_ext
from flash_ext import checks, interface

BATCH, SEQLEN_Q, SEQLEN_K, HEADS_Q, HEADS_K, HEAD_DIM, HEAD_DIM_V = 2, 5, 7, 4, 2, 16, 8
Arguments = dict[str, Any]


def _half(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def dense_arguments() -> Arguments:
    """A call that is fine."""
    return {
        "q": _half(BATCH, SEQLEN_Q, HEADS_Q, HEAD_DIM),
        "k": _half(BATCH, SEQLEN_K, HEADS_K, HEAD_DIM),
        "v": _half(BATCH, SEQLEN_K, HEADS_K, HEAD_DIM_V),
    }


def varlen_arguments() -> Arguments:
    """A packed call that is fine."""
    return {
        "q": _half(10, HEADS_Q, HEAD_DIM),
        "k": _half(14, HEADS_K, HEAD_DIM),
        "v": _half(14, HEADS_K, HEAD_DIM_V),
        "cu_seqlens_q": _ints(0, 4, 10),
        "cu_seqlens_k": _ints(0, 9, 14),
    }


@dataclass
class Bad:
    """A call with something wrong, and what its error must say."""

    name: str
    changes: Arguments
    error: type[Exception]
    says: tuple[str, ...]  # the argument, its value, what is allowed
    base: Callable[[], Arguments] = dense_arguments
    # Where the mistake can be made: check, op (what torch's schema lets through), public.
    through: tuple[str, ...] = field(default=("check", "op", "public"))

    def arguments(self) -> Arguments:
        return {**self.base(), **self.changes}


def dense(name: str, error: type[Exception], says: tuple[str, ...], **changes: Any) -> Bad:
    return Bad(name, changes, error, says)


def varlen(name: str, error: type[Exception], says: tuple[str, ...], **changes: Any) -> Bad:
    return Bad(name, changes, error, says, varlen_arguments)


def only(bad: Bad, *through: str) -> Bad:
    bad.through = through
    return bad


def mistyped(name: str, value: Any, says: tuple[str, ...], base: Callable[[], Arguments] = dense_arguments) -> Bad:
    """A wrong Python type: the operator's schema, torch's, refuses some of these in its own words."""
    return Bad(
        f"{name} is {' '.join(repr(value).split()):.20}",
        {name: value},
        TypeError,
        (name, *says),
        base,
        ("check", "public"),
    )


def _fp8(name: str, *shape: int) -> Bad:
    tensor = torch.zeros(shape).to(torch.float8_e4m3fn)
    return dense(
        f"{name} is fp8", NotImplementedError, (name, "float8_e4m3fn", "fp8", "torch.float16"), **{name: tensor}
    )


_PERMUTED = _ints(0, 0, 4, 4, 10, 10)[::2]  # values 0, 4, 10; not contiguous
_HUGE = torch.zeros((), dtype=torch.bfloat16)

TENSORS = [
    *(mistyped(name, [1.0], ("list", "torch.Tensor")) for name in ("q", "k", "v")),
    *(mistyped(name, np.zeros((2, 5, 4, 16)), ("ndarray", "torch.Tensor")) for name in ("q", "k", "v")),
    *(mistyped(name, None, ("NoneType", "torch.Tensor")) for name in ("q", "k", "v")),
    mistyped("k", 3, ("int", "torch.Tensor")),
    dense("q float32", TypeError, ("q ", "torch.float32", "torch.float16 or torch.bfloat16", "autocast"),
          q=_half(2, 5, 4, 16, dtype=torch.float32)),
    dense("all float32", TypeError, ("q ", "torch.float32", "torch.float16", "autocast"),
          **{name: value.float() for name, value in dense_arguments().items()}),
    dense("q float64", TypeError, ("q ", "torch.float64", "torch.float16"), q=_half(2, 5, 4, 16, dtype=torch.float64)),
    dense("q int8", TypeError, ("q ", "torch.int8", "torch.float16"), q=_half(2, 5, 4, 16, dtype=torch.int8)),
    dense("q bool", TypeError, ("q ", "torch.bool", "torch.float16"), q=_half(2, 5, 4, 16, dtype=torch.bool)),
    dense("v complex", TypeError, ("v ", "torch.complex64", "torch.float16"),
          v=_half(2, 7, 2, 8, dtype=torch.complex64)),
    _fp8("q", 2, 5, 4, 16), _fp8("k", 2, 7, 2, 16), _fp8("v", 2, 7, 2, 8),
    dense("fp8 with a gradient", NotImplementedError, ("q ", "float8_e5m2", "fp8"),
          q=torch.zeros(2, 5, 4, 16).to(torch.float8_e5m2).requires_grad_()),
    dense("k of another dtype", TypeError, ("k ", "torch.float16", "q, torch.bfloat16"),
          k=_half(2, 7, 2, 16, dtype=torch.float16)),
    dense("v of another dtype", TypeError, ("v ", "torch.float16", "q, torch.bfloat16"),
          v=_half(2, 7, 2, 8, dtype=torch.float16)),
    dense("k on another device", ValueError, ("k ", "meta", "device of q, cpu"), k=_half(2, 7, 2, 16).to("meta")),
    dense("v on another device", ValueError, ("v ", "meta", "device of q, cpu"), v=_half(2, 7, 2, 8).to("meta")),
    only(dense("q sparse", TypeError, ("q ", "sparse_coo", "strided"), q=_half(2, 5, 4, 16).to_sparse()),
         "check", "public"),
    only(dense("k nested", TypeError, ("k ", "nested", "strided"),
               k=torch.nested.nested_tensor([_half(3, 2, 16), _half(7, 2, 16)])), "check", "public"),
    dense("q of rank 3", ValueError, ("q ", "(5, 4, 16)", "batch, seqlen_q, heads_q, head_dim", "cu_seqlens"),
          q=_half(5, 4, 16)),
    dense("q of rank 5", ValueError, ("q ", "(1, 2, 5, 4, 16)", "batch, seqlen_q"), q=_half(1, 2, 5, 4, 16)),
    dense("q of rank 0", ValueError, ("q ", "()", "batch, seqlen_q"), q=_half()),
    dense("k of rank 3", ValueError, ("k ", "(7, 2, 16)", "batch, seqlen_k"), k=_half(7, 2, 16)),
    dense("v of rank 2", ValueError, ("v ", "(7, 8)", "batch, seqlen_k"), v=_half(7, 8)),
    varlen("packed q of rank 4", ValueError, ("q ", "(2, 5, 4, 16)", "total_q, heads_q, head_dim"),
           q=_half(2, 5, 4, 16)),
    varlen("packed k of rank 4", ValueError, ("k ", "(2, 7, 2, 16)", "total_k"), k=_half(2, 7, 2, 16)),
    dense("k of another batch", ValueError, ("k ", "(3, 7, 2, 16)", "batch of q, 2"), k=_half(3, 7, 2, 16),
          v=_half(3, 7, 2, 8)),
    dense("k of another head_dim", ValueError, ("k ", "head_dim 24", "q, 16"), k=_half(2, 7, 2, 24)),
    dense("v of another length", ValueError, ("v ", "(2, 6, 2, 8)", "(2, 7, 2, head_dim_v)"), v=_half(2, 6, 2, 8)),
    dense("v of other heads", ValueError, ("v ", "(2, 7, 4, 8)", "(2, 7, 2, head_dim_v)"), v=_half(2, 7, 4, 8)),
    dense("v of another batch", ValueError, ("v ", "(1, 7, 2, 8)", "(2, 7, 2, head_dim_v)"), v=_half(1, 7, 2, 8)),
    dense("heads do not divide", ValueError, ("q ", "5 heads", "multiple of the 2 heads"), q=_half(2, 5, 5, 16)),
    dense("fewer query heads", ValueError, ("q ", "1 heads", "multiple of the 2 heads"), q=_half(2, 5, 1, 16)),
    dense("q without heads", ValueError, ("q ", "0 heads", "at least 1"), q=_half(2, 5, 0, 16)),
    dense("k without heads", ValueError, ("k ", "0 heads", "at least 1"), k=_half(2, 7, 0, 16), v=_half(2, 7, 0, 8)),
    dense("head_dim 0", ValueError, ("q ", "head_dim 0", "multiple of 8 from 8 to 256"), q=_half(2, 5, 4, 0),
          k=_half(2, 7, 2, 0)),
    dense("head_dim 264", ValueError, ("q ", "head_dim 264", "multiple of 8 from 8 to 256"), q=_half(2, 5, 4, 264),
          k=_half(2, 7, 2, 264)),
    dense("head_dim 257", ValueError, ("q ", "head_dim 257", "multiple of 8 from 8 to 256"), q=_half(2, 5, 4, 257),
          k=_half(2, 7, 2, 257)),
    dense("head_dim_v 300", ValueError, ("v ", "head_dim 300", "multiple of 8 from 8 to 256"), v=_half(2, 7, 2, 300)),
    dense("head_dim_v 0", ValueError, ("v ", "head_dim 0", "multiple of 8 from 8 to 256"), v=_half(2, 7, 2, 0)),
    only(dense("head_dim 12", ValueError, ("q ", "head_dim 12", "multiple of 8 from 8 to 256"), q=_half(2, 5, 4, 12),
               k=_half(2, 7, 2, 12)), "check", "op"),
    only(dense("head_dim_v 9", ValueError, ("v ", "head_dim 9", "multiple of 8 from 8 to 256"), v=_half(2, 7, 2, 9)),
         "check", "op"),
    only(dense("padding must not hide head dims that differ", ValueError, ("k ", "head_dim 14", "q, 12"),
               q=_half(2, 5, 4, 12), k=_half(2, 7, 2, 14)), "public"),
    varlen("2^31 rows", ValueError, ("q ", "2147483648", "below 2^31"), q=_HUGE.expand(2**31, 4, 16)),
    dense("2^31 sequences", ValueError, ("q ", "2147483648", "below 2^31"), q=_HUGE.expand(2**31, 1, 4, 16),
          k=_HUGE.expand(2**31, 1, 2, 16), v=_HUGE.expand(2**31, 1, 2, 8)),
]  # fmt: skip

VECTORS = [
    only(varlen("cu_seqlens_k missing", ValueError, ("cu_seqlens_k", "None", "both", "neither"), cu_seqlens_k=None),
         "check", "op"),
    only(varlen("cu_seqlens_q missing", ValueError, ("cu_seqlens_q", "None", "both", "neither"), cu_seqlens_q=None),
         "check", "op"),
    only(varlen("public cu_seqlens_q missing", TypeError, ("cu_seqlens_q", "None", "(batch + 1)"), cu_seqlens_q=None),
         "public"),
    only(varlen("public cu_seqlens_k missing", TypeError, ("cu_seqlens_k", "None", "(batch + 1)"), cu_seqlens_k=None),
         "public"),
    mistyped("cu_seqlens_q", [0, 4, 10], ("list", "torch.Tensor"), varlen_arguments),
    varlen("cu_seqlens_q int64", TypeError, ("cu_seqlens_q", "torch.int64", "torch.int32"),
           cu_seqlens_q=_ints(0, 4, 10, dtype=torch.int64)),
    varlen("cu_seqlens_k float", TypeError, ("cu_seqlens_k", "torch.float32", "torch.int32"),
           cu_seqlens_k=torch.zeros(3)),
    varlen("cu_seqlens_q of rank 2", ValueError, ("cu_seqlens_q", "(1, 3)", "(batch + 1)"),
           cu_seqlens_q=_ints(0, 4, 10)[None]),
    varlen("cu_seqlens_q empty", ValueError, ("cu_seqlens_q", "(0,)", "(batch + 1)"), cu_seqlens_q=_ints(),
           cu_seqlens_k=_ints()),
    varlen("cu_seqlens lengths differ", ValueError, ("cu_seqlens_k", "length 2", "cu_seqlens_q", "3"),
           cu_seqlens_k=_ints(0, 14)),
    varlen("cu_seqlens_q not contiguous", ValueError, ("cu_seqlens_q", "(2,)", "contiguous"), cu_seqlens_q=_PERMUTED),
    varlen("cu_seqlens_k on another device", ValueError, ("cu_seqlens_k", "meta", "q, cpu"),
           cu_seqlens_k=_ints(0, 9, 14).to("meta")),
    mistyped("seqused_k", 3, ("int", "torch.Tensor")),
    dense("seqused_q int64", TypeError, ("seqused_q", "torch.int64", "torch.int32"),
          seqused_q=_ints(3, 4, dtype=torch.int64)),
    dense("seqused_k of another length", ValueError, ("seqused_k", "(3,)", "(batch) = (2)"), seqused_k=_ints(1, 2, 3)),
    varlen("packed seqused_k of another length", ValueError, ("seqused_k", "(3,)", "(batch) = (2)"),
           seqused_k=_ints(1, 2, 3)),
    dense("seqused_q of rank 2", ValueError, ("seqused_q", "(2, 1)", "(batch) = (2)"), seqused_q=_ints(1, 2)[:, None]),
    dense("seqused_q expanded", ValueError, ("seqused_q", "(0,)", "contiguous"), seqused_q=_ints(1).expand(2)),
    dense("seqused_q on another device", ValueError, ("seqused_q", "meta", "q, cpu"),
          seqused_q=_ints(1, 2).to("meta")),
    mistyped("alibi_slopes", 0.5, ("float", "torch.Tensor")),
    dense("alibi_slopes fp16", TypeError, ("alibi_slopes", "torch.float16", "torch.float32"),
          alibi_slopes=_half(4, dtype=torch.float16)),
    dense("alibi_slopes of key heads", ValueError, ("alibi_slopes", "(2,)", "(heads_q) = (4)", "(2, 4)"),
          alibi_slopes=torch.zeros(2)),
    dense("alibi_slopes of another batch", ValueError, ("alibi_slopes", "(3, 4)", "(2, 4)"),
          alibi_slopes=torch.zeros(3, 4)),
    dense("alibi_slopes as a bias mask", ValueError, ("alibi_slopes", "(2, 4, 5, 7)", "(2, 4)"),
          alibi_slopes=torch.zeros(2, 4, 5, 7)),
    dense("alibi_slopes on another device", ValueError, ("alibi_slopes", "meta", "q, cpu"),
          alibi_slopes=torch.zeros(4, device="meta")),
    dense("alibi_slopes with a gradient", ValueError, ("alibi_slopes", "requires_grad=True", "detach()"),
          alibi_slopes=torch.zeros(4, requires_grad=True)),
    dense("alibi_slopes beside a gradient", ValueError, ("alibi_slopes", "requires_grad=True", "detach()"),
          alibi_slopes=torch.zeros(4, requires_grad=True), q=_half(2, 5, 4, 16).requires_grad_()),
    mistyped("sinks", [0.0] * 4, ("learnable_sink", "list", "torch.Tensor")),
    dense("sinks float64", TypeError, ("sinks", "torch.float64", "torch.float32"),
          sinks=torch.zeros(4, dtype=torch.float64)),
    dense("sinks of key heads", ValueError, ("learnable_sink", "(2,)", "(heads_q) = (4)"), sinks=torch.zeros(2)),
    dense("sinks of rank 2", ValueError, ("sinks", "(4, 1)", "(heads_q) = (4)"), sinks=torch.zeros(4, 1)),
    dense("sinks on another device", ValueError, ("sinks", "meta", "q, cpu"), sinks=torch.zeros(4, device="meta")),
    only(dense("dropout without rng_state", ValueError, ("rng_state", "None", "0.5", "int64 tensor of shape (2)"),
               dropout_p=0.5), "check", "op"),
    only(dense("rng_state without dropout", ValueError, ("rng_state", "dropout_p is 0.0", "above 0"),
               rng_state=_ints(1, 2, dtype=torch.int64)), "check", "op"),
    only(dense("rng_state int32", TypeError, ("rng_state", "torch.int32", "torch.int64"), dropout_p=0.5,
               rng_state=_ints(1, 2)), "check", "op"),
    only(dense("rng_state of another shape", ValueError, ("rng_state", "(3,)", "shape (2)"), dropout_p=0.5,
               rng_state=_ints(1, 2, 3, dtype=torch.int64)), "check", "op"),
    only(dense("rng_state not contiguous", ValueError, ("rng_state", "(2,)", "contiguous"), dropout_p=0.5,
               rng_state=_ints(1, 0, 2, 0, dtype=torch.int64)[::2]), "check", "op"),
    only(dense("rng_state on another device", ValueError, ("rng_state", "meta", "q, cpu"), dropout_p=0.5,
               rng_state=_ints(1, 2, dtype=torch.int64).to("meta")), "check", "op"),
]  # fmt: skip

_NAN, _INF = math.nan, math.inf
_FP32 = "fp32 holds: 0 or a magnitude from 1.2e-38 to 1e+38"


def beyond_64_bits(bad: Bad) -> Bad:
    """torch's schema refuses it before the operator is asked."""
    return only(bad, "check", "public")


NUMBERS = [
    *(
        dense(f"softmax_scale {value}", ValueError, ("softmax_scale", str(value), "finite", _FP32), softmax_scale=value)
        for value in (_NAN, _INF, -_INF, 1e39, -1e39, 1e-50, -1e-39, 1.1e38)
    ),
    beyond_64_bits(dense("softmax_scale 10**400", ValueError, ("softmax_scale", "1000", _FP32),
                         softmax_scale=10**400)),
    beyond_64_bits(dense("softmax_scale 10**5000", ValueError, ("softmax_scale", "integer of 16610 bits"),
                         softmax_scale=10**5000)),
    only(dense("softmax_scale, a fraction", ValueError, ("softmax_scale", "Fraction(1000", _FP32),
               softmax_scale=Fraction(10**400)), "check", "public"),
    mistyped("softmax_scale", "0.1", ("'0.1'", "finite")),
    mistyped("softmax_scale", torch.ones(()), ("tensor", "finite")),
    mistyped("softmax_scale", True, ("True", "finite")),
    *(
        dense(f"softcap {value}", ValueError, ("softcap", str(value), "at least 0", _FP32), softcap=value)
        for value in (_NAN, _INF, -1.0, 1e39, 1e-50, -1e39, -1e-50)
    ),
    dense("softcap too small for the scale", ValueError, ("softcap", "1e-10 with softmax_scale -1e+30", "1e+38"),
          softcap=1e-10, softmax_scale=-1e30),
    mistyped("softcap", None, ("None", "at least 0")),
    mistyped("softcap", False, ("False", "at least 0")),
    *(
        dense(f"dropout_p {value}", ValueError, ("dropout_p", str(value), "[0, 1)"), dropout_p=value)
        for value in (-0.1, 1.0, 1.5, _NAN, _INF)
    ),
    mistyped("dropout_p", "0.1", ("'0.1'", "[0, 1)")),
    mistyped("dropout_p", None, ("None", "[0, 1)")),
    mistyped("dropout_p", True, ("True", "[0, 1)")),
    mistyped("dropout_p", torch.zeros(3), ("tensor", "[0, 1)")),
    dense("window_left -2", ValueError, ("window_left (window_size[0])", "-2", "at least -1"), window_left=-2),
    *(
        dense(f"{name} -2**40", ValueError, (name, str(-(2**40)), "at least -1"), **{name: -(2**40)})
        for name in ("window_left", "window_right")
    ),
    beyond_64_bits(dense("window_left -2**70", ValueError, ("window_left", str(-(2**70)), "at least -1"),
                         window_left=-(2**70))),
    *(
        dense(f"sm_margin {value}", ValueError, ("sm_margin", str(value), "at most 2147483647"), sm_margin=value)
        for value in (2**31, 2**40, -(2**40))
    ),
    beyond_64_bits(dense("sm_margin 2**70", ValueError, ("sm_margin", str(2**70), "at most 2147483647"),
                         sm_margin=2**70)),
    dense("num_splits 2**40", NotImplementedError, ("num_splits", str(2**40), "0 or 1"), num_splits=2**40),
    dense("num_splits -2**40", ValueError, ("num_splits", str(-(2**40)), "at least 0"), num_splits=-(2**40)),
    beyond_64_bits(dense("num_splits 2**70", NotImplementedError, ("num_splits", str(2**70), "0 or 1"),
                         num_splits=2**70)),
    dense("window_right -7", ValueError, ("window_right (window_size[1])", "-7", "at least -1"), window_right=-7),
    Bad("window_left 1.0", {"window_left": 1.0}, TypeError, ("window_size[0]", "1.0", "integer"),
        through=("check", "public")),
    Bad("window_right None", {"window_right": None}, TypeError, ("window_size[1]", "None", "integer"),
        through=("check", "public")),
    Bad("window_left True", {"window_left": True}, TypeError, ("window_size[0]", "True", "integer"),
        through=("check", "public")),
    mistyped("causal", 1, ("1", "bool")),
    mistyped("causal", None, ("None", "bool")),
    mistyped("deterministic", 0, ("0", "bool")),
    mistyped("deterministic", "yes", ("'yes'", "bool")),
    dense("num_splits 2", NotImplementedError, ("num_splits", "2", "0 or 1"), num_splits=2),
    dense("num_splits -1", ValueError, ("num_splits", "-1", "at least 0"), num_splits=-1),
    mistyped("num_splits", None, ("None", "at least 0")),
    mistyped("num_splits", 1.0, ("1.0", "at least 0")),
    dense("sm_margin -1", ValueError, ("sm_margin", "-1", "at least 0"), sm_margin=-1),
    mistyped("sm_margin", 0.5, ("0.5", "at least 0")),
    varlen("max_seqlen_q -1", ValueError, ("max_seqlen_q", "-1", "at least 0"), max_seqlen_q=-1),
    mistyped("max_seqlen_k", 7.0, ("7.0", "integer"), varlen_arguments),
    mistyped("max_seqlen_q", torch.tensor(7.0), ("tensor(7.)", "integer"), varlen_arguments),
    mistyped("max_seqlen_k", torch.tensor([7]), ("tensor([7])", "integer"), varlen_arguments),
    mistyped("max_seqlen_q", True, ("True", "integer"), varlen_arguments),
]  # fmt: skip

RESERVED = [
    varlen("block_table", NotImplementedError, ("block_table", "None"), block_table=_ints(0, 1)[None]),
    *(
        dense(name, NotImplementedError, (name, "fp8", "None"), **{name: torch.ones(())})
        for name in ("q_descale", "k_descale", "v_descale")
    ),
]

ALL = [*TENSORS, *VECTORS, *NUMBERS, *RESERVED]
assert len({bad.name for bad in ALL}) == len(ALL)


def _named(through: str) -> list[Any]:
    return [pytest.param(bad, id=bad.name) for bad in ALL if through in bad.through]


def assert_refused(bad: Bad, call: Callable[[], Any]) -> None:
    with pytest.raises(bad.error) as caught:
        call()
    assert type(caught.value) is bad.error
    message = str(caught.value)
    assert message.startswith("flash_ext: ")
    for text in bad.says:
        assert text in message, f"{text!r} is not in: {message}"


_dense_function: Callable[..., Any] = flash_ext.flash_attn_func
_varlen_function: Callable[..., Any] = flash_ext.flash_attn_varlen_func


def call_public(arguments: Arguments, **more: Any) -> Any:
    """The public function for these keywords of the operators."""
    arguments = {**arguments, **more}
    arguments["window_size"] = (arguments.pop("window_left", -1), arguments.pop("window_right", -1))
    if "sinks" in arguments:
        arguments["learnable_sink"] = arguments.pop("sinks")
    if "cu_seqlens_q" not in arguments:
        return _dense_function(**arguments)
    return _varlen_function(**{"max_seqlen_q": None, "max_seqlen_k": None, **arguments})


@pytest.fixture
def _nothing_is_drawn() -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state()), "a refused call drew a random number"


@pytest.mark.parametrize("bad", _named("check"))
def test_forward_check(bad: Bad) -> None:
    assert_refused(bad, lambda: checks.check_forward(**bad.arguments()))


@pytest.mark.parametrize("bad", _named("op"))
def test_operator(bad: Bad) -> None:
    assert_refused(bad, lambda: torch.ops.flash_ext.fwd(**bad.arguments()))


@pytest.mark.parametrize("bad", _named("op"))
def test_backward_operator(bad: Bad) -> None:
    """bwd refuses the same; what it takes beside is fine here."""
    out, lse = _half(BATCH, SEQLEN_Q, HEADS_Q, HEAD_DIM_V), torch.zeros(BATCH, HEADS_Q, SEQLEN_Q)
    assert_refused(bad, lambda: torch.ops.flash_ext.bwd(out, None, out=out, lse=lse, **bad.arguments()))


@pytest.mark.parametrize("bad", _named("public"))
@pytest.mark.usefixtures("_nothing_is_drawn")
def test_public_function(bad: Bad) -> None:
    assert_refused(bad, lambda: call_public(bad.arguments()))


@pytest.mark.parametrize("bad", [param for param in _named("public") if "dropout_p" not in param.values[0].changes])
@pytest.mark.usefixtures("_nothing_is_drawn")
def test_refused_with_dropout_draws_nothing(bad: Bad) -> None:
    assert_refused(bad, lambda: call_public(bad.arguments(), dropout_p=0.5))


@pytest.mark.parametrize("bad", _named("public"))
@pytest.mark.usefixtures("_nothing_is_drawn")
def test_public_function_under_a_mode(bad: Bad) -> None:
    """Not the direct way: the same errors, and nothing drawn."""
    more = {} if "dropout_p" in bad.changes else {"dropout_p": 0.5}
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert_refused(bad, lambda: call_public(bad.arguments(), **more))


class Marked(torch.Tensor):
    """A subclass that changes nothing."""


def _as_marked(value: Any) -> Any:
    return value.as_subclass(Marked) if isinstance(value, torch.Tensor) and value.layout is torch.strided else value


@pytest.mark.parametrize("bad", _named("public"))
@pytest.mark.usefixtures("_nothing_is_drawn")
def test_public_function_with_a_subclass(bad: Bad) -> None:
    """Not the direct way either."""
    not_tensors = ("softmax_scale", "dropout_p", "max_seqlen_q", "max_seqlen_k")
    arguments = {name: value if name in not_tensors else _as_marked(value) for name, value in bad.arguments().items()}
    more = {} if "dropout_p" in bad.changes else {"dropout_p": 0.5}
    assert_refused(bad, lambda: call_public(arguments, **more))


def _is_of_a_wrong_half_dtype(bad: Bad) -> bool:
    """Which autocast puts right."""
    values = [bad.changes[name] for name in "qkv" if name in bad.changes]
    castable = (torch.float32, torch.float16)
    return any(isinstance(value, torch.Tensor) and value.dtype in castable for value in values)


@pytest.mark.parametrize("bad", [param for param in _named("public") if not _is_of_a_wrong_half_dtype(param.values[0])])
@pytest.mark.usefixtures("_nothing_is_drawn")
def test_public_function_under_autocast(bad: Bad) -> None:
    more = {} if "dropout_p" in bad.changes else {"dropout_p": 0.5}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_refused(bad, lambda: call_public(bad.arguments(), **more))


@pytest.mark.parametrize("bad", _named("public"))
def test_explain(bad: Bad) -> None:
    """It raises what the call would raise."""
    arguments = bad.arguments()
    arguments["window_size"] = (arguments.pop("window_left", -1), arguments.pop("window_right", -1))
    if "sinks" in arguments:
        arguments["learnable_sink"] = arguments.pop("sinks")
    if bad.base is varlen_arguments and None in (arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]):
        bad = Bad(bad.name, {}, ValueError, ("cu_seqlens", "None", "both"))  # explain serves both functions
    assert_refused(bad, lambda: flash_ext.explain(**arguments))


_COMPILED = [bad for bad in (*NUMBERS, *RESERVED) if "op" in bad.through or bad.error is TypeError]


@pytest.mark.parametrize("bad", [pytest.param(bad, id=bad.name) for bad in _COMPILED])
def test_compiled_public_function(bad: Bad) -> None:
    """The compiler's error holds ours; of a wrong type only its name, not the value."""
    arguments = bad.arguments()
    constants = {name: value for name, value in bad.changes.items() if not isinstance(value, torch.Tensor)}
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}

    def call(tensors: Arguments) -> Any:
        return call_public({**tensors, **constants})

    torch._dynamo.reset()
    with pytest.raises((torch._dynamo.exc.TorchRuntimeError, torch._dynamo.exc.Unsupported)) as caught:
        torch.compile(call, backend="eager", fullgraph=True)(tensors)
    message = str(caught.value)
    name = next(iter(bad.changes))
    assert f"flash_ext: {name}" in message and "expected" in message, message
    if bad.error is not TypeError:
        assert bad.error.__name__ in message and all(text in message for text in bad.says), message


def test_compiled_packed_functions() -> None:
    for tensor, says in ((_half(2, 5, 4, 16), "has shape (2, 5, 4, 16)"), (None, "is NoneType")):
        torch._dynamo.reset()
        compiled: Callable[..., Any] = torch.compile(
            flash_ext.flash_attn_qkvpacked_func, backend="eager", fullgraph=True
        )
        with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
            compiled(tensor)
        assert f"flash_ext: qkv {says}" in str(caught.value)


@pytest.mark.parametrize("bad", [param for param in _named("public") if param.values[0].base is dense_arguments])
def test_public_function_that_records_a_gradient(bad: Bad) -> None:
    arguments = bad.arguments()
    arguments = {
        name: value.detach().requires_grad_() if name in "qkv" and _can_require_grad(value) else value
        for name, value in arguments.items()
    }
    assert_refused(bad, lambda: call_public(arguments))


def _can_require_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.is_floating_point()


def test_the_bases_are_fine() -> None:
    """Else every test above could pass for the wrong reason."""
    for arguments in (dense_arguments(), varlen_arguments()):
        checks.check_forward(**arguments)
        out, lse = torch.ops.flash_ext.fwd(**{name: value.to("meta") for name, value in arguments.items()})
        assert out.shape == (*arguments["q"].shape[:-1], HEAD_DIM_V) and lse.dtype is torch.float32


def test_numbers_of_other_libraries_and_large_bounds() -> None:
    """What means the same is the same: NumPy's numbers and bools; bounds and hints that no sequence reaches."""
    arguments = {name: torch.randn_like(value) for name, value in dense_arguments().items()}
    plain = call_public(arguments)
    causal = call_public(arguments, causal=True)
    assert not torch.equal(plain, causal)
    for ways in (arguments, {name: _as_marked(value) for name, value in arguments.items()}):
        assert torch.equal(call_public(ways, causal=np.bool_(True), deterministic=np.bool_(False)), causal)
        assert isinstance(call_public(ways, return_lse=np.bool_(True)), tuple)
        for beyond in (2**31 - 1, 2**31, 2**40, 2**70, np.int64(2**40)):
            assert torch.equal(call_public(ways, window_left=beyond, window_right=beyond), plain)
            assert torch.equal(call_public(ways, window_left=beyond, causal=True), causal)
        for scale in (1.2e-38, 1, np.float32(0.25), Fraction(1, 4)):
            assert torch.equal(call_public(ways, softmax_scale=scale), call_public(ways, softmax_scale=float(scale)))
        assert torch.equal(call_public(ways, sm_margin=2**31 - 1), plain)
    for beyond in (2**31, 2**62):
        out, _ = torch.ops.flash_ext.fwd(**arguments, window_left=beyond, window_right=beyond)
        assert torch.equal(out, plain)
    packed = {name: torch.zeros_like(value) for name, value in varlen_arguments().items() if name in "qkv"}
    lengths = {name: value for name, value in varlen_arguments().items() if name not in "qkv"}
    for operands in (packed, {name: _as_marked(value) for name, value in packed.items()}):
        call_public({**operands, **lengths}, max_seqlen_q=2**70, max_seqlen_k=np.int64(2**40))


def test_a_refused_call_leaves_its_inputs_alone() -> None:
    arguments = dense_arguments()
    arguments["q"].normal_()
    before = arguments["q"].clone()
    with pytest.raises(ValueError, match="softcap"):
        call_public(arguments, softcap=-1.0)
    assert torch.equal(arguments["q"], before)


# ---------------------------------------------------------------------------------------------------------------------
# Arguments of the public functions alone.


@pytest.mark.parametrize("window", [None, 3, (1,), (1, 2, 3), "-1", torch.tensor([1, 1])])
def test_window_size_is_a_pair(window: Any) -> None:
    arguments = dense_arguments()
    with pytest.raises(TypeError, match="flash_ext: window_size is .*; expected a pair of integers"):
        flash_ext.flash_attn_func(arguments["q"], arguments["k"], arguments["v"], window_size=window)


@pytest.mark.parametrize("name", ["return_lse", "return_attn_probs"])
def test_flags_are_bools(name: str) -> None:
    with pytest.raises(TypeError, match=rf"flash_ext: {name} is 1 \(int\); expected a bool"):
        call_public(dense_arguments(), **{name: 1})


def test_one_form_of_result() -> None:
    with pytest.raises(ValueError, match="flash_ext: return_lse is True with return_attn_probs=True; expected one"):
        call_public(dense_arguments(), return_lse=True, return_attn_probs=True)


_CU = _ints(0, 4, 10)
PACKED: list[tuple[Callable[..., Any], tuple[Any, ...], type[Exception], tuple[str, ...]]] = [
    (flash_ext.flash_attn_qkvpacked_func, (None,), TypeError, ("qkv", "NoneType", "torch.Tensor")),
    (flash_ext.flash_attn_qkvpacked_func, (_half(2, 5, 2, 4, 16),), ValueError,
     ("qkv", "(2, 5, 2, 4, 16)", "(batch, seqlen, 3, heads, head_dim)")),
    (flash_ext.flash_attn_qkvpacked_func, (_half(5, 3, 4, 16),), ValueError,
     ("qkv", "(5, 3, 4, 16)", "(batch, seqlen, 3, heads, head_dim)")),
    (flash_ext.flash_attn_qkvpacked_func, (_half(2, 5, 3, 4, 16).float(),), TypeError,
     ("qkv", "torch.float32", "torch.float16", "autocast")),
    (flash_ext.flash_attn_qkvpacked_func, (_half(2, 5, 3, 4, 264),), ValueError,
     ("head_dim 264", "multiple of 8 from 8 to 256")),
    (flash_ext.flash_attn_kvpacked_func, (_half(2, 5, 4, 16), _half(2, 7, 3, 2, 16)), ValueError,
     ("kv", "(2, 7, 3, 2, 16)", "(batch, seqlen, 2, heads, head_dim)")),
    (flash_ext.flash_attn_kvpacked_func, (_half(2, 5, 4, 16), [1]), TypeError, ("kv", "list", "torch.Tensor")),
    (flash_ext.flash_attn_kvpacked_func, (_half(2, 5, 4, 12), _half(2, 7, 2, 2, 14)), ValueError,
     ("kv", "head_dim 14", "q, 12")),
    (flash_ext.flash_attn_varlen_qkvpacked_func, (_half(2, 5, 3, 4, 16), _CU, 6), ValueError,
     ("qkv", "(2, 5, 3, 4, 16)", "(total, 3, heads, head_dim)")),
    (flash_ext.flash_attn_varlen_qkvpacked_func, (_half(10, 3, 4, 16), None, 6), TypeError,
     ("cu_seqlens", "None", "(batch + 1)")),
    (flash_ext.flash_attn_varlen_qkvpacked_func, (_half(10, 3, 4, 16), _CU.long(), 6), TypeError,
     ("cu_seqlens", "torch.int64", "torch.int32")),
    (flash_ext.flash_attn_varlen_kvpacked_func, (_half(10, 4, 16), _half(14, 2, 16), _CU, _CU, 6, 6), ValueError,
     ("kv", "(14, 2, 16)", "(total, 2, heads, head_dim)")),
    (flash_ext.flash_attn_varlen_kvpacked_func, (_half(10, 4, 16), _half(14, 2, 2, 16), _CU, None, 6, 6), TypeError,
     ("cu_seqlens_k", "None", "(batch + 1)")),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(PACKED)))
@pytest.mark.usefixtures("_nothing_is_drawn")
def test_packed_functions(index: int) -> None:
    function, arguments, error, says = PACKED[index]
    bad = Bad(function.__name__, {}, error, says)
    assert_refused(bad, lambda: function(*arguments))
    assert_refused(bad, lambda: function(*arguments, dropout_p=0.5))


def _call_under_a_transform(transform: str) -> Any:
    arguments = dense_arguments()
    q, k, v = arguments["q"], arguments["k"], arguments["v"]

    def attention(q: torch.Tensor) -> Any:
        return flash_ext.flash_attn_func(q, k, v, dropout_p=0.5)

    if transform == "vmap over q, per example":
        return torch.func.vmap(attention, randomness="different")(q[None])
    if transform == "vmap over q, the same":
        return torch.func.vmap(attention, randomness="same")(q[None])
    if transform == "vmap over q":
        return torch.func.vmap(attention)(q[None])
    if transform == "vmap over something else":
        return torch.func.vmap(lambda x: x + attention(q).sum(), randomness="different")(torch.zeros(3))
    if transform == "vmap over the sinks":
        call = lambda sinks: flash_ext.flash_attn_func(q, k, v, dropout_p=0.5, learnable_sink=sinks)  # noqa: E731
        return torch.func.vmap(call, randomness="same")(torch.zeros(3, HEADS_Q))
    if transform == "grad":
        return torch.func.grad(lambda q: attention(q).float().sum())(q)
    if transform == "vmap of grad":
        grad = torch.func.grad(lambda q: attention(q).float().sum())
        return torch.func.vmap(grad, randomness="same")(q[None])
    if transform == "jvp":
        return torch.func.jvp(attention, (q,), (q,))
    raise AssertionError(transform)


@pytest.mark.parametrize(
    ("transform", "what"),
    [
        ("vmap over q, per example", "vmap over flash_ext operators"),
        ("vmap over q, the same", "vmap over flash_ext operators"),
        ("vmap over q", "vmap over flash_ext operators"),
        ("vmap over something else", "vmap over flash_ext operators"),
        ("vmap over the sinks", "vmap over flash_ext operators"),
        ("grad", "torch.func transforms"),
        ("vmap of grad", "vmap over flash_ext operators"),
        ("jvp", "forward-mode AD"),
    ],
)
@pytest.mark.usefixtures("_nothing_is_drawn")
def test_a_refused_transform_draws_nothing(transform: str, what: str) -> None:
    with pytest.raises(NotImplementedError, match=f"flash_ext: {what} .*not implemented"):
        _call_under_a_transform(transform)


@pytest.mark.usefixtures("_nothing_is_drawn")
def test_an_inference_tensor_beside_a_gradient_draws_nothing() -> None:
    arguments = dense_arguments()
    with torch.inference_mode():
        arguments["k"] = arguments["k"].clone()
    call_public(arguments, dropout_p=0.0)
    arguments["q"].requires_grad_()
    with pytest.raises(ValueError, match="flash_ext: k is an inference tensor; expected a normal tensor"):
        call_public(arguments, dropout_p=0.5)


@pytest.mark.parametrize("way", ["direct", "subclass", "autocast", "mode"])
@pytest.mark.usefixtures("_nothing_is_drawn")
def test_a_call_without_a_kernel_draws_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only dispatch can refuse is refused before the random number too."""

    def refuse(*arguments: Any) -> str:
        raise NotImplementedError("flash_ext: no kernel")

    monkeypatch.setattr(interface, "uses_reference", lambda q: False)
    monkeypatch.setattr(interface, "path_of", refuse)
    arguments = dense_arguments()
    if way == "subclass":
        arguments["q"] = _as_marked(arguments["q"])
    modes: dict[str, AbstractContextManager[Any]] = {
        "autocast": torch.autocast("cpu", dtype=torch.bfloat16),
        "mode": torch.utils.flop_counter.FlopCounterMode(display=False),
    }
    with modes.get(way, nullcontext()), pytest.raises(NotImplementedError, match="flash_ext: no kernel"):
        call_public(arguments, dropout_p=0.5)


# ---------------------------------------------------------------------------------------------------------------------
# The backward's own arguments.

_OUT, _LSE = (BATCH, SEQLEN_Q, HEADS_Q, HEAD_DIM_V), (BATCH, HEADS_Q, SEQLEN_Q)
BACKWARD: list[tuple[str, Any, type[Exception], tuple[str, ...]]] = [
    ("dout", _half(*_OUT[:-1], 16), ValueError, ("dout", "(2, 5, 4, 16)", "(2, 5, 4, 8)")),
    ("dout", _half(*_OUT, dtype=torch.float32), TypeError, ("dout", "torch.float32", "torch.bfloat16")),
    ("dout", _half(*_OUT).to("meta"), ValueError, ("dout", "meta", "q, cpu")),
    ("out", _half(5, 4, 8), ValueError, ("out", "(5, 4, 8)", "(2, 5, 4, 8)")),
    ("out", _half(*_OUT, dtype=torch.float16), TypeError, ("out", "torch.float16", "torch.bfloat16")),
    ("lse", torch.zeros(2, 5, 4), ValueError, ("lse", "(2, 5, 4)", "(2, 4, 5)")),
    ("lse", torch.zeros(_LSE, dtype=torch.float64), TypeError, ("lse", "torch.float64", "torch.float32")),
    ("lse", torch.zeros(_LSE, device="meta"), ValueError, ("lse", "meta", "q, cpu")),
    ("dlse", torch.zeros(2, 4), ValueError, ("dlse", "(2, 4)", "(2, 4, 5)")),
    ("dlse", torch.zeros(_LSE, dtype=torch.bfloat16), TypeError, ("dlse", "torch.bfloat16", "torch.float32")),
]


@pytest.mark.parametrize("index", range(len(BACKWARD)))
def test_backward_arguments(index: int) -> None:
    name, value, error, says = BACKWARD[index]
    arguments = {"dout": _half(*_OUT), "dlse": None, "out": _half(*_OUT), "lse": torch.zeros(_LSE), **dense_arguments()}
    checks.check_backward(**arguments)
    arguments[name] = value
    bad = Bad(name, {}, error, says)
    assert_refused(bad, lambda: checks.check_backward(**arguments))
    assert_refused(bad, lambda: torch.ops.flash_ext.bwd(**arguments))


@pytest.mark.parametrize("name", ["dout", "out", "lse"])
def test_backward_arguments_are_tensors(name: str) -> None:
    arguments = {"dout": _half(*_OUT), "dlse": None, "out": _half(*_OUT), "lse": torch.zeros(_LSE), **dense_arguments()}
    with pytest.raises(TypeError, match=f"flash_ext: {name} is NoneType .*expected a torch.Tensor"):
        checks.check_backward(**{**arguments, name: None})


# ---------------------------------------------------------------------------------------------------------------------
# Between padded and packed.

_PADDED, _MASK = torch.zeros(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
_PLACES = torch.tensor([0, 4])
PADDING: list[tuple[Callable[..., Any], tuple[Any, ...], type[Exception], tuple[str, ...]]] = [
    (flash_ext.unpad_input, ([1], _MASK), TypeError, ("hidden_states", "list", "torch.Tensor")),
    (flash_ext.unpad_input, (torch.zeros(6), _MASK), ValueError, ("hidden_states", "(6,)", "(batch, seqlen, ...)")),
    (flash_ext.unpad_input, (_PADDED, [[1]]), TypeError, ("attention_mask", "list", "torch.Tensor")),
    (flash_ext.unpad_input, (_PADDED, _MASK.float()), TypeError, ("attention_mask", "torch.float32", "integer")),
    (flash_ext.unpad_input, (_PADDED, _MASK[:1]), ValueError, ("attention_mask", "(1, 3)", "(2, 3)")),
    (flash_ext.unpad_input, (_PADDED, _MASK, _MASK[0]), ValueError, ("unused_mask", "(3,)", "(2, 3)")),
    (flash_ext.pad_input, (None, _PLACES, 2, 3), TypeError, ("hidden_states", "NoneType", "torch.Tensor")),
    (flash_ext.pad_input, (torch.zeros(()), _PLACES, 2, 3), ValueError, ("hidden_states", "()", "(rows, ...)")),
    (flash_ext.pad_input, (_PADDED, [0, 4], 2, 3), TypeError, ("indices", "list", "torch.Tensor")),
    (flash_ext.pad_input, (_PADDED, _PLACES.float(), 2, 3), TypeError, ("indices", "torch.float32", "torch.int32")),
    (flash_ext.pad_input, (_PADDED, _PLACES[None], 2, 3), ValueError, ("indices", "(1, 2)", "(total)")),
    (flash_ext.pad_input, (_PADDED, _PLACES[:1], 2, 3), ValueError, ("indices", "(1,)", "(2,)")),
    (flash_ext.pad_input, (_PADDED, _PLACES.to("meta"), 2, 3), ValueError, ("indices", "meta", "hidden_states, cpu")),
    (flash_ext.pad_input, (_PADDED, _PLACES, "2", 3), TypeError, ("batch", "'2'", "integer of at least 0")),
    (flash_ext.pad_input, (_PADDED, _PLACES, 2, -3), ValueError, ("seqlen", "-3", "integer of at least 0")),
]


@pytest.mark.parametrize("index", range(len(PADDING)))
def test_padding(index: int) -> None:
    function, arguments, error, says = PADDING[index]
    assert_refused(Bad(function.__name__, {}, error, says), lambda: function(*arguments))


# ---------------------------------------------------------------------------------------------------------------------
# The early exit for common calls says the same as the whole check.

_CHOICES: dict[str, list[Any]] = {
    "softmax_scale": [None, 0.5, -1.0, _NAN, _INF, 1, True, "x"],
    "causal": [False, True, 0, 1, None],
    "window_left": [-1, 0, 10**12, -2, 1.0, True, None],
    "window_right": [-1, 3, -5, False],
    "softcap": [0.0, 0, 30.0, -0.5, _NAN, False],
    "dropout_p": [0.0, 0, 0.1, 1.0, _NAN, False],
    "num_splits": [0, 1, 2, -1, 0.0],
    "sm_margin": [0, 8, -1, None],
    "deterministic": [False, True, 0],
    "max_seqlen_q": [None, 0, 5, -1, 2.0, True],
    "max_seqlen_k": [None, 7, -3],
    "q": [(2, 5, 4, 16), (2, 5, 3, 16), (0, 5, 4, 16), (10, 4, 16), (2, 5, 4, 12), (2, 5, 0, 16), (10, 4, 264)],
    "k": [(2, 7, 2, 16), (2, 7, 4, 16), (0, 7, 2, 16), (14, 2, 16), (2, 7, 2, 24), (2, 7, 0, 16), (3, 7, 2, 16)],
    "v": [(2, 7, 2, 8), (2, 7, 4, 8), (0, 7, 2, 8), (14, 2, 8), (2, 6, 2, 8), (2, 7, 2, 300), (2, 7, 2, 4), (14, 2, 0)],
    "cu_seqlens_q": [None, (0, 4, 10), (0, 10), ()],
    "cu_seqlens_k": [None, (0, 4, 10), (0, 10), ()],
}
_DEFAULTS = {name: values[0] for name, values in _CHOICES.items()}


def _outcome(arguments: Arguments) -> str:
    try:
        checks.check_forward(**arguments)
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@given(
    changes=st.dictionaries(st.sampled_from(sorted(_CHOICES)), st.integers(0, 7), max_size=4),
    packed=st.booleans(),
    vector_dtype=st.sampled_from([torch.int32, torch.int32, torch.int64]),
    dtypes=st.lists(
        st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]), min_size=3, max_size=3
    ),
)
def test_early_exit_agrees_with_the_whole_check(
    changes: dict[str, int], packed: bool, vector_dtype: torch.dtype, dtypes: list[torch.dtype]
) -> None:
    chosen = dict(_DEFAULTS)
    if packed:
        chosen |= {"q": (10, 4, 16), "k": (14, 2, 16), "v": (14, 2, 8), "cu_seqlens_q": (0, 4, 10)}
        chosen |= {"cu_seqlens_k": (0, 4, 10)}
    for name, index in changes.items():
        chosen[name] = _CHOICES[name][index % len(_CHOICES[name])]
    arguments = dict(chosen)
    for name, dtype in zip("qkv", dtypes, strict=True):
        arguments[name] = torch.zeros(chosen[name], dtype=dtype)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if chosen[name] is not None:
            arguments[name] = torch.tensor(chosen[name], dtype=vector_dtype)
    usual = _outcome(arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "_are_plain_operands", lambda *arguments: False)
        assert _outcome(arguments) == usual


# ---------------------------------------------------------------------------------------------------------------------
# FLASH_EXT_CHECK=1.


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cu_seqlens_q": _ints(0, 6, 4)}, ("cu_seqlens_q", "[0, 6, 4]", "ascending", "10")),
        ({"cu_seqlens_k": _ints(0, 9, 15)}, ("cu_seqlens_k", "[0, 9, 15]", "14")),
        ({"cu_seqlens_k": _ints(-1, 9, 14)}, ("cu_seqlens_k", "[-1, 9, 14]", "ascending")),
        ({"seqused_k": _ints(10, 5)}, ("seqused_k", "[10, 5]", "[9, 5]")),
        ({"seqused_q": _ints(-1, 5)}, ("seqused_q", "[-1, 5]", "[4, 6]")),
    ],
)
def test_device_values_are_validated_on_demand(
    changes: Arguments, says: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {**varlen_arguments(), **changes}
    monkeypatch.setattr(checks, "VALIDATE", False)
    checks.check_forward(**arguments)
    monkeypatch.setattr(checks, "VALIDATE", True)
    assert_refused(Bad("", {}, ValueError, says), lambda: checks.check_forward(**arguments))
    checks.check_forward(**varlen_arguments())
    checks.check_forward(**dense_arguments(), seqused_k=_ints(0, 7))
    with pytest.raises(ValueError, match="seqused_k is .*0 to the lengths"):
        checks.check_forward(**dense_arguments(), seqused_k=_ints(0, 8))


_UNSORTED = {"cu_seqlens_q": _ints(0, 6, 4)}


def _in_fake_mode(call: Callable[[Arguments], Any], arguments: Arguments, real: tuple[str, ...] = ()) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return call({name: x if name in real else mode.from_tensor(x) for name, x in arguments.items()})


def _under_a_mode(call: Callable[[Arguments], Any], arguments: Arguments) -> Any:
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        return call(arguments)


def _traced(call: Callable[[Arguments], Any], arguments: Arguments) -> Any:
    return make_fx(call, tracing_mode="real")(arguments)(arguments)


def _compiled(call: Callable[[Arguments], Any], arguments: Arguments) -> Any:
    torch._dynamo.reset()
    return torch.compile(call, backend="aot_eager", fullgraph=True)(arguments)


def _vmapped(call: Callable[[Arguments], Any], arguments: Arguments) -> Any:
    def of_one(cu_seqlens_q: torch.Tensor) -> Any:
        return call({**arguments, "cu_seqlens_q": cu_seqlens_q})

    return torch.func.vmap(of_one)(arguments["cu_seqlens_q"][None])


_WAYS: dict[str, Callable[[Callable[[Arguments], Any], Arguments], Any]] = {
    "subclass": lambda call, arguments: call({name: _as_marked(value) for name, value in arguments.items()}),
    "subclass cu_seqlens": lambda call, arguments: call({**arguments, "cu_seqlens_q": _as_marked(
        arguments["cu_seqlens_q"])}),
    "wrapper subclass": lambda call, arguments: call({name: TwoTensor(x, x.clone()) for name, x in arguments.items()}),
    "functionalize": lambda call, arguments: torch.func.functionalize(call)(arguments),
    "mode": _under_a_mode,
    "make_fx": _traced,
    "compile": _compiled,
}  # fmt: skip


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("way", _WAYS)
def test_device_values_are_validated_where_the_call_runs(
    way: str, public: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "VALIDATE", True)

    def call(arguments: Arguments) -> Any:
        return call_public(arguments, causal=True) if public else torch.ops.flash_ext.fwd(**arguments, causal=True)[0]

    assert _WAYS[way](call, varlen_arguments()).shape == (10, HEADS_Q, HEAD_DIM_V)
    with pytest.raises(ValueError, match=r"flash_ext: cu_seqlens_q is \[0, 6, 4\]; expected ascending values"):
        _WAYS[way](call, {**varlen_arguments(), **_UNSORTED})


@pytest.mark.parametrize("public", [False, True])
def test_stand_ins_have_no_values_to_validate(public: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "VALIDATE", True)

    def call(arguments: Arguments) -> Any:
        return call_public(arguments) if public else torch.ops.flash_ext.fwd(**arguments)[0]

    arguments = {**varlen_arguments(), **_UNSORTED}
    real = ("cu_seqlens_q", "cu_seqlens_k")
    for out in (
        _in_fake_mode(call, arguments),
        _in_fake_mode(call, arguments, real),  # nothing is computed with them
        call({name: value.to("meta") for name, value in arguments.items()}),
    ):
        assert out.shape == (10, HEADS_Q, HEAD_DIM_V)
    with pytest.raises(NotImplementedError, match="flash_ext: vmap over flash_ext operators"):
        _vmapped(call, varlen_arguments())


@pytest.mark.gpu
def test_validation_is_skipped_while_capturing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning; the captured call must not synchronise."""
    arguments = {name: value.to(path.device) for name, value in varlen_arguments().items()}
    monkeypatch.setattr(checks, "VALIDATE", True)
    call_public(arguments)  # the libraries are loaded outside of the capture
    checks._warn_while_capturing.cache_clear()
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(RuntimeWarning, match="FLASH_EXT_CHECK=1 is skipped") as caught, torch.cuda.graph(graph):
        call_public(arguments)
        call_public(arguments)
    assert len([one for one in caught if "FLASH_EXT_CHECK" in str(one.message)]) == 1
