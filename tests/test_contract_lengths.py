"""Contract: empty and uneven sequences, max_seqlen as a mere hint, bad lengths on the device."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from itertools import product
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from helpers.accuracy import assert_same_bits
from helpers.allocations import GuardedAllocations
from helpers.cases import Case, make_inputs
from helpers.check import check, run
from helpers.paths import Path
from helpers.tables import for_cases
from ptx_emulator.settings import environment

# (query lengths, key lengths) of packed sequences.
UNEVEN = [
    ((1,), (1,)),
    ((0,), (0,)),
    ((0, 0, 0), (0, 0, 0)),
    ((0,), (10,)),
    ((10,), (0,)),
    ((0, 5, 0, 0, 7, 0), (3, 5, 0, 4, 0, 9)),
    ((1, 1, 1, 1), (5, 128, 0, 129)),
    ((200, 1, 64, 3), (1, 200, 64, 0)),
    ((65,) * 9, (66,) * 9),
    (tuple(range(20)), tuple(range(20, 0, -1))),
]


@for_cases(
    Case(lengths_q=q, lengths_k=k, heads=(2, 1), head_dims=(64, 64), varlen=True, causal=causal, sinks=sinks)
    for q, k in UNEVEN
    for causal, sinks in ((False, None), (True, None), (True, torch.float32))
)
def test_uneven_sequences(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """Sequences without queries or keys at the start, in between and at the end; each sequence is by itself."""
    check(path, rng, case, direction)


@for_cases(
    Case(lengths_q=(192,), lengths_k=(keys,), heads=(2, 1), head_dims=(d, d)) for keys in (640, 601) for d in (64, 128)
)
def test_last_tile_half_full(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """A warpgroup without rows skips every key block of its tile, in step with its neighbours."""
    check(path, rng, case, direction)


@for_cases(
    [
        *(
            Case(lengths_q=(2100,), lengths_k=(keys,), heads=(2, 1), head_dims=(d, d), causal=causal)
            for keys, causal in ((130, False), (300, True))
            for d in (64, 128)
        ),
        *(
            Case(lengths_q=q, lengths_k=(130, 70), heads=(2, 1), head_dims=(64, 64), varlen=True)
            for q in ((2100, 64), (2100, 2100))
        ),
    ]
)
def test_many_queries(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """The sm90 backward up to head dim 128 clears dq beyond 2048 queries; up to there whoever comes first stores."""
    check(path, rng, case, direction)


def banded_attention(inputs: list[torch.Tensor], window_left: int, rows: int = 512) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv of one head in fp64 from q, k, v, dout (rows, head dim), of a causal window, by blocks."""
    q, k, v, dout = (each.double().detach() for each in inputs)
    for each in (q, k, v):
        each.requires_grad_()
    outs, lses = [], []
    for first in range(0, len(q), rows):
        key = max(0, first - window_left)
        scores = q[first : first + rows] @ k[key : first + rows].T * q.shape[1] ** -0.5
        distance = torch.arange(first, first + len(scores))[:, None] - torch.arange(key, key + scores.shape[1])
        scores = scores.masked_fill((distance < 0) | (distance > window_left), float("-inf"))
        lses.append(scores.logsumexp(1))
        outs.append(scores.softmax(1) @ v[key : first + rows])
    out = torch.cat(outs)
    return [out.detach(), torch.cat(lses).detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.needs("backward", "causal", "window", head_dims=(256, 256))
def test_causal_sections(path: Path, rng: torch.Generator) -> None:
    """8192 rows of head dim 256: a grid takes so many key tiles of one head, a section, before those of the next."""
    rows, heads, head_dim, window_left = path.fit(gpu=8192, cpu=1024, emulated=8192), 7, 256, 40
    shape = (1, rows, heads, head_dim)
    q, k, v, dout = (torch.randn(shape, generator=rng).to(torch.bfloat16) for _ in range(4))
    expected = [
        torch.stack(each, -2)[None]
        for each in zip(
            *(
                [head if head.dim() > 1 else head[:, None] for head in banded_attention(of_head, window_left)]
                for of_head in ([each[0, :, head] for each in (q, k, v, dout)] for head in range(heads))
            ),
            strict=True,
        )
    ]
    out, lse = expected[0].to(torch.bfloat16), expected[1][..., 0].transpose(1, 2).float().contiguous()
    q, k, v, dout, out, lse = (each.to(path.device) for each in (q, k, v, dout, out, lse))
    # Some 900 CTAs: in the emulator once, without the checker.
    with environment(FLASH_EXT_EMULATOR_SCHEDULE="eager", FLASH_EXT_EMULATOR_CHECK="0"):
        gradients = torch.ops.flash_ext.bwd(dout, None, q, k, v, out, lse, window_left=window_left, window_right=0)
    for name, actual, exact in zip(("dq", "dk", "dv"), gradients, expected[2:], strict=False):
        difference = (actual.cpu().double() - exact).square().sum((0, 1, 3))
        error = (difference / exact.square().sum((0, 1, 3))).sqrt()
        assert (error < 2**-8).all(), f"{name}: {error.tolist()}, head by head"


@for_cases(
    Case(lengths_q=q, lengths_k=k, heads=(2, 1), causal=causal, sinks=sinks, dlse=dlse)
    for q, k in (((), ()), ((0, 0), (5, 5)), ((5, 5), (0, 0)), ((0,), (0,)))
    for causal, sinks, dlse in ((False, None, True), (True, torch.float32, True), (False, torch.bfloat16, False))
)
def test_dense_without_rows(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """Batch 0, seqlen_q 0, seqlen_k 0: empty outputs, or zeros; with a sink lse is the sink and dlse reaches it."""
    check(path, rng, case, direction)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.needs("varlen")
def test_varlen_without_sequences(path: Path, sinks: bool) -> None:
    """cu_seqlens of one element: no sequence at all, every row is slack."""
    device = path.device
    cu_seqlens = torch.tensor([0], dtype=torch.int32, device=device)
    q = torch.full((3, 2, 64), torch.nan, dtype=torch.bfloat16, device=device)
    keywords: dict[str, Any] = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    if sinks:
        keywords["sinks"] = torch.ones(2, device=device)
    out, lse = torch.ops.flash_ext.fwd(q, q, q, **keywords)
    assert (out == 0).all() and (lse == -torch.inf).all()
    if path.supports("backward", features={"varlen"}):
        dq, dk, dv, dsinks = torch.ops.flash_ext.bwd(q, None, q, q, q, out, lse, **keywords)
        for gradient in (dq, dk, dv, dsinks):
            assert (gradient == 0).all()


@for_cases(
    Case(
        lengths_q=(70, 0, 130),
        lengths_k=(200, 5, 90),
        heads=(2, 1),
        varlen=True,
        causal=causal,
        hints=hints,
        slack=slack,
    )
    for causal in (False, True)
    for hints in ("exact", "none", "short")
    for slack in ((0, 0, 0), (3, 4, 5))
)
def test_hints(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """max_seqlen may be right, missing or too small: grids come from shapes, no sequence is cut."""
    check(path, rng, case, direction)


def test_hints_change_no_bit(path: Path, rng: torch.Generator) -> None:
    """Any hint gives the same bits, 0 and a huge one too."""
    case = Case(
        lengths_q=(70, 0, 130),
        lengths_k=(200, 5, 90),
        heads=(2, 1),
        varlen=path.supports("forward", features={"varlen"}),
    )
    case = case if case.varlen else case.with_(lengths_q=(70,), lengths_k=(90,))
    inputs = make_inputs(case, path.device, rng)
    expected = run(inputs, "forward")
    for hint in (None, 0, 1, 10**6):
        inputs.keywords |= {"max_seqlen_q": hint, "max_seqlen_k": hint}
        got = run(inputs, "forward")
        assert_same_bits("out", got.out, expected.out)
        assert_same_bits("lse", got.lse, expected.lse)


BAD_LENGTHS = {
    "descending": [0, 90, 40, 120],
    "all descending": [120, 80, 40, 0],
    "negative start": [-50, 30, 60, 120],
    "negative end": [0, 30, 60, -1],
    "beyond the end": [0, 30, 60, 100_000],
    "all beyond the end": [10**9, 10**9 + 5, 2**31 - 3, 2**31 - 1],
    "extreme": [-(2**31), 2**31 - 1, -(2**31), 2**31 - 1],
    "overlapping": [0, 100, 20, 110],
}


@pytest.mark.sanitizer
@pytest.mark.needs("varlen")
@pytest.mark.usefixtures("overlapping_rows")
@pytest.mark.parametrize("name", BAD_LENGTHS)
@pytest.mark.parametrize("side", ["q", "k", "both"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("causal", [False, True])
def test_bad_cu_seqlens_touch_nothing_outside(
    path: Path,
    rng: torch.Generator,
    guarded_outputs: GuardedAllocations,
    name: str,
    side: str,
    direction: str,
    causal: bool,
) -> None:
    """Wrong rows, never an access outside the tensors: guard bands around arguments and results stay as they were."""
    case = Case(lengths_q=(40, 50, 30), lengths_k=(40, 50, 30), heads=(2, 1), varlen=True, causal=causal)
    inputs = make_inputs(case, path.device, rng)
    for of in ("q", "k") if side == "both" else (side,):
        inputs.keywords[f"cu_seqlens_{of}"] = torch.tensor(BAD_LENGTHS[name], dtype=torch.int32, device=path.device)
    results = run(inputs, direction)
    assert results.out.shape == inputs.q.shape
    guarded_outputs.check_surroundings()


@pytest.mark.sanitizer
@pytest.mark.usefixtures("overlapping_rows")
@pytest.mark.parametrize("side", ["q", "k", "both"])
@pytest.mark.parametrize(
    "lengths",
    [
        [0, 300, 40, 400],
        [400, 300, 0, 0],
        [0, 400, 0, 400],
        [10, 5, 390, -7],
        [0, 400, 400, 390],
        [0, 256, 10, 400],  # of queries: a slot that looks empty is another sequence's
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "head_dim",
    [
        pytest.param(d, marks=pytest.mark.needs("backward", "varlen", "deterministic", head_dims=(d, d)))
        for d in (64, 256)
    ],
)
def test_backward_ends_with_bad_cu_seqlens(
    path: Path,
    rng: torch.Generator,
    guarded_outputs: GuardedAllocations,
    lengths: list[int],
    side: str,
    head_dim: int,
    deterministic: bool,
) -> None:
    """Key tiles add to dq in turns, or behind the first; those that such lengths hide have no turn, and nobody may wait
    for them, nor for whoever seems to have come first to a query tile that is hidden."""
    case = Case(
        lengths_q=(200, 160, 40), lengths_k=(180, 120, 100), heads=(2, 1), head_dims=(head_dim, head_dim), varlen=True
    )
    inputs = make_inputs(case, path.device, rng)
    inputs.keywords["deterministic"] = deterministic  # not of the case: the order of additions is not kept here
    for of in ("q", "k") if side == "both" else (side,):
        inputs.keywords[f"cu_seqlens_{of}"] = torch.tensor(lengths, dtype=torch.int32, device=path.device)
    results = run(inputs, "backward")
    assert results.dq is not None
    assert results.dq.shape == inputs.q.shape
    guarded_outputs.check_surroundings()


@pytest.mark.needs("seqused")
@pytest.mark.parametrize("used", [(-1, -(2**31)), (1000, 2**31 - 1), (-5, 41)])
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_bad_seqused_is_clamped(
    path: Path,
    rng: torch.Generator,
    guarded_outputs: GuardedAllocations,
    used: tuple[int, int],
    varlen: bool,
    direction: str,
) -> None:
    """A used length below 0 counts as 0, one beyond the sequence as the whole sequence; nothing outside is touched."""
    case = Case(lengths_q=(40, 40), lengths_k=(60, 60), heads=(2, 1), varlen=varlen)
    inputs = make_inputs(case, path.device, rng)
    tensor = torch.tensor(used, dtype=torch.int32, device=path.device)
    inputs.keywords |= {"seqused_q": tensor, "seqused_k": tensor}
    got = run(inputs, direction)
    guarded_outputs.check_surroundings()
    inputs.keywords |= {
        "seqused_q": torch.tensor([min(max(rows, 0), 40) for rows in used], dtype=torch.int32, device=path.device),
        "seqused_k": torch.tensor([min(max(rows, 0), 60) for rows in used], dtype=torch.int32, device=path.device),
    }
    expected = run(inputs, direction)
    assert_same_bits("out", got.out, expected.out)
    assert_same_bits("lse", got.lse, expected.lse)


@pytest.mark.sanitizer
@pytest.mark.needs("varlen")
@pytest.mark.parametrize(("slack", "causal", "d"), list(product([(0, 0, 0), (3, 5, 70)], [False, True], [32, 64, 128])))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_results_end_where_they_should(
    path: Path,
    rng: torch.Generator,
    guarded_outputs: GuardedAllocations,
    slack: tuple[int, int, int],
    causal: bool,
    d: int,
    direction: str,
) -> None:
    """Good lengths with ragged ends: nothing is written beside the outputs and workspaces, before or after them."""
    for varlen in (False, True):
        case = Case(
            lengths_q=(70, 1, 130),
            lengths_k=(65, 200, 3),
            heads=(3, 1),
            head_dims=(d, d),
            varlen=varlen,
            slack=slack,
            causal=causal,
        )
        if path.supports(direction, case.dtype, case.head_dims, case.features):
            run(make_inputs(case, path.device, rng), direction)
            guarded_outputs.check_surroundings()


CHECKED = """
    import torch, flash_ext
    device = {device!r}
    q = torch.randn(10, 2, 64, device=device).to(torch.bfloat16)
    cu = lambda *x: torch.tensor(x, dtype=torch.int32, device=device)
    good = cu(0, 4, 10)
    flash_ext.flash_attn_varlen_func(q, q, q, good, good, 6, 6)
    for bad in (cu(0, 7, 5), cu(0, 4, 11), cu(-1, 4, 10)):
        for arguments in ((bad, good), (good, bad)):
            name = "cu_seqlens_q" if arguments[0] is bad else "cu_seqlens_k"
            try:
                flash_ext.flash_attn_varlen_func(q, q, q, *arguments, 6, 6)
            except ValueError as error:
                assert str(error).startswith("flash_ext: " + name), error
            else:
                raise SystemExit(f"{{name}}={{bad.tolist()}} was not refused")
    d = q.view(1, 10, 2, 64)
    for used in (cu(-1), cu(11)):
        for name in ("seqused_q", "seqused_k"):
            try:
                flash_ext.flash_attn_func(d, d, d, **{{name: used}})
            except ValueError as error:
                assert str(error).startswith("flash_ext: " + name), error
            else:
                raise SystemExit(f"{{name}}={{used.tolist()}} was not refused")
    flash_ext.flash_attn_func(d, d, d, seqused_q=cu(10), seqused_k=cu(0))
    print("checked")
"""


@pytest.mark.needs("varlen", "seqused")
def test_check_variable_refuses_bad_lengths(path: Path) -> None:
    """FLASH_EXT_CHECK=1 reads the lengths and names the argument that is wrong."""
    script = textwrap.dedent(CHECKED.format(device=str(path.device)))
    environment = os.environ | {"FLASH_EXT_CHECK": "1"}
    root = FilePath(__file__).resolve().parents[1]
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0 and result.stdout.strip() == "checked", result.stdout + result.stderr
