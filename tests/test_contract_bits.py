"""Contract: deterministic bits, and a row's bits that do not depend on what shares its batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.accuracy import assert_same_bits
from helpers.cases import Case, Inputs, make_inputs
from helpers.check import Results, run
from helpers.paths import Path
from helpers.tables import for_cases

_NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def _assert_repeats(inputs: Inputs, direction: str, times: int, call: Callable[[], Results] | None = None) -> None:
    call = call or (lambda: run(inputs, direction))
    first = call()
    for _ in range(times - 1):
        again = call()
        for name in _NAMES:
            expected = getattr(first, name)
            if expected is not None:
                assert_same_bits(name, getattr(again, name), expected)


DETERMINISTIC = Case(lengths_q=(150, 150), lengths_k=(200, 200), heads=(6, 2), deterministic=True)


@for_cases(
    [
        *(DETERMINISTIC.with_(head_dims=(d, d), causal=d % 64 == 0) for d in (32, 64, 96, 128, 192, 256)),
        DETERMINISTIC.with_(head_dims=(192, 128)),
        DETERMINISTIC.with_(head_dims=(40, 72)),
        DETERMINISTIC.with_(sinks=torch.float32, causal=True),
        DETERMINISTIC.with_(
            varlen=True, lengths_q=(150, 0, 3), lengths_k=(20, 5, 190), slack=(1, 2, 3), sinks=torch.bfloat16
        ),
        DETERMINISTIC.with_(softcap=5.0, alibi="heads", dropout_p=0.2),
        DETERMINISTIC.with_(window=(30, 10), heads=(8, 1)),
    ]
)
def test_deterministic(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """The same bits on every run: dq, dk, dv under GQA and dsinks included, at every head dim."""
    _assert_repeats(make_inputs(case, path.device, rng), direction, path.fit(gpu=100, cpu=3, emulated=2))


@for_cases(DETERMINISTIC.with_(deterministic=False, head_dims=(d, d)) for d in (64, 128))
def test_forward_bits_always_repeat(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """out and lse have the same bits on every run without ``deterministic`` too."""
    if direction == "forward":
        _assert_repeats(make_inputs(case, path.device, rng), direction, path.fit(gpu=100, cpu=3, emulated=2))
    else:  # and after a backward has used the device
        inputs = make_inputs(case, path.device, rng)
        first, again = run(inputs), run(inputs)
        assert_same_bits("out", again.out, first.out)
        assert_same_bits("lse", again.lse, first.lse)


@pytest.mark.needs("backward", "deterministic", "sinks", "causal")
def test_torch_deterministic_mode(path: Path, rng: torch.Generator) -> None:
    """torch.use_deterministic_algorithms(True) selects the deterministic kernels: same bits as deterministic=True."""
    inputs = make_inputs(DETERMINISTIC.with_(sinks=torch.float32, causal=True), path.device, rng)
    expected = run(inputs)
    inputs.keywords["deterministic"] = False
    torch.use_deterministic_algorithms(True)
    got = run(inputs)
    for name in _NAMES:
        assert_same_bits(name, getattr(got, name), getattr(expected, name))


# What may share a batch with the sequence that is watched: (query lengths, key lengths, its place).
NEIGHBOURS = [
    ((70,), (200,), 0),
    ((70, 70), (200, 200), 0),
    ((3, 70), (5, 200), 1),
    ((300, 70, 1), (400, 200, 0), 1),
    ((0, 0, 70, 500), (0, 9, 200, 1), 2),
]


# seqused is a flag of the call, which the kernel may depend on: every call compared passes it.
@for_cases(
    [
        Case(
            lengths_q=(70,), lengths_k=(200,), heads=(4, 2), head_dims=head_dims, varlen=varlen, slack=(0, 1, 0)
        ).with_(**options)
        for options in (
            {},
            {"causal": True},
            {"window": (40, 10)},
            {"softcap": 5.0, "alibi": "heads", "sinks": torch.float32},
        )
        for head_dims in ((64, 64), (128, 128), (40, 72))
        for varlen in (False, True)
    ],
    directions=["forward"],
)
def test_bits_do_not_depend_on_the_batch(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """The bits of a sequence's rows are the same alone, beside others, at another place, and with longer buffers."""
    watched = make_inputs(case, path.device, rng)
    own = watched.segments[0]
    expected: Results | None = None
    for lengths_q, lengths_k, place in NEIGHBOURS:
        inputs = make_inputs(case.with_(lengths_q=lengths_q, lengths_k=lengths_k), path.device, rng)
        segment = inputs.segments[place]
        inputs.q[segment.q] = watched.q[own.q]
        inputs.k[segment.k], inputs.v[segment.k] = watched.k[own.k], watched.v[own.k]
        inputs.keywords |= {key: watched.keywords[key] for key in ("alibi_slopes", "sinks") if key in watched.keywords}
        got = run(inputs, direction)
        rows = Results(got.out[segment.q].clone(), got.lse[segment.lse].clone())
        expected = expected or rows
        assert_same_bits(f"out beside {len(lengths_q) - 1} others", rows.out, expected.out)
        assert_same_bits(f"lse beside {len(lengths_q) - 1} others", rows.lse, expected.lse)


@pytest.mark.parametrize("causal", [False, True])
def test_forward_bits_do_not_depend_on_the_number_of_heads(path: Path, rng: torch.Generator, causal: bool) -> None:
    """A head has the same bits alone and among others."""
    inputs = make_inputs(Case(lengths_q=(100,), lengths_k=(150,), heads=(6, 3), causal=causal), path.device, rng)
    whole = run(inputs, "forward")
    for head in range(3):
        queries = slice(2 * head, 2 * head + 2)
        out, lse = torch.ops.flash_ext.fwd(
            inputs.q[:, :, queries], inputs.k[:, :, head : head + 1], inputs.v[:, :, head : head + 1], **inputs.keywords
        )
        assert_same_bits("out", out, whole.out[:, :, queries])
        assert_same_bits("lse", lse, whole.lse[:, queries])
