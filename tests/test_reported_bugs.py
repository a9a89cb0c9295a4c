"""Inputs on which attention libraries were reported to fail, each standing for a kind of fault that must not exist.

The right value is the contract's. Large shapes keep what triggers the fault and shrink in heads or batch where the path
is a CPU; those over 8 GB are marked ``large``. Tensors are (batch, seqlen, heads, head_dim) unless said.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.accuracy import assert_accurate, assert_lse, assert_same_bits
from helpers.cases import Case, make_inputs, visible
from helpers.check import Results, check, run, verify
from helpers.paths import Path
from helpers.tables import for_cases


def _differences(*bounds: int) -> tuple[int, ...]:
    """Lengths from cu_seqlens."""
    return tuple(stop - start for start, stop in pairwise(bounds))


# ---------------------------------------------------------------------------------------------------------------------
# Empty, short and unequal.


@for_cases([Case(lengths_q=(1,), lengths_k=(1,), heads=(1, 1), head_dims=(16, 16), dtype=torch.float16, dlse=False)])
def test_one_key_per_row_has_no_gradient_of_scores(
    path: Path, rng: torch.Generator, case: Case, direction: str
) -> None:
    """fp16 q = k = v (1, 1, 1, 16): softmax of one key is constant, so dq and dk are 0, not NaN."""
    inputs = make_inputs(case, path.device, rng)
    inputs.k = inputs.v = inputs.q
    results = run(inputs, direction)
    assert torch.equal(results.out, inputs.v)
    if direction == "backward":
        assert results.dq is not None and results.dk is not None
        assert results.dq.abs().max() < 1e-5 and results.dk.abs().max() < 1e-5
        assert results.dv is not None and torch.equal(results.dv, inputs.dout)


@for_cases(
    [
        Case(
            lengths_q=_differences(0, 76, 110, 256),
            lengths_k=_differences(0, 1, 2, 3),
            heads=(1, 1),
            head_dims=(32, 32),
            dtype=torch.float16,
            varlen=True,
            causal=True,
            magnitude=3.0,
        )
    ]
)
def test_causal_rows_with_no_or_one_key(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """varlen causal, one key per sequence: all rows but the last see none; gradients are finite and right."""
    check(path, rng, case, direction, through="autograd" if direction == "backward" else "operator")


@pytest.mark.timeout(120)
@for_cases(
    [Case(lengths_q=(0, 0, 1023), lengths_k=(0, 1, 2045), heads=(32, 32), head_dims=(128, 128), varlen=True)],
)
def test_leading_empty_sequences_do_not_hang(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """varlen bf16, 32 heads, d 128, query lengths 0, 0, 1023 and key lengths 0, 1, 2045."""
    check(path, rng, case.with_(heads=path.fit(gpu=(32, 32), cpu=(2, 2), emulated=(1, 1))), direction)


@for_cases(
    [
        Case(
            lengths_q=_differences(0, 0, 1208, 2048, 2048),
            lengths_k=_differences(0, 2538, 4280, 5120, 8192),
            heads=(4, 1),
            head_dims=(256, 256),
            varlen=True,
            causal=causal,
        )
        for causal in (False, True)
    ]
)
def test_empty_queries_between_and_at_the_ends(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """varlen d 256, 4/1 heads, sequences with keys but without queries first and last."""
    shrink = path.fit(gpu=1, cpu=8, emulated=16)
    lengths = {name: tuple(-(-rows // shrink) for rows in getattr(case, name)) for name in ("lengths_q", "lengths_k")}
    check(path, rng, case.with_(**lengths), direction)


@for_cases(
    Case(
        lengths_q=_differences(0, 1, 1, 2), lengths_k=_differences(0, 3, 3, 8), heads=(9, 9), varlen=True, causal=causal
    )
    for causal in (False, True)
)
def test_empty_sequence_among_single_tokens(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """q (2, 9, 64) as varlen tokens, max_seqlen_q 1: an empty sequence on the one-token path."""
    check(path, rng, case, direction)


@for_cases([Case(lengths_q=(2048,), lengths_k=(1024,), heads=(2, 1), head_dims=(64, 64), causal=True)])
def test_more_queries_than_keys(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """causal, seqlen_q 2048, seqlen_k 1024: the first 1024 rows are exactly 0 with lse -inf, their gradients 0."""
    scale = path.fit(gpu=1, cpu=2, emulated=8)
    case = case.with_(lengths_q=(2048 // scale,), lengths_k=(1024 // scale,))
    inputs = make_inputs(case, path.device, rng)
    results = run(inputs, direction)
    blind = 1024 // scale
    assert (results.out[:, :blind] == 0).all() and (results.lse[:, :, :blind] == -torch.inf).all()
    assert (results.lse[:, :, blind:]).isfinite().all()
    if results.dq is not None:
        assert (results.dq[:, :blind] == 0).all()
    verify(inputs, results, direction)


@for_cases(
    Case(lengths_q=(129,), lengths_k=(sk,), heads=(2, 2), window=(32, 64))
    for sk in (1, 31, 64, 96, 128, 129, 130, 200, 257)
)
def test_window_over_unequal_lengths(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """window (32, 64), seqlen_q 129 and other seqlen_k: rows with no key give 0, not NaN."""
    assert case.lengths_k[0] > 64 or not visible(case, 0).any(1).all()
    check(path, rng, case, direction)


@pytest.mark.parametrize("rows", [1, 129, 200])
@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.needs("backward"))])
def test_widest_window_is_causal(path: Path, rng: torch.Generator, rows: int, direction: str) -> None:
    """window (S - 1, 0) equals causal."""
    inputs = make_inputs(Case(lengths_q=(rows,), lengths_k=(rows,), causal=True), path.device, rng)
    causal = dict(inputs.keywords)
    inputs.keywords |= {"causal": False, "window_left": rows - 1, "window_right": 0}
    results = run(inputs, direction)
    inputs.keywords = causal
    verify(inputs, results, direction)


@for_cases(
    Case(lengths_q=q, lengths_k=k, heads=(2, 2), varlen=varlen)
    for q, k, varlen in (
        ((5, 5), (0, 0), False),
        ((5, 0), (0, 0), True),
        ((), (), False),
        ((0,), (5,), False),
        ((0, 0), (5, 2), True),
        ((0,), (0,), True),
    )
)
def test_nothing_to_do_is_no_launch_error(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """Total keys 0, batch 0, seqlen_q 0: empty or zero outputs."""
    check(path, rng, case, direction)


# ---------------------------------------------------------------------------------------------------------------------
# Values.


@for_cases(
    Case(lengths_q=q, lengths_k=k, heads=heads, slack=(0, slack, 0), dtype=torch.float16, causal=causal)
    for q, k, heads, slack in (((3, 3), (1, 3), (1, 1), 0), ((1,) * 4, (32, 64, 96, 48), (8, 8), 32))
    for causal in (False, True)
)
def test_nan_after_the_used_keys_does_not_leak(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """batch 2, lengths 1 and 3 of 3; batch 4, 8 heads, d 64, lengths 32, 64, 96, 48 of a cache of 128: 0 x NaN."""
    check(path, rng, case, direction)


@for_cases(
    [
        Case(
            lengths_q=_differences(0, 144, 432, 944),
            lengths_k=_differences(0, 144, 432, 944),
            heads=(16, 16),
            varlen=True,
            slack=(0, 0, 2),
        )
    ]
)
def test_rows_past_the_last_sequence(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """cu_seqlens 0, 144, 432, 944 of 946 rows, 16 heads, d 64: outputs and gradients of the last two are 0."""
    check(path, rng, case.with_(heads=path.fit(gpu=(16, 16), cpu=(2, 2), emulated=(1, 1))), direction)


@for_cases(
    Case(
        lengths_q=(1024,),
        lengths_k=(1024,),
        heads=(1, 1),
        head_dims=(128, 128),
        dtype=torch.float16,
        causal=True,
        magnitude=magnitude,
    )
    for magnitude in (4.0, 12.0)
)
def test_large_logits(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """causal fp16 (1, 1024, 1, 128) with large logits: the backward is finite and right."""
    rows = path.fit(gpu=1024, cpu=1024, emulated=300)
    check(path, rng, case.with_(lengths_q=(rows,), lengths_k=(rows,)), direction)


@pytest.mark.timeout(120)
@for_cases(
    [
        Case(
            lengths_q=(1024,) * 2,
            lengths_k=(1024,) * 2,
            heads=(32, 32),
            head_dims=(128, 128),
            softcap=10.0,
            causal=True,
        )
    ]
)
def test_softcap_backward_does_not_hang(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """softcap 10, batch 2, 1024, 32 heads, d 128, causal."""
    rows = path.fit(gpu=1024, cpu=512, emulated=256)
    heads = path.fit(gpu=32, cpu=2, emulated=1)
    check(path, rng, case.with_(lengths_q=(rows,) * 2, lengths_k=(rows,) * 2, heads=(heads, heads)), direction)


@pytest.mark.parametrize("varlen", [False, True])
def test_lse_of_a_masked_row_merges_as_the_identity(path: Path, rng: torch.Generator, varlen: bool) -> None:
    """lse of a masked row is -inf on every path, empty keys or not; logaddexp with it changes no bit."""
    features = {"varlen", "seqused"} if varlen else {"seqused"}
    if not path.supports("forward", features=features):
        varlen = False
    case = Case(lengths_q=(70, 70, 70), lengths_k=(0, 90, 40), heads=(2, 2), varlen=varlen, causal=True)
    if not path.supports("forward", features=case.features):
        case = Case(lengths_q=(70,), lengths_k=(40,), heads=(2, 2), causal=True)
    inputs = make_inputs(case, path.device, rng)
    results = run(inputs, "forward")
    for segment in inputs.segments:
        blind = ~visible(case, segment.index, path.device).any(1)
        masked = results.lse[segment.lse][:, blind]
        assert (masked == -torch.inf).all(), masked.unique()
        other = torch.randn(masked.shape, generator=rng).to(path.device)
        assert_same_bits("merged lse", torch.logaddexp(other, masked), other)
        weight = torch.exp(masked - torch.logaddexp(other, masked))
        assert (weight == 0).all() and (results.out[segment.q][blind] == 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# Layout and size.


@pytest.mark.needs("backward", head_dims=(128, 128))
def test_one_row_in_each_of_many_sequences(path: Path, rng: torch.Generator) -> None:
    """backward with batch 8300, seqlen 1, 16 heads, d 128: one key per row, so dv = dout and dq = dk = 0."""
    shape = (path.fit(gpu=8300, cpu=8300, emulated=9), 1, 16, 128)
    q, k, v, dout = (torch.randn(shape, generator=rng).to(torch.bfloat16).to(path.device) for _ in range(4))
    out, lse = torch.ops.flash_ext.fwd(q, k, v)
    assert torch.equal(out, v)
    scores = (q.float() * k.float()).sum(-1).transpose(1, 2) * 128**-0.5
    torch.testing.assert_close(lse, scores, rtol=2e-5, atol=2e-5)
    dq, dk, dv, _ = torch.ops.flash_ext.bwd(dout, None, q, k, v, out, lse)
    assert torch.equal(dv, dout)
    assert dq.abs().max() < 1e-3 and dk.abs().max() < 1e-3


@pytest.mark.large
@pytest.mark.timeout(300)
@pytest.mark.needs("backward", head_dims=(128, 128))
def test_offsets_and_scratch_beyond_2_to_31(path: Path, rng: torch.Generator) -> None:
    """backward of (400, 10496, 4, 128): every tensor has more than 2^31 elements; the last batches are right."""
    from flash_ext import reference

    shape = (400, 10496, 4, 128)
    generator = torch.Generator(path.device).manual_seed(int(torch.randint(2**31, (), generator=rng)))
    q, k, v, dout = (
        torch.randn(shape, dtype=torch.bfloat16, device=path.device, generator=generator) for _ in range(4)
    )
    out, lse = torch.ops.flash_ext.fwd(q, k, v)
    got = torch.ops.flash_ext.bwd(dout, None, q, k, v, out, lse)
    for b, head in ((0, 0), (204, 3), (205, 0), (399, 3)):  # 2^31 elements end in batch 399; 2^32 bytes in batch 399
        pick = (slice(b, b + 1), slice(None), slice(head, head + 1))
        q1, k1, v1, dout1 = (x[pick].contiguous() for x in (q, k, v, dout))
        truth, truth_lse = reference.oracle_fwd(q1, k1, v1)
        base, base_lse = reference.baseline_fwd(q1, k1, v1)
        assert_accurate("out", out[pick], truth, base)
        assert_lse(lse[b : b + 1, head : head + 1], truth_lse)
        expected = reference.oracle_bwd(dout1, None, q1, k1, v1)
        ours = reference.baseline_bwd(dout1, None, q1, k1, v1, base, base_lse)
        for name, tensor, of, other in zip(("dq", "dk", "dv"), got[:3], expected[:3], ours[:3], strict=True):
            assert_accurate(f"{name} of batch {b} head {head}", tensor[pick], of, other)
    for name, tensor in (("out", out), *zip(("dq", "dk", "dv"), got[:3], strict=True)):
        assert not (tensor == 0).all(-1).any() and tensor.isfinite().all(), f"rows of {name} were not written"


@pytest.mark.needs("backward", "varlen", head_dims=(96, 96))
@pytest.mark.parametrize("total", [1000, pytest.param(410_923, marks=pytest.mark.large)])
def test_gradient_with_a_wide_row_stride(path: Path, rng: torch.Generator, total: int) -> None:
    """varlen backward, dout (410923, 16, 96) with strides (9728, 96, 1): the numbers of the contiguous copy."""
    heads = path.fit(gpu=16, cpu=4, emulated=2)
    lengths = (300, 1, 0, 200, 499) if total == 1000 else (*[2048] * 200, 1323)
    assert sum(lengths) == total
    device = path.device
    generator = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=rng)))
    wide = torch.full((total, 9728), torch.nan, dtype=torch.bfloat16, device=device)
    dout = wide.as_strided((total, heads, 96), (9728, 96, 1))
    dout.copy_(torch.randn(total, heads, 96, device=device, generator=generator))
    q, k, v = (torch.randn(total, heads, 96, dtype=dout.dtype, device=device, generator=generator) for _ in range(3))
    bounds = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32).to(device)
    deterministic = path.supports("backward", head_dims=(96, 96), features={"varlen", "deterministic"})
    keywords: dict[str, Any] = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "deterministic": deterministic}
    out, lse = torch.ops.flash_ext.fwd(q, k, v, **keywords)
    expected = torch.ops.flash_ext.bwd(dout.contiguous(), None, q, k, v, out, lse, **keywords)
    got = torch.ops.flash_ext.bwd(dout, None, q, k, v, out, lse, **keywords)
    for name, tensor, other in zip(("dq", "dk", "dv"), got[:3], expected[:3], strict=True):
        if deterministic:
            assert_same_bits(name, tensor, other)
        else:
            torch.testing.assert_close(tensor, other, rtol=2e-2, atol=1e-2)


@for_cases(
    [
        Case(
            lengths_q=(8192,), lengths_k=(8192,), heads=(32, 32), head_dims=(256, 256), layouts=(("q", "heads_first"),)
        ),
        Case(lengths_q=(32, 32), lengths_k=(32, 32), heads=(4, 4), head_dims=(128, 128), layouts=(("dout", "scalar"),)),
        Case(
            lengths_q=(200, 200),
            lengths_k=(90, 90),
            heads=(4, 2),
            layouts=(("dout", "heads_first"), ("v", "qkv_packed")),
        ),
        Case(
            lengths_q=(200, 200),
            lengths_k=(90, 90),
            heads=(4, 2),
            layouts=(("dout", "sliced_rows"), ("q", "dim_swapped")),
        ),
    ]
)
def test_strides_of_views_and_gradients(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """q a transposed view of (1, 32, 8192, 256); dout expanded with stride 0; dout with other strides than out."""
    if case.lengths_q == (8192,):
        rows = path.fit(gpu=2048, cpu=300, emulated=130)
        heads = path.fit(gpu=32, cpu=3, emulated=2)
        case = case.with_(lengths_q=(rows,), lengths_k=(rows,), heads=(heads, heads))
    check(path, rng, case, direction, through="autograd" if direction == "backward" else "operator")


@for_cases(
    Case(lengths_q=(1,) * 3, lengths_k=(5, 64, 200), heads=(group * heads, heads), head_dims=(64, 64), causal=causal)
    for heads in range(1, 9)
    for group, causal in ((1, False), (3, True))
)
def test_every_number_of_key_heads(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """1 to 8 key/value heads with one query token, caches of other lengths through ``seqused``."""
    check(path, rng, case, direction)


# ---------------------------------------------------------------------------------------------------------------------
# Repetition.


@pytest.mark.needs("seqused", head_dims=(128, 128))
@pytest.mark.parametrize("rows", [1, 5])
def test_length_of_one_row_changes_no_other(path: Path, rng: torch.Generator, rows: int) -> None:
    """Batch 4, 32/8 heads, d 128, cache 1024, lengths 900, 1000, 120, 500: one changes, no bit of the others."""
    heads = path.fit(gpu=(32, 8), cpu=(8, 2), emulated=(2, 1))
    case = Case(
        lengths_q=(rows,) * 4, lengths_k=(900, 1000, 120, 500), heads=heads, head_dims=(128, 128), slack=(0, 23, 0)
    )
    inputs = make_inputs(case, path.device, rng)
    lengths = inputs.keywords["seqused_k"]
    # Every row of the cache gets a number, so that a longer length is valid as well.
    inputs.k.copy_(torch.randn(inputs.k.shape, generator=rng))
    inputs.v.copy_(torch.randn(inputs.v.shape, generator=rng))
    before = run(inputs, "forward")
    for sequence, length in ((0, 1024), (1, 1), (2, 900), (3, 0)):
        kept = lengths.clone()
        lengths[sequence] = length
        after = run(inputs, "forward")
        lengths.copy_(kept)
        for other in range(4):
            if other != sequence:
                assert_same_bits(f"out of sequence {other}", after.out[other], before.out[other])
                assert_same_bits(f"lse of sequence {other}", after.lse[other], before.lse[other])
        assert not torch.equal(after.out[sequence], before.out[sequence])


@pytest.mark.timeout(300)
@for_cases(
    [
        Case(
            lengths_q=(rows,) * 2,
            lengths_k=(rows,) * 2,
            heads=(heads, heads),
            dtype=torch.float16,
            deterministic=True,
            causal=causal,
        )
        for rows, heads in ((1024, 12), (512, 8))
        for causal in (False, True)
    ],
    directions=["backward"],
)
def test_deterministic_backward_under_load(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """fp16 (2, 1024, 12, 64) and (2, 512, 8, 64): 1000 runs while another stream loads memory give one set of bits."""
    rows = path.fit(gpu=case.lengths_q[0], cpu=256, emulated=200)
    heads = path.fit(gpu=case.heads[0], cpu=2, emulated=1)
    inputs = make_inputs(
        case.with_(lengths_q=(rows,) * 2, lengths_k=(rows,) * 2, heads=(heads, heads)), path.device, rng
    )
    first = run(inputs, direction)
    load = torch.empty(2**27, device=path.device) if path.kind == "gpu" else None
    stream = torch.cuda.Stream() if path.kind == "gpu" else None
    operands = inputs.q, inputs.k, inputs.v
    for repetition in range(path.fit(gpu=1000, cpu=3, emulated=3)):
        if stream is not None and load is not None and repetition % 4 == 0:
            with torch.cuda.stream(stream):
                load.add_(1.0)
        gradients = torch.ops.flash_ext.bwd(
            inputs.dout, inputs.dlse, *operands, first.out, first.lse, **inputs.keywords
        )
        same = [torch.equal(x, getattr(first, name)) for x, name in zip(gradients[:3], ("dq", "dk", "dv"), strict=True)]
        assert all(same), f"bits of (dq, dk, dv) differ in repetition {repetition}: {same}"


@pytest.mark.gpu
@pytest.mark.needs("seqused", head_dims=(128, 128))
def test_graph_sees_lengths_changed_in_place(path: Path, rng: torch.Generator) -> None:
    """A CUDA graph replayed after ``seqused_k`` changed in place: no stale plan."""
    case = Case(
        lengths_q=(1,) * 4, lengths_k=(900, 1000, 120, 500), heads=(32, 8), head_dims=(128, 128), slack=(0, 23, 0)
    )
    inputs = make_inputs(case, path.device, rng)
    inputs.k.copy_(torch.randn(inputs.k.shape, generator=rng))
    inputs.v.copy_(torch.randn(inputs.v.shape, generator=rng))
    run(inputs, "forward")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = Results(*torch.ops.flash_ext.fwd(inputs.q, inputs.k, inputs.v, **inputs.keywords))
    for lengths in ((900, 1000, 120, 500), (1, 2, 3, 4), (1024, 0, 1024, 128), (500, 120, 1000, 900)):
        inputs.keywords["seqused_k"].copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        expected = run(inputs, "forward")
        assert_same_bits("out", results.out, expected.out)
        assert_same_bits("lse", results.lse, expected.lse)


# ---------------------------------------------------------------------------------------------------------------------
# With PyTorch.


def _views(rng: torch.Generator, device: torch.device, layout: str) -> list[torch.Tensor]:
    shape = {"permuted": (2, 4, 50, 64), "sliced": (2, 60, 6, 64), "expanded": (1, 50, 1, 64)}[layout]
    tensors = [torch.randn(shape, generator=rng).to(torch.bfloat16).to(device) for _ in range(3)]
    if layout == "permuted":
        return [x.transpose(1, 2) for x in tensors]
    return [x[:, 5:55, 1:5] if layout == "sliced" else x.expand(2, 50, 4, 64) for x in tensors]


@pytest.mark.timeout(300)
@pytest.mark.needs("backward", "causal", "sinks")
@pytest.mark.parametrize("layout", ["permuted", "sliced", "expanded"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_with_views(path: Path, rng: torch.Generator, layout: str, dynamic: bool) -> None:
    """torch.compile(fullgraph=True), dynamic shapes too, of permuted, sliced and expanded inputs: as in eager mode."""
    import flash_ext

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flash_ext.flash_attn_func(
            q, k, v, causal=True, return_lse=True, learnable_sink=sinks, deterministic=True
        )
        return out * 2, lse

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for repetition in range(2):
        leaves = [x.detach().requires_grad_() for x in _views(rng, path.device, layout)]
        if dynamic and repetition:
            leaves = [x.detach()[:, :37].requires_grad_() for x in leaves]
        sinks = torch.randn(4, generator=rng).to(path.device).requires_grad_()
        found = []
        for function in (attend, compiled):
            out, lse = function(leaves[0], leaves[1], leaves[2], sinks)
            gradients = torch.autograd.grad((out, lse), (*leaves, sinks), (torch.ones_like(out), torch.ones_like(lse)))
            found.append((out.detach(), lse.detach(), *gradients))
        for eager, traced in zip(*found, strict=True):
            torch.testing.assert_close(traced, eager, rtol=2e-2, atol=2e-2)
    torch._dynamo.reset()


@for_cases(
    [
        Case(
            lengths_q=(70, 0, 90),
            lengths_k=(100, 30, 60),
            heads=(4, 2),
            varlen=varlen,
            slack=(2, 3, 4),
            causal=True,
            window=(50, -1),
            sinks=torch.float32,
            softcap=6.0,
            alibi="batch",
            dropout_p=0.2,
            deterministic=deterministic,
        )
        for varlen in (False, True)
        for deterministic in (False, True)
    ],
    directions=["backward"],
)
def test_autograd_forgets_no_argument(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """cu_seqlens, seqused, dropout, ``deterministic``, ...: each that the forward had, the backward has."""
    inputs = make_inputs(case, path.device, rng)
    results = run(inputs, direction, through="autograd")
    verify(inputs, results, direction)
    if case.deterministic:
        again = run(inputs, direction, through="autograd")
        for name in ("dq", "dk", "dv", "dsinks"):
            assert_same_bits(name, getattr(again, name), getattr(results, name))


@pytest.mark.needs("backward")
def test_gradient_of_lse_is_not_dropped(path: Path, rng: torch.Generator) -> None:
    """Ring attention under autograd: two halves of the keys merged by lse have the gradients of the whole."""
    inputs = make_inputs(Case(lengths_q=(90,), lengths_k=(120,), heads=(2, 2), dlse=False), path.device, rng)
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    parts = [torch.ops.flash_ext.fwd(q, k[:, keys], v[:, keys]) for keys in (slice(0, 50), slice(50, 120))]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(part.float() * torch.exp(part_lse - lse).transpose(1, 2).unsqueeze(-1) for part, part_lse in parts)
    assert isinstance(out, torch.Tensor)
    gradients = torch.autograd.grad(out, (q, k, v), inputs.dout.float())
    whole = run(inputs)
    for name, got in zip(("dq", "dk", "dv"), gradients, strict=True):
        expected = getattr(whole, name)
        bound = 3e-2 * float(expected.abs().max())
        torch.testing.assert_close(got, expected, rtol=0, atol=bound)
        if name != "dv":  # without the part through lse the error is of the size of the gradient itself
            assert expected.abs().max() > 10 * bound


@pytest.mark.parametrize(
    ("argument", "keywords"),
    [
        ("q", {"dtype": torch.float8_e4m3fn}),
        ("q", {"dtype": torch.float8_e4m3fn, "dropout_p": 0.1}),
        ("alibi_slopes", {"alibi_slopes": (2, 3)}),
        ("sinks", {"sinks": (1,)}),
        ("seqused_k", {"seqused_k": (3,)}),
        ("seqused_q", {"seqused_q": (1,)}),
        ("rng_state", {"dropout_p": 0.1, "rng_state": (3,)}),
    ],
)
def test_refused_with_a_message(path: Path, rng: torch.Generator, argument: str, keywords: dict[str, Any]) -> None:
    """fp8 input, fp8 with dropout, tensors of the wrong shape: an error that names the argument, never ignored."""
    dtypes = {"seqused_k": torch.int32, "seqused_q": torch.int32, "rng_state": torch.int64}
    arguments = {
        name: torch.zeros(value, dtype=dtypes.get(name, torch.float32), device=path.device)
        if isinstance(value, tuple)
        else value
        for name, value in keywords.items()
    }
    dtype = arguments.pop("dtype", torch.bfloat16)
    x = torch.randn(2, 16, 2, 64, generator=rng).to(dtype).to(path.device)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"^flash_ext: {argument} "):
        torch.ops.flash_ext.fwd(x, x, x, **arguments)
