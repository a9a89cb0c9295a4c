"""The choice of a path: which library's kernels serve a call, and what to say when none can.

The GPU's compute capability picks the path, the most specific first; the sm80 path serves what that one cannot. What
no built kernel can do is refused with the reason: a CUDA tensor never ends on the cpu path unless
``FLASH_EXT_PATH=cpu`` says so.

`flash_ext.environment` has the variables: ``FLASH_EXT_PATH`` (sm80, sm90, sm100 or cpu) forces a path;
``FLASH_EXT_EMULATE`` (sm80, sm90 or sm100) makes CPU tensors the device tensors of that path, whose library must then
be linked against the emulator. Both together must agree, but that ``FLASH_EXT_PATH=cpu`` goes past the emulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from flash_ext import _C, environment

if TYPE_CHECKING:
    from flash_ext._C import Kernel

__all__ = [
    "EMULATED_PATH",
    "FORCED_PATH",
    "Call",
    "Direction",
    "call_of",
    "candidates",
    "choose",
    "path_of",
    "refusal",
    "uses_reference",
]

Direction = Literal["forward", "backward"]

_DTYPE_NAMES: dict[torch.dtype, Literal["fp16", "bf16"]] = {torch.float16: "fp16", torch.bfloat16: "bf16"}


#: The path that serves every call, as the environment says; None: the GPU decides.
FORCED_PATH: str | None = environment.PATH or environment.EMULATE
#: The path whose kernels run on CPU tensors.
EMULATED_PATH: str | None = None if FORCED_PATH == "cpu" else environment.EMULATE


@dataclass(frozen=True)
class Call:
    """All that the choice of a path and a kernel may depend on: nothing that changes from one batch to the next."""

    direction: Direction
    on_cpu: bool
    device: int  # CUDA ordinal; 0 under emulation
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    features: int

    def describe_device(self) -> str:
        """The device and its name."""
        if self.on_cpu and EMULATED_PATH is None:
            return "cpu"
        if EMULATED_PATH is not None:
            return f"emulated {_C.device_info(EMULATED_PATH, self.device)['name']}"
        return f"cuda:{self.device} ({torch.cuda.get_device_name(self.device)})"

    def compute_capability(self) -> tuple[int, int]:
        """Of the GPU, or of the one that the emulator plays."""
        if EMULATED_PATH is not None:
            return _C.device_info(EMULATED_PATH, self.device)["compute_capability"]
        return torch.cuda.get_device_capability(self.device)


def call_of(direction: Direction, q: Tensor, head_dim: int, head_dim_v: int, features: int) -> Call:
    """The call with tensors like q; raises `NotImplementedError` for a device that is neither CUDA nor the CPU."""
    if not (q.is_cuda or q.is_cpu):
        raise NotImplementedError(
            f"flash_ext: q is on {q.device}; expected a CUDA or cpu tensor (FLASH_EXT_PATH=cpu runs the PyTorch "
            "implementation on any device)"
        )
    return Call(direction, q.is_cpu, max(q.get_device(), 0), q.dtype, head_dim, head_dim_v, features)


def choose(call: Call, path: str, features: int | None = None) -> Kernel | str:
    """The kernel of one path for the call, or why there is none: one clause without the path's name in front."""
    if call.on_cpu and EMULATED_PATH is None:
        return "its kernels need CUDA tensors"
    if path not in _C.available_paths():
        return f"not built ({_C.library_file(path)} does not exist; FLASH_EXT_PATHS={path} pip install . builds it)"
    dtype = _DTYPE_NAMES[call.dtype]
    features = call.features if features is None else features
    return _C.choose(path, call.direction, dtype, call.head_dim, call.head_dim_v, features, call.device)


def candidates(call: Call, forced: str | None) -> list[str]:
    """Paths to try, best first."""
    if forced is not None:
        return [forced]
    return [path for path in _C.PATHS if _C.path_serves(path, *call.compute_capability())]


def refusal(call: Call) -> NotImplementedError:
    """The error for a call that no path may serve: what is missing, on which GPU, and what would serve instead."""
    cpu = "FLASH_EXT_PATH=cpu runs the PyTorch implementation on any device, slowly"
    if call.on_cpu and EMULATED_PATH is None:
        return NotImplementedError(
            f"flash_ext: FLASH_EXT_PATH={FORCED_PATH} needs CUDA tensors, and q is on the cpu; leave it unset "
            "or move the tensors to a GPU"
        )
    device = call.describe_device()
    paths = candidates(call, FORCED_PATH)
    if not paths:
        major, minor = call.compute_capability()
        return NotImplementedError(
            f"flash_ext: no path has kernels for {device}, compute capability {major}.{minor}; 8.0 is the oldest. {cpu}"
        )
    forced = f"FLASH_EXT_PATH={FORCED_PATH}: " if FORCED_PATH is not None else ""
    text = f"flash_ext: {forced}no {call.direction} kernel serves this call on {device}. "
    text += " ".join(f"{path}: {choose(call, path)}." for path in paths)

    if FORCED_PATH is not None and EMULATED_PATH is None:
        for path in candidates(call, None):
            if path != FORCED_PATH and isinstance(choose(call, path), dict):
                return NotImplementedError(f"{text} The {path} path serves it: leave FLASH_EXT_PATH unset")
    for name, bit in _C.FEATURES.items():
        for path in paths if call.features & bit else ():
            if isinstance(choose(call, path, call.features & ~bit), dict):
                argument = _C.FEATURE_ARGUMENTS[name]
                return NotImplementedError(f"{text} Without {argument} the {path} path serves it. {cpu}")
    return NotImplementedError(f"{text} {cpu}")


# Written by any thread, each entry always with the same value.
_paths: dict[tuple[Direction, int, torch.dtype, int, int, int], str] = {}


def path_of(direction: Direction, q: Tensor, head_dim: int, head_dim_v: int, features: int) -> str:
    """The path whose kernels serve a call on CUDA (or emulated) tensors like q; raises `NotImplementedError`."""
    key = (direction, q.get_device(), q.dtype, head_dim, head_dim_v, features)
    path = _paths.get(key)
    if path is not None:
        return path
    call = call_of(direction, q, head_dim, head_dim_v, features)
    if not call.on_cpu or EMULATED_PATH is not None:
        for path in candidates(call, FORCED_PATH):
            if isinstance(choose(call, path), dict):
                _paths[key] = path
                if direction == "forward":
                    _C.set_plain_path(path, _DTYPE_NAMES[q.dtype], key[1], head_dim, head_dim_v, features)
                return path
    raise refusal(call)


def uses_reference(q: Tensor) -> bool:
    """Whether the cpu path serves tensors like q."""
    return FORCED_PATH == "cpu" or (FORCED_PATH is None and q.is_cpu)
