"""Contract: any strides, of gradients too, give the numbers of contiguous copies; offsets and grids of any size."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from helpers.accuracy import assert_accurate, assert_lse, assert_same_bits
from helpers.cases import Case, Inputs, make_inputs
from helpers.check import Results, check, run
from helpers.memory import LAYOUTS, Guards
from helpers.paths import Path
from helpers.tables import for_cases

BASE = Case(lengths_q=(40, 40), lengths_k=(75, 75), heads=(4, 2), head_dims=(64, 32), deterministic=True)
DLSE_LAYOUTS = ("rows_heads", "every_second", "expanded")


def _contiguous(inputs: Inputs) -> Inputs:
    """The same numbers in plain contiguous tensors."""
    dlse = None if inputs.dlse is None else inputs.dlse.contiguous().clone()
    q, k, v, dout = (x.contiguous().clone() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    guards = Guards(torch.Generator(), inputs.q.device)
    return Inputs(
        inputs.case, q, k, v, dout, dlse, inputs.keywords, inputs.segments, guards, inputs.slack_q, inputs.slack_k
    )


def _assert_same(got: Results, expected: Results, direction: str) -> None:
    for name in ("out", "lse") if direction == "forward" else ("out", "lse", "dq", "dk", "dv"):
        assert_same_bits(name, getattr(got, name), getattr(expected, name))


@for_cases(
    BASE.with_(varlen=varlen, layouts=((name, layout),))
    for name, layout, varlen in product(("q", "k", "v", "dout"), sorted(set(LAYOUTS) - {"contiguous"}), (False, True))
)
def test_layout_of_one_tensor(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """Each tensor in each layout: transposed, sliced, expanded, last dimension not contiguous, base misaligned."""
    inputs = make_inputs(case, path.device, rng)
    _assert_same(run(inputs, direction), run(_contiguous(inputs), direction), direction)


@for_cases(
    [BASE.with_(varlen=varlen, layouts=(("dlse", layout),)) for layout, varlen in product(DLSE_LAYOUTS, (False, True))],
    directions=["backward"],
)
def test_layout_of_dlse(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """The gradient of lse: transposed, strided, one number expanded."""
    inputs = make_inputs(case, path.device, rng)
    _assert_same(run(inputs, direction), run(_contiguous(inputs), direction), direction)


@for_cases(
    BASE.with_(
        varlen=varlen,
        slack=(2, 3, 1),
        layouts=tuple((name, layout) for name in ("q", "k", "v", "dout")),
        sinks=torch.float16,
        causal=True,
    )
    for layout in ("heads_first", "sliced_heads", "qkv_packed", "odd_rows", "misaligned", "every_second", "dim_swapped")
    for varlen in (False, True)
)
def test_layout_with_poisoned_gaps(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """All tensors in one layout, with slack rows, against the oracle; what lies in the gaps of a view is NaN."""
    check(path, rng, case, direction, through="autograd" if direction == "backward" else "operator")


@pytest.mark.needs("backward", "deterministic")
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "heads_first", "rows_first", "odd_rows", "misaligned", "dim_swapped"])
def test_layout_of_saved_results(path: Path, rng: torch.Generator, varlen: bool, layout: str) -> None:
    """out and lse as the backward gets them may be strided too: a framework may have kept them in its own layout."""
    inputs = make_inputs(BASE.with_(varlen=varlen), path.device, rng)
    inputs.guards.freeze()
    tensors = inputs.q, inputs.k, inputs.v
    out, lse = torch.ops.flash_ext.fwd(*tensors, **inputs.keywords)
    expected = torch.ops.flash_ext.bwd(inputs.dout, inputs.dlse, *tensors, out, lse, **inputs.keywords)
    strided_out = inputs.guards.place("out", out.cpu(), layout)
    strided_lse = inputs.guards.place("lse", lse.cpu().unsqueeze(-1), "sliced_dim").select(-1, 0)
    inputs.guards.freeze()
    got = torch.ops.flash_ext.bwd(inputs.dout, inputs.dlse, *tensors, strided_out, strided_lse, **inputs.keywords)
    inputs.guards.check()
    for name, tensor, other in zip(("dq", "dk", "dv"), got[:3], expected[:3], strict=True):
        assert_same_bits(name, tensor, other)


@pytest.mark.sanitizer
@pytest.mark.needs("backward", "deterministic")
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(
    "layout", ["contiguous", "heads_first", "rows_first", "sliced_heads", "sliced_rows", "qkv_packed", "sliced_dim"]
)
def test_gradients_into_given_views(path: Path, rng: torch.Generator, varlen: bool, layout: str) -> None:
    """Gradients written through strided views, as the packed functions do: nothing beside the views changes."""
    from flash_ext import dispatch

    inputs = make_inputs(BASE.with_(varlen=varlen, slack=(2, 3, 4)), path.device, rng)
    expected = run(inputs)
    targets = {}
    for name, like in (("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v)):
        guards = Guards(rng, path.device)
        target = guards.place(name, torch.full(like.shape, torch.nan, dtype=like.dtype), layout)
        guards.freeze()
        targets[name] = (guards, target)
    given: Any = {name: target for name, (_, target) in targets.items()}
    got = dispatch.backward(
        inputs.dout, inputs.dlse, inputs.q, inputs.k, inputs.v, expected.out, expected.lse, **inputs.keywords, **given
    )
    for tensor, (name, (guards, target)) in zip(got[:3], targets.items(), strict=True):
        assert tensor.data_ptr() == target.data_ptr() and tensor.stride() == target.stride()
        assert_same_bits(name, target, getattr(expected, name))
        guards.check_outside(target)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_explain_says_what_is_packed(path: Path, rng: torch.Generator, name: str) -> None:
    """No copy if the last dimension is contiguous, the base aligned to 16 bytes and the strides multiples of them."""
    import flash_ext

    packed = {"odd_rows", "misaligned", "dim_swapped"} if path.kind != "cpu" else set()
    for layout in (
        "contiguous",
        "heads_first",
        "sliced_dim",
        "expanded_batch",
        "odd_rows",
        "misaligned",
        "dim_swapped",
    ):
        inputs = make_inputs(BASE.with_(layouts=((name, layout),)), path.device, rng)
        explanation = flash_ext.explain(inputs.q, inputs.k, inputs.v)
        assert explanation.path == path.library
        assert set(explanation.copies) == ({name} if layout in packed else set()), f"{layout}: {explanation}"


# ---------------------------------------------------------------------------------------------------------------------
# Size.


def _far_apart(values: torch.Tensor, axis: int, stride: int) -> torch.Tensor:
    """A copy whose indices along an axis lie ``stride`` elements apart; memory that is not touched is not committed."""
    strides = list(values.contiguous().stride())
    strides[axis] = stride
    extent = sum((size - 1) * step for size, step in zip(values.shape, strides, strict=True)) + 1
    far = torch.empty(extent, dtype=values.dtype, device=values.device).as_strided(values.shape, strides)
    return far.copy_(values)


@pytest.mark.needs("backward", "deterministic")
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("sign_bit", [31, 32])
def test_offsets_beyond_32_bits(path: Path, rng: torch.Generator, name: str, axis: int, sign_bit: int) -> None:
    """Batch, row and head strides that put elements 2^31 and more from the first one."""
    case = Case(lengths_q=(3, 3), lengths_k=(3, 3), heads=(3, 3), head_dims=(64, 64), deterministic=True)
    inputs = make_inputs(case, path.device, rng)
    expected = run(inputs)
    extent = getattr(inputs, name).shape[axis]
    stride = 2**sign_bit // (extent - 1) + 64
    setattr(inputs, name, _far_apart(getattr(inputs, name), axis, stride // 64 * 64))
    _assert_same(run(inputs), expected, "backward")


# Batch x heads or row blocks beyond what the y and z dimensions of a CUDA grid hold (65,535).
@pytest.mark.large("emulated")
@pytest.mark.needs("backward")
@pytest.mark.parametrize(
    ("batch", "heads", "rows", "keys"),
    [(70_000, 1, 2, 3), (2, 66_000, 1, 2), (300, 300, 1, 1), (1, 1, 0, 2)],
)
def test_more_than_65535_blocks(path: Path, rng: torch.Generator, batch: int, heads: int, rows: int, keys: int) -> None:
    """Every block of a huge grid computes its own rows: compared with the formula for few keys, in fp32."""
    head_dim = 8
    rows = rows or path.fit(gpu=65_536 * 64 + 3, cpu=100_003, emulated=65_536 * 64 + 3)
    device = path.device
    shape = (batch, rows, heads, head_dim)
    q, dout = (torch.randn(shape, generator=rng).to(torch.bfloat16).to(device) for _ in range(2))
    k, v = (torch.randn((batch, keys, heads, head_dim), generator=rng).to(torch.bfloat16).to(device) for _ in range(2))
    out, lse = torch.ops.flash_ext.fwd(q, k, v)
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * head_dim**-0.5
    p = scores.softmax(-1)
    expected = torch.einsum("bhij,bjhd->bihd", p, v.float())
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2e-2)
    del scores
    dq, dk, dv, _ = torch.ops.flash_ext.bwd(dout, None, q, k, v, out, lse)
    torch.testing.assert_close(
        dv.float(), torch.einsum("bhij,bihd->bjhd", p, dout.float()), rtol=2e-2, atol=_sum_bound(rows)
    )
    dp = torch.einsum("bihd,bjhd->bhij", dout.float(), v.float())
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * head_dim**-0.5
    torch.testing.assert_close(dq.float(), torch.einsum("bhij,bjhd->bihd", ds, k.float()), rtol=2e-2, atol=6e-2)
    torch.testing.assert_close(
        dk.float(), torch.einsum("bhij,bihd->bjhd", ds, q.float()), rtol=2e-2, atol=_sum_bound(rows)
    )


def _sum_bound(rows: int) -> float:
    """Rounding of that many random terms."""
    return 4e-2 * max(1.0, rows**0.5)


@pytest.mark.large
@pytest.mark.needs("backward")
def test_more_than_2_to_31_elements(path: Path, rng: torch.Generator) -> None:
    """Contiguous tensors of more than 2^31 elements, each row's result where it belongs."""
    batch, rows, heads, head_dim = 2, 2**24 + 64, 1, 64
    device = path.device
    generator = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=rng)))
    q = torch.randn(batch, rows, heads, head_dim, dtype=torch.bfloat16, device=device, generator=generator)
    k, v = (torch.randn(batch, 2, heads, head_dim, dtype=q.dtype, device=device, generator=generator) for _ in range(2))
    out, lse = torch.ops.flash_ext.fwd(q, k, v)
    picks = torch.tensor([0, 1, 2**23, 2**24 - 1, rows - 65, rows - 64, rows - 1])
    pick: Any = (slice(None), picks.to(device))
    from flash_ext import reference

    truth, truth_lse = reference.oracle_fwd(q[pick], k, v)
    assert_accurate("out", out[pick], truth, reference.baseline_fwd(q[pick], k, v)[0])
    assert_lse(lse.transpose(1, 2)[pick].transpose(1, 2), truth_lse)
    assert not (out == 0).all(-1).any(), "rows of out were not written"
    dq, _, _, _ = torch.ops.flash_ext.bwd(q, None, q, k, v, out, lse)
    expected, *_ = reference.oracle_bwd(q[pick], None, q[pick], k, v)
    baseline_out, baseline_lse = reference.baseline_fwd(q[pick], k, v)
    ours, *_ = reference.baseline_bwd(q[pick], None, q[pick], k, v, baseline_out, baseline_lse)
    assert_accurate("dq", dq[pick], expected, ours, magnitude=expected.abs().amax())
