"""The rows of the benchmark: shapes, masks, operation counts and floors, read from ``rows.toml``."""

from __future__ import annotations

import math
import random
import re
import sys
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# A backward pass does five matrix products where the forward does two.
BACKWARD_OVER_FORWARD = 2.5

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Row:
    """One attention problem.

    Attributes
    ----------
    group : str
        The table of ``rows.toml`` it stands in: ``training``, ``varlen`` or ``cpu``.
    lengths : tuple of int
        Length of each sequence; queries and keys are equally long.
    heads_q, heads_k, head_dim : int
        Query heads, key/value heads, and the size of one head of q, k and v.
    causal : bool
        Lower-triangular mask.
    packed : bool
        True: the sequences lie behind one another, ``(total, heads, head_dim)``; False:
        ``(batch, seqlen, heads, head_dim)``.
    floors : dict
        Direction to the speed, as a ratio to cuDNN, that flash_ext is held to. Empty: none.
    share_of : tuple of (str, float) or None
        Name of another row, and the share of flash_ext's own speed there that this row is held to.
    label : str
        Name of a packed row; a dense row is named by its shape.
    """

    group: str
    lengths: tuple[int, ...]
    heads_q: int
    heads_k: int
    head_dim: int
    causal: bool
    packed: bool = False
    floors: dict[str, float] = field(default_factory=dict)
    share_of: tuple[str, float] | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """Unique, readable and stable: recordings are compared by it."""
        heads = f"h{self.heads_q}" if self.heads_q == self.heads_k else f"h{self.heads_q}/{self.heads_k}"
        size = self.label or f"b{self.batch} s{self.lengths[0]}"
        return f"{size} {heads} d{self.head_dim} {'causal' if self.causal else 'full'}"

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def flop(self, direction: str) -> float:
        """Floating-point operations of one call.

        Two matrix products of ``2 * length**2 * head_dim`` for each query head, half of it when causal; the backward
        counts 2.5 times the forward. Recomputation, softmax and masked blocks that a kernel visits are not counted.
        """
        forward = 4.0 * self.heads_q * self.head_dim * sum(float(length) ** 2 for length in self.lengths)
        if self.causal:
            forward /= 2.0
        return forward if direction == "forward" else BACKWARD_OVER_FORWARD * forward


def log_uniform_lengths(count: int, shortest: int, longest: int, seed: int) -> tuple[int, ...]:
    """``count`` lengths whose logarithm is uniform in [log(shortest), log(longest)]; the same on every machine."""
    uniform = random.Random(seed)
    ratio = math.log(longest / shortest)
    return tuple(round(shortest * math.exp(uniform.random() * ratio)) for _ in range(count))


def _dense(group: str, entry: dict[str, Any]) -> Row:
    return Row(
        group=group,
        lengths=(entry["seqlen"],) * entry["batch"],
        heads_q=entry["heads"],
        heads_k=entry.get("heads_k", entry["heads"]),
        head_dim=entry["head_dim"],
        causal=entry.get("causal", False),
        floors=dict(entry.get("floor", {})),
    )


def _varlen(entry: dict[str, Any]) -> Row:
    return Row(
        group="varlen",
        lengths=log_uniform_lengths(entry["sequences"], entry["shortest"], entry["longest"], entry["seed"]),
        heads_q=entry["heads"],
        heads_k=entry.get("heads_k", entry["heads"]),
        head_dim=entry["head_dim"],
        causal=entry.get("causal", False),
        packed=True,
        share_of=(entry["of"], entry["share"]),
        label=f"varlen {entry['sequences']} x {entry['shortest']}..{entry['longest']}",
    )


def load_rows() -> list[Row]:
    """Every row of ``rows.toml``, in its order."""
    table = tomllib.loads(resources.files(__package__).joinpath("rows.toml").read_text(encoding="utf-8"))
    rows = [_dense("training", entry) for entry in table["training"]]
    rows += [_varlen(entry) for entry in table["varlen"]]
    rows += [_dense("cpu", entry) for entry in table["cpu"]]
    return rows


def select_rows(device_type: str, pattern: str = "", quick: bool = False) -> list[Row]:
    """The rows to measure on a kind of device.

    Parameters
    ----------
    device_type : str
        ``cuda`` takes the training and varlen rows, anything else the small ones.
    pattern : str
        Regular expression searched in the names; empty takes all.
    quick : bool
        Only head dim 128 at 1k and 4k, or the first two of the small rows.

    Raises
    ------
    ValueError
        If the pattern is no regular expression or no row is left.
    """
    rows = [row for row in load_rows() if (row.group == "cpu") == (device_type != "cuda")]
    if quick and device_type == "cuda":
        rows = [row for row in rows if row.head_dim == 128 and not row.packed and row.lengths[0] <= 4096]
    elif quick:
        rows = rows[:2]
    try:
        rows = [row for row in rows if re.search(pattern, row.name)]
    except re.error as error:
        raise ValueError(f"flash_ext: --rows={pattern!r} is no regular expression: {error}") from None
    if not rows:
        names = ", ".join(row.name for row in load_rows())
        raise ValueError(f"flash_ext: --rows={pattern!r} matches none of the rows for this device; rows are: {names}")
    return rows
