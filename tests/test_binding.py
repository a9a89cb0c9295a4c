"""flash_ext._C over a make-believe library: what reaches a kernel, what comes back, and what is refused."""

from __future__ import annotations

import itertools
import math
import threading
import time
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from helpers.fake import FakeRuntime, compiler, in_process, library_dir
from helpers.paths import Path as PathUnderTest
from hypothesis import given, settings

# CPU tensors are the device tensors of a path.
emulated = in_process(FLASH_EXT_EMULATE="sm80")
emulated_attributes = in_process(FLASH_EXT_EMULATE="sm80", FLASH_EXT_NO_DLPACK="1")

DTYPE_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
NULL = 0


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Distinct values that every 16-bit type holds exactly."""
    return (torch.arange(math.prod(shape)) % 251).to(dtype).reshape(shape)


def call_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, **options: Any
) -> dict[str, Any]:
    """Call ``_C.forward`` with the operator's defaults; the kernel's record."""
    from flash_ext import _C

    _C.forward("sm80", q, k, v, out, lse, *positional(options))
    return FakeRuntime("sm80").last_call()


def call_backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, *tensors: torch.Tensor | None, **options: Any
) -> dict[str, Any]:
    """Call ``_C.backward`` with the operator's defaults; the kernel's record."""
    from flash_ext import _C

    arguments: tuple[Any, ...] = (dout, dlse, *tensors, *positional(options))
    _C.backward("sm80", *arguments)
    return FakeRuntime("sm80").last_call()


def positional(options: dict[str, Any]) -> tuple[Any, ...]:
    defaults: dict[str, Any] = {
        "cu_seqlens_q": None,
        "cu_seqlens_k": None,
        "seqused_q": None,
        "seqused_k": None,
        "alibi_slopes": None,
        "sinks": None,
        "rng_state": None,
        "softmax_scale": None,
        "causal": False,
        "window_left": -1,
        "window_right": -1,
        "softcap": 0.0,
        "dropout_p": 0.0,
        "num_splits": 0,
        "sm_margin": 0,
        "deterministic": False,
    }
    assert options.keys() <= defaults.keys()
    return tuple({**defaults, **options}.values())


def results(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a call, filled with NaN."""
    *rows, heads, _ = q.shape
    out = torch.full((*rows, heads, v.shape[-1]), math.nan, dtype=q.dtype)
    return out, torch.full((*rows[:-1], heads, rows[-1]), math.nan)


def view_of(tensor: torch.Tensor) -> dict[str, int]:
    """What a contiguous-enough tensor looks like in the parameters."""
    stride = tensor.stride()
    batch = stride[0] if tensor.ndim == 4 else 0
    return {"data": tensor.data_ptr(), "stride_batch": batch, "stride_row": stride[-3], "stride_head": stride[-2]}


# ---------------------------------------------------------------------------------------------------------------------
# Parameters.


@emulated
def test_dense_parameters() -> None:
    q, k, v = numbers(2, 5, 6, 64), numbers(2, 7, 3, 64), numbers(2, 7, 3, 48)
    out, lse = results(q, v)
    call = call_forward(q, k, v, out, lse)
    params = call["params"]
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        assert params[name] == view_of(tensor), name
    assert params["lse"] == lse.data_ptr()
    sizes = {name: params[name] for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k")}
    assert sizes == {"batch": 2, "seqlen_q": 5, "seqlen_k": 7, "heads_q": 6, "heads_k": 3}
    assert (params["head_dim"], params["head_dim_v"]) == (64, 48)
    assert params["dtype"] == DTYPE_CODES[torch.bfloat16]
    assert params["softmax_scale"] == pytest.approx(1 / 8, rel=1e-7)
    assert (params["causal"], params["window_left"], params["window_right"], params["softcap"]) == (0, -1, -1, 0)
    pointers = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "alibi_slopes", "sinks", "rng_state")
    assert all(params[name] == NULL for name in pointers)
    assert params["dropout_threshold"] == params["deterministic"] == params["num_splits"] == params["sm_margin"] == 0
    assert call["kernel"] == "sm80_forward_bf16_d64x64_m128n128_plain"
    assert (call["device"], call["sm_count"], call["workspace_size"], call["stream"]) == (0, 132, 0, NULL)
    assert torch.equal(out, q[..., :48])
    assert torch.equal(lse, torch.full_like(lse, 1 / 8))


@emulated
def test_packed_parameters() -> None:
    q, k, v = numbers(11, 4, 64), numbers(13, 2, 64), numbers(13, 2, 64)
    cu_seqlens_q = torch.tensor([0, 4, 11], dtype=torch.int32)
    cu_seqlens_k = torch.tensor([0, 6, 13], dtype=torch.int32)
    out, lse = results(q, v)
    params = call_forward(q, k, v, out, lse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)["params"]
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        assert params[name] == view_of(tensor), name
    assert params["cu_seqlens_q"] == cu_seqlens_q.data_ptr()
    assert params["cu_seqlens_k"] == cu_seqlens_k.data_ptr()
    assert (params["batch"], params["seqlen_q"], params["seqlen_k"]) == (2, 11, 13)
    assert torch.equal(out, q)


@emulated
def test_every_option_reaches_the_kernel() -> None:
    q = numbers(2, 5, 4, 64)
    out, lse = results(q, q)
    seqused_q = torch.tensor([5, 3], dtype=torch.int32)
    seqused_k = torch.tensor([4, 5], dtype=torch.int32)
    slopes, sinks = torch.rand(2, 4), torch.rand(4, dtype=torch.float16)
    rng_state = torch.tensor([7, 9])
    call = call_forward(
        q,
        q,
        q,
        out,
        lse,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        alibi_slopes=slopes,
        sinks=sinks,
        rng_state=rng_state,
        softmax_scale=0.3,
        causal=True,
        window_left=3,
        window_right=4,
        softcap=15.0,
        dropout_p=0.25,
        num_splits=1,
        sm_margin=2,
        deterministic=True,
    )
    params = call["params"]
    assert call["kernel"] == "sm80_forward_bf16_d64x64_m128n128_rich"
    assert params["seqused_q"] == seqused_q.data_ptr() and params["seqused_k"] == seqused_k.data_ptr()
    assert params["alibi_slopes"] == slopes.data_ptr() and params["alibi_stride_batch"] == 4
    assert params["sinks"] == sinks.data_ptr() and params["sinks_dtype"] == DTYPE_CODES[torch.float16]
    assert params["rng_state"] == rng_state.data_ptr() and params["dropout_threshold"] == 16384
    assert params["softmax_scale"] == pytest.approx(0.3, rel=1e-7) and params["softcap"] == 15
    assert (params["causal"], params["window_left"], params["window_right"]) == (1, 3, 4)
    assert (params["num_splits"], params["sm_margin"], params["deterministic"]) == (1, 2, 1)


@emulated
@pytest.mark.parametrize(
    ("dropout_p", "threshold"), [(0.5, 32768), (0.1, 6554), (1e-9, 0), (1 - 1e-9, 65535), (1 / 131072, 1)]
)
def test_dropout_threshold(dropout_p: float, threshold: int) -> None:
    q = numbers(1, 2, 1, 64)
    rng_state = torch.tensor([1, 2])
    params = call_forward(q, q, q, *results(q, q), dropout_p=dropout_p, rng_state=rng_state)["params"]
    assert params["dropout_threshold"] == threshold
    assert params["rng_state"] == (rng_state.data_ptr() if threshold else NULL)


@emulated
def test_one_row_of_slopes_serves_every_batch() -> None:
    q = numbers(3, 2, 4, 64)
    for slopes in (torch.rand(4), torch.rand(4)[None].expand(3, 4)):
        params = call_forward(q, q, q, *results(q, q), alibi_slopes=slopes)["params"]
        assert params["alibi_slopes"] == slopes.data_ptr() and params["alibi_stride_batch"] == 0


@emulated
def test_backward_parameters() -> None:
    q, k, v = numbers(2, 5, 4, 128), numbers(2, 7, 2, 128), numbers(2, 7, 2, 128)
    out, lse = results(q, v)
    dout = numbers(2, 5, 4, 128)
    dlse = torch.rand(2, 5, 4).transpose(1, 2)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    sinks = torch.rand(4)
    dsinks = torch.zeros(4)
    call = call_backward(dout, dlse, q, k, v, out, lse, dq, dk, dv, dsinks, sinks=sinks, causal=True)
    params = call["params"]
    assert call["kernel"] == "sm80_backward_bf16_d128x128_m64n128_rich"
    for name, tensor in (("dout", dout), ("dq", dq), ("dk", dk), ("dv", dv)):
        assert params[name] == view_of(tensor), name
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        assert params["attention"][name] == view_of(tensor), name
    assert params["attention"]["lse"] == lse.data_ptr()
    assert params["dlse"] == dlse.data_ptr()
    strides = [params[f"dlse_stride_{name}"] for name in ("batch", "head", "row")]
    assert strides == list(dlse.stride())
    assert params["dsinks"] == dsinks.data_ptr()
    assert torch.equal(dq, q) and torch.equal(dk, k) and torch.equal(dv, v) and torch.equal(dsinks, sinks)


@emulated
def test_backward_without_dlse_and_sinks() -> None:
    q = numbers(9, 2, 128)
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)
    out, lse = results(q, q)
    gradients = [torch.zeros_like(q) for _ in range(3)]
    options = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    dlse = torch.rand(9, 2).t()
    params = call_backward(q, dlse, q, q, q, out, lse, *gradients, None, **options)["params"]
    strides = [params[f"dlse_stride_{name}"] for name in ("batch", "head", "row")]
    assert strides == [0, 1, 2]
    params = call_backward(q, None, q, q, q, out, lse, *gradients, None, **options)["params"]
    assert params["dlse"] == params["dsinks"] == NULL
    assert all(torch.equal(gradient, q) for gradient in gradients)


# ---------------------------------------------------------------------------------------------------------------------
# Strides: views are read and written where they lie, or through one packed copy, with the same result.


def expected_in_place(tensor: torch.Tensor) -> bool:
    """The contract: last dimension contiguous, address and other strides multiples of 16 bytes, extent 1 exempt."""
    size = tensor.element_size()
    return (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(
            extent == 1 or stride * size % 16 == 0
            for extent, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        )
    )


def layouts(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Tensors of one shape and one content whose memory differs."""
    content = numbers(*shape)
    batch, rows, heads, head_dim = shape
    permuted = {
        "".join(map(str, order)): content.permute(order).contiguous().permute([order.index(i) for i in range(4)])
        for order in itertools.permutations(range(4))
    }
    wide = torch.zeros(2, batch, rows, heads, head_dim + 8, dtype=content.dtype)
    padded = torch.zeros(batch, rows, heads, head_dim + 3, dtype=content.dtype)
    shifted = torch.zeros(content.numel() + 1, dtype=content.dtype)
    skipping = torch.zeros(batch, 2 * rows, heads, head_dim, dtype=content.dtype)
    tensors = {
        **{f"permuted {order}": tensor for order, tensor in permuted.items()},
        "sliced head_dim": wide[0, ..., 8:],
        "sliced head_dim, odd address": wide[1, ..., 3 : head_dim + 3],
        "odd strides": padded[..., :head_dim],
        "shifted by one element": shifted[1:].view(shape),
        "every other row": skipping[:, ::2],
    }
    for tensor in tensors.values():
        tensor.copy_(content)
    return tensors


def check_layouts() -> None:
    shape = (2, 3, 4, 64)
    content = numbers(*shape)
    copied = set()
    for name, q in layouts(shape).items():
        out, lse = results(q, q)
        params = call_forward(q, content, content, out, lse)["params"]
        in_place = params["q"]["data"] == q.data_ptr()
        assert in_place == expected_in_place(q), (name, q.stride(), q.data_ptr() % 16)
        assert torch.equal(out, content), name
        copied |= set() if in_place else {name}
    assert "sliced head_dim, odd address" in copied and "odd strides" in copied and "permuted 0132" in copied
    assert "permuted 0213" not in copied and "sliced head_dim" not in copied and "every other row" not in copied


test_inputs_of_any_layout = emulated(check_layouts)
test_inputs_of_any_layout_without_dlpack = emulated_attributes(check_layouts)


@emulated
def test_expanded_inputs_are_read_in_place() -> None:
    k = numbers(2, 3, 1, 64).expand(2, 3, 4, 64)
    q = numbers(1, 5, 4, 64).expand(2, 5, 4, 64)
    out, lse = results(q, k)
    params = call_forward(q, k, k, out, lse)["params"]
    assert params["q"] == view_of(q) and params["q"]["stride_batch"] == 0
    assert params["k"] == view_of(k) and params["k"]["stride_head"] == 0
    assert torch.equal(out, q)


@emulated
def test_stride_of_an_extent_of_one_does_not_matter() -> None:
    memory = numbers(5, 64)
    q = memory.as_strided((1, 5, 1, 64), (3, 64, 7, 1))
    params = call_forward(q, q, q, *results(q, q))["params"]
    assert params["q"] == {"data": memory.data_ptr(), "stride_batch": 320, "stride_row": 64, "stride_head": 64}
    row = memory.as_strided((1, 1, 5, 64), (1, 5, 64, 1))
    params = call_forward(row, row, row, *results(row, row))["params"]
    assert params["q"] == {"data": memory.data_ptr(), "stride_batch": 320, "stride_row": 320, "stride_head": 64}


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    """A view with drawn permutation, slices and offset into larger memory."""
    shape = tuple(draw(st.sampled_from(extents)) for extents in ((1, 2), (1, 3), (1, 2, 4), (8, 64)))
    order = draw(st.permutations(range(4)))
    margins = [draw(st.integers(0, 9)) for _ in range(4)]
    steps = [draw(st.integers(1, 2)) for _ in range(3)] + [1]
    begins = [draw(st.integers(0, margin)) for margin in margins]
    offset = draw(st.sampled_from([0, 1, 8]))
    big = [extent * step + margin for extent, step, margin in zip(shape, steps, margins, strict=True)]
    memory = torch.zeros(math.prod(big) + offset, dtype=torch.bfloat16)
    tensor = memory[offset:].view([big[i] for i in order]).permute([order.index(i) for i in range(4)])
    for dim, (begin, extent, step) in enumerate(zip(begins, shape, steps, strict=True)):
        tensor = tensor.narrow(dim, begin, extent * step)[(slice(None),) * dim + (slice(None, None, step),)]
    assert tensor.shape == shape
    return tensor


@emulated
@settings(deadline=None, max_examples=200)
@given(strided(), strided())
def test_any_view_gives_the_numbers_of_a_contiguous_copy(q: torch.Tensor, target: torch.Tensor) -> None:
    from flash_ext import _C

    q.copy_(numbers(*q.shape))
    params = call_forward(q, q, q, *results(q, q))["params"]
    in_place = params["q"]["data"] == q.data_ptr()
    assert in_place == expected_in_place(q) == (_C.packing_reason(q) == ""), (q.shape, q.stride())

    source = numbers(*target.shape)
    memory = target.as_strided((target.untyped_storage().nbytes() // 2,), (1,), 0)
    memory.fill_(-1)
    lse = torch.empty(target.shape[0], target.shape[2], target.shape[1])
    params = call_forward(source, source, source, target, lse)["params"]
    assert (params["out"]["data"] == target.data_ptr()) == expected_in_place(target), (target.shape, target.stride())
    assert torch.equal(target, source)
    assert int((memory != -1).sum()) == target.numel()  # and nothing around it was written


@emulated
def test_gradients_are_written_into_views_of_one_packed_tensor() -> None:
    qkv = numbers(2, 5, 3, 4, 128)
    gradient = torch.zeros_like(qkv)
    out, lse = results(qkv[:, :, 0], qkv[:, :, 0])
    targets = gradient.unbind(2)
    params = call_backward(numbers(2, 5, 4, 128), None, *qkv.unbind(2), out, lse, *targets, None)["params"]
    assert [params[name]["data"] for name in ("dq", "dk", "dv")] == [target.data_ptr() for target in targets]
    assert torch.equal(gradient, qkv)


@emulated
def test_gradients_are_written_through_a_copy_where_they_must() -> None:
    q = numbers(2, 5, 4, 128)
    out, lse = results(q, q)
    memory = torch.zeros(3, 2, 5, 4, 131, dtype=q.dtype)
    call_backward(q, None, q, q, q, out, lse, *memory[..., 1:129], None)
    assert all(torch.equal(target, q) for target in memory[..., 1:129])
    assert int((memory != 0).sum()) == 3 * int((q != 0).sum())


@emulated
def test_vectors_and_lse_of_any_stride() -> None:
    q = numbers(2, 5, 4, 128)
    slopes, sinks = torch.rand(8)[::2], torch.rand(4, 2)[:, 0]
    params = call_forward(q, q, q, *results(q, q), alibi_slopes=slopes, sinks=sinks)["params"]
    assert params["alibi_slopes"] != slopes.data_ptr() and params["sinks"] != sinks.data_ptr()
    dsinks = torch.zeros(4)
    lse = torch.rand(2, 5, 4).transpose(1, 2)
    gradients = [torch.zeros_like(q) for _ in range(3)]
    params = call_backward(q, None, q, q, q, q, lse, *gradients, dsinks, sinks=sinks)["params"]
    assert params["attention"]["lse"] != lse.data_ptr()
    assert torch.equal(dsinks, sinks)


@emulated
def test_results_need_memory_of_their_own() -> None:
    q = numbers(2, 5, 4, 64)
    _, lse = results(q, q)
    with pytest.raises(ValueError, match=r"flash_ext: out of shape \(2, 5, 4, 64\) is an expanded view: dimension 0"):
        call_forward(q, q, q, torch.zeros(5, 4, 64, dtype=q.dtype).expand(2, 5, 4, 64), lse)
    with pytest.raises(ValueError, match="flash_ext: lse is not contiguous"):
        call_forward(q, q, q, torch.zeros_like(q), lse.transpose(1, 2).contiguous().transpose(1, 2))


# ---------------------------------------------------------------------------------------------------------------------
# Reading tensors.


def check_tensor_info(dlpack: bool) -> None:
    from flash_ext import _C

    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.int64, torch.uint8]
    tensors = [torch.zeros(2, 3, dtype=dtype) for dtype in dtypes]
    base = numbers(2, 3, 4, 64)
    tensors += [base.transpose(1, 2), base[:, 1:, ::2, 3:], base[:0], torch.zeros(()), base[0, 0, 0].expand(5, 64)]
    tensors += [torch.nn.Parameter(base), torch.nn.Parameter(base).detach(), base.clone().requires_grad_() * 2]
    for tensor in tensors:
        info = _C.tensor_info(tensor)
        assert info == {
            "data_ptr": tensor.data_ptr(),
            "shape": tuple(tensor.shape),
            "stride": tensor.stride(),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": "cpu",
            "stream": NULL,
            "dlpack": dlpack,
        }, (info, tensor.shape, tensor.stride())
    assert _C.tensor_info(torch.zeros(1, dtype=torch.float64))["dtype"] == "another type"


@emulated
def test_tensors_are_read_through_dlpack() -> None:
    check_tensor_info(hasattr(torch.Tensor, "__dlpack_c_exchange_api__"))


@emulated_attributes
def test_tensors_are_read_through_attributes() -> None:
    check_tensor_info(False)


def check_refused_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from flash_ext import _C

    with pytest.raises(ValueError, match="flash_ext: tensor has 5 dimensions"):
        _C.tensor_info(torch.zeros(1, 1, 1, 1, 1))
    with FakeTensorMode():
        fake = torch.empty(2, 3)
    with pytest.raises(RuntimeError):
        _C.tensor_info(fake)
    for wrong in (None, 3, [1.0], "text"):
        with pytest.raises((AttributeError, TypeError)):
            _C.tensor_info(wrong)  # type: ignore[arg-type]


test_what_is_no_tensor_is_refused = emulated(check_refused_tensors)
test_what_is_no_tensor_is_refused_without_dlpack = emulated_attributes(check_refused_tensors)


@in_process()
def test_cpu_tensors_are_refused_without_emulation() -> None:
    q = numbers(1, 2, 1, 64)
    with pytest.raises(ValueError, match="flash_ext: q is on cpu; path sm80 needs a CUDA tensor"):
        call_forward(q, q, q, *results(q, q))


# ---------------------------------------------------------------------------------------------------------------------
# What keeps a kernel inside the tensors.


def wrong_arguments() -> dict[str, tuple[dict[str, Any], str]]:
    """Changes to a valid call and what the error says."""
    bf16 = torch.bfloat16
    int32 = torch.int32
    return {
        "rank": ({"q": torch.zeros(5, 4, 64, dtype=bf16)}, "q of shape"),
        "k rank": ({"k": torch.zeros(7, 2, 64, dtype=bf16)}, "k of shape"),
        "k batch": ({"k": torch.zeros(3, 7, 2, 64, dtype=bf16)}, "k of shape"),
        "k head_dim": ({"k": torch.zeros(2, 7, 2, 72, dtype=bf16)}, "k of shape"),
        "v rows": ({"v": torch.zeros(2, 8, 2, 64, dtype=bf16)}, "v of shape"),
        "v heads": ({"v": torch.zeros(2, 7, 4, 64, dtype=bf16)}, "v of shape"),
        "heads": ({"q": torch.zeros(2, 5, 3, 64, dtype=bf16)}, "q has 3 heads, not a multiple of k's 2"),
        "k dtype": ({"k": torch.zeros(2, 7, 2, 64, dtype=torch.float16)}, "k has float16; bfloat16 is needed"),
        "q dtype": ({name: torch.zeros(2, 5, 2, 64, dtype=int32) for name in "qkv"}, "q has int32"),
        "out rows": ({"out": torch.zeros(2, 4, 4, 64, dtype=bf16)}, "out of shape"),
        "out dtype": ({"out": torch.zeros(2, 5, 4, 64)}, "out has float32"),
        "lse shape": ({"lse": torch.zeros(2, 5, 4)}, "lse of shape"),
        "lse dtype": ({"lse": torch.zeros(2, 4, 5, dtype=bf16)}, "lse has bfloat16"),
        "seqused length": ({"seqused_k": torch.zeros(3, dtype=int32)}, "seqused_k of shape"),
        "seqused dtype": ({"seqused_q": torch.zeros(2, dtype=torch.int64)}, "seqused_q has int64"),
        "slopes shape": ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes of shape"),
        "slopes batch": ({"alibi_slopes": torch.zeros(3, 4)}, "alibi_slopes of shape"),
        "sinks shape": ({"sinks": torch.zeros(2)}, "sinks of shape"),
        "no rng_state": ({"dropout_p": 0.5}, "rng_state"),
        "rng_state shape": ({"dropout_p": 0.5, "rng_state": torch.zeros(1, dtype=torch.int64)}, "rng_state of shape"),
        "cu_seqlens dtype": ({"cu_seqlens_q": torch.zeros(3)}, "cu_seqlens_q has float32"),
        "cu_seqlens empty": ({"cu_seqlens_q": torch.zeros(0, dtype=int32)}, "cu_seqlens_q is empty"),
        "window": ({"window_left": 2**31}, "window_left=2147483648 does not fit 32 bits"),
    }


@emulated
@pytest.mark.parametrize("name", list(wrong_arguments()))
def test_arguments_that_do_not_agree_are_refused(name: str) -> None:
    changes, message = wrong_arguments()[name]
    q, k, v = numbers(2, 5, 4, 64), numbers(2, 7, 2, 64), numbers(2, 7, 2, 64)
    out, lse = results(q, v)
    call: dict[str, Any] = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    call_forward(**call)
    if "cu_seqlens_q" in changes:
        call.update(q=q[0], out=out[0], lse=lse[0])
    with pytest.raises(ValueError, match="flash_ext: " + message.replace("(", r"\(")):
        call_forward(**{**call, **changes})


@emulated
def test_gradients_that_do_not_fit_are_refused() -> None:
    q = numbers(2, 5, 4, 128)
    out, lse = results(q, q)
    good = torch.zeros_like(q)
    for position, name in enumerate(("dq", "dk", "dv")):
        gradients = [good] * 3
        gradients[position] = good[:, 1:]
        with pytest.raises(ValueError, match=f"flash_ext: {name} of shape"):
            call_backward(q, None, q, q, q, out, lse, *gradients, None)
    for dsinks, message in ((None, "dsinks is None"), (torch.zeros(4, dtype=torch.float16), "dsinks has another type")):
        with pytest.raises(ValueError, match=message):
            call_backward(q, None, q, q, q, out, lse, good, good, good, dsinks, sinks=torch.zeros(4))


@emulated
def test_head_dim_that_no_copy_makes_launchable_is_refused() -> None:
    q = numbers(1, 2, 3, 60)
    with pytest.raises(ValueError, match="flash_ext: q of shape .* head_dim must be a multiple of 8"):
        call_forward(q, q, q, *results(q, q))


# ---------------------------------------------------------------------------------------------------------------------
# Workspace, device, errors, threads.


@emulated
def test_workspace_comes_from_the_allocator() -> None:
    from flash_ext import _C, allocate

    q = numbers(2, 5, 4, 128)
    out, lse = results(q, q)
    gradients = [torch.zeros_like(q) for _ in range(3)]
    asked = []

    def allocator(nbytes: int, like: torch.Tensor) -> torch.Tensor:
        asked.append((nbytes, like is q, allocate.workspace(nbytes, like)))
        return asked[-1][2]

    try:
        _C.set_allocator(allocator)
        call = call_backward(q, None, q, q, q, out, lse, *gradients, None)
        assert len(asked) == 1
        nbytes, is_q, memory = asked[0]
        assert is_q and call["workspace_size"] == nbytes and call["workspace"] == memory.data_ptr()
        assert call["workspace"] % 256 == 0
        call_forward(q, q, q, out, lse)  # asks for none
        assert len(asked) == 1

        def failing(nbytes: int, like: torch.Tensor) -> torch.Tensor:
            raise MemoryError("no more")

        _C.set_allocator(failing)
        with pytest.raises(MemoryError, match="no more"):
            call_backward(q, None, q, q, q, out, lse, *gradients, None)
        for bad in (
            lambda nbytes, like: torch.zeros(nbytes - 1, dtype=torch.uint8),
            lambda n, _: torch.zeros(n + 1)[1:],
        ):
            _C.set_allocator(bad)
            with pytest.raises(RuntimeError, match="flash_ext: the allocator did not return"):
                call_backward(q, None, q, q, q, out, lse, *gradients, None)
    finally:
        _C.set_allocator(allocate.workspace)


@emulated
def test_the_device_is_current_during_the_launch_and_restored() -> None:
    fake = FakeRuntime("sm80")
    q = numbers(1, 2, 1, 64)
    fake.current_device = 1
    call = call_forward(q, q, q, *results(q, q))
    assert (call["device"], call["current_device"], fake.current_device) == (0, 0, 1)
    fake.fail_next(700)
    with pytest.raises(RuntimeError):
        call_forward(q, q, q, *results(q, q))
    assert fake.current_device == 1
    fake.current_device = 0


@emulated
def test_cuda_errors_name_the_kernel() -> None:
    from flash_ext import _C

    fake = FakeRuntime("sm80")
    q = numbers(1, 2, 1, 64)
    fake.fail_next(700)
    message = r"cudaErrorIllegalAddress \(an illegal memory access was encountered\)"
    with pytest.raises(
        RuntimeError, match=f"flash_ext: kernel sm80_forward_bf16_d64x64_m128n128_plain failed: {message}"
    ):
        call_forward(q, q, q, *results(q, q))
    fake.fail_next(700)
    with pytest.raises(RuntimeError, match=f"flash_ext: kernel sm80_probe failed: {message}"):
        _C.probe("sm80", torch.zeros(3), 1.0)
    call_forward(q, q, q, *results(q, q))  # and the next call works


@emulated
def test_probe_fills() -> None:
    from flash_ext import _C

    tensor = torch.zeros(3, 5)
    _C.probe("sm80", tensor, 2.5)
    assert torch.equal(tensor, torch.full((3, 5), 2.5))
    with pytest.raises(ValueError, match="flash_ext: tensor has bfloat16"):
        _C.probe("sm80", tensor.bfloat16(), 1.0)
    with pytest.raises(ValueError, match="flash_ext: tensor is not contiguous"):
        _C.probe("sm80", tensor.t(), 1.0)


@emulated
def test_threads_run_while_a_kernel_is_launched() -> None:
    """A launch may wait for the device, so it must not hold what other Python threads need."""
    fake = FakeRuntime("sm80")
    q = numbers(1, 2, 1, 64)
    call_forward(q, q, q, *results(q, q))
    fake.set_launch_milliseconds(200)
    seconds: list[float] = []

    def launch() -> None:
        call_forward(q, q, q, *results(q, q))

    try:
        threads = [threading.Thread(target=launch) for _ in range(4)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds.append(time.perf_counter() - start)
    finally:
        fake.set_launch_milliseconds(0)
    assert seconds[0] < 0.6  # one after the other takes 0.8


@emulated
def test_threads_do_not_mix_their_calls() -> None:
    from flash_ext import _C

    failures: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for step in range(200):
            head_dim = (64, 128, 256)[(seed + step) % 3]
            q = torch.randn(1, 1 + seed, 2, head_dim + step % 2, generator=generator).bfloat16()[..., :head_dim]
            out, lse = results(q, q)
            params = call_forward(q, q, q, out, lse, causal=step % 5 == 0)["params"]
            if params["head_dim"] != head_dim or not torch.equal(out, q):
                failures.append(f"thread {seed}, step {step}")
            if isinstance(_C.choose("sm80", "forward", "bf16", head_dim, head_dim, 0, seed % 2), str):
                failures.append(f"choice of thread {seed}, step {step}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[:5]


@emulated
def test_arguments_and_copies_are_let_go() -> None:
    import gc
    import sys

    q = numbers(1, 2, 3, 67)[..., :64]  # copied
    out, lse = results(q, q)
    call_forward(q, q, q, out, lse)
    before = [sys.getrefcount(tensor) for tensor in (q, out, lse)]
    gc.collect()
    tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
    for _ in range(10):
        call_forward(q, q, q, out, lse)
    assert [sys.getrefcount(tensor) for tensor in (q, out, lse)] == before
    gc.collect()
    assert sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()) == tensors


# ---------------------------------------------------------------------------------------------------------------------
# The choice of a kernel (csrc/api).


def choose(
    head_dim: int, head_dim_v: int, *features: str, direction: Any = "forward", dtype: Any = "bf16", device: int = 0
) -> str:
    """The name of the chosen kernel without path, direction and dtype, or the reason."""
    from flash_ext import _C

    mask = sum(_C.FEATURES[name] for name in features)
    kernel = _C.choose("sm80", direction, dtype, head_dim, head_dim_v, mask, device)
    return kernel if isinstance(kernel, str) else kernel["name"].split("_", 3)[3]


@in_process()
def test_smallest_tile_that_holds_both_head_dims() -> None:
    for head_dim, head_dim_v, kernel in (
        (8, 8, "d64x64_m128n128_plain"),
        (64, 64, "d64x64_m128n128_plain"),
        (72, 64, "d128x128_m128n128_plain"),
        (64, 128, "d128x128_m128n128_plain"),
        (192, 128, "d192x128_m128n64_plain"),
        (136, 8, "d192x128_m128n64_plain"),
        (192, 136, "d256x256_m128n64_plain"),
        (256, 256, "d256x256_m128n64_plain"),
    ):
        assert choose(head_dim, head_dim_v) == kernel, (head_dim, head_dim_v)


@in_process()
def test_variant_and_tile_follow_the_features() -> None:
    assert choose(64, 64, "causal", "varlen", "sinks") == "d64x64_m128n128_plain"
    assert choose(64, 64, "causal", "softcap") == "d64x64_m128n128_rich"
    assert choose(128, 128) == "d128x128_m128n128_plain"
    assert choose(128, 128, "causal") == "d128x128_m128n64_plain"
    assert choose(128, 128, "window", "alibi") == "d128x128_m128n64_rich"
    assert choose(128, 128, "dropout") == "d128x128_m128n128_rich"


@in_process()
def test_refusals_say_what_is_missing() -> None:
    none = "has no forward kernel"
    for reason, expected in (
        (choose(256, 256, "causal", "softcap", "dropout"), "softcap and dropout_p with bf16, head_dim=256"),
        (choose(264, 256), f"{none} for bf16 with head_dim=264, head_dim_v=256; its widest holds 256 and 256"),
        (choose(64, 64, dtype="fp32"), f"{none} for fp32; it has fp16, bf16"),
        (choose(64, 64, "softcap", dtype="fp16"), f"softcap with fp16, head_dim=64 and head_dim_v=64 {none}"),
        (choose(64, 64, device=7), "device 7 cannot be used: cudaErrorInvalidDevice (invalid device ordinal)"),
    ):
        assert expected in reason, reason


@in_process(FLASH_EXT_MAX_SHARED_MEMORY="140000", FLASH_EXT_SM_COUNT="20")
def test_tiles_that_do_not_fit_are_passed_over() -> None:
    from flash_ext import _C

    assert choose(256, 256) == "d256x256_m64n64_plain"
    info = _C.device_info("sm80", 0)
    assert info == {"compute_capability": (8, 0), "sm_count": 20, "shared_memory": 140000, "name": "Fake GPU 0"}


@in_process(FLASH_EXT_MAX_SHARED_MEMORY="50000", FLASH_EXT_SM_COUNT="2000")
def test_no_tile_fits() -> None:
    from flash_ext import _C

    assert choose(64, 64) == "d64x64_m128n128_plain"
    expected = "needs 65536 bytes of shared memory per CTA; Fake GPU 0 offers 50000"
    reason = choose(128, 128, "causal")
    # a forward without a mask has another tile, which does not fit either
    assert expected in reason, reason
    assert _C.device_info("sm80", 1)["sm_count"] == 132  # no more than there are


@in_process(FLASH_EXT_TILE="128x64")
def test_forced_tile() -> None:
    assert choose(128, 128) == "d128x128_m128n64_plain"  # whatever `when` says
    assert choose(256, 256) == "d256x256_m128n64_plain"
    assert choose(64, 64) == "d128x128_m128n64_plain"
    reason = choose(128, 128, direction="backward")
    assert reason.startswith("FLASH_EXT_TILE=128x64 is no tile of path sm80's backward kernels"), reason


@in_process(FLASH_EXT_TILE="128x64")
def test_one_forced_tile_after_another() -> None:
    """`_C.force_tile` in a process that has chosen already."""
    from flash_ext import _C

    assert choose(128, 128) == "d128x128_m128n64_plain"
    _C.force_tile(0, 0)
    own = choose(128, 128)
    assert own != "d128x128_m128n64_plain" and choose(64, 64) == "d64x64_m128n128_plain"
    _C.force_tile(128, 64)
    assert choose(128, 128) == "d128x128_m128n64_plain"
    _C.force_tile(1, 1)
    assert choose(128, 128).startswith("FLASH_EXT_TILE=1x1 is no tile of path sm80's forward kernels")


@in_process(FAKE_CC="7.5")
def test_gpus_that_a_path_does_not_serve() -> None:
    expected = "path sm80 serves GPUs of compute capability 8.0 and newer; Fake GPU 0 has 7.5"
    assert choose(64, 64) == expected


@in_process(FAKE_DEVICES="0")
def test_no_gpu() -> None:
    from flash_ext import _C

    assert choose(64, 64) == "device 0 cannot be used: cudaErrorNoDevice (no CUDA-capable device is detected)"
    with pytest.raises(RuntimeError, match="flash_ext: path sm80 cannot use device 0: cudaErrorNoDevice"):
        _C.device_info("sm80", 0)


@in_process()
def test_which_gpus_a_path_serves() -> None:
    from flash_ext import _C

    served = {
        path: [version for version in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0))
               if _C.path_serves(path, *version)]
        for path in _C.PATHS
    }  # fmt: skip
    assert served == {
        "sm100": [(10, 0), (10, 3)],
        "sm90": [(9, 0)],
        "sm80": [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0)],
    }


@in_process()
def test_tables() -> None:
    from flash_ext import _C

    kernels = _C.kernels("sm80")
    assert [kernel["path"] for kernel in kernels] == ["sm80"] * len(kernels)
    assert kernels[0] == {
        "name": "sm80_forward_bf16_d256x256_m128n64_plain",
        "path": "sm80",
        "direction": "forward",
        "dtype": "bf16",
        "head_dim": 256,
        "head_dim_v": 256,
        "block_m": 128,
        "block_n": 64,
        "stages": 2,
        "warps": 4,
        "shared_memory": 196608,
        "features": ["causal", "window", "varlen", "seqused", "sinks", "deterministic"],
    }
    assert _C.available_paths() == ["sm100", "sm90", "sm80"]
    assert _C.library_dir() == str(library_dir())
    assert _C.library_build_info("sm90")["version"] == "fake"
    assert {"version", "commit", "abi_version"} <= _C.build_info().keys()
    for arguments in (("sm80", "sideways", "bf16"), ("sm80", "forward", "int8")):
        with pytest.raises(ValueError, match="flash_ext: d"):
            _C.choose(*arguments, 64, 64, 0, 0)  # type: ignore[arg-type]


@in_process()
def test_features_of_a_call() -> None:
    from flash_ext import _C

    something = torch.zeros(1)
    plain = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "alibi_slopes", "sinks"))
    plain |= {"softmax_scale": None, "causal": False, "window_left": -1, "window_right": -1}
    plain |= {"softcap": 0.0, "dropout_p": 0.0, "deterministic": False}
    for changes, expected in (
        ({}, []),
        ({"causal": True}, ["causal"]),
        ({"causal": True, "window_right": 3}, ["causal"]),
        ({"window_right": 0}, ["window"]),
        ({"window_left": 0}, ["window"]),
        ({"causal": True, "window_left": 5}, ["causal", "window"]),
        ({"cu_seqlens_q": something, "cu_seqlens_k": something}, ["varlen"]),
        ({"seqused_k": something}, ["seqused"]),
        ({"sinks": something}, ["sinks"]),
        ({"softcap": 1.0}, ["softcap"]),
        ({"alibi_slopes": something}, ["alibi"]),
        ({"dropout_p": 0.1}, ["dropout"]),
        ({"dropout_p": 1e-9}, []),
        ({"deterministic": True}, ["deterministic"]),
        ({"softmax_scale": 0.5}, []),
        ({"softmax_scale": 0.0}, ["general_scale"]),
        ({"softmax_scale": -1.0}, ["general_scale"]),
        ({"softmax_scale": 1e-60}, ["general_scale"]),  # 0 in fp32
    ):
        arguments: tuple[Any, ...] = tuple({**plain, **changes}.values())
        mask = _C.features(*arguments)
        assert [name for name, bit in _C.FEATURES.items() if mask & bit] == expected, changes


# ---------------------------------------------------------------------------------------------------------------------
# Libraries that cannot be used.


@in_process(FAKE_PURPOSE="a process that has loaded no library")
def test_unusable_libraries_are_named(tmp_path: Path) -> None:
    import subprocess

    from flash_ext import _C

    def look_in(folder: Path) -> None:
        _C.configure(
            library_dir=str(folder), emulated=False, use_dlpack=True, block_m=0, block_n=0, sm_count=0,
            max_shared_memory=0,
        )  # fmt: skip

    with pytest.raises(ValueError, match="flash_ext: path='cpu' has no kernels; allowed are sm80, sm90 and sm100"):
        _C.kernels("cpu")

    look_in(tmp_path)
    file = tmp_path / "libflash_ext_sm80.so"
    assert _C.available_paths() == [] and _C.library_file("sm80") == str(file)
    with pytest.raises(RuntimeError) as missing:
        _C.kernels("sm80")
    assert str(missing.value) == (
        f"flash_ext: path sm80 is not built: {file} does not exist. Build it with FLASH_EXT_PATHS=sm80 pip install ., "
        "or set FLASH_EXT_LIBRARY_DIR to the folder that holds it"
    )

    file.write_text("no library")
    with pytest.raises(RuntimeError, match=f"flash_ext: cannot load {file}: "):
        _C.kernels("sm80")

    def build(source: str) -> None:
        file.unlink()
        cxx = compiler()
        assert cxx is not None
        command = [cxx, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(file)]
        subprocess.run(command, input=source, text=True, check=True)

    file.write_bytes((library_dir() / file.name).read_bytes()[:-20])
    with pytest.raises(RuntimeError, match=rf"flash_ext: cannot load {file}: it is incomplete, \d+ of \d+ bytes; copy"):
        _C.kernels("sm80")

    build("int unrelated;")
    with pytest.raises(RuntimeError, match=f"flash_ext: {file} has no function flash_ext_abi_version; build it again"):
        _C.kernels("sm80")
    build('extern "C" int flash_ext_abi_version() { return 999; }')
    with pytest.raises(RuntimeError, match="has ABI version 999, flash_ext._C needs 1; build both"):
        _C.kernels("sm80")

    look_in(library_dir())  # a failure is not remembered
    assert _C.kernels("sm80")


# ---------------------------------------------------------------------------------------------------------------------
# On a real GPU.


@pytest.mark.gpu
def test_probe_runs_on_the_current_stream(path: PathUnderTest) -> None:
    from flash_ext import _C

    tensor = torch.zeros(1 << 20, device=path.device)
    side = torch.cuda.Stream()
    assert _C.tensor_info(tensor)["stream"] == torch.cuda.current_stream().cuda_stream
    with torch.cuda.stream(side):
        assert _C.tensor_info(tensor)["stream"] == side.cuda_stream
        torch.cuda._sleep(50_000_000)  # cycles: the default stream has long passed by
        tensor.fill_(1.0)
        _C.probe(path.library, tensor, 2.0)
    side.synchronize()
    assert bool((tensor == 2.0).all())


@pytest.mark.gpu
def test_probe_can_be_captured(path: PathUnderTest) -> None:
    from flash_ext import _C

    tensor = torch.zeros(1000, device=path.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _C.probe(path.library, tensor, 3.0)
    assert not tensor.any()
    graph.replay()
    torch.cuda.synchronize()
    assert bool((tensor == 3.0).all())


@pytest.mark.gpu
def test_the_tensors_device_is_used_and_the_current_one_kept(path: PathUnderTest) -> None:
    from flash_ext import _C

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for current, other in ((0, 1), (1, 0)):
        with torch.cuda.device(current):
            tensor = torch.zeros(1000, device=f"cuda:{other}")
            _C.probe(path.library, tensor, 4.0)
            assert torch.cuda.current_device() == current
            assert torch.zeros(1, device="cuda").device.index == current
            torch.cuda.synchronize(other)
            assert bool((tensor == 4.0).all())


@pytest.mark.gpu
def test_device_info_agrees_with_torch(path: PathUnderTest) -> None:
    from flash_ext import _C

    for device in range(torch.cuda.device_count()):
        info = _C.device_info(path.library, device)
        properties = torch.cuda.get_device_properties(device)
        assert info["name"] == properties.name
        assert info["compute_capability"] == (properties.major, properties.minor)
        assert info["sm_count"] == properties.multi_processor_count
