"""The one place that allocates what the kernels and the cpu path write: outputs and workspaces.

With ``FLASH_EXT_POISON=1`` in the environment every byte of a new tensor is set to 0xFF, which
is NaN in fp16, bf16 and fp32 and -1 in the integer types, so that a result that was never written shows up in the
tests. torch's own ``fill_uninitialized_memory`` acts only in its deterministic mode, which would select other kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flash_ext import environment

__all__ = ["POISON", "empty", "empty_like", "outputs", "workspace"]

POISON: bool = environment.POISON

# What LaunchContext in csrc/params.h promises of a workspace. CUDA's caching allocator gives 512 bytes, the host's 64.
_WORKSPACE_ALIGNMENT = 256


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    tensor.detach().view(-1).view(torch.uint8).fill_(0xFF)
    return tensor


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new contiguous tensor of ``shape``, not initialised (0xFF bytes under ``FLASH_EXT_POISON=1``)."""
    tensor = torch.empty(*shape, dtype=dtype, device=device)  # a tuple would cost 0.35 us more
    return _poison(tensor) if POISON else tensor


def empty_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new contiguous tensor of ``tensor``'s shape and device, whatever its strides; see `empty`."""
    result = torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)
    return _poison(result) if POISON else result


def outputs(q: torch.Tensor, head_dim_v: int, *lse_shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of a forward call: out, like q with the head_dim of v, and lse, fp32; see `empty`."""
    if q.shape[-1] == head_dim_v:
        out = empty_like(q)  # takes less time than from a shape
    else:
        out = empty((*q.shape[:-1], head_dim_v), q.dtype, q.device)
    return out, empty(lse_shape, torch.float32, q.device)


def workspace(nbytes: int, like: torch.Tensor) -> torch.Tensor:
    """Scratch memory of one call.

    Parameters
    ----------
    nbytes : int
        How many bytes the kernel asked for.
    like : torch.Tensor
        Any tensor of the call: names the device.

    Returns
    -------
    torch.Tensor
        (nbytes,) uint8 on ``like``'s device, its address a multiple of 256 bytes, not initialised (see `empty`).
        On CUDA it belongs to the current stream, as every tensor of the caching allocator does.
    """
    tensor = empty((nbytes + _WORKSPACE_ALIGNMENT,), torch.uint8, like.device)
    return tensor.narrow(0, -tensor.data_ptr() % _WORKSPACE_ALIGNMENT, nbytes)
