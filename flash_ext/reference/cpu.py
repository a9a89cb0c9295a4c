"""The cpu path: the contract in plain PyTorch operations, on whatever device the tensors are on.

The forward is the online softmax over tiles of keys, the backward recomputes the probabilities from lse
(FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2); no matrix of scores is ever larger than a tile, so memory is
linear in the lengths. Operands are converted to fp32 tile by tile; products, softmax and accumulators are fp32 and each
result is rounded once.

The lengths are read on the host. On a CPU that costs nothing; where FLASH_EXT_PATH=cpu sends CUDA tensors here it
synchronises, so such a call cannot be captured in a CUDA graph.

PyTorch's own CPU flash kernel is not used underneath, although in bf16 it is faster by up to a half: on random causal
inputs of 1024 rows its lse is off by three times the contract's tolerance and the RMS errors of its dk and dv are 1.3
to 1.5 times the baseline's; in fp16 its backward is ten times slower.

Same bits on every run: every operation here is deterministic, and a row's forward depends on its own sequence alone
(see `tiles`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flash_ext import allocate

from .dropout import dropout_rescale, keep_mask
from .products import are_finite, special_terms, without_specials
from .sequences import Options, statistics_shape, visible
from .tiles import BLOCK_M, BLOCK_N, Unit, load_rows, store_rows, units

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .sequences import OpKeywords


class _Plan:
    """What the steps of one unit share: masks, biases and dropout bits of any tile, and which tiles there are."""

    def __init__(self, options: Options, unit: Unit, device: torch.device) -> None:
        self.options = options
        self.unit = unit
        self.device = device
        seqlens_q = [options.queries.length[sequence] for sequence in unit.sequences]
        seqlens_k = [options.keys.length[sequence] for sequence in unit.sequences]
        offsets = [sk - sq for sq, sk in zip(seqlens_q, seqlens_k, strict=True)]
        self._min_k, self._max_k = min(seqlens_k), max(seqlens_k)
        self._min_offset, self._max_offset = min(offsets), max(offsets)
        self._seqlen_q: Tensor | int = seqlens_q[0]
        self._seqlen_k: Tensor | int = seqlens_k[0]
        if min(seqlens_q) != max(seqlens_q) or self._min_k != self._max_k:
            self._seqlen_q = torch.tensor(seqlens_q, device=device)[:, None, None, None]
            self._seqlen_k = torch.tensor(seqlens_k, device=device)[:, None, None, None]
        slopes = options.slopes(unit.sequences)
        self._slopes = None if slopes is None else slopes[:, unit.heads_q, None, None].float()
        if options.dropout_threshold > 0:
            self._batch = torch.tensor(unit.sequences, device=device)
            self._heads = torch.arange(unit.heads_q.start, unit.heads_q.stop, device=device)
        self.rescale = dropout_rescale(options.dropout_threshold)

    def key_starts(self) -> range:
        """First keys of the key tiles."""
        return range(0, self.unit.padded_k, BLOCK_N)

    def query_starts(self) -> range:
        """First rows of the query tiles."""
        return range(0, self.unit.padded_q, BLOCK_M)

    def is_seen(self, first_row: int, rows: int, first_key: int, keys: int) -> bool:
        """False if no row of this tile, in any sequence, sees any of its keys."""
        low, _ = self.options.visible_keys(first_row, first_row + rows, self._min_offset, self._max_k)
        _, high = self.options.visible_keys(first_row, first_row + rows, self._max_offset, self._max_k)
        return low < first_key + keys and first_key < high

    def seen(self, first_row: int, rows: int, first_key: int, keys: int) -> Tensor | None:
        """The mask of a tile, (sequences or 1, 1, rows, keys); None if every row sees every key.

        Rows past a sequence's end are no reason for a mask: their q, dO and probabilities are 0 and nothing is stored
        for them.
        """
        options, last_row, last_key = self.options, first_row + rows - 1, first_key + keys - 1
        if (
            last_key < self._min_k
            and (options.right is None or last_key <= first_row + self._min_offset + options.right)
            and (options.left is None or first_key >= last_row + self._max_offset - options.left)
        ):
            return None
        row, key = self._positions(first_row, rows, first_key, keys)
        return visible(options, row, key, self._seqlen_q, self._seqlen_k).view(-1, 1, rows, keys)

    def keep(self, first_row: int, rows: int, first_key: int, keys: int) -> Tensor | None:
        """The dropout bits of a tile, (sequences, heads_q, rows, keys); None without dropout."""
        rng_state = self.options.rng_state
        if self.options.dropout_threshold == 0 or rng_state is None:
            return None
        row = torch.arange(first_row, first_row + rows, device=self.device)
        return keep_mask(rng_state, self.options.dropout_threshold, self._batch, self._heads, row, first_key, keys)

    def add_bias_(self, scores: Tensor, first_row: int, first_key: int) -> None:
        """Subtract ALiBi's bias from scores of shape (sequences, heads_q, rows, keys), if there are slopes."""
        if self._slopes is None:
            return
        row, key = self._positions(first_row, scores.shape[2], first_key, scores.shape[3])
        distance = (row + (self._seqlen_k - self._seqlen_q) - key).abs().float()
        scores.addcmul_(self._slopes, distance, value=-1.0)

    def _positions(self, first_row: int, rows: int, first_key: int, keys: int) -> tuple[Tensor, Tensor]:
        row = torch.arange(first_row, first_row + rows, device=self.device)[:, None]
        return row, torch.arange(first_key, first_key + keys, device=self.device)


@dataclass(frozen=True)
class _KeyTile:
    """Keys and values of a unit, fp32, and in the backward the sums of their gradients."""

    first: int
    k: Tensor  # (count_k, keys, d)
    v: Tensor  # (count_k, keys, d_v)
    dk: Tensor | None = None  # like k, of the scaled scores
    dv: Tensor | None = None  # like v

    @property
    def keys(self) -> int:
        """Number of keys, padding included."""
        return self.k.shape[1]


@dataclass(frozen=True)
class _QueryTile:
    """Query rows of a unit and what the backward needs of them, fp32."""

    first: int
    rows: int
    q: Tensor  # (count_k, group * rows, d)
    dout: Tensor  # (count_k, group * rows, d_v)
    lse: Tensor  # (count_k, group * rows, 1); +inf where the row sees nothing, so that its probabilities are 0
    shift: Tensor  # (count_k, group * rows, 1): rowsum(dO * O) - dlse
    dq: Tensor  # like q, of the scaled scores: the sum so far


class _Scratch:
    """Buffers that the steps of a call write over and over, one per name, so that no step allocates."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """A contiguous fp32 tensor with undefined content; valid until the name is asked for again."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=torch.float32, device=device)
        return buffer[:size].view(shape)


def _scores(
    plan: _Plan,
    q: Tensor,
    keys: _KeyTile,
    first_row: int,
    seen: Tensor | None,
    scratch: _Scratch,
    with_cap_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The scores of a tile, -inf where not seen, and the derivative of the softcap there if asked for.

    Both are (count_k, group * rows, keys) in scratch memory.
    """
    options = plan.options
    shape = (q.shape[0], q.shape[1], keys.keys)
    scores = scratch.get("scores", shape, q.device)
    factor = options.scale if options.softcap == 0 else options.scale / options.softcap
    if factor == 0:  # BLAS does not read its operands then, and would hide their NaN
        torch.bmm(q, keys.k.transpose(1, 2), out=scores).mul_(factor)
    else:
        torch.baddbmm(scores, q, keys.k.transpose(1, 2), beta=0, alpha=factor, out=scores)
    cap_gradient = None
    if options.softcap > 0:
        scores.tanh_()
        if with_cap_gradient:
            cap_gradient = scratch.get("cap_gradient", shape, q.device)
            torch.square(scores, out=cap_gradient).neg_().add_(1.0)
        scores.mul_(options.softcap)
    by_head = plan.unit.by_query_head(scores)
    plan.add_bias_(by_head, first_row, keys.first)
    if seen is not None:
        by_head.masked_fill_(~seen, -math.inf)
    return scores, cap_gradient


def _accumulate_(
    total: Tensor, plan: _Plan, weights: Tensor, values: Tensor, seen: Tensor | None, over_rows: bool = False
) -> None:
    """``total += weights @ values``, or with `over_rows` ``weights^T @ values``; weights has the layout of the scores.

    With a mask, NaN and Inf in values stay with the rows, or keys, that see them.
    """
    operand = weights.transpose(1, 2) if over_rows else weights
    if seen is None or are_finite(values):
        total.baddbmm_(operand, values)
        return
    seen = seen.expand(plan.unit.by_query_head(weights).shape).reshape(weights.shape)
    total.baddbmm_(operand, without_specials(values))
    total.add_(special_terms(operand, seen.transpose(1, 2) if over_rows else seen, values))


def _load_keys(options: Options, unit: Unit, x: Tensor, first: int) -> Tensor:
    """Keys or values of a tile that starts at `first`, (count_k, keys, d) fp32."""
    keys = min(BLOCK_N, unit.padded_k - first)
    return load_rows(options.keys, x, unit.sequences, unit.heads_k, first, keys).flatten(0, 1)


def _load_queries(options: Options, unit: Unit, x: Tensor, first: int, fill: float = 0.0) -> Tensor:
    """Rows of a query-side tensor from `first` on, (count_k, group * rows, d) fp32."""
    rows = min(BLOCK_M, unit.padded_q - first)
    return unit.by_key_head(load_rows(options.queries, x, unit.sequences, unit.heads_q, first, rows, fill))


def _forward_tile(
    plan: _Plan, q: Tensor, first_row: int, rows: int, key_tiles: Iterable[_KeyTile], head_dim_v: int, scratch: _Scratch
) -> tuple[Tensor, Tensor]:
    """Out (count_k, group * rows, d_v) and lse (count_k, group * rows, 1) of a tile of query rows, fp32."""
    unit, options, device = plan.unit, plan.options, plan.device
    out = torch.zeros(q.shape[:2] + (head_dim_v,), dtype=torch.float32, device=device)
    top = torch.full((len(unit.sequences), unit.count_q, rows, 1), -math.inf, dtype=torch.float32, device=device)
    if options.sinks is not None:  # a sink acts as a first key whose value is 0
        top.copy_(options.sinks[unit.heads_q, None, None])
    top = unit.by_key_head(top)
    total = (top > -math.inf).float()
    for keys in key_tiles:
        if not plan.is_seen(first_row, rows, keys.first, keys.keys):
            continue
        seen = plan.seen(first_row, rows, keys.first, keys.keys)
        scores, _ = _scores(plan, q, keys, first_row, seen, scratch)
        new_top = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        shift = new_top.masked_fill(new_top == -math.inf, 0.0)
        correction = torch.exp(top - shift)
        weights = scores.sub_(shift).exp_()
        total.mul_(correction).add_(weights.sum(dim=-1, keepdim=True))
        keep = plan.keep(first_row, rows, keys.first, keys.keys)
        if keep is not None:
            unit.by_query_head(weights).mul_(keep)
        out.mul_(correction)
        _accumulate_(out, plan, weights, keys.v, seen)
        top = new_top
    out.mul_(plan.rescale / total.masked_fill(total == 0, 1.0))
    return out, top.masked_fill(top == -math.inf, 0.0) + total.log()


def _forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    queries = options.queries
    out = allocate.empty(q.shape[:-1] + v.shape[-1:], q.dtype, q.device).zero_()
    lse = allocate.empty(statistics_shape(q, queries.packed), torch.float32, q.device).fill_(-math.inf)
    lse_rows = queries.by_rows(lse)[..., None]
    scratch = _Scratch()

    def staged(padded_q: int, padded_k: int) -> int:
        return padded_k * (k.shape[-1] + v.shape[-1]) if padded_q > BLOCK_M else 0

    for unit in units(options, q.shape[-2], k.shape[-2], staged):
        plan = _Plan(options, unit, q.device)

        def load_key_tiles(unit: Unit = unit, plan: _Plan = plan) -> Iterator[_KeyTile]:
            for first in plan.key_starts():
                yield _KeyTile(first, *(_load_keys(options, unit, x, first) for x in (k, v)))

        # One tile of query rows reads each key once; several share what is converted once.
        key_tiles = list(load_key_tiles()) if len(plan.query_starts()) > 1 else load_key_tiles()
        for first in plan.query_starts():
            rows = min(BLOCK_M, unit.padded_q - first)
            q_tile = _load_queries(options, unit, q, first)
            out_tile, lse_tile = _forward_tile(plan, q_tile, first, rows, key_tiles, v.shape[-1], scratch)
            for x, tile in ((out, out_tile), (lse_rows, lse_tile)):
                store_rows(queries, x, unit.sequences, unit.heads_q, first, unit.by_query_head(tile))
    return out, lse


def _backward_tile(plan: _Plan, queries: _QueryTile, keys: _KeyTile, scratch: _Scratch) -> None:
    """Add what one tile of scores gives to the gradients of its rows and keys."""
    unit, options = plan.unit, plan.options
    where = (queries.first, queries.rows, keys.first, keys.keys)
    if not plan.is_seen(*where):
        return
    assert keys.dk is not None and keys.dv is not None
    seen = plan.seen(*where)
    scores, cap_gradient = _scores(plan, queries.q, keys, queries.first, seen, scratch, options.softcap > 0)
    probabilities = scores.sub_(queries.lse).exp_()
    dscores = scratch.get("dscores", tuple(scores.shape), scores.device)
    torch.bmm(queries.dout, keys.v.transpose(1, 2), out=dscores)
    kept = probabilities
    keep = plan.keep(*where)
    if keep is not None:
        scaled_keep = keep.float().mul_(plan.rescale).view_as(probabilities)
        dscores.mul_(scaled_keep)
        kept = scaled_keep.mul_(probabilities)
    dscores.sub_(queries.shift).mul_(probabilities)
    if cap_gradient is not None:
        dscores.mul_(cap_gradient)
    if seen is not None:  # a NaN in lse, dout or v has reached entries that are not there
        for x in (kept, dscores):
            unit.by_query_head(x).masked_fill_(~seen, 0.0)
    _accumulate_(keys.dv, plan, kept, queries.dout, seen, over_rows=True)
    _accumulate_(keys.dk, plan, dscores, queries.q, seen, over_rows=True)
    _accumulate_(queries.dq, plan, dscores, keys.k, seen)


@dataclass(frozen=True)
class _Gradients:
    """Arguments and results of one backward call."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    options: Options
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor  # (heads_q) fp64

    def compute(self) -> None:
        """Write dq, dk and dv, and add to dsinks."""
        options, d, d_v = self.options, self.q.shape[-1], self.v.shape[-1]
        heads_q, heads_k = self.q.shape[-2], self.k.shape[-2]
        for x in (self.dq, self.dk, self.dv):
            x.zero_()

        def staged_of_queries(padded_q: int) -> int:
            return heads_q // heads_k * padded_q * (2 * d + d_v)

        def staged_of_keys(padded_k: int) -> int:
            return padded_k * 2 * (d + d_v)

        def staged(padded_q: int, padded_k: int) -> int:
            return min(staged_of_queries(padded_q), staged_of_keys(padded_k))

        scratch = _Scratch()
        for unit in units(options, heads_q, heads_k, staged):
            plan = _Plan(options, unit, self.q.device)
            query_tiles = (self._query_tile(unit, first) for first in plan.query_starts())
            key_tiles = (self._key_tile(unit, first) for first in plan.key_starts())
            # The shorter side is kept in fp32, tiles of the other come and go. Either order of the two loops adds the
            # same terms in the same order to every gradient.
            if staged_of_queries(unit.padded_q) <= staged_of_keys(unit.padded_k):
                queries = list(query_tiles)
                for key_tile in key_tiles:
                    for query_tile in queries:
                        _backward_tile(plan, query_tile, key_tile, scratch)
                    self._finish_keys(unit, key_tile)
                for query_tile in queries:
                    self._finish_queries(unit, query_tile)
            else:
                keys = list(key_tiles)
                for query_tile in query_tiles:
                    for key_tile in keys:
                        _backward_tile(plan, query_tile, key_tile, scratch)
                    self._finish_queries(unit, query_tile)
                for key_tile in keys:
                    self._finish_keys(unit, key_tile)

    def _query_tile(self, unit: Unit, first: int) -> _QueryTile:
        def statistic(x: Tensor, fill: float = 0.0) -> Tensor:
            return _load_queries(self.options, unit, self.options.queries.by_rows(x)[..., None], first, fill)

        q, dout, out = (_load_queries(self.options, unit, x, first) for x in (self.q, self.dout, self.out))
        lse = statistic(self.lse, -math.inf)
        empty = lse == -math.inf
        shift = (dout * out).sum(dim=-1, keepdim=True)
        if self.dlse is not None:
            shift.sub_(statistic(self.dlse))
        rows = min(BLOCK_M, unit.padded_q - first)
        for statistic_tile, ignored in ((lse, math.inf), (shift, 0.0)):
            statistic_tile.masked_fill_(empty, ignored)
        return _QueryTile(first, rows, q, dout, lse, shift, torch.zeros_like(q))

    def _key_tile(self, unit: Unit, first: int) -> _KeyTile:
        k, v = (_load_keys(self.options, unit, x, first) for x in (self.k, self.v))
        return _KeyTile(first, k, v, torch.zeros_like(k), torch.zeros_like(v))

    def _finish_queries(self, unit: Unit, tile: _QueryTile) -> None:
        options = self.options
        dq = unit.by_query_head(tile.dq.mul_(options.scale))
        store_rows(options.queries, self.dq, unit.sequences, unit.heads_q, tile.first, dq)
        if options.sinks is not None:
            sinks = options.sinks[unit.heads_q, None, None].double()
            share = torch.exp(sinks - unit.by_query_head(tile.lse).double())  # 0 where lse is +inf
            self.dsinks[unit.heads_q] -= (share * unit.by_query_head(tile.shift)).sum(dim=(0, 2, 3))

    def _finish_keys(self, unit: Unit, tile: _KeyTile) -> None:
        assert tile.dk is not None and tile.dv is not None
        for x, gradient in ((self.dk, tile.dk.mul_(self.options.scale)), (self.dv, tile.dv)):
            rows = gradient.unflatten(0, (len(unit.sequences), -1))
            store_rows(self.options.keys, x, unit.sequences, unit.heads_k, tile.first, rows)


def fwd(q: Tensor, k: Tensor, v: Tensor, **keywords: Unpack[OpKeywords]) -> tuple[Tensor, Tensor]:
    """Forward attention, as ``torch.ops.flash_ext.fwd``.

    Parameters
    ----------
    q, k, v : Tensor
        (batch, seqlen, heads, d), or (total, heads, d) with ``cu_seqlens_*``; fp16 or bf16, any strides and device.
    **keywords
        Those of ``torch.ops.flash_ext.fwd``, already checked; lengths out of bounds are clamped.

    Returns
    -------
    out : Tensor
        Contiguous, like q with the head dim of v.
    lse : Tensor
        fp32, (batch, heads_q, seqlen_q), or (heads_q, total_q).

    Raises
    ------
    NotImplementedError, TypeError, ValueError
        See `Options.resolve`.
    """
    options = Options.resolve(q, k, **keywords)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return _forward(q, k, v, options)


def bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    **keywords: Unpack[OpKeywords],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Backward attention, as ``torch.ops.flash_ext.bwd``.

    Parameters
    ----------
    dout : Tensor
        Like out, any strides.
    dlse : Tensor or None
        Like lse, any strides; not read where lse is -inf.
    q, k, v, out, lse, **keywords
        The forward's arguments and results.
    dq, dk, dv : Tensor, optional
        Where to write the gradients: like q, k and v, any strides that do not overlap. Default: new tensors.

    Returns
    -------
    dq, dk, dv : Tensor
        In the dtypes of q, k, v.
    dsinks : Tensor
        In the dtype and shape of sinks, or 0 elements in fp32 without.

    Raises
    ------
    NotImplementedError, TypeError, ValueError
        See `Options.resolve`.
    """
    options = Options.resolve(q, k, **keywords)
    dq = allocate.empty_like(q) if dq is None else dq
    dk = allocate.empty_like(k) if dk is None else dk
    dv = allocate.empty_like(v) if dv is None else dv
    sinks = options.sinks
    dsinks = allocate.empty((0,), torch.float32, q.device) if sinks is None else allocate.empty_like(sinks)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        sums = torch.zeros(q.shape[-2], dtype=torch.float64, device=q.device)
        _Gradients(dout, dlse, q, k, v, out, lse, options, dq, dk, dv, sums).compute()
        if sinks is not None:
            dsinks.copy_(sums)
    return dq, dk, dv, dsinks
