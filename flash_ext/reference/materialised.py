"""Attention from the formula, with the scores of a block of rows held whole.

Two arithmetics share it: fp64 throughout (`oracle`) and the accuracy baseline of a low-precision type (`baseline`).
With i, j the positions in a sequence and sq, sk its lengths::

    x_ij  = scale * q_i . k_j;       y_ij = softcap * tanh(x_ij / softcap), or x_ij without softcap
    s_ij  = y_ij - slope * |i + sk - sq - j|                          where row i sees key j
    lse_i = log(sum_j exp(s_ij) + exp(sink))
    p_ij  = exp(s_ij - lse_i);       z_ij = keep_ij * p_ij / keep probability
    o_i   = sum_j z_ij v_j

and the gradients of a loss with dO = dL/dO, dlse = dL/dlse (FlashAttention, arXiv 2205.14135, appendix B.2, extended by
the derivative of lse, the cap and the sink)::

    dv_j    = sum_i z_ij dO_i
    dp_ij   = keep_ij / keep probability * dO_i . v_j;     delta_i = dO_i . o_i
    ds_ij   = p_ij * (dp_ij - delta_i + dlse_i)
    dx_ij   = ds_ij * (1 - (y_ij / softcap)^2)
    dq_i    = scale * sum_j dx_ij k_j;                     dk_j = scale * sum_i dx_ij q_i
    dsink   = sum_i exp(sink - lse_i) * (dlse_i - delta_i)

A row whose visible scores are all -inf, or that sees no key, has the sum 0: out 0 and lse -inf, or lse = sink.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .dropout import dropout_rescale, keep_mask
from .products import product_of_visible
from .sequences import Options, new_statistics, visible

_SCORES_AT_ONCE = 1 << 23


@dataclass(frozen=True)
class Arithmetic:
    """The precision that the formula is computed in.

    Attributes
    ----------
    dtype : torch.dtype
        Of scores, softmax and the accumulators of products.
    operand : torch.dtype
        What P and dS are rounded to before they meet a matrix product. Dropout scales P behind the rounding, as kernels
        do: scaled before it, P would lie elsewhere between two powers of two and lose up to twice or half as much.
    """

    dtype: torch.dtype
    operand: torch.dtype

    def rounded(self, x: Tensor) -> Tensor:
        """`x` at the precision of an operand, in the dtype of the computation."""
        return x.to(self.operand).to(self.dtype)


@dataclass(frozen=True)
class _Block:
    """The scores of some rows of one sequence, all its query heads."""

    sequence: int
    first: int
    stop: int
    q: Tensor  # (heads_k, group * rows, d)
    k: Tensor  # (heads_k, sk, d)
    v: Tensor  # (heads_k, sk, d_v)
    scores: Tensor  # (heads_q, rows, sk), -inf where not seen
    seen: Tensor  # (heads_q, rows, sk) bool
    keep: Tensor | None  # (heads_q, rows, sk): 0 where dropped, else 1 / keep probability
    cap_gradient: Tensor | None  # (heads_q, rows, sk): dy/dx of the softcap

    def by_query_head(self, x: Tensor) -> Tensor:
        """(heads_k, group * rows, n) as (heads_q, rows, n)."""
        return x.reshape(self.scores.shape[0], self.stop - self.first, x.shape[-1])

    def by_key_head(self, x: Tensor) -> Tensor:
        """(heads_q, rows, n) as (heads_k, group * rows, n)."""
        heads_k, heads_q = self.k.shape[0], self.scores.shape[0]
        return x.reshape(heads_k, heads_q // heads_k * x.shape[1], x.shape[-1])

    def weighted(self, weights: Tensor, values: Tensor) -> Tensor:
        """Sum over seen keys: (heads_q, rows, sk) with (heads_k, sk, n) gives (heads_q, rows, n)."""
        return self.by_query_head(product_of_visible(self.by_key_head(weights), self.by_key_head(self.seen), values))

    def weighted_over_rows(self, weights: Tensor, values: Tensor) -> Tensor:
        """Sum over the rows, and the heads of a group, that see a key: to (heads_k, sk, n)."""
        transposed, seen = (self.by_key_head(x).transpose(1, 2) for x in (weights, self.seen))
        return product_of_visible(transposed, seen, values)


def _blocks(q: Tensor, k: Tensor, v: Tensor, options: Options, arithmetic: Arithmetic) -> Iterator[_Block]:
    heads_q, heads_k, device = q.shape[-2], k.shape[-2], q.device
    for sequence in range(options.queries.batch):
        sq, sk = options.queries.length[sequence], options.keys.length[sequence]
        keys, values = (
            options.keys.rows(x, sequence).to(arithmetic.dtype).transpose(0, 1).contiguous() for x in (k, v)
        )
        step = max(1, _SCORES_AT_ONCE // max(1, heads_q * sk))
        for first in range(0, sq, step):
            stop = min(first + step, sq)
            queries = options.queries.rows(q, sequence, first, stop).to(arithmetic.dtype).transpose(0, 1)
            queries = queries.reshape(heads_k, heads_q // heads_k * (stop - first), q.shape[-1])
            scores = ((queries @ keys.transpose(1, 2)) * options.scale).reshape(heads_q, stop - first, sk)
            cap_gradient = None
            if options.softcap > 0:
                capped = torch.tanh(scores / options.softcap)
                cap_gradient = 1 - capped.square()
                scores = options.softcap * capped
            rows, columns = torch.arange(first, stop, device=device)[:, None], torch.arange(sk, device=device)
            slopes = options.slopes([sequence])
            if slopes is not None:
                distance = (rows + (sk - sq) - columns).abs().to(arithmetic.dtype)
                scores = scores - slopes[0, :, None, None].to(arithmetic.dtype) * distance
            seen = visible(options, rows, columns, sq, sk).expand(scores.shape)
            scores = scores.masked_fill(~seen, -math.inf)
            keep = None
            if options.dropout_threshold > 0:
                assert options.rng_state is not None  # Options.resolve has refused the call otherwise
                mask = keep_mask(
                    options.rng_state,
                    options.dropout_threshold,
                    torch.tensor([sequence], device=device),
                    torch.arange(heads_q, device=device),
                    rows[:, 0],
                    0,
                    sk,
                )
                keep = mask[0].to(arithmetic.dtype) * dropout_rescale(options.dropout_threshold)
            yield _Block(sequence, first, stop, queries, keys, values, scores, seen, keep, cap_gradient)


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """Out and lse in `arithmetic.dtype`, in the operators' layouts.

    Parameters
    ----------
    q, k, v : Tensor
        (batch, seqlen, heads, d) or (total, heads, d), any float dtype and strides.
    options : Options
        From `Options.resolve`.
    arithmetic : Arithmetic
        The precision.

    Returns
    -------
    tuple of Tensor
        out like q with the head dim of v; lse (batch, heads_q, seqlen_q) or (heads_q, total_q).
    """
    out = torch.zeros(q.shape[:-1] + v.shape[-1:], dtype=arithmetic.dtype, device=q.device)
    lse = new_statistics(q, options.queries.packed, arithmetic.dtype)
    lse_rows = options.queries.by_rows(lse)
    for block in _blocks(q, k, v, options, arithmetic):
        scores = block.scores
        top = scores.new_full((*scores.shape[:2], 1), -math.inf)
        if scores.shape[-1] > 0:
            top = scores.amax(dim=-1, keepdim=True)
        if options.sinks is not None:
            sinks = options.sinks.to(arithmetic.dtype)[:, None, None]
            top = torch.maximum(top, sinks)
        top = top.masked_fill(top == -math.inf, 0.0)
        exponentials = torch.exp(scores - top).masked_fill(~block.seen, 0.0)
        total = exponentials.sum(dim=-1, keepdim=True)
        if options.sinks is not None:
            total = total + torch.exp(sinks - top)
        weights = arithmetic.rounded(exponentials / total.masked_fill(total == 0, 1.0))
        if block.keep is not None:
            weights = weights * block.keep
        rows = block.weighted(weights, block.v)
        rows = rows.masked_fill(total == 0, 0.0)
        options.queries.rows(out, block.sequence, block.first, block.stop).copy_(rows.transpose(0, 1))
        options.queries.rows(lse_rows, block.sequence, block.first, block.stop).copy_(
            (top + total.log()).squeeze(-1).transpose(0, 1)
        )
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients in `arithmetic.dtype`, in the operators' layouts.

    Parameters
    ----------
    dout, dlse : Tensor
        Like out and lse; dlse may be None (0).
    q, k, v, options, arithmetic
        As for `forward`.
    out, lse : Tensor
        The forward's results.

    Returns
    -------
    tuple of Tensor
        dq, dk, dv like q, k, v; dsinks (heads_q), or 0 elements without sinks.
    """
    dtype, device = arithmetic.dtype, q.device
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=device) for x in (q, k, v))
    dsinks = torch.zeros(0 if options.sinks is None else q.shape[-2], dtype=dtype, device=device)

    def per_row(statistic: Tensor, block: _Block) -> Tensor:
        rows = options.queries.rows(options.queries.by_rows(statistic), block.sequence, block.first, block.stop)
        return rows.to(dtype).transpose(0, 1)[..., None]

    def per_element(x: Tensor, block: _Block) -> Tensor:
        return options.queries.rows(x, block.sequence, block.first, block.stop).to(dtype).transpose(0, 1)

    for block in _blocks(q, k, v, options, arithmetic):
        lse_rows = per_row(lse, block)
        empty = lse_rows == -math.inf
        probabilities = torch.exp(block.scores - lse_rows).masked_fill(~block.seen | empty, 0.0)
        dout_rows = per_element(dout, block)
        delta = (dout_rows * per_element(out, block)).sum(dim=-1, keepdim=True)
        dlse_rows = torch.zeros_like(delta) if dlse is None else per_row(dlse, block).masked_fill(empty, 0.0)

        dprobabilities = block.by_query_head(block.by_key_head(dout_rows) @ block.v.transpose(1, 2))
        weights = arithmetic.rounded(probabilities)
        if block.keep is not None:
            weights = weights * block.keep
            dprobabilities = dprobabilities * block.keep
        dscores = probabilities * (dprobabilities - (delta - dlse_rows))
        if block.cap_gradient is not None:
            dscores = dscores * block.cap_gradient
        dscores = arithmetic.rounded(dscores.masked_fill(~block.seen | empty, 0.0))

        dq_rows = block.weighted(dscores, block.k) * options.scale
        options.queries.rows(dq, block.sequence, block.first, block.stop).copy_(dq_rows.transpose(0, 1))
        dk_rows = block.weighted_over_rows(dscores, block.q) * options.scale
        options.keys.rows(dk, block.sequence).add_(dk_rows.transpose(0, 1))
        dv_rows = block.weighted_over_rows(weights, block.by_key_head(dout_rows))
        options.keys.rows(dv, block.sequence).add_(dv_rows.transpose(0, 1))
        if options.sinks is not None:
            sink_share = torch.exp(options.sinks.to(dtype)[:, None, None] - lse_rows)
            dsinks += (sink_share * (dlse_rows - delta)).masked_fill(empty, 0.0).sum(dim=(1, 2))
    return dq, dk, dv, dsinks
