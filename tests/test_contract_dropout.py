"""Contract: the dropout mask is a documented function of (rng_state, batch, query head, row, key), on every path."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.accuracy import assert_same_bits
from helpers.cases import Case, make_inputs
from helpers.check import check
from helpers.paths import Path
from helpers.tables import for_cases
from torch import Tensor

_MASK32 = 2**32 - 1


def _philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int) -> tuple[int, int, int, int]:
    """Philox4x32 (Salmon et al., SC 2011) in plain integers, written apart from the library's."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        low, high = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(high >> 32) ^ c[1] ^ k[0], high & _MASK32, (low >> 32) ^ c[3] ^ k[1], low & _MASK32]
        k = [(k[0] + 0x9E3779B9) & _MASK32, (k[1] + 0xBB67AE85) & _MASK32]
    return c[0], c[1], c[2], c[3]


def _kept(state: list[int], dropout_p: float, b: int, h: int, i: int, j: int) -> bool:
    """The documented keep bit of one score."""
    mixed = (state[0] ^ (state[1] * 0x9E3779B97F4A7C15)) % 2**64
    counter = ((j // 32) * 4 + (j % 8) // 2, i, b, h)
    words = _philox4x32(counter, (mixed & _MASK32, mixed >> 32), 7)
    element = ((j // 8) % 4) * 2 + j % 2
    r16 = (words[element // 2] >> (16 * (element % 2))) & 0xFFFF
    return r16 >= min(65535, math.floor(dropout_p * 65536 + 0.5))


def _state(rng: torch.Generator, device: torch.device | None = None) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, generator=rng).to(device)


def test_philox_known_answers() -> None:
    """The test's own generator against the published vectors for 7 and 10 rounds."""
    assert _philox4x32((0, 0, 0, 0), (0, 0), 7) == (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)
    assert _philox4x32((0, 0, 0, 0), (0, 0), 10) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = (_MASK32,) * 4
    assert _philox4x32(ones, (_MASK32, _MASK32), 10) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


def test_mask_is_the_documented_function(rng: torch.Generator) -> None:
    """reference.dropout_mask, bit by bit, for negative and extreme states and every position within 64 keys."""
    from flash_ext import reference

    for state in (_state(rng), torch.tensor([0, 0]), torch.tensor([-1, -(2**63)]), torch.tensor([2**63 - 1, 1])):
        mask = reference.dropout_mask(state, 0.3, 2, 3, 4, 70)
        for b, h, i, j in [(1, 2, 3, j) for j in range(70)] + [(0, 0, 0, j) for j in range(70)]:
            assert mask[b, h, i, j].item() is _kept(state.tolist(), 0.3, b, h, i, j), (state, b, h, i, j)


def test_mask_statistics(rng: torch.Generator) -> None:
    """The share of kept scores, and no correlation between neighbours in any direction or between two states."""
    from flash_ext import reference

    shape = (2, 4, 128, 512)
    n = math.prod(shape)
    for p in (0.01, 0.1, 0.5, 0.9):
        mask = reference.dropout_mask(_state(rng), p, *shape).double()
        keep = 1 - reference.dropout_threshold(p) / 65536
        deviation = math.sqrt(keep * (1 - keep))
        assert abs(mask.mean() - keep) < 6 * deviation / math.sqrt(n), p
        centred = (mask - keep) / deviation
        others = {f"axis {axis}": centred.roll(1, axis) for axis in range(4)} | {
            "2 keys apart": centred.roll(2, 3),
            "8 keys apart": centred.roll(8, 3),
            "32 keys apart": centred.roll(32, 3),
            "another state": (reference.dropout_mask(_state(rng), p, *shape).double() - keep) / deviation,
        }
        for name, other in others.items():
            assert abs((centred * other).mean()) < 6 / math.sqrt(n), f"p={p}: correlated with {name}"
        by_row = mask.mean(-1)
        assert (by_row - keep).abs().max() < 7 * deviation / math.sqrt(shape[3]), f"p={p}: a row is not like the others"


def _recovered_mask(path: Path, case: Case, keywords: dict[str, Any], rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """(batch, heads, sq, sk): which scores the path kept, and P with dropout, read through one-hot values."""
    (batch, sq), sk = (case.batch, case.lengths_q[0]), case.lengths_k[0]
    heads, heads_k = case.heads
    q = (torch.randn(batch, sq, heads, 64, generator=rng) * 0.5).to(case.dtype).to(path.device)
    k = (torch.randn(batch, sk, heads_k, 64, generator=rng) * 0.5).to(case.dtype).to(path.device)
    weights = torch.empty(batch, heads, sq, sk)
    for first in range(0, sk, 64):
        keys = min(64, sk - first)
        v = torch.zeros(batch, sk, heads_k, 64, dtype=case.dtype)
        v[:, first : first + keys, :, :keys] = torch.eye(keys, dtype=case.dtype)[:, None, :]
        out, _ = torch.ops.flash_ext.fwd(q, k, v.to(path.device), **keywords)
        weights[..., first : first + keys] = out[..., :keys].permute(0, 2, 1, 3).float().cpu()
    return weights != 0, weights


@pytest.mark.needs("dropout")
@pytest.mark.parametrize("p", [0.0001, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("heads", [(3, 3), (4, 2)])
@pytest.mark.parametrize(("sq", "sk"), [(5, 7), (65, 130), (130, 200)])
def test_path_uses_the_documented_mask(
    path: Path, rng: torch.Generator, p: float, heads: tuple[int, int], sq: int, sk: int
) -> None:
    """The zeros of P as the path computed it are those of the mask, for every batch, query head, row and key."""
    from flash_ext import reference

    case = Case(lengths_q=(sq,) * 2, lengths_k=(sk,) * 2, heads=heads, dtype=torch.float16)
    state = _state(rng, path.device)
    kept, weights = _recovered_mask(path, case, {"dropout_p": p, "rng_state": state}, rng)
    mask = reference.dropout_mask(state.cpu(), p, 2, heads[0], sq, sk)
    assert_same_bits("mask", kept, mask)
    rescale = 65536 / (65536 - reference.dropout_threshold(p))
    if sk >= 100 and p <= 0.5:
        # Mean of P / keep probability over all scores: the rescale is the exact one of the 16-bit threshold.
        total = weights.sum(-1).mean()
        expected = (mask.double() * rescale).mean()
        assert abs(total - expected) < 0.02


@pytest.mark.needs("dropout")
def test_rescale_is_exact(path: Path, rng: torch.Generator) -> None:
    """One key: out is v / (1 - threshold / 65536) or 0; p below the resolution drops and scales nothing."""
    from flash_ext import reference

    for p in (1e-9, 0.25, 0.3, 0.7, 0.9999999):
        state = _state(rng, path.device)
        q = torch.randn(1, 64, 4, 64, generator=rng).to(torch.float16).to(path.device)
        v = torch.ones(1, 1, 4, 64, dtype=torch.float16, device=path.device)
        out, lse = torch.ops.flash_ext.fwd(q, q[:, :1], v, dropout_p=p, rng_state=state)
        kept = reference.dropout_mask(state.cpu(), p, 1, 4, 64, 1)[0, :, :, 0].transpose(0, 1).to(path.device)
        rescale = 65536 / (65536 - reference.dropout_threshold(p))
        expected = torch.where(kept, torch.tensor(rescale).to(torch.float16).item(), 0.0).to(torch.float16)
        assert torch.equal(out[0], expected[..., None].expand(64, 4, 64)), p
        without = torch.ops.flash_ext.fwd(q, q[:, :1], v)[1]
        torch.testing.assert_close(lse, without, rtol=2e-5, atol=2e-5)


@for_cases(
    Case(
        lengths_q=(70, 3, 130),
        lengths_k=(140, 90, 70),
        heads=(4, 2),
        dtype=dtype,
        varlen=varlen,
        dropout_p=p,
        causal=causal,
        slack=(2, 3, 1),
    )
    for p in (0.1, 0.8)
    for varlen in (False, True)
    for dtype, causal in ((torch.float16, False), (torch.bfloat16, True))
)
def test_dropout(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """Positions count from the start of each sequence; forward and backward use one mask."""
    check(path, rng, case, direction, through="autograd" if direction == "backward" else "operator")


@pytest.mark.needs("dropout")
def test_state_is_read_when_the_kernel_runs(path: Path, rng: torch.Generator) -> None:
    """The state is two numbers in device memory: the same tensor with other numbers is another mask."""
    inputs = make_inputs(Case(heads=(2, 2), dropout_p=0.5), path.device, rng)
    first = torch.ops.flash_ext.fwd(inputs.q, inputs.k, inputs.v, **inputs.keywords)[0]
    again = torch.ops.flash_ext.fwd(inputs.q, inputs.k, inputs.v, **inputs.keywords)[0]
    assert_same_bits("out", again, first)
    for word in range(2):
        inputs.keywords["rng_state"][word] += 1
        other = torch.ops.flash_ext.fwd(inputs.q, inputs.k, inputs.v, **inputs.keywords)[0]
        assert not torch.equal(other, first), f"rng_state[{word}] does not matter"


@pytest.mark.needs("dropout")
def test_public_function_draws_only_when_it_must(path: Path, rng: torch.Generator) -> None:
    """p = 0 and a refused call leave torch's generator alone; p > 0 draws, and torch.manual_seed brings it back."""
    import flash_ext

    def generator_state() -> Tensor:
        return torch.cuda.get_rng_state() if path.kind == "gpu" else torch.get_rng_state()

    inputs = make_inputs(Case(heads=(2, 2)), path.device, rng)
    q, k, v = inputs.q, inputs.k, inputs.v
    torch.manual_seed(7)
    before = generator_state()
    flash_ext.flash_attn_func(q, k, v)
    assert torch.equal(generator_state(), before), "a call without dropout drew a number"
    for refused in (
        lambda: flash_ext.flash_attn_func(q, k, v.float(), dropout_p=0.5),
        lambda: flash_ext.flash_attn_func(q, k, v, dropout_p=1.0),
        lambda: flash_ext.flash_attn_func(q, k, v, dropout_p=0.5, num_splits=2),
        lambda: flash_ext.flash_attn_func(q, k, v, dropout_p=0.5, learnable_sink=torch.zeros(3, device=path.device)),
    ):
        with pytest.raises((TypeError, ValueError, NotImplementedError), match="^flash_ext: "):
            refused()
        assert torch.equal(generator_state(), before), "a refused call drew a number"
    first = flash_ext.flash_attn_func(q, k, v, dropout_p=0.5)
    assert not torch.equal(generator_state(), before)
    second = flash_ext.flash_attn_func(q, k, v, dropout_p=0.5)
    assert not torch.equal(first, second), "two calls share a mask"
    torch.manual_seed(7)
    assert_same_bits("out", flash_ext.flash_attn_func(q, k, v, dropout_p=0.5), first)


@pytest.mark.needs("backward", "dropout")
def test_autograd_uses_the_forward_mask(path: Path, rng: torch.Generator) -> None:
    """dv through autograd of the public function: dv[j] = sum of kept, rescaled P over the rows, so the masks agree."""
    import flash_ext

    q = torch.zeros(1, 64, 2, 64, dtype=torch.float16, device=path.device)
    k = torch.zeros(1, 32, 2, 64, dtype=torch.float16, device=path.device)
    v = torch.zeros(1, 32, 2, 64, dtype=torch.float16, device=path.device)
    v[:, :, :, :32] = torch.eye(32, dtype=torch.float16, device=path.device)[:, None, :]
    v.requires_grad_()
    out = flash_ext.flash_attn_func(q, k, v, dropout_p=0.5)
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    # out[i, h, j] is the weight of key j in row i; its sum over rows is dv[j, h, c] for every c.
    torch.testing.assert_close(dv[0, :, :, 0].float(), out[0, :, :, :32].float().sum(0).T, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "case",
    [Case(lengths_q=(1,), lengths_k=(63,), heads=(4, 1), dtype=torch.float16, dropout_p=0.4375, magnitude=0.1)],
    ids=str,
)
def test_weights_just_above_a_power_of_two(path: Path, rng: torch.Generator, case: Case, direction: str) -> None:
    """P about 1/63 rounds coarsely; times 1 / keep probability, just below 2^-5, it would not: P is rounded first."""
    for _ in range(4):
        check(path, rng, case, direction)


@pytest.mark.needs("dropout")
def test_dropout_without_state_is_refused(path: Path, rng: torch.Generator) -> None:
    """The operators have no hidden generator."""
    inputs = make_inputs(Case(), path.device, rng)
    with pytest.raises(ValueError, match="^flash_ext: rng_state"):
        torch.ops.flash_ext.fwd(inputs.q, inputs.k, inputs.v, dropout_p=0.5)
