"""Contract: memory outside the sequences may hold anything, changes nothing and is never written; inside, NaN shows."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers.accuracy import assert_same_bits
from helpers.cases import Case, make_inputs, visible
from helpers.check import check, run
from helpers.paths import Path
from helpers.tables import for_cases

BASE = Case(lengths_q=(70, 3, 130), lengths_k=(40, 200, 129), heads=(4, 2), head_dims=(64, 64))

# Rows before the first sequence, at the end of each (through seqused), after the last: parts of a tile, whole tiles.
SLACKS = [(0, 0, 0), (5, 0, 0), (0, 0, 7), (0, 3, 0), (130, 0, 300), (1, 140, 1)]


@for_cases(
    BASE.with_(varlen=varlen, slack=slack, causal=causal, dtype=dtype)
    for slack in SLACKS
    for varlen in (False, True)
    for causal in (False, True)
    for dtype in (torch.float16, torch.bfloat16)
    if varlen or slack[0] == slack[2] == 0 or slack[1]
)
def test_slack(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """NaN, Inf and huge numbers before, between and after sequences, in q, k, v, dout and dlse."""
    check(path, rng, case, direction)


@for_cases(
    BASE.with_(varlen=varlen, slack=(2, 3, 4), **options)
    for varlen in (False, True)
    for options in (
        {"sinks": torch.float32},
        {"softcap": 5.0},
        {"alibi": "batch"},
        {"alibi": "heads", "causal": True},
        {"window": (20, 30)},
        {"dropout_p": 0.3},
        {"deterministic": True, "causal": True},
        {"softmax_scale": -0.5},
        {"head_dims": (192, 128)},
        {"head_dims": (40, 24)},
    )
)
def test_slack_with_options(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """The same under each option: no mask or bias turns a NaN outside into a number, or a number into a result."""
    check(path, rng, case, direction)


@pytest.mark.sanitizer
@for_cases(
    Case(
        lengths_q=tuple(sq for sq, _ in pairs),
        lengths_k=tuple(sk for _, sk in pairs),
        heads=(4, 2),
        varlen=varlen,
        slack=(0, 1, 0),
        causal=causal,
    )
    for pairs in ([(0, 0), (0, 5), (5, 0), (5, 5)], [(64, 63), (64, 64), (64, 65), (1, 128), (127, 1)])
    for varlen, causal in product((False, True), repeat=2)
)
def test_seqused_ends_inside_and_at_a_tile(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """``seqused`` of 0, of a tile less one, a tile, a tile and one; positions and masks count the used rows."""
    check(path, rng, case, direction)


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.needs("seqused")
def test_seqused_on_one_side(path: Path, rng: torch.Generator, side: str, varlen: bool, direction: str) -> None:
    """Only ``seqused_q``, or only ``seqused_k``: the other side counts whole."""
    case = Case(lengths_q=(60, 60), lengths_k=(80, 80), heads=(2, 1), causal=True)
    if varlen:
        case = case.with_(lengths_q=(50, 70), lengths_k=(90, 100), varlen=True)
    inputs = make_inputs(case, path.device, rng)
    full = case.lengths_q if side == "q" else case.lengths_k
    used = tuple(length - 13 for length in full)
    inputs.keywords[f"seqused_{side}"] = torch.tensor(used, dtype=torch.int32, device=path.device)
    got = run(inputs, direction)
    shorter = case.with_(**{f"lengths_{side}": used})
    for segment, sq, sk in zip(inputs.segments, shorter.lengths_q, shorter.lengths_k, strict=True):
        alone = Case(lengths_q=(sq,), lengths_k=(sk,), heads=(2, 1), causal=True)
        single = make_inputs(alone, path.device, rng)
        q, k, v, dout = (
            inputs.q[segment.q][:sq],
            inputs.k[segment.k][:sk],
            inputs.v[segment.k][:sk],
            inputs.dout[segment.q][:sq],
        )
        assert inputs.dlse is not None
        single.q, single.k, single.v, single.dout = (x.unsqueeze(0) for x in (q, k, v, dout))
        single.dlse = inputs.dlse[segment.lse][:, :sq].unsqueeze(0)
        expected = run(single, direction)
        assert_same_bits("out", got.out[segment.q][:sq], expected.out[0])
        assert_same_bits("lse", got.lse[segment.lse][:, :sq], expected.lse[0])
        assert (got.out[segment.q][sq:] == 0).all() and (got.lse[segment.lse][:, sq:] == -torch.inf).all()
        if direction == "backward":
            assert got.dq is not None and got.dk is not None and got.dv is not None
            assert expected.dq is not None and expected.dk is not None and expected.dv is not None
            for rows, other in (
                (got.dq[segment.q][:sq], expected.dq[0]),
                (got.dk[segment.k][:sk], expected.dk[0]),
                (got.dv[segment.k][:sk], expected.dv[0]),
            ):
                torch.testing.assert_close(rows, other, rtol=2e-2, atol=2e-2)
            for gradient, rest in ((got.dq, (segment.q, sq)), (got.dk, (segment.k, sk)), (got.dv, (segment.k, sk))):
                assert (gradient[rest[0]][rest[1] :] == 0).all()


@pytest.mark.needs("varlen", "seqused")
@pytest.mark.parametrize("varlen", [False, True])
def test_results_do_not_depend_on_slack(path: Path, rng: torch.Generator, varlen: bool) -> None:
    """Poison or zeros outside the sequences: the same bits, forward."""
    case = BASE.with_(varlen=varlen, slack=(9, 20, 11), causal=True)
    state = rng.get_state()
    poisoned = make_inputs(case, path.device, rng)
    got = run(poisoned, "forward")
    rng.set_state(state)
    clean = make_inputs(case, path.device, rng, poison=False)
    for segment in clean.segments:
        clean.q[segment.q] = poisoned.q[segment.q]
        clean.k[segment.k] = poisoned.k[segment.k]
        clean.v[segment.k] = poisoned.v[segment.k]
    expected = run(clean, "forward")
    assert_same_bits("out", got.out, expected.out)
    assert_same_bits("lse", got.lse, expected.lse)


@pytest.mark.parametrize("tensor", ["q", "k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("varlen", [False, True])
def test_nan_inside_is_not_hidden(path: Path, rng: torch.Generator, tensor: str, value: float, varlen: bool) -> None:
    """One bad number in a sequence: every row whose formula uses it shows it; other heads and sequences never do."""
    if varlen and not path.supports("forward", features={"varlen"}):
        varlen = False
    case = Case(lengths_q=(70, 70), lengths_k=(100, 100), heads=(2, 2), varlen=varlen, causal=True)
    inputs = make_inputs(case, path.device, rng)
    clean = run(inputs, "forward")
    segment = inputs.segments[1]
    # Row 40 of q, or key 60: seen by the rows from 30 on; head 1; column 5.
    position = 40 if tensor == "q" else 60
    target = {"q": inputs.q, "k": inputs.k, "v": inputs.v}[tensor]
    target[segment.q if tensor == "q" else segment.k][position, 1, 5] = value
    got = run(inputs, "forward")

    reached = torch.zeros(70, dtype=torch.bool)
    if tensor == "q":
        reached[40] = True
    else:
        reached = visible(case, 1)[:, 60]
    out, lse = got.out[segment.q][:, 1].float().cpu(), got.lse[segment.lse][1].cpu()
    if tensor == "v":
        expected = torch.full((int(reached.sum()),), value)
        assert torch.equal(out[reached][:, 5].nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
        assert torch.equal(lse, clean.lse[segment.lse][1].cpu())
    elif value != value or tensor == "q":
        # q +-Inf against keys of both signs: scores of both infinities, so NaN.
        assert out[reached].isnan().all(), "NaN of a row that sees it is hidden in out"
        assert lse[reached].isnan().all() or (value == value and not lse[reached].isfinite().any())
    else:
        # k +-Inf: the score of key 60 is +-Inf by the sign of q[:, 5]: +Inf gives NaN, -Inf drops the key.
        positive = inputs.q[segment.q][:, 1, 5].float().cpu() * value > 0
        assert out[reached & positive].isnan().all(), "an infinite score is hidden in out"
        assert not lse[reached & positive].isfinite().any()
        assert out[reached & ~positive].isfinite().all()
    # Elsewhere: the other head, the other sequence.
    assert_same_bits("other head", got.out[segment.q][:, 0], clean.out[segment.q][:, 0])
    assert_same_bits("other sequence", got.out[inputs.segments[0].q], clean.out[inputs.segments[0].q])


@pytest.mark.needs("backward")
@pytest.mark.parametrize("tensor", ["dout", "v"])
def test_nan_inside_reaches_the_gradients(path: Path, rng: torch.Generator, tensor: str) -> None:
    """A NaN in dout or v of a sequence shows in the gradients of that head and batch, and nowhere else."""
    inputs = make_inputs(Case(lengths_q=(70, 70), lengths_k=(100, 100), heads=(2, 2)), path.device, rng)
    clean = run(inputs)
    getattr(inputs, tensor)[1, 33, 1, 7] = torch.nan
    got = run(inputs)
    assert got.dq is not None and got.dk is not None and got.dv is not None and clean.dq is not None
    shown = {"dout": [got.dq[1, 33, 1], got.dk[1, :, 1], got.dv[1, :, 1, 7]], "v": [got.dq[1, :, 1], got.dk[1, 33, 1]]}
    for rows in shown[tensor]:
        assert rows.isnan().all(), "a NaN inside is hidden in a gradient"
    for gradient in (got.dq, got.dk, got.dv):
        assert gradient[0].isfinite().all() and gradient[:, :, 0].isfinite().all(), (
            "a NaN leaked to another head or batch"
        )
