"""Guard bands around what flash_ext allocates: its outputs and workspaces."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

__all__ = ["GuardedAllocations"]

_BAND = 4096  # bytes on each side, more than any row of a tile
_ALIGNMENT = 256  # what workspaces are promised


class GuardedAllocations:
    """Puts each tensor that flash_ext allocates between two bands of random bytes, and checks the bands.

    The tensors are filled with NaN, as FLASH_EXT_POISON=1 does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
        from flash_ext import _C, allocate

        self._generator = generator
        self._bands: list[tuple[str, Tensor, Tensor]] = []
        monkeypatch.setattr(allocate, "empty", self._empty)
        monkeypatch.setattr(allocate, "empty_like", self._empty_like)
        _C.set_allocator(self._workspace)

    def restore(self) -> None:
        """Give flash_ext its own workspaces back; the other allocations are undone by ``monkeypatch``."""
        from flash_ext import _C, allocate

        _C.set_allocator(allocate.workspace)

    def _bytes(self, name: str, nbytes: int, device: torch.device) -> Tensor:
        buffer = torch.randint(256, (nbytes + 2 * _BAND + _ALIGNMENT,), dtype=torch.uint8, generator=self._generator)
        buffer = buffer.to(device)
        start = _BAND + -(buffer.data_ptr() + _BAND) % _ALIGNMENT
        inside = buffer[start : start + nbytes]
        inside.fill_(0xFF)
        for band in (buffer[:start], buffer[start + nbytes :]):
            self._bands.append((name, band, band.clone()))
        return inside

    def _empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        return self._bytes(f"an output of shape {tuple(shape)}", nbytes, device).view(dtype).view(tuple(shape))

    def _empty_like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self._empty(tensor.shape, dtype or tensor.dtype, tensor.device)

    def _workspace(self, nbytes: int, like: Tensor) -> Tensor:
        return self._bytes(f"a workspace of {nbytes} bytes", nbytes, like.device)

    def check_surroundings(self) -> None:
        """Raise AssertionError if a band changed, or if nothing was allocated through flash_ext.allocate."""
        assert self._bands, "no output was allocated through flash_ext.allocate"
        for name, band, before in self._bands:
            changed = (band != before).nonzero()
            assert not changed.numel(), (
                f"{changed.numel()} bytes beside {name} were written, first at {int(changed[0])}"
            )

    def forget(self) -> None:
        """Let go of the tensors allocated so far."""
        self._bands.clear()
