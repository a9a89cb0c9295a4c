"""Tensors with hostile surroundings: guard bands, poison in every byte that is no value, and any memory layout."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["LAYOUTS", "CONSTANT_LAYOUTS", "Guards", "integer_view", "poison_"]

_GUARD = 256  # elements before and after each tensor: keeps the 16-byte alignment of the base address


def integer_view(tensor: Tensor) -> Tensor:
    """The bits of a contiguous tensor, as the integer type of its size."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def poison_(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill in place with what must never reach a result: NaN, both infinities and the largest finite numbers.

    Integer tensors get values that are out of every bound.
    """
    if tensor.numel() == 0:
        return tensor
    if tensor.dtype.is_floating_point:
        largest = torch.finfo(tensor.dtype).max
        values = torch.tensor([torch.nan, torch.inf, -torch.inf, largest, -largest, torch.nan])
    else:
        values = torch.tensor([2**31 - 1, -1, -(2**31), 1 << 20])
    choice = torch.randint(len(values), tensor.shape, generator=generator)
    return tensor.copy_(values[choice].to(tensor.dtype).to(tensor.device))


# A layout is two functions: the shape of the memory it lies in, and the view of that memory that is the tensor. Shapes
# are (batch, rows, heads, head_dim), or (total, heads, head_dim).
_Shape = tuple[int, ...]
_Layout = tuple[Callable[[_Shape], _Shape], Callable[[Tensor, _Shape], Tensor]]


def _replace(shape: _Shape, axis: int, extent: int) -> _Shape:
    changed = list(shape)
    changed[axis] = extent
    return tuple(changed)


def _wider(axis: int, before: int, after: int) -> _Layout:
    """A slice of a larger tensor."""
    return (
        lambda shape: _replace(shape, axis, shape[axis] + before + after),
        lambda memory, shape: memory.narrow(axis, before, shape[axis]),
    )


def _swapped(first: int, second: int) -> _Layout:
    """A transposed view."""

    def memory_shape(shape: _Shape) -> _Shape:
        changed = list(shape)
        changed[first], changed[second] = changed[second], changed[first]
        return tuple(changed)

    return memory_shape, lambda memory, shape: memory.transpose(first, second)


def _expanded(axis: int) -> _Layout:
    """A stride-0 dimension."""
    return lambda shape: _replace(shape, axis, min(shape[axis], 1)), lambda memory, shape: memory.expand(shape)


def _packed_view(memory: Tensor, shape: _Shape) -> Tensor:
    return memory.select(-3, 1)


LAYOUTS: dict[str, _Layout] = {
    "contiguous": (lambda shape: shape, lambda memory, shape: memory),
    "heads_first": _swapped(-3, -2),  # (batch, heads, rows, head_dim) in memory
    "rows_first": _swapped(0, -3),  # (rows, batch, heads, head_dim) in memory; varlen: no change
    "sliced_heads": _wider(-2, 1, 2),
    "sliced_rows": _wider(-3, 3, 5),
    "sliced_dim": _wider(-1, 8, 8),  # rows stay multiples of 16 bytes apart
    "qkv_packed": (lambda shape: (*shape[:-2], 3, *shape[-2:]), _packed_view),
    "odd_rows": _wider(-1, 0, 1),  # rows 2 bytes more than a multiple of 16 apart: packed
    "misaligned": _wider(-1, 4, 4),  # the base 8 bytes off, rows a multiple of 16 bytes apart: packed
    "misaligned_odd": _wider(-1, 1, 2),
    "dim_swapped": _swapped(-1, -3),  # the last dimension is not contiguous: packed
    "every_second": (
        lambda shape: _replace(shape, -1, 2 * shape[-1]),
        lambda memory, shape: memory[..., ::2],
    ),
    "expanded_batch": _expanded(0),
    "expanded_rows": _expanded(-3),
    "expanded_heads": _expanded(-2),
    "expanded_dim": _expanded(-1),
    "scalar": (lambda shape: (1,) * len(shape), lambda memory, shape: memory.expand(shape)),
}
# Layouts in which several indices share memory: values must be constant along those dimensions.
CONSTANT_LAYOUTS: dict[str, tuple[int, ...]] = {
    "expanded_batch": (0,),
    "expanded_rows": (-3,),
    "expanded_heads": (-2,),
    "expanded_dim": (-1,),
    "scalar": (0, -3, -2, -1),
}


class Guards:
    """Places tensors inside larger, poisoned buffers and later says whether anything in them changed."""

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self._generator = generator
        self._device = device
        self._buffers: list[tuple[str, Tensor]] = []
        self._frozen: list[Tensor] = []

    def place(self, name: str, values: Tensor, layout: str = "contiguous") -> Tensor:
        """A tensor of these values on the device, in this layout, poison in every other byte of its buffer.

        In layouts that share memory, the first index along each shared dimension gives the value.
        """
        shape = tuple(values.shape)
        memory_shape, view = LAYOUTS[layout]
        inner_shape = memory_shape(shape)
        extent = math.prod(inner_shape)
        buffer = poison_(torch.empty(_GUARD + extent + _GUARD, dtype=values.dtype), self._generator).to(self._device)
        inner = buffer[_GUARD : _GUARD + extent].view(inner_shape)
        for axis in CONSTANT_LAYOUTS.get(layout, ()):
            values = values.narrow(axis, 0, min(values.shape[axis], 1))
        (inner if layout in CONSTANT_LAYOUTS else view(inner, shape)).copy_(values)
        self._buffers.append((name, buffer))
        return view(inner, shape)

    def freeze(self) -> None:
        """Remember every buffer as it is now; what changes later is an error."""
        self._frozen = [buffer.clone() for _, buffer in self._buffers]

    def check(self) -> None:
        """Raise AssertionError if anything changed since `freeze`."""
        for (name, buffer), before in zip(self._buffers, self._frozen, strict=True):
            if not torch.equal(integer_view(buffer), integer_view(before)):
                changed = (integer_view(buffer) != integer_view(before)).nonzero().view(-1)
                raise AssertionError(
                    f"{name} or its surroundings were written: {changed.numel()} elements, first at "
                    f"{int(changed[0]) - _GUARD} from the start of its memory, last at {int(changed[-1]) - _GUARD}"
                )

    def check_outside(self, view: Tensor) -> None:
        """Raise AssertionError if anything changed since `freeze` but the elements of a view of the one buffer held."""
        ((name, buffer),) = self._buffers
        inside = torch.zeros(buffer.shape, dtype=torch.bool, device=buffer.device)
        inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
        changed = (integer_view(buffer) != integer_view(self._frozen[0])) & ~inside
        assert not changed.any(), f"{int(changed.sum())} elements beside {name} were written"
