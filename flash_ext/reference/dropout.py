"""The dropout mask: a documented function of (rng_state, batch, query head, row, key), the same on every path.

A score at (batch b, query head h, row i, key j; i and j are positions in their sequence) is kept if its 16-bit number
r16 is at least ``dropout_threshold(dropout_p)``. r16 comes from the counter-based generator Philox4x32 with 7 rounds
(Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011)::

    key64   = rng_state[0] XOR (rng_state[1] * 0x9E3779B97F4A7C15 mod 2^64);  key = (low 32 bits, high 32 bits)
    counter = ((j // 32) * 4 + (j % 8) // 2, i, b, h);                        output words w[0..3]
    element = ((j // 8) % 4) * 2 + j % 2;    r16 = (w[element // 2] >> (16 * (element % 2))) & 0xFFFF

One Philox call thus serves the 8 scores that one thread of an mma accumulator holds in 32 keys of a row. Kept
probabilities are scaled by ``65536 / (65536 - threshold)``, the inverse of the keep probability that 16 bits realise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_ext.checks import check_probability, check_size, check_tensor, refusal

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_GOLDEN64 = 0x9E3779B97F4A7C15 - 2**64  # as a signed 64-bit number
_RESOLUTION = 65536
_SCORES_AT_ONCE = 1 << 22


def dropout_threshold(dropout_p: float) -> int:
    """The 16-bit number from which a score is kept, ``min(65535, floor(dropout_p * 65536 + 0.5))``."""
    return min(_RESOLUTION - 1, math.floor(dropout_p * _RESOLUTION + 0.5))


def dropout_rescale(threshold: int) -> float:
    """What kept probabilities are multiplied by: the inverse of the exact keep probability."""
    return _RESOLUTION / (_RESOLUTION - threshold)


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor], rounds: int = 7) -> tuple[Tensor, ...]:
    """Philox4x32 on int64 tensors that hold 32-bit words.

    Parameters
    ----------
    counter : tuple of 4 Tensors
        int64, each in [0, 2^32), broadcastable against each other.
    key : tuple of 2 Tensors
        int64, each in [0, 2^32), broadcastable against the counter.
    rounds : int
        7 for the dropout mask.

    Returns
    -------
    tuple of 4 Tensors
        int64 words in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The 64-bit products wrap into negative numbers; the mask drops the sign bits that >> brings in.
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK32) ^ (c1 ^ k0),
            product1 & _MASK32,
            ((product0 >> 32) & _MASK32) ^ (c3 ^ k1),
            product0 & _MASK32,
        )
        k0 = (k0 + _KEY_INCREMENTS[0]) & _MASK32
        k1 = (k1 + _KEY_INCREMENTS[1]) & _MASK32
    return c0, c1, c2, c3


def keep_mask(
    rng_state: Tensor, threshold: int, batch: Tensor, heads: Tensor, rows: Tensor, first_key: int, keys: int
) -> Tensor:
    """The keep bits of a block of scores.

    Parameters
    ----------
    rng_state : Tensor
        int64[2], on the device of the result. Not read on the host.
    threshold : int
        From `dropout_threshold`.
    batch, heads, rows : Tensor
        int64 indices, one-dimensional.
    first_key, keys : int
        The block holds keys `first_key` to ``first_key + keys``.

    Returns
    -------
    Tensor
        bool, (len(batch), len(heads), len(rows), keys).
    """
    device = rng_state.device
    key64 = rng_state[0] ^ (rng_state[1] * _GOLDEN64)
    key = (key64 & _MASK32, (key64 >> 32) & _MASK32)
    first_span, stop_span = first_key // 32, (first_key + keys + 31) // 32
    calls = torch.arange(first_span * 4, stop_span * 4, device=device)
    words = philox4x32(
        (calls, rows[:, None], batch[:, None, None, None], heads[:, None, None]),
        key,
    )
    # Key j = 32 * span + 8 * word + 2 * call + half: from (span, call, word, half) to that order.
    shape = (len(batch), len(heads), len(rows), stop_span - first_span, 4)
    words32 = torch.stack([word.expand(shape[:3] + (-1,)).reshape(shape) for word in words], dim=-2)
    halves = torch.stack([words32 & 0xFFFF, words32 >> 16], dim=-1)
    kept = (halves >= threshold).flatten(3)
    start = first_key - first_span * 32
    return kept[..., start : start + keys]


def dropout_mask(rng_state: Tensor, dropout_p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The whole dropout mask, on the device of `rng_state`.

    Parameters
    ----------
    rng_state : Tensor
        int64[2], as passed to ``torch.ops.flash_ext.fwd``.
    dropout_p : float
        Probability of dropping a score, in [0, 1).
    batch, heads, seqlen_q, seqlen_k : int
        Query heads; positions count from the start of each sequence, so a varlen batch takes the largest lengths.

    Returns
    -------
    Tensor
        bool, (batch, heads, seqlen_q, seqlen_k): True where the score is kept.

    Raises
    ------
    TypeError, ValueError
        For anything else.
    """
    check_tensor("rng_state", rng_state)
    if rng_state.dtype is not torch.int64:
        raise refusal(TypeError, "rng_state", f"has dtype {rng_state.dtype}", "torch.int64, shape (2)")
    if rng_state.shape != (2,):
        raise refusal(ValueError, "rng_state", f"has shape {tuple(rng_state.shape)}", "shape (2)")
    check_probability(dropout_p)
    for name, size in (("batch", batch), ("heads", heads), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        check_size(name, size)
    device = rng_state.device
    threshold = dropout_threshold(dropout_p)
    mask = torch.empty((batch, heads, seqlen_q, seqlen_k), dtype=torch.bool, device=device)
    all_batches, all_heads, all_rows = (torch.arange(n, device=device) for n in (batch, heads, seqlen_q))
    rows_at_once = max(1, _SCORES_AT_ONCE // max(1, heads * seqlen_k))
    for b in range(batch):
        for first in range(0, seqlen_q, rows_at_once):
            rows = all_rows[first : first + rows_at_once]
            mask[b, :, first : first + len(rows)] = keep_mask(
                rng_state, threshold, all_batches[b : b + 1], all_heads, rows, 0, seqlen_k
            )[0]
    return mask
