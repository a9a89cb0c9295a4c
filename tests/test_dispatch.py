"""Which path serves a call, what explain says of it, and how the rest is refused, over a make-believe library."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.fake import FakeRuntime, in_process, library_dir

NO_LIBRARIES = "/nowhere"

emulated = in_process(FLASH_EXT_EMULATE="sm80")


def gpu_call(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    *features: str,
    head_dim: int = 64,
    direction: Any = "forward",
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """What selection knows of a call on CUDA tensors, on a machine that has no GPU."""
    from flash_ext import _C, selection

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Fake GPU")
    mask = sum(_C.FEATURES[name] for name in features)
    return selection.Call(direction, False, 0, dtype, head_dim, head_dim, mask)


# ---------------------------------------------------------------------------------------------------------------------
# The path.


@in_process()
def test_compute_capability_picks_the_most_specific_path() -> None:
    from flash_ext import selection

    with pytest.MonkeyPatch.context() as monkeypatch:
        for capability, paths in (
            ((7, 5), []),
            ((8, 0), ["sm80"]),
            ((8, 9), ["sm80"]),
            ((9, 0), ["sm90", "sm80"]),
            ((10, 0), ["sm100", "sm80"]),
            ((10, 3), ["sm100", "sm80"]),
            ((11, 0), ["sm80"]),
            ((12, 0), ["sm80"]),
        ):
            call = gpu_call(monkeypatch, capability)
            assert selection.candidates(call, None) == paths, capability
            assert selection.candidates(call, "sm90") == ["sm90"]


@in_process(FAKE_CC="9.0")
def test_sm80_serves_what_the_first_path_cannot() -> None:
    from flash_ext import _C, selection

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(_C, "available_paths", lambda: ["sm80"])
        call = gpu_call(monkeypatch, (9, 0))
        chosen = {path: selection.choose(call, path) for path in selection.candidates(call, None)}
        expected = f"not built ({library_dir()}/libflash_ext_sm90.so does not exist; "
        assert str(chosen["sm90"]).startswith(expected), chosen["sm90"]
        assert isinstance(chosen["sm80"], dict) and chosen["sm80"]["path"] == "sm80"


@in_process(FAKE_CC="9.0")
def test_refusal_names_what_is_missing_where_and_what_would_serve() -> None:
    from flash_ext import selection

    with pytest.MonkeyPatch.context() as monkeypatch:
        text = str(selection.refusal(gpu_call(monkeypatch, (9, 0), "causal", "softcap", head_dim=256)))
        assert text == (
            "flash_ext: no forward kernel serves this call on cuda:0 (Fake GPU). "
            "sm90: softcap with bf16, head_dim=256 and head_dim_v=256 has no forward kernel on path sm90. "
            "sm80: softcap with bf16, head_dim=256 and head_dim_v=256 has no forward kernel on path sm80. "
            "Without softcap the sm90 path serves it. "
            "FLASH_EXT_PATH=cpu runs the PyTorch implementation on any device, slowly"
        )
        text = str(selection.refusal(gpu_call(monkeypatch, (9, 0), dtype=torch.float16, direction="backward")))
        assert "sm90: path sm90 has no backward kernel for fp16; it has bf16." in text
        text = str(selection.refusal(gpu_call(monkeypatch, (7, 5))))
        assert "no path has kernels for cuda:0 (Fake GPU), compute capability 7.5; 8.0 is the oldest" in text


@in_process(FLASH_EXT_PATH="sm100", FAKE_CC="9.0")
def test_refusal_of_a_forced_path_names_the_one_that_serves() -> None:
    from flash_ext import selection

    with pytest.MonkeyPatch.context() as monkeypatch:
        text = str(selection.refusal(gpu_call(monkeypatch, (9, 0))))
        assert text == (
            "flash_ext: FLASH_EXT_PATH=sm100: no forward kernel serves this call on cuda:0 (Fake GPU). "
            "sm100: path sm100 serves GPUs of compute capability 10.0 and 10.3; Fake GPU 0 has 9.0. "
            "The sm90 path serves it: leave FLASH_EXT_PATH unset"
        )


@in_process(FLASH_EXT_LIBRARY_DIR=NO_LIBRARIES)
def test_refusal_without_any_library_says_how_to_build_one() -> None:
    import flash_ext
    from flash_ext import selection

    with pytest.MonkeyPatch.context() as monkeypatch:
        text = str(selection.refusal(gpu_call(monkeypatch, (8, 6))))
        assert text == (
            "flash_ext: no forward kernel serves this call on cuda:0 (Fake GPU). sm80: not built "
            "(/nowhere/libflash_ext_sm80.so does not exist; FLASH_EXT_PATHS=sm80 pip install . builds it). "
            "FLASH_EXT_PATH=cpu runs the PyTorch implementation on any device, slowly"
        )
    assert flash_ext.kernels() == []
    assert flash_ext.build_info()["libraries"] == {}
    q = torch.randn(1, 3, 2, 64).bfloat16()
    assert flash_ext.flash_attn_func(q, q, q).shape == q.shape  # cpu tensors need none


@in_process(FLASH_EXT_PATH="sm80")
def test_forced_gpu_path_refuses_cpu_tensors() -> None:
    import flash_ext

    q = torch.randn(1, 3, 2, 64).bfloat16()
    with pytest.raises(
        NotImplementedError, match="flash_ext: FLASH_EXT_PATH=sm80 needs CUDA tensors, and q is on the cpu"
    ):
        flash_ext.flash_attn_func(q, q, q)
    explanation = flash_ext.explain(q, q, q)
    assert explanation.path is None and "needs CUDA tensors" in str(explanation.error)


@in_process(FLASH_EXT_PATH="cpu")
def test_forced_cpu_path() -> None:
    import flash_ext

    q = torch.randn(1, 3, 2, 64).bfloat16()
    explanation = flash_ext.explain(q, q, q)
    assert explanation.path == "cpu"
    assert explanation.passed_over == dict.fromkeys(("sm100", "sm90", "sm80"), "FLASH_EXT_PATH=cpu")
    assert torch.isfinite(flash_ext.flash_attn_func(q, q, q)).all()


@in_process()
def test_other_devices_are_refused() -> None:
    from flash_ext import dispatch

    q = torch.empty(1, 3, 2, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(NotImplementedError, match="flash_ext: q is on meta; expected a CUDA or cpu tensor"):
        dispatch.forward(q, q, q)
    with pytest.raises(NotImplementedError, match="flash_ext: q is on meta; expected a CUDA or cpu tensor"):
        dispatch.explain(q, q, q)


# ---------------------------------------------------------------------------------------------------------------------
# Calls.


@emulated
def test_forward_runs_the_chosen_kernel() -> None:
    from flash_ext import dispatch

    fake = FakeRuntime("sm80")
    for head_dim, head_dim_v, options, kernel in (
        (64, 64, {}, "sm80_forward_bf16_d64x64_m128n128_plain"),
        (64, 64, {"softcap": 3.0}, "sm80_forward_bf16_d64x64_m128n128_rich"),
        (128, 64, {"causal": True}, "sm80_forward_bf16_d128x128_m128n64_plain"),
        (256, 256, {}, "sm80_forward_bf16_d256x256_m128n64_plain"),
    ):
        for _ in range(2):  # the second call takes the remembered choice
            q = torch.randn(2, 5, 4, head_dim).bfloat16()
            k, v = torch.randn(2, 7, 2, head_dim).bfloat16(), torch.randn(2, 7, 2, head_dim_v).bfloat16()
            out, lse = dispatch.forward(q, k, v, **options)
            assert fake.last_call()["kernel"] == kernel
            assert torch.equal(out, q[..., :head_dim_v]) and out.is_contiguous()
            assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32


@emulated
def test_backward_allocates_what_is_not_given() -> None:
    from flash_ext import dispatch

    q = torch.randn(5, 2, 4, 128).bfloat16().transpose(0, 1)
    k = torch.randn(2, 7, 2, 128).bfloat16()
    out, lse = dispatch.forward(q, k, k)
    mine = torch.zeros(2, 7, 2, 2, 128, dtype=k.dtype)
    sinks = torch.rand(4)
    dq, dk, dv, dsinks = dispatch.backward(
        out, None, q, k, k, out, lse, sinks=sinks, dk=mine[:, :, 0], dv=mine[:, :, 1]
    )
    assert dq.is_contiguous() and torch.equal(dq, q)
    assert dk.data_ptr() == mine.data_ptr() and torch.equal(mine[:, :, 0], k) and torch.equal(mine[:, :, 1], k)
    assert torch.equal(dsinks, sinks)
    dsinks = dispatch.backward(out, None, q, k, k, out, lse)[3]
    assert dsinks.shape == (0,) and dsinks.dtype == torch.float32


@emulated
def test_a_call_that_no_kernel_serves_is_refused() -> None:
    from flash_ext import dispatch

    q = torch.randn(1, 3, 2, 256).bfloat16()
    with pytest.raises(NotImplementedError) as refusal:
        dispatch.forward(q, q, q, softcap=1.0)
    text = str(refusal.value)
    assert text.startswith("flash_ext: FLASH_EXT_PATH=sm80: no forward kernel serves this call on emulated Fake GPU 0.")
    assert "Without softcap the sm80 path serves it" in text
    q = q[..., :64].half()
    with pytest.raises(NotImplementedError, match="path sm80 has no backward kernel for fp16; it has bf16"):
        dispatch.backward(q, None, q, q, q, q, torch.zeros(1, 2, 3))


@emulated
def test_lazily_negated_and_zero_tensors_are_what_they_say() -> None:
    """z.conj().imag negates when it is read: kernels would see what lies in memory."""
    import flash_ext
    from flash_ext import ops

    def lazy(tensor: torch.Tensor) -> torch.Tensor:
        negated = torch._neg_view(-tensor)
        assert negated.is_neg() and torch.equal(negated, tensor)
        return negated

    fake = FakeRuntime("sm80")
    q = torch.randn(1, 3, 1, 128).bfloat16()
    sinks, dlse = torch.rand(1), torch.randn(1, 1, 3)
    imaginary = torch.complex(torch.zeros_like(dlse), -dlse).conj().imag
    assert imaginary.is_neg() and torch.equal(imaginary, dlse)
    for _ in range(2):  # the short way, once the kind is known
        assert torch.equal(flash_ext.flash_attn_func(lazy(q), q, q), q)
        assert torch.equal(torch.ops.flash_ext.fwd(lazy(q), lazy(q), lazy(q))[0], q)
    out, lse = ops.run_forward(q, q, q, {})
    dq, dk, dv, dsinks = ops.run_backward(
        lazy(q), imaginary, lazy(q), lazy(q), lazy(q), out, lse, {"sinks": lazy(sinks)}
    )
    assert torch.equal(dq, q) and torch.equal(dk, q) and torch.equal(dv, q) and torch.equal(dsinks, sinks)
    params = fake.last_call()["params"]
    assert params["dlse"] != imaginary.data_ptr()
    zero = torch._efficientzerotensor(q.shape, dtype=q.dtype)
    assert torch.equal(ops.run_backward(zero, None, q, q, q, out, lse, {})[0], q)
    assert torch.equal(ops.run_forward(zero, q, q, {})[0], torch.zeros_like(q))


@in_process()
def test_reference_gradients_go_where_asked() -> None:
    from flash_ext import dispatch

    q = torch.randn(1, 5, 2, 64).bfloat16()
    out, lse = dispatch.forward(q, q, q)
    gradient = torch.randn_like(q)
    wanted = dispatch.backward(gradient, None, q, q, q, out, lse)
    packed = torch.full((1, 5, 3, 2, 64), math.nan).bfloat16()
    dq, dk, dv, _ = dispatch.backward(
        gradient, None, q, q, q, out, lse, dq=packed[:, :, 0], dk=packed[:, :, 1], dv=packed[:, :, 2]
    )
    assert dq.data_ptr() == packed.data_ptr()
    assert all(torch.equal(mine, other) for mine, other in zip((dq, dk, dv), wanted[:3], strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Nothing to compute: the kernels' side against the cpu path, which has loops that simply do not run.


def degenerate_calls() -> dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]]:
    """Shapes of q and k, and options."""
    int32 = torch.int32
    sinks = torch.tensor([0.5, -math.inf])
    uneven = torch.tensor([1, 4, 4, 9], dtype=int32)
    none = torch.zeros(4, dtype=int32)
    return {
        "batch 0": ((0, 5, 2, 64), (0, 7, 2, 64), {}),
        "batch 0, sinks": ((0, 5, 2, 64), (0, 7, 2, 64), {"sinks": sinks}),
        "no query": ((2, 0, 2, 64), (2, 7, 2, 64), {"sinks": sinks}),
        "no key": ((2, 5, 2, 64), (2, 0, 2, 64), {}),
        "no key, sinks": ((2, 5, 2, 64), (2, 0, 2, 64), {"sinks": sinks, "causal": True}),
        "no key, sinks, seqused": (
            (2, 5, 2, 64),
            (2, 0, 2, 64),
            {"sinks": sinks, "seqused_q": torch.tensor([3, 9], dtype=int32)},
        ),
        "packed, no key": ((11, 2, 64), (0, 2, 64), {"cu_seqlens_q": uneven, "cu_seqlens_k": none}),
        "packed, no key, sinks": (
            (11, 2, 64),
            (0, 2, 64),
            {"cu_seqlens_q": uneven, "cu_seqlens_k": none, "sinks": sinks},
        ),
        "packed, no key, sinks, seqused": (
            (11, 2, 64),
            (0, 2, 64),
            {
                "cu_seqlens_q": uneven,
                "cu_seqlens_k": none,
                "sinks": sinks,
                "seqused_q": torch.tensor([1, 0, 3], dtype=int32),
            },
        ),
        "packed, no query": ((0, 2, 64), (7, 2, 64), {"cu_seqlens_q": none, "cu_seqlens_k": none, "sinks": sinks}),
        "packed, no sequence": (
            (4, 2, 64),
            (7, 2, 64),
            {"cu_seqlens_q": none[:1], "cu_seqlens_k": none[:1], "sinks": sinks},
        ),
    }


@emulated
@pytest.mark.parametrize("name", list(degenerate_calls()))
def test_nothing_to_compute(name: str) -> None:
    from flash_ext import dispatch, reference

    fake = FakeRuntime("sm80")
    shape_q, shape_k, options = degenerate_calls()[name]
    shape_q, shape_k = (*shape_q[:-1], 128), (*shape_k[:-1], 128)
    q, k = torch.randn(shape_q).bfloat16(), torch.randn(shape_k).bfloat16()
    before = fake.last_call()
    out, lse = dispatch.forward(q, k, k, **options)
    wanted_out, wanted_lse = reference.oracle_fwd(q, k, k, **options)
    assert torch.equal(out, wanted_out.to(out.dtype)) and out.shape == wanted_out.shape
    assert torch.equal(lse, wanted_lse.float()) and lse.shape == wanted_lse.shape

    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    unread = torch.isinf(lse)
    if "sinks" in options:  # no row of a sequence may have its dlse set to NaN, only those outside
        unread = unread & (options["sinks"][:, None] != -math.inf)
    dlse[unread] = math.nan
    gradients = dispatch.backward(dout, dlse, q, k, k, out, lse, **options)
    wanted = reference.oracle_bwd(dout, dlse, q, k, k, **options)
    for mine, other, gradient in zip(gradients, wanted, ("dq", "dk", "dv", "dsinks"), strict=True):
        assert mine.shape == other.shape, gradient
        assert torch.allclose(mine.double(), other.double(), rtol=0, atol=1e-5), gradient  # sums of 11 in fp32
    assert fake.last_call() == before  # nothing was launched
    dsinks = dispatch.backward(dout, None, q, k, k, out, lse, **options)[3]
    assert not dsinks.any()


# ---------------------------------------------------------------------------------------------------------------------
# What one can ask.


@emulated
def test_explain_says_what_runs() -> None:
    import flash_ext

    fake = FakeRuntime("sm80")
    q, k = torch.randn(2, 5, 4, 128).bfloat16(), torch.randn(2, 7, 2, 128).bfloat16()
    explanation = flash_ext.explain(q, k, k, causal=True, softcap=2.0)
    flash_ext.flash_attn_func(q, k, k, causal=True, softcap=2.0)
    assert explanation.kernel == fake.last_call()["kernel"] == "sm80_forward_bf16_d128x128_m128n64_rich"
    assert explanation.path == "sm80" and explanation.tile == (128, 64) and explanation.shared_memory == 65536
    assert (explanation.stages, explanation.warps, explanation.splits) == (2, 4, 1)
    assert explanation.features == ("causal", "softcap") and explanation.copies == {} and explanation.error is None
    assert explanation.passed_over == {
        "sm100": "FLASH_EXT_PATH=sm80",
        "sm90": "FLASH_EXT_PATH=sm80",
        "cpu": "serves CUDA tensors only with FLASH_EXT_PATH=cpu",
    }
    text = str(explanation)
    for part in ("forward on emulated Fake GPU 0: sm80", explanation.kernel, "128 query rows x 64 keys, 2 stages"):
        assert part in text, text
    backward = flash_ext.explain(q, k, k, causal=True, direction="backward")
    assert backward.kernel == "sm80_backward_bf16_d128x128_m64n128_rich"


@emulated
def test_explain_agrees_with_the_copies_made() -> None:
    import flash_ext

    fake = FakeRuntime("sm80")
    q = torch.randn(1, 5, 2, 67).bfloat16()[..., :64]
    k = torch.randn(1, 64, 2, 5).bfloat16().transpose(1, 3)
    v = torch.randn(1, 5, 2, 64).bfloat16()
    sinks = torch.rand(4)[::2]
    explanation = flash_ext.explain(q, k, v, learnable_sink=sinks)
    assert explanation.copies == {
        "q": "the stride of dimension 1, 268 bytes, is not a multiple of 16",
        "k": "its last dimension is not contiguous (stride 10)",
        "learnable_sink": "it is not contiguous (stride 2)",
    }
    flash_ext.flash_attn_func(q, k, v, learnable_sink=sinks)
    params = fake.last_call()["params"]
    in_place = {name for name, tensor in (("q", q), ("k", k), ("v", v)) if params[name]["data"] == tensor.data_ptr()}
    assert in_place == {"v"} and params["sinks"] != sinks.data_ptr()
    assert "copy of        q: the stride of dimension 1" in str(explanation)

    padded = flash_ext.explain(q[..., :60], k[..., :60], v)
    assert padded.copies == {"q": "head_dim 60 is padded to 64", "k": "head_dim 60 is padded to 64"}
    assert padded.kernel == "sm80_forward_bf16_d64x64_m128n128_plain"


@emulated
def test_explain_of_a_refused_call_has_its_error() -> None:
    import flash_ext

    q = torch.randn(1, 3, 2, 256).bfloat16()
    explanation = flash_ext.explain(q, q, q, softcap=1.0)
    with pytest.raises(NotImplementedError) as refusal:
        flash_ext.flash_attn_func(q, q, q, softcap=1.0)
    assert explanation.path is None and explanation.kernel is None
    assert explanation.error == str(refusal.value)
    assert "has no forward kernel on path sm80" in explanation.passed_over["sm80"]


@in_process(FAKE_CC="9.0")
def test_explain_gives_the_reason_for_every_path_passed_over() -> None:
    import flash_ext
    from flash_ext import explanation as module

    with pytest.MonkeyPatch.context() as monkeypatch:
        call = gpu_call(monkeypatch, (9, 0), "causal")
        monkeypatch.setattr(module, "call_of", lambda *arguments: call)
        monkeypatch.setattr(module, "uses_reference", lambda q: False)
        q = torch.randn(1, 3, 2, 64).bfloat16()
        result = flash_ext.explain(q, q, q, causal=True)
        assert result.path == "sm90" and result.device == "cuda:0 (Fake GPU)"
        assert result.passed_over == {
            "sm100": "serves compute capability 10.0 and 10.3; this GPU has 9.0",
            "sm80": "sm90 comes first",
            "cpu": "serves CUDA tensors only with FLASH_EXT_PATH=cpu",
        }


@in_process()
def test_explain_on_the_cpu() -> None:
    import flash_ext

    q = torch.randn(3, 2, 60).bfloat16()
    cu_seqlens = torch.tensor([0, 3], dtype=torch.int32)
    explanation = flash_ext.explain(q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, dropout_p=0.5)
    assert explanation.path == "cpu" and explanation.kernel is None
    assert explanation.features == ("varlen", "dropout") and set(explanation.copies) == {"q", "k", "v"}
    assert set(explanation.passed_over) == {"sm100", "sm90", "sm80"}
    assert "flash_ext.reference" in str(explanation)


@in_process()
def test_explain_refuses_what_the_call_refuses() -> None:
    import flash_ext

    q = torch.randn(1, 3, 2, 64).bfloat16()
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (ValueError, {"direction": "sideways"}),
        (ValueError, {"dropout_p": 1.5}),
        (ValueError, {"window_size": (-2, 0)}),
        (NotImplementedError, {"num_splits": 4}),
        (NotImplementedError, {"block_table": torch.zeros(1, 1, dtype=torch.int32)}),
    ]
    for error, arguments in wrong:
        with pytest.raises(error, match="^flash_ext: "):
            flash_ext.explain(q, q, q, **arguments)
    with pytest.raises(TypeError, match="^flash_ext: q has dtype torch.float32"):
        flash_ext.explain(q.float(), q, q)


@in_process()
def test_kernels_and_build_info_cover_every_library() -> None:
    import flash_ext

    kernels = flash_ext.kernels()
    assert {kernel["path"] for kernel in kernels} == {"sm80", "sm90", "sm100"}
    assert len({kernel["name"] for kernel in kernels}) == len(kernels)
    info = flash_ext.build_info()
    assert set(info["libraries"]) == {"sm80", "sm90", "sm100"}
    assert info["library_dir"] == str(library_dir()) and "version" in info["module"]
