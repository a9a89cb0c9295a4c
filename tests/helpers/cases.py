"""A case: everything that describes one attention call but its numbers; and inputs for it, poisoned and guarded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from .memory import CONSTANT_LAYOUTS, Guards, poison_

__all__ = ["Case", "Inputs", "Segment", "make_inputs", "visible"]

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Case:
    """One call of the operators: shapes, layout and options.

    Attributes
    ----------
    lengths_q, lengths_k : tuple of int
        Rows that count, per sequence (after ``seqused``).
    heads : tuple of int
        Query heads, key/value heads.
    head_dims : tuple of int
        Head dim of q and k, head dim of v.
    varlen : bool
        Packed sequences with ``cu_seqlens`` instead of a batch dimension.
    slack : tuple of int
        Rows that do not count: before the first sequence and after the last (varlen only: first and third number), and
        at the end of each sequence through ``seqused`` (second number). Keys get one row more than queries wherever
        the number is not 0.
    alibi : str or None
        ``heads`` or ``batch``: slopes of shape (heads_q) or (batch, heads_q).
    sinks : torch.dtype or None
        The type of the sinks, None: no sinks.
    hints : str
        ``exact``, ``none`` or ``short``: what is passed as max_seqlen (varlen only).
    layouts : tuple of (str, str)
        Name of a tensor (q, k, v, dout, dlse) and a layout of `helpers.memory.LAYOUTS`; contiguous where absent.
    dlse : bool
        Whether the loss depends on lse.
    magnitude : float
        Standard deviation of q and k.
    """

    lengths_q: tuple[int, ...] = (67,)
    lengths_k: tuple[int, ...] = (67,)
    heads: tuple[int, int] = (2, 2)
    head_dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.bfloat16
    varlen: bool = False
    slack: tuple[int, int, int] = (0, 0, 0)
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str | None = None
    sinks: torch.dtype | None = None
    dropout_p: float = 0.0
    softmax_scale: float | None = None
    deterministic: bool = False
    hints: str = "exact"
    layouts: tuple[tuple[str, str], ...] = ()
    dlse: bool = True
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        assert len(self.lengths_q) == len(self.lengths_k)
        assert set(dict(self.layouts)) <= {"q", "k", "v", "dout", "dlse"}

    @property
    def batch(self) -> int:
        """How many sequences."""
        return len(self.lengths_q)

    @property
    def scale(self) -> float:
        """The factor of q.k."""
        return self.head_dims[0] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def scores(self) -> int:
        """Scores of one head, all sequences."""
        return sum(q * k for q, k in zip(self.lengths_q, self.lengths_k, strict=True))

    @property
    def uses_seqused(self) -> bool:
        """Whether ``seqused_q`` and ``seqused_k`` are passed."""
        unequal = len(set(self.lengths_q)) > 1 or len(set(self.lengths_k)) > 1
        return self.slack[1] > 0 or (unequal and not self.varlen)

    @property
    def features(self) -> set[str]:
        """What a kernel must be able to do, in the names of ``csrc/kernels.toml``."""
        asked = {
            "causal": self.causal,
            "window": self.window != (-1, -1),
            "varlen": self.varlen,
            "seqused": self.uses_seqused,
            "sinks": self.sinks is not None,
            "softcap": self.softcap > 0,
            "alibi": self.alibi is not None,
            "dropout": self.dropout_p > 0,
            "deterministic": self.deterministic,
            "general_scale": self.scale <= 0,
        }
        return {name for name, wanted in asked.items() if wanted}

    def with_(self, **changes: Any) -> Case:
        """This case with some fields changed."""
        return replace(self, **changes)

    def __str__(self) -> str:
        """Short, unique text: the id of a parametrised test."""
        defaults = Case()

        def lengths(values: Sequence[int]) -> str:
            if len(values) > 6:
                return f"{len(values)}x{min(values)}..{max(values)}"
            return (
                f"{len(values)}x{values[0]}"
                if len(values) > 1 and len(set(values)) == 1
                else "+".join(map(str, values))
            )

        parts = [
            _SHORT[self.dtype],
            f"d{self.head_dims[0]}" + (f"x{self.head_dims[1]}" if self.head_dims[1] != self.head_dims[0] else ""),
            f"h{self.heads[0]}" + (f"x{self.heads[1]}" if self.heads[1] != self.heads[0] else ""),
            f"q{lengths(self.lengths_q)}",
            f"k{lengths(self.lengths_k)}",
        ]
        shown = {"dtype", "head_dims", "heads", "lengths_q", "lengths_k"}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in shown or value == getattr(defaults, item.name):
                continue
            if item.name == "layouts":
                parts += [f"{name}_{layout}" for name, layout in value]
            elif value is True:
                parts.append(item.name)
            elif isinstance(value, tuple):
                parts.append(item.name + ",".join(map(str, value)))
            else:
                parts.append(f"{item.name}{_SHORT.get(value, value)}")
        return "-".join(parts)


@dataclass
class Segment:
    """Where the rows that count of one sequence lie in the tensors of a call."""

    index: int
    q: tuple[Any, ...]  # indexes q, out, dq, dout: (rows, heads, head_dim)
    k: tuple[Any, ...]  # indexes k, v, dk, dv
    lse: tuple[Any, ...]  # indexes lse, dlse: (heads, rows)


@dataclass
class Inputs:
    """The tensors of one call. Everything but the rows of `segments` is poison."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    keywords: dict[str, Any]  # of torch.ops.flash_ext.fwd and bwd
    segments: list[Segment]
    guards: Guards
    slack_q: Tensor = field(repr=False)  # (batch, rows) or (total_q) bool: rows outside the sequences
    slack_k: Tensor = field(repr=False)


def visible(case: Case, index: int, device: torch.device | None = None) -> Tensor:
    """The keys that each row of a sequence sees, (seqlen_q, seqlen_k) bool, from the contract's inequalities."""
    rows, keys = case.lengths_q[index], case.lengths_k[index]
    i = torch.arange(rows, device=device)[:, None] + keys - rows
    j = torch.arange(keys, device=device)[None, :]
    seen = torch.ones(rows, keys, dtype=torch.bool, device=device)
    left, right = case.window
    if case.causal:
        seen &= j <= i
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    return seen


@dataclass
class _Rows:
    """How the rows of queries or keys lie in memory."""

    shape: tuple[int, ...]  # (batch, rows) or (total,)
    cu_seqlens: list[int] | None
    starts: list[int]

    def index(self, sequence: int, length: int) -> tuple[Any, ...]:
        """Indexes (..., heads, head_dim) tensors: the rows that count of a sequence."""
        if self.cu_seqlens is None:
            return (sequence, slice(0, length))
        return (slice(self.starts[sequence], self.starts[sequence] + length),)

    def lse_index(self, sequence: int, length: int) -> tuple[Any, ...]:
        """Indexes lse of shape (batch, heads, rows) or (heads, total)."""
        if self.cu_seqlens is None:
            return (sequence, slice(None), slice(0, length))
        return (slice(None), slice(self.starts[sequence], self.starts[sequence] + length))


def _arrange(lengths: Sequence[int], varlen: bool, slack: tuple[int, int, int]) -> _Rows:
    before, between, after = slack
    if not varlen:
        return _Rows((len(lengths), max(lengths, default=0) + between), None, [])
    cu_seqlens = [before]
    for length in lengths:
        cu_seqlens.append(cu_seqlens[-1] + length + between)
    return _Rows((cu_seqlens[-1] + after,), cu_seqlens, cu_seqlens[:-1])


def make_inputs(case: Case, device: torch.device, generator: torch.Generator, *, poison: bool = True) -> Inputs:
    """Random inputs of a case.

    Parameters
    ----------
    case : Case
        What to make.
    device : torch.device
        Where the tensors go; the numbers are drawn on the CPU, so they are the same everywhere.
    generator : torch.Generator
        On the CPU.
    poison : bool
        Fill rows that do not count with NaN, Inf and huge numbers; else with zeros.
    """
    layouts = dict(case.layouts)
    guards = Guards(generator, device)
    slack_k = tuple(rows + (rows > 0) for rows in case.slack)
    rows_q = _arrange(case.lengths_q, case.varlen, case.slack)
    rows_k = _arrange(case.lengths_k, case.varlen, (slack_k[0], slack_k[1], slack_k[2]))
    segments = [
        Segment(b, rows_q.index(b, sq), rows_k.index(b, sk), rows_q.lse_index(b, sq))
        for b, (sq, sk) in enumerate(zip(case.lengths_q, case.lengths_k, strict=True))
    ]
    used_q = torch.zeros(rows_q.shape, dtype=torch.bool)
    used_k = torch.zeros(rows_k.shape, dtype=torch.bool)
    for segment in segments:
        used_q[segment.q] = True
        used_k[segment.k] = True

    def operand(name: str, used: Tensor, heads: int, head_dim: int, deviation: float = 1.0) -> Tensor:
        shape = (*used.shape, heads, head_dim)
        layout = layouts.get(name, "contiguous")
        values = torch.randn(shape, generator=generator) * deviation
        for axis in CONSTANT_LAYOUTS.get(layout, ()):
            values = values.narrow(axis, 0, min(values.shape[axis], 1)).expand(values.shape)
        values = values.to(case.dtype).clone()
        if not used.all() and layout not in CONSTANT_LAYOUTS:
            values[~used] = poison_(values[~used], generator) if poison else 0
        return guards.place(name, values, layout)

    (heads_q, heads_k), (head_dim, head_dim_v) = case.heads, case.head_dims
    q = operand("q", used_q, heads_q, head_dim, case.magnitude)
    k = operand("k", used_k, heads_k, head_dim, case.magnitude)
    v = operand("v", used_k, heads_k, head_dim_v)
    dout = operand("dout", used_q, heads_q, head_dim_v)

    dlse = None
    if case.dlse:
        values = torch.randn((*used_q.shape, heads_q), generator=generator)
        for segment, sq in zip(segments, case.lengths_q, strict=True):
            if case.sinks is None and sq and (sq > case.lengths_k[segment.index] or case.window != (-1, -1)):
                blind = ~visible(case, segment.index).any(1)
                values[segment.q][blind] = torch.nan  # lse is -inf there: its gradient must be ignored
        if not used_q.all():
            values[~used_q] = poison_(values[~used_q], generator) if poison else 0
        if case.varlen:
            dlse = _place_dlse(guards, values.transpose(0, 1), layouts.get("dlse", "contiguous"))
        else:
            dlse = _place_dlse(guards, values.transpose(1, 2), layouts.get("dlse", "contiguous"))

    def vector(name: str, values: Sequence[int]) -> Tensor:
        return guards.place(name, torch.tensor(values, dtype=torch.int32).view(-1, 1, 1)).view(-1)

    keywords: dict[str, Any] = {
        "causal": case.causal,
        "window_left": case.window[0],
        "window_right": case.window[1],
        "softcap": case.softcap,
        "softmax_scale": case.softmax_scale,
        "dropout_p": case.dropout_p,
        "deterministic": case.deterministic,
    }
    if case.varlen:
        assert rows_q.cu_seqlens is not None and rows_k.cu_seqlens is not None
        keywords["cu_seqlens_q"] = vector("cu_seqlens_q", rows_q.cu_seqlens)
        keywords["cu_seqlens_k"] = vector("cu_seqlens_k", rows_k.cu_seqlens)
        if case.hints != "none":
            for name, lengths, between in (("q", case.lengths_q, case.slack[1]), ("k", case.lengths_k, slack_k[1])):
                exact = max(lengths, default=0) + between
                keywords[f"max_seqlen_{name}"] = exact if case.hints == "exact" else min(exact, 1)
    if case.uses_seqused:
        keywords["seqused_q"] = vector("seqused_q", case.lengths_q)
        keywords["seqused_k"] = vector("seqused_k", case.lengths_k)
    if case.alibi is not None:
        shape = (case.batch, heads_q) if case.alibi == "batch" else (heads_q,)
        slopes = torch.rand(shape, generator=generator) * 0.5
        keywords["alibi_slopes"] = guards.place("alibi_slopes", slopes.view(-1, 1, 1)).view(shape)
    if case.sinks is not None:
        sinks = (torch.randn(heads_q, generator=generator) * 2).to(case.sinks)
        keywords["sinks"] = guards.place("sinks", sinks.view(-1, 1, 1)).view(-1)
    if case.dropout_p > 0:
        state = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, generator=generator)
        keywords["rng_state"] = guards.place("rng_state", state.view(-1, 1, 1)).view(-1)
    return Inputs(case, q, k, v, dout, dlse, keywords, segments, guards, (~used_q).to(device), (~used_k).to(device))


def _place_dlse(guards: Guards, values: Tensor, layout: str) -> Tensor:
    """dlse (batch, heads, rows) or (heads, total), fp32; layouts of it are named as those of a (heads, rows, 1)."""
    if layout == "contiguous":
        return guards.place("dlse", values.unsqueeze(-1)).squeeze(-1)
    if layout == "rows_heads":  # (batch, rows, heads) in memory
        return guards.place("dlse", values.transpose(-1, -2).unsqueeze(-1)).squeeze(-1).transpose(-1, -2)
    if layout == "every_second":
        return guards.place("dlse", values.unsqueeze(-1), "sliced_dim")[..., 0]
    assert layout == "expanded", layout
    return guards.place("dlse", values.flatten()[:1].view(1, 1, 1)).view((1,) * values.dim()).expand(values.shape)
