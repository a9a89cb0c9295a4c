"""The short way of a forward call (csrc/binding/plain.cpp): it serves what is certainly fit, as the long way would, and
leaves everything else to the checks, whose words for what is wrong test_bad_input.py has.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.fake import FakeRuntime, in_process

emulated = in_process(FLASH_EXT_EMULATE="sm80")


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def cu_seqlens(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def know_every_kind(*operands: Any) -> None:
    """Let every kind of call with these head dims and dtypes be known, whatever its options."""
    from flash_ext import _C

    dims = {operand.shape[-1] for operand in operands if isinstance(operand, torch.Tensor) and operand.ndim}
    for dtype, head_dim, head_dim_v in itertools.product(("fp16", "bf16"), dims, dims):
        for features in range(2 * max(_C.FEATURES.values())):
            _C.set_plain_path("sm80", dtype, -1, head_dim, head_dim_v, features)  # type: ignore[arg-type]


@contextmanager
def no_long_way() -> Iterator[None]:
    """Fail where a call does not take the short way."""
    from flash_ext import dispatch

    with mock.patch.object(dispatch, "forward", side_effect=AssertionError("the long way was taken")):
        yield


# ---------------------------------------------------------------------------------------------------------------------
# What is served.


def good_calls() -> dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]]:
    q, k, v = numbers(2, 5, 4, 64), numbers(2, 7, 2, 64), numbers(2, 7, 2, 48)
    packed = numbers(10, 4, 64), numbers(14, 2, 64), numbers(14, 2, 64)
    lengths = {"cu_seqlens_q": cu_seqlens(0, 4, 10), "cu_seqlens_k": cu_seqlens(0, 9, 14)}
    return {
        "dense": ((q, k, v), {}),
        "causal": ((q, k, v), {"causal": True}),
        "fp16": ((q.half(), k.half(), v.half()), {"causal": False}),
        "parameters": (tuple(torch.nn.Parameter(tensor) for tensor in (q, k, v)), {}),
        "window": ((q, k, v), {"window_left": 3, "window_right": 0}),
        "window beyond 32 bits": ((q, k, v), {"window_left": 2**31, "window_right": 2**100}),
        "scale": ((q, k, v), {"softmax_scale": 0.3}),
        "negative scale": ((q, k, v), {"softmax_scale": -0.3}),
        "deterministic": ((q, k, v), {"deterministic": True}),
        "defaults": ((q, k, v), {
            "cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": None, "max_seqlen_k": 7, "seqused_q": None,
            "seqused_k": None, "block_table": None, "softmax_scale": None, "causal": False, "window_left": -1,
            "window_right": -1, "softcap": 0.0, "alibi_slopes": None, "sinks": None, "dropout_p": 0.0,
            "rng_state": None, "q_descale": None, "k_descale": None, "v_descale": None, "num_splits": 0,
            "sm_margin": 0, "deterministic": False,
        }),
        "packed": (packed, lengths),
        "packed with hints": (packed, {**lengths, "max_seqlen_q": 6, "max_seqlen_k": 9, "causal": True}),
        "transposed": (tuple(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v)), {}),
        "expanded": ((q, k[:1].expand(2, 7, 2, 64), v), {}),
        "misaligned": ((q, k, numbers(2, 7, 2, 65)[..., 1:]), {}),
    }  # fmt: skip


@emulated
@pytest.mark.parametrize("name", list(good_calls()))
def test_the_short_way_does_what_the_long_way_does(name: str) -> None:
    from flash_ext import dispatch, ops

    fake = FakeRuntime("sm80")
    (q, k, v), options = good_calls()[name]
    q, k, v = q.detach(), k.detach(), v.detach()
    long = dispatch.forward(q, k, v, **ops._resolve(options))
    call = fake.last_call()
    (q, k, v), _ = good_calls()[name]  # parameters again, and other numbers
    with torch.no_grad():
        short = dispatch.plain_forward(q, k, v, options, False)
    assert short is not None
    for mine, other in zip(short, long, strict=True):
        assert type(mine) is torch.Tensor and not mine.requires_grad
        assert (mine.shape, mine.stride(), mine.dtype) == (other.shape, other.stride(), other.dtype)
    assert torch.equal(short[0], q.detach()[..., : v.shape[-1]])  # what the make-believe kernel writes
    assert torch.equal(short[1], long[1])
    again = fake.last_call()
    assert again["kernel"] == call["kernel"]
    for key, value in again["params"].items():  # the tensors lie elsewhere
        if isinstance(value, dict):
            assert {**value, "data": 0} == {**call["params"][key], "data": 0}, key
        elif key not in ("lse", "cu_seqlens_q", "cu_seqlens_k"):
            assert value == call["params"][key], key
    if "cu_seqlens_q" in options:
        lengths = options["cu_seqlens_q"], options["cu_seqlens_k"]
        assert lengths[0] is None or [again["params"][f"cu_seqlens_{side}"] for side in "qk"] == [
            tensor.data_ptr() for tensor in lengths
        ]


@emulated
def test_a_kind_is_known_once_the_long_way_has_served_it() -> None:
    import flash_ext
    from flash_ext import dispatch

    q = numbers(1, 3, 2, 96)
    assert dispatch.plain_forward(q, q, q, {}, False) is None
    dispatch.forward(q, q, q)
    short_ways: list[Callable[[], Any]] = [
        lambda: dispatch.plain_forward(q, q, q, {}, False),
        lambda: flash_ext.flash_attn_func(q, q, q, return_lse=True),
        lambda: torch.ops.flash_ext.fwd(q, q, q),
    ]
    for short in short_ways:
        with no_long_way():
            assert torch.equal(short()[0], q)
    for others, options in (
        (q.half(), {}),
        (q[..., :88], {}),
        (q, {"causal": True}),
    ):
        assert dispatch.plain_forward(others, others, others, options, False) is None, (others.shape, options)


@emulated
def test_deterministic_mode_is_an_option_like_the_argument() -> None:
    import flash_ext

    fake = FakeRuntime("sm80")
    q = numbers(1, 3, 2, 64)
    know_every_kind(q)
    with no_long_way():
        for mode in (False, True):
            torch.use_deterministic_algorithms(mode)
            try:
                flash_ext.flash_attn_func(q, q, q)
            finally:
                torch.use_deterministic_algorithms(False)
            assert fake.last_call()["params"]["deterministic"] == int(mode)


@emulated
def test_a_gradient_is_recorded_all_the_same() -> None:
    import flash_ext

    q = numbers(1, 3, 2, 64)
    know_every_kind(q)
    leaf = q.clone().requires_grad_()
    for out in (flash_ext.flash_attn_func(q, leaf, q), torch.ops.flash_ext.fwd(q, q, leaf)[0]):
        assert out.requires_grad
    with no_long_way(), torch.inference_mode():
        assert not flash_ext.flash_attn_func(leaf, leaf, leaf).requires_grad


# ---------------------------------------------------------------------------------------------------------------------
# What is left to the checks.


def bad_calls() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        import test_bad_input

        return test_bad_input.ALL


@emulated
def test_nothing_that_the_checks_refuse_is_served() -> None:
    from flash_ext import dispatch

    fake = FakeRuntime("sm80")
    before = fake.last_call()
    for bad in bad_calls():
        arguments = bad.arguments()
        q, k, v = (arguments.pop(name) for name in "qkv")
        know_every_kind(*(tensor for tensor in (q, k, v) if not getattr(tensor, "is_nested", False)))
        for deterministic in (False, True):
            assert dispatch.plain_forward(q, k, v, arguments, deterministic) is None, bad.name
    assert fake.last_call() == before


class Wrapped(torch.Tensor):
    """A subclass without behaviour of its own."""


@emulated
def test_what_is_rare_is_left_to_the_long_way() -> None:
    from torch._subclasses import FakeTensorMode

    from flash_ext import dispatch

    q = numbers(2, 3, 2, 64)
    know_every_kind(q)
    plain = dispatch.plain_forward
    assert plain(q, q, q, {}, False) is not None
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(q)
    functional = torch._to_functional_tensor(q)
    others = {
        "a subclass": q.as_subclass(Wrapped),
        "a fake": fake,
        "meta": q.to("meta"),
        "functional": functional,
        "another rank": q[0],
        "no rows": q[:, :0],
        "no batch": q[:0],
    }
    for name, other in others.items():
        assert plain(other, other, other, {}, False) is None, name
        assert plain(q, other, other, {}, False) is None, name
    for options in (
        {"softcap": 1.0},
        {"dropout_p": 0.5, "rng_state": torch.tensor([1, 2])},
        {"num_splits": 1},
        {"sm_margin": 1},
        {"sinks": torch.zeros(2)},
        {"alibi_slopes": torch.zeros(2)},
        {"seqused_k": cu_seqlens(1, 2)},
        {"window_left": True},
        {"softmax_scale": 1},
        {"something new": 0},
    ):
        assert plain(q, q, q, options, False) is None, options
    rows = q[0]
    none = {"cu_seqlens_q": cu_seqlens(0), "cu_seqlens_k": cu_seqlens(0)}
    assert plain(rows, rows, rows, none, False) is None
    one = {"cu_seqlens_q": cu_seqlens(0, 3), "cu_seqlens_k": cu_seqlens(0, 3)}
    assert plain(rows, rows, rows, one, False) is not None
    assert plain(rows, rows, rows, {**one, "cu_seqlens_k": one["cu_seqlens_k"].as_subclass(Wrapped)}, False) is None


@in_process(FLASH_EXT_EMULATE="sm80", FLASH_EXT_NO_DLPACK="1")
def test_without_dlpack_there_is_no_short_way() -> None:
    from flash_ext import dispatch

    q = numbers(2, 3, 2, 64)
    know_every_kind(q)
    assert dispatch.plain_forward(q, q, q, {}, False) is None


@in_process(FLASH_EXT_EMULATE="sm80", FLASH_EXT_CHECK="1")
def test_lengths_are_validated_all_the_same() -> None:
    import flash_ext

    q = numbers(5, 2, 64)
    know_every_kind(q)
    for values in ((0, 9), (3, 1)):
        with pytest.raises(ValueError, match="flash_ext: cu_seqlens_"):
            flash_ext.flash_attn_varlen_func(q, q, q, cu_seqlens(*values), cu_seqlens(0, 5), None, None)


@in_process()
def test_cpu_tensors_have_no_short_way_without_emulation() -> None:
    import flash_ext
    from flash_ext import dispatch

    q = numbers(1, 3, 2, 64)
    for _ in range(2):
        flash_ext.flash_attn_func(q, q, q)
        assert dispatch.plain_forward(q, q, q, {}, False) is None


# ---------------------------------------------------------------------------------------------------------------------
# Allocation.


@emulated
def test_outputs_come_from_the_allocator() -> None:
    from flash_ext import _C, allocate

    q, v = numbers(2, 3, 2, 64), numbers(2, 3, 2, 48)
    know_every_kind(q, v)
    asked: list[tuple[int, ...]] = []

    def allocator(like: torch.Tensor, *sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert like is q
        asked.append(sizes)
        out, lse = allocate.outputs(like, *sizes)
        return out.fill_(math.nan), lse.fill_(math.nan)

    def failing(*arguments: Any) -> Any:
        raise MemoryError("no more")

    wrong: list[Callable[..., Any]] = [lambda *_: None, lambda *_: (q,), lambda *_: [q, q]]
    try:
        _C.set_output_allocator(allocator)
        results = _C.plain_forward(q, q, v, {}, False)
        assert results is not None and not results[0].isnan().any() and not results[1].isnan().any()
        assert asked == [(48, 2, 2, 3)]
        _C.set_output_allocator(failing)
        with pytest.raises(MemoryError, match="no more"):
            _C.plain_forward(q, q, v, {}, False)
        for allocator_of_something in wrong:
            _C.set_output_allocator(allocator_of_something)
            with pytest.raises(RuntimeError, match="flash_ext: the allocator of outputs did not return"):
                _C.plain_forward(q, q, v, {}, False)
    finally:
        _C.set_output_allocator(allocate.outputs)


@emulated
def test_the_path_of_a_kind_is_a_path() -> None:
    from flash_ext import _C

    with pytest.raises(ValueError, match="flash_ext: path='sm75' has no kernels"):
        _C.set_plain_path("sm75", "fp16", -1, 64, 64, 0)
    with pytest.raises(ValueError, match="flash_ext: dtype='fp17'"):
        _C.set_plain_path("sm80", "fp17", -1, 64, 64, 0)  # type: ignore[arg-type]
