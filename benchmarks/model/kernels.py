"""The kernels of csrc/kernels.toml, and how many steps they take for a problem."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Kernel:
    """One bf16 kernel of the plain variant.

    Attributes
    ----------
    path, direction : str
    head_dim, head_dim_v : int
    tile : dict
        Its tile in kernels.toml: block_m, block_n, stages, warps and the path's own keys.
    when : str
        ``masked`` or ``full`` if it serves only such calls, else empty.
    """

    path: str
    direction: str
    head_dim: int
    head_dim_v: int
    tile: dict[str, int]
    when: str = ""

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def name(self) -> str:
        """As in ``flash_ext.kernels()``."""
        tile = f"m{self.block_m}n{self.block_n}"
        return f"{self.path}_{self.direction}_bf16_d{self.head_dim}x{self.head_dim_v}_{tile}_plain"

    @property
    def block_m(self) -> int:
        return self.tile["block_m"]

    @property
    def block_n(self) -> int:
        return self.tile["block_n"]

    @property
    def ctas_per_tile(self) -> int:
        """CTAs that work on one tile: the pairs of sm100."""
        return self.tile.get("cluster", 1) if self.path == "sm100" else 1

    @property
    def walkers(self) -> int:
        """Groups of warps of a CTA that walk the blocks of a tile, each on rows of its own."""
        if self.path == "sm80" or self.has_gradient_roles:
            return 1
        if self.direction == "backward":
            return self.block_n // 64 if self.path == "sm90" else 2
        rows = 64 if self.path == "sm90" else 128 * self.ctas_per_tile
        return self.block_m // rows

    @property
    def has_gradient_roles(self) -> bool:
        """Whether dV, dK and dQ have a warpgroup each (csrc/sm90/backward_roles.cuh)."""
        return bool(self.tile.get("roles"))

    def roles(self) -> dict[str, range]:
        """Warps of a CTA by what they do. A path that is not known has one role."""
        warps = self.tile["warps"]
        if self.has_gradient_roles:
            return {"producer": range(4), "scores": range(4, 8), "gradients": range(8, 12), "queries": range(12, warps)}
        if self.path == "sm90":
            return {"producer": range(4), "walker": range(4, warps)}
        if self.path == "sm100" and self.direction == "backward":
            return {
                "queries": range(4),
                "walker": range(4, 12),
                "products": range(12, 13),
                "producer": range(13, warps),
            }
        if self.path == "sm100" and self.direction == "forward":
            softmax = 4 * self.walkers
            return {
                "walker": range(softmax),
                "correction": range(softmax, softmax + 4),
                "products": range(softmax + 4, softmax + 5),
                "producer": range(softmax + 5, warps),
            }
        return {"walker": range(warps)}


def load_kernels(file: Path = ROOT / "csrc" / "kernels.toml") -> list[Kernel]:
    """The bf16 kernels of the plain variant, in the table's order."""
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    found = []
    for row in table["kernel"]:
        if "plain" not in row["variants"] or "bf16" not in row["dtype"]:
            continue
        for entry in row["tiles"]:
            tile: dict[str, Any] = dict(entry)
            when = tile.pop("when", "")
            head_dim, head_dim_v = row["head_dim"]
            found.append(Kernel(row["path"], row["direction"], head_dim, head_dim_v, tile, when))
    return found


def choose(kernels: list[Kernel], path: str, direction: str, head_dims: tuple[int, int], causal: bool) -> Kernel | None:
    """The kernel that a call with these head dims, of Q and K and of V, runs on where shared memory is not short; None:
    the path has none for it."""
    for kernel in sorted(kernels, key=lambda k: k.head_dim + k.head_dim_v):
        if (kernel.path, kernel.direction) != (path, direction):
            continue
        if kernel.head_dim < head_dims[0] or kernel.head_dim_v < head_dims[1]:
            continue
        if kernel.when == ("full" if causal else "masked"):
            continue
        return kernel
    return None


@dataclass(frozen=True)
class Steps:
    """The walk of one tile, in one CTA: (unmasked, masked) steps of each walker.

    ``rows``: rows or keys that exist in the tile, of a CTA.
    """

    walkers: tuple[tuple[int, int], ...]

    @property
    def full(self) -> float:
        """Mean over the walkers."""
        return sum(full for full, _ in self.walkers) / len(self.walkers)

    @property
    def masked(self) -> float:
        return sum(masked for _, masked in self.walkers) / len(self.walkers)

    @property
    def longest(self) -> int:
        """Blocks that the CTA loads."""
        return max(full + masked for full, masked in self.walkers)


def _split(begin: int, end: int, full_begin: int, full_end: int) -> tuple[int, int]:
    full = max(min(end, full_end) - max(begin, full_begin), 0)
    return full, max(end - begin, 0) - full


def tiles_of(kernel: Kernel, rows: int, keys: int, causal: bool) -> Iterator[Steps]:
    """The tiles of one head, in ascending order, once for each CTA that works on one."""
    shift = keys - rows
    m, n = kernel.block_m, kernel.block_n
    if kernel.direction == "forward":
        walker_rows = m // kernel.walkers
        for first in range(0, rows, m):
            walks = []
            for row in range(first, first + m, walker_rows):
                last = min(row + walker_rows, rows)
                if last <= row:
                    walks.append((0, 0))
                    continue
                visible = min(keys, last + shift) if causal else keys
                uncut = min(keys, row + 1 + shift) if causal else keys
                walks.append(_split(0, -(-max(visible, 0) // n), 0, max(uncut, 0) // n))
            for _ in range(kernel.ctas_per_tile):
                yield Steps(tuple(walks))
        return
    for first in range(0, keys, n):
        last = min(first + n, keys)
        begin = max(first - shift, 0) // m if causal else 0
        full_begin = -(-max(last - 1 - shift, 0) // m) if causal else 0
        end = -(-rows // m)
        walk = _split(min(begin, end), end, full_begin, rows // m if last - first == n else 0)
        for _ in range(kernel.ctas_per_tile):
            yield Steps((walk,) * kernel.walkers)
