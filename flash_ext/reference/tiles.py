"""How the cpu path cuts a call: units of sequences that run in step, and moving their rows between layouts.

Every product of the cpu path has the shape (unit's sequences x key/value heads, group x query rows, keys): one matrix
per sequence and key/value head, whose size depends on that sequence's own lengths alone. So a row's bits do not depend
on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .sequences import Options, Side

BLOCK_M = 128
"""Query rows of a tile."""
BLOCK_N = 128
"""Keys of a tile."""
_SCORES_AT_ONCE = 1 << 19  # of all matrices of a step: 2 MiB, which the caches hold
_STAGED_AT_ONCE = 1 << 25  # fp32 elements of a unit's rows that are converted once and kept: 128 MiB


def padded_length(length: int) -> int:
    """The rows that a sequence of `length` rows is computed with: few sizes, so that unlike sequences run in step."""
    if length <= 16:
        return 1 << (length - 1).bit_length() if length > 0 else 0
    step = 16 if length <= 128 else 64
    return -(-length // step) * step


@dataclass(frozen=True)
class Unit:
    """Sequences of like lengths, and some of their heads, that run in step.

    Attributes
    ----------
    sequences : list of int
        Indices in the batch.
    heads_k : slice
        Key/value heads.
    heads_q : slice
        Their query heads.
    padded_q, padded_k : int
        Rows that each sequence is computed with.
    """

    sequences: list[int]
    heads_k: slice
    heads_q: slice
    padded_q: int
    padded_k: int

    @property
    def count_k(self) -> int:
        """Number of matrices in a step: sequences times key/value heads."""
        return len(self.sequences) * int(self.heads_k.stop - self.heads_k.start)

    @property
    def count_q(self) -> int:
        """Number of query heads."""
        return int(self.heads_q.stop - self.heads_q.start)

    def by_key_head(self, x: Tensor) -> Tensor:
        """(sequences, heads_q, rows, n) viewed as (count_k, group * rows, n)."""
        return x.view(self.count_k, -1, x.shape[-1])

    def by_query_head(self, x: Tensor) -> Tensor:
        """(count_k, group * rows, n) viewed as (sequences, heads_q, rows, n)."""
        return x.view(len(self.sequences), self.count_q, -1, x.shape[-1])


def units(options: Options, heads_q: int, heads_k: int, staged: Callable[[int, int], int]) -> Iterator[Unit]:
    """Cut a call into units.

    Parameters
    ----------
    options : Options
        Gives the sequences. Those without query rows are left out: nothing is to be computed for them.
    heads_q, heads_k : int
        Head counts.
    staged : callable
        From a sequence's padded lengths of queries and keys to the fp32 elements that the caller keeps for it, per
        key/value head, while a unit runs.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for sequence, (sq, sk) in enumerate(zip(options.queries.length, options.keys.length, strict=True)):
        if sq > 0:
            alike.setdefault((padded_length(sq), padded_length(sk)), []).append(sequence)
    group = heads_q // heads_k
    for (padded_q, padded_k), sequences in alike.items():
        scores = group * min(padded_q, BLOCK_M) * min(max(padded_k, 1), BLOCK_N)
        matrices = max(1, min(_SCORES_AT_ONCE // scores, _STAGED_AT_ONCE // max(staged(padded_q, padded_k), 1)))
        heads_at_once = min(heads_k, matrices)
        sequences_at_once = max(1, matrices // heads_k)
        for start in range(0, len(sequences), sequences_at_once):
            for head in range(0, heads_k, heads_at_once):
                stop = min(head + heads_at_once, heads_k)
                yield Unit(
                    sequences[start : start + sequences_at_once],
                    slice(head, stop),
                    slice(head * group, stop * group),
                    padded_q,
                    padded_k,
                )


def _valid_rows(side: Side, sequences: list[int], first: int, count: int) -> list[int]:
    return [min(max(side.length[sequence] - first, 0), count) for sequence in sequences]


def _consecutive(sequences: list[int]) -> bool:
    return sequences[-1] - sequences[0] == len(sequences) - 1


def load_rows(
    side: Side, x: Tensor, sequences: list[int], heads: slice, first: int, count: int, fill: float = 0.0
) -> Tensor:
    """Rows `first` to ``first + count`` of some sequences and heads, in fp32, heads first, contiguous.

    Rows past a sequence's end are not read into the result: they hold `fill`.

    Parameters
    ----------
    side : Side
        Where the sequences lie in `x`.
    x : Tensor
        (batch, rows, heads, n) or (total, heads, n), any strides.
    sequences : list of int
        Which sequences.
    heads : slice
        Which heads.
    first, count : int
        Which rows of each sequence.
    fill : float
        Of the rows past the end.

    Returns
    -------
    Tensor
        (len(sequences), heads, count, n) fp32.
    """
    valid = _valid_rows(side, sequences, first, count)
    block = torch.empty(
        (len(sequences), heads.stop - heads.start, count, x.shape[-1]), dtype=torch.float32, device=x.device
    )
    rows = block.transpose(1, 2)
    if len(sequences) == 1:
        rows[0, : valid[0]] = side.rows(x, sequences[0], first, first + valid[0])[:, heads]
        if valid[0] < count:
            rows[0, valid[0] :] = fill
        return block
    if side.packed:
        begin = torch.tensor([side.begin[sequence] for sequence in sequences], device=x.device)
        index = begin[:, None] + torch.arange(first, first + count, device=x.device)
        index = index.clamp_(max=x.shape[0] - 1).flatten()
        rows.copy_(x[:, heads].index_select(0, index).view(rows.shape))
    else:
        source = x[:, first : first + count, heads]
        if _consecutive(sequences):
            source = source[sequences[0] : sequences[-1] + 1]
        else:
            source = source.index_select(0, torch.tensor(sequences, device=x.device))
        rows[:, : source.shape[1]] = source
    if min(valid) < count:
        past = torch.arange(count, device=x.device) >= torch.tensor(valid, device=x.device)[:, None]
        rows.masked_fill_(past[..., None, None], fill)
    return block


def store_rows(side: Side, x: Tensor, sequences: list[int], heads: slice, first: int, values: Tensor) -> None:
    """Write what `load_rows` would read, converted to the dtype of `x`; rows past a sequence's end are not written.

    Parameters
    ----------
    side, x, sequences, heads, first
        As for `load_rows`.
    values : Tensor
        (len(sequences), heads, count, n).
    """
    count = values.shape[2]
    valid = _valid_rows(side, sequences, first, count)
    rows = values.transpose(1, 2)
    if len(sequences) == 1:
        side.rows(x, sequences[0], first, first + valid[0])[:, heads] = rows[0, : valid[0]]
        return
    if not side.packed and _consecutive(sequences) and min(valid) == max(valid):
        x[sequences[0] : sequences[-1] + 1, first : first + valid[0], heads] = rows[:, : valid[0]]
        return
    inside = torch.arange(count, device=x.device) < torch.tensor(valid, device=x.device)[:, None]
    which, row = inside.nonzero(as_tuple=True)
    source = rows[which, row].to(x.dtype)
    if side.packed:
        begin = torch.tensor([side.begin[sequence] for sequence in sequences], device=x.device)
        x[:, heads].index_copy_(0, begin[which] + (row + first), source)
    else:
        x[:, :, heads].index_put_((torch.tensor(sequences, device=x.device)[which], row + first), source)
