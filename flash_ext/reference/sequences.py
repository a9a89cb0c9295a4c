"""What a call asks for, resolved on the host: the sequences, the mask's bounds and the score's parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack


class OpKeywords(TypedDict, total=False):
    """The keywords of ``torch.ops.flash_ext.fwd`` and ``bwd``; what is left out has the operator's default."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    block_table: Tensor | None
    softmax_scale: float | None
    causal: bool
    window_left: int
    window_right: int
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    rng_state: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    num_splits: int
    sm_margin: int
    deterministic: bool


@dataclass(frozen=True)
class Side:
    """Where each sequence's rows lie in the query-side or the key-side tensors.

    Attributes
    ----------
    packed : bool
        True for ``(total, heads, d)`` with ``cu_seqlens``, False for ``(batch, seqlen, heads, d)``.
    begin : tuple of int
        First row of each sequence; all 0 when not packed.
    length : tuple of int
        Rows of each sequence that count, after ``seqused``.
    """

    packed: bool
    begin: tuple[int, ...]
    length: tuple[int, ...]

    @classmethod
    def resolve(cls, x: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None) -> Side:
        """Read the lengths on the host (a synchronisation if they live on a GPU) and clamp them into `x`."""
        if cu_seqlens is None:
            batch, rows = x.shape[0], x.shape[1]
            begin, length = [0] * batch, [rows] * batch
        else:
            total = x.shape[0]
            bounds = [min(max(bound, 0), total) for bound in cu_seqlens.tolist()]
            begin = bounds[:-1]
            length = [max(stop - start, 0) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
        if seqused is not None:
            length = [min(rows, max(used, 0)) for rows, used in zip(length, seqused.tolist(), strict=True)]
        return cls(cu_seqlens is not None, tuple(begin), tuple(length))

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.length)

    def rows(self, x: Tensor, sequence: int, first: int = 0, stop: int | None = None) -> Tensor:
        """A view ``(rows, heads, ...)`` of rows `first` to `stop` (default: its length) of one sequence of `x`."""
        begin = self.begin[sequence]
        stop = self.length[sequence] if stop is None else stop
        if self.packed:
            return x[begin + first : begin + stop]
        return x[sequence, first:stop]

    def by_rows(self, x: Tensor) -> Tensor:
        """A per-row statistic, (batch, heads, rows) or (heads, total), viewed with its rows before its heads."""
        return x.transpose(-1, -2)


@dataclass(frozen=True)
class Options:
    """One call's options with their defaults filled in.

    Attributes
    ----------
    queries, keys : Side
        Where the sequences lie.
    scale : float
        Multiplies q.k.
    left, right : int or None
        Row i sees keys ``i + sk - sq - left <= j <= i + sk - sq + right``; None is unbounded. Causal is a right of 0.
    softcap : float
        ``softcap * tanh(scaled / softcap)`` where it is above 0.
    alibi_slopes : Tensor or None
        (heads_q) or (batch, heads_q).
    sinks : Tensor or None
        (heads_q).
    dropout_threshold : int
        See `flash_ext.reference.dropout`; 0 is no dropout.
    rng_state : Tensor or None
        int64[2].
    """

    queries: Side
    keys: Side
    scale: float
    left: int | None
    right: int | None
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dropout_threshold: int
    rng_state: Tensor | None

    @classmethod
    def resolve(cls, q: Tensor, k: Tensor, **keywords: Unpack[OpKeywords]) -> Options:
        """Fill in the defaults; refuse what this package does not compute.

        Raises
        ------
        NotImplementedError
            For a page table, fp8 scales or split keys.
        TypeError
            For a keyword that the operators do not have.
        ValueError
            For dropout without ``rng_state``.
        """
        from .dropout import dropout_threshold

        unknown = keywords.keys() - OpKeywords.__annotations__.keys()
        if unknown:
            raise TypeError(f"flash_ext: unknown keyword {sorted(unknown)[0]!r}")
        for name in ("block_table", "q_descale", "k_descale", "v_descale"):
            if keywords.get(name) is not None:
                raise NotImplementedError(f"flash_ext: {name} is not supported by flash_ext.reference; leave it None")
        num_splits = keywords.get("num_splits", 0)
        if num_splits not in (0, 1):
            raise NotImplementedError(f"flash_ext: num_splits={num_splits} is not supported; allowed are 0 and 1")
        threshold = dropout_threshold(keywords.get("dropout_p", 0.0))
        rng_state = keywords.get("rng_state")
        if keywords.get("dropout_p", 0.0) > 0 and rng_state is None:
            raise ValueError(
                f"flash_ext: dropout_p={keywords['dropout_p']} needs rng_state, an int64 tensor of shape (2,)"
            )

        left = keywords.get("window_left", -1)
        right = keywords.get("window_right", -1)
        if keywords.get("causal", False):
            right = 0 if right < 0 else min(right, 0)
        scale = keywords.get("softmax_scale")
        return cls(
            queries=Side.resolve(q, keywords.get("cu_seqlens_q"), keywords.get("seqused_q")),
            keys=Side.resolve(k, keywords.get("cu_seqlens_k"), keywords.get("seqused_k")),
            scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
            left=None if left < 0 else int(left),
            right=None if right < 0 else int(right),
            softcap=float(keywords.get("softcap", 0.0)),
            alibi_slopes=keywords.get("alibi_slopes"),
            sinks=keywords.get("sinks"),
            dropout_threshold=threshold,
            rng_state=rng_state,
        )

    def visible_keys(self, first: int, stop: int, offset: int, seqlen_k: int) -> tuple[int, int]:
        """The half-open range of keys that rows `first` to `stop` can see between them; `offset` is sk - sq."""
        low = 0 if self.left is None else max(0, first + offset - self.left)
        high = seqlen_k if self.right is None else min(seqlen_k, stop + offset + self.right)
        return low, max(low, high)

    def slopes(self, sequences: list[int]) -> Tensor | None:
        """The ALiBi slopes of these sequences, (len(sequences) or 1, heads_q)."""
        if self.alibi_slopes is None:
            return None
        if self.alibi_slopes.dim() == 1:
            return self.alibi_slopes[None]
        return self.alibi_slopes[sequences]


def statistics_shape(q: Tensor, packed: bool) -> tuple[int, ...]:
    """The shape of lse: (batch, heads, seqlen_q), or (heads, total_q) when the queries are packed."""
    if packed:
        return (q.shape[1], q.shape[0])
    return (q.shape[0], q.shape[2], q.shape[1])


def visible(options: Options, rows: Tensor, keys: Tensor, seqlen_q: Tensor | int, seqlen_k: Tensor | int) -> Tensor:
    """Which key each row sees: the mask of the contract, from positions that broadcast against each other.

    Parameters
    ----------
    rows, keys : Tensor
        int64 positions in their sequence.
    seqlen_q, seqlen_k : Tensor or int
        The sequences' lengths; positions at or past them see nothing and are not seen.

    Returns
    -------
    Tensor
        bool, of the broadcast shape.
    """
    mask = (rows < seqlen_q) & (keys < seqlen_k)
    distance = keys - rows - (seqlen_k - seqlen_q)
    if options.right is not None:
        mask = mask & (distance <= options.right)
    if options.left is not None:
        mask = mask & (distance >= -options.left)
    return mask


def new_statistics(q: Tensor, packed: bool, dtype: torch.dtype) -> Tensor:
    """An lse of -inf everywhere."""
    return torch.full(statistics_shape(q, packed), -math.inf, dtype=dtype, device=q.device)
