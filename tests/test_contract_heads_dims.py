"""Contract: every head dim from 8 to 256, pairs of them, both dtypes, any grouping of query heads."""

from __future__ import annotations

import pytest
import torch
from helpers.cases import Case
from helpers.check import check
from helpers.paths import Path
from helpers.tables import for_cases, native_head_dims

# Every step of 8, so every remainder of every tile's head dim.
HEAD_DIMS = range(8, 257, 8)
# Native pairs, pairs that run on a larger tile, and v wider than q.
PAIRS = [
    *((192, 128), (64, 128), (128, 64), (8, 256), (256, 8), (72, 40)),
    *((96, 160), (184, 120), (200, 128), (40, 72), (96, 64), (64, 96)),
]
GROUPS = [(1, 1), (2, 1), (3, 1), (3, 3), (4, 2), (6, 3), (5, 1), (8, 1), (12, 4), (7, 7), (16, 2), (71, 1)]


@for_cases(
    Case(lengths_q=(70,), lengths_k=(100,), heads=(2, 1), head_dims=(d, d), dtype=dtype, causal=True)
    for i, d in enumerate(HEAD_DIMS)
    for dtype in (
        (torch.float16, torch.bfloat16) if d in (64, 128, 256) else (torch.float16, torch.bfloat16)[i % 2 :][:1]
    )
)
def test_head_dims(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """8 to 256 in steps of 8; the default scale is 1 / sqrt(head_dim) of each."""
    check(path, rng, case, direction)


@for_cases(
    Case(lengths_q=(3, 70), lengths_k=(130, 60), heads=(4, 2), head_dims=pair, dtype=dtype, varlen=varlen)
    for pair in PAIRS
    for dtype, varlen in ((torch.float16, False), (torch.bfloat16, True))
)
def test_pairs_of_head_dims(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """Another head dim for V than for Q and K; no column of the padding of a tile reaches a result."""
    check(path, rng, case, direction)


@for_cases(
    Case(lengths_q=(33, 33), lengths_k=(80, 80), heads=heads, head_dims=(32, 32), causal=True, sinks=torch.float32)
    for heads in GROUPS
)
def test_groups_of_heads(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """Query heads a multiple of the key/value heads: consecutive ones share a key head, dk and dv sum over them."""
    check(path, rng, case, direction)


@for_cases(
    Case(lengths_q=(1,), lengths_k=(sk,), heads=(heads, heads_k), head_dims=(d, d), causal=True)
    for sk in (1, 200)
    for heads, heads_k, d in ((8, 1, 64), (8, 8, 128), (32, 4, 64))
)
def test_one_query(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """One query row: the shape of decoding."""
    check(path, rng, case, direction)


@pytest.mark.sanitizer
@for_cases(
    Case(
        lengths_q=(65, 130),
        lengths_k=(129, 70),
        heads=(4, 2),
        head_dims=pair,
        varlen=varlen,
        causal=causal,
        slack=(1, 2, 3),
    )
    for pair in native_head_dims()
    for varlen in (False, True)
    for causal in (False, True)
)
def test_native_tiles(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """Each native pair of head dims with ragged ends: small enough to run under compute-sanitizer."""
    check(path, rng, case, direction)
