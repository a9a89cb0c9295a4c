"""Contract: what a score is, and which keys a row sees: scale, softcap, ALiBi, causal, window, sequence ends."""

from __future__ import annotations

import pytest
import torch
from helpers.cases import Case, make_inputs, visible
from helpers.check import check, run, verify
from helpers.paths import Path
from helpers.tables import for_cases

# Lengths around the edges of every tile shape: 1, one less, equal, one more, several tiles.
EDGES = [(1, 1), (1, 300), (300, 1), (63, 65), (64, 64), (65, 63), (127, 129), (128, 128), (129, 127), (193, 257)]
BASE = Case(heads=(4, 2))


def _lengths(sq: int, sk: int) -> Case:
    return BASE.with_(lengths_q=(sq,), lengths_k=(sk,))


@for_cases(_lengths(*edge).with_(causal=causal) for edge in EDGES for causal in (False, True))
def test_lengths_and_causal(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """Every remainder of a tile; ``causal`` keeps j <= i + sk - sq, aligned to the last key."""
    check(path, rng, case, direction)


WINDOWS = [(0, 0), (5, 0), (0, 5), (64, 64), (32, 64), (-1, 0), (0, -1), (-1, 7), (7, -1), (1000, 1000)]


@for_cases(
    _lengths(*edge).with_(window=window, causal=causal)
    for edge in [(129, 129), (70, 200), (200, 70)]
    for window in WINDOWS
    for causal in (False, True)
)
def test_windows(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """-1 is unbounded, 0 is a real bound, causal with a window intersects both."""
    check(path, rng, case, direction)


@for_cases(
    BASE.with_(lengths_q=(sq,), lengths_k=(sk,), softcap=softcap, causal=causal, magnitude=magnitude)
    for sq, sk in [(80, 150), (130, 70)]
    for softcap, magnitude in [(1.0, 1.0), (10.0, 1.0), (30.0, 4.0)]
    for causal in (False, True)
)
def test_softcap(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """score = softcap * tanh(scale * q.k / softcap), also where tanh saturates."""
    check(path, rng, case, direction)


@for_cases(
    BASE.with_(lengths_q=(sq, sq), lengths_k=(sk, sk), alibi=alibi, causal=causal)
    for sq, sk in [(80, 80), (70, 150), (150, 70)]
    for alibi in ("heads", "batch")
    for causal in (False, True)
)
def test_alibi(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """The bias is -slope * |i + sk - sq - j|, when causal too, and it is in lse."""
    check(path, rng, case, direction)


@for_cases(
    BASE.with_(lengths_q=(70,), lengths_k=(130,), softmax_scale=scale, causal=causal, softcap=softcap, sinks=sinks)
    for scale in (0.0, -0.125, -1.0, 1.0, 1e-3)
    for causal in (False, True)
    for softcap, sinks in ((0.0, None), (5.0, torch.float32))
)
def test_scale(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """Any finite scale: zero makes every visible key equal, a negative one turns the order of the keys round."""
    check(path, rng, case, direction)


@pytest.mark.sanitizer
@for_cases(
    BASE.with_(
        lengths_q=(70, 131),
        lengths_k=(130, 100),
        slack=(3, 2, 4),
        dtype=dtype,
        varlen=varlen,
        causal=causal,
        window=window,
        softcap=8.0,
        alibi="batch",
        sinks=torch.bfloat16,
        dropout_p=0.2,
        deterministic=True,
    )
    for dtype in (torch.float16, torch.bfloat16)
    for varlen in (False, True)
    for causal in (False, True)
    for window in ((-1, -1), (40, 20))
)
def test_everything_at_once(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """Every option in one call: the order in which they act is the contract's."""
    check(path, rng, case, direction)


@for_cases(
    BASE.with_(lengths_q=(150,), lengths_k=(190,), dtype=dtype, magnitude=magnitude, causal=True)
    for dtype in (torch.float16, torch.bfloat16)
    for magnitude in (3.0, 8.0)
)
def test_peaked_softmax(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """Large logits: nearly all weight on one key, a running maximum that jumps."""
    check(path, rng, case, direction)


@pytest.mark.parametrize("rise", [3.0, 30.0, 1000.0, -1000.0])
@for_cases(
    [
        BASE.with_(lengths_q=(140,), lengths_k=(530,), head_dims=head_dims, heads=(2, 1), dtype=dtype, causal=causal)
        for head_dims, dtype, causal in [
            ((64, 64), torch.float16, False),
            ((64, 64), torch.bfloat16, True),
            ((96, 96), torch.bfloat16, False),
            ((128, 128), torch.bfloat16, True),
            ((192, 128), torch.float16, False),
            ((256, 256), torch.bfloat16, False),
        ]
    ],
    directions=("forward",),
)
def test_rising_scores(path: Path, rng: torch.Generator, case: Case, direction: str, rise: float) -> None:
    """Half of the rows, at random, see scores that rise by this much every 100 keys, the others scores that fall: the
    running maximum of a row, its neighbours' and the next block's have nothing to do with each other."""
    inputs = make_inputs(case, path.device, rng)
    sign = torch.randint(0, 2, inputs.q.shape[:-1], generator=rng, device="cpu").to(inputs.q) * 2 - 1
    keys = torch.arange(inputs.k.shape[1], device=inputs.k.device).to(inputs.k.dtype) / 100
    inputs.q[..., 0] = sign * 8
    inputs.k[..., 0] = keys[None, :, None] * (rise / case.scale / 8)
    results = run(inputs, direction)
    verify(inputs, results, direction)


@pytest.mark.parametrize("window", [(-1, 0), (1000, 0), (149, 0)])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_window_equal_to_causal(path: Path, rng: torch.Generator, window: tuple[int, int], direction: str) -> None:
    """A window that cuts what ``causal`` cuts gives what ``causal`` gives."""
    inputs = make_inputs(BASE.with_(lengths_q=(150,), lengths_k=(150,), causal=True), path.device, rng)
    as_causal = dict(inputs.keywords)
    inputs.keywords |= {"causal": False, "window_left": window[0], "window_right": window[1]}
    results = run(inputs, direction)
    inputs.keywords = as_causal
    verify(inputs, results, direction)


def test_unbounded_window_equals_none(path: Path, rng: torch.Generator) -> None:
    """Bounds wider than the sequences, up to the largest int32, change nothing and do not overflow."""
    case = BASE.with_(lengths_q=(100,), lengths_k=(140,))
    inputs = make_inputs(case, path.device, rng)
    plain = run(inputs, "forward")
    for bound in (240, 2**31 - 1):
        inputs.keywords |= {"window_left": bound, "window_right": bound}
        wide = run(inputs, "forward")
        torch.testing.assert_close(wide.out, plain.out)
        torch.testing.assert_close(wide.lse, plain.lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("sq", "sk"), [(5, 9), (9, 5), (70, 200), (200, 70)])
@pytest.mark.parametrize("window", [(-1, -1), (2, 3), (0, 0), (-1, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_seen_keys_one_by_one(
    path: Path, rng: torch.Generator, sq: int, sk: int, window: tuple[int, int], causal: bool
) -> None:
    """With scale 0 and V a staircase of ones, out counts the seen keys: the mask itself, without an oracle."""
    case = Case(
        lengths_q=(sq,),
        lengths_k=(sk,),
        heads=(1, 1),
        head_dims=(64, 64),
        dtype=torch.float16,
        window=window,
        causal=causal,
        softmax_scale=0.0,
    )
    if not path.supports("forward", case.dtype, case.head_dims, case.features):
        case = case.with_(softmax_scale=1e-30)
    seen = visible(case, 0).float()
    inputs = make_inputs(case, path.device, rng)
    for first in range(0, sk, 64):
        keys = min(64, sk - first)
        v = torch.zeros(1, sk, 1, 64, dtype=torch.float16)
        v[0, first : first + keys, 0, :keys] = torch.eye(keys)
        inputs.v = v.to(path.device)
        out = run(inputs, "forward").out[0, :, 0, :keys].float().cpu()
        expected = seen / seen.sum(1, keepdim=True).clamp_min(1.0)
        torch.testing.assert_close(out, expected[:, first : first + keys], rtol=2e-3, atol=1e-6)
