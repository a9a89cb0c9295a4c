"""flash_ext._C: the compiled kernels, one library per path, loaded when first needed (csrc/binding/)."""

# ruff: noqa: N999

from collections.abc import Callable
from typing import Any, Literal, TypedDict

from torch import Tensor

class Kernel(TypedDict):
    """One built kernel: a row of csrc/kernels.toml times dtype, tile and variant."""

    name: str
    path: str
    direction: str
    dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    stages: int
    warps: int
    shared_memory: int
    features: list[str]

class Device(TypedDict):
    """A GPU as a path's library sees it; shared_memory in bytes per CTA."""

    compute_capability: tuple[int, int]
    sm_count: int
    shared_memory: int
    name: str

class TensorInfo(TypedDict):
    """A tensor as the binding sees it; strides in elements."""

    data_ptr: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    stream: int
    dlpack: bool

FEATURES: dict[str, int]
"""Bit of each feature, by its name in csrc/kernels.toml."""
FEATURE_ARGUMENTS: dict[str, str]
"""The argument of the public functions that asks for a feature."""
PATHS: tuple[str, ...]
"""Every path with kernels, most specific first."""

def configure(
    *,
    library_dir: str,
    emulated: bool,
    use_dlpack: bool,
    block_m: int,
    block_n: int,
    sm_count: int,
    max_shared_memory: int,
) -> None: ...
def force_tile(block_m: int, block_n: int) -> None: ...
def forward(
    path: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    num_splits: int,
    sm_margin: int,
    deterministic: bool,
    /,
) -> None: ...
def backward(
    path: str,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dsinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    num_splits: int,
    sm_margin: int,
    deterministic: bool,
    /,
) -> None: ...
def features(
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    /,
) -> int: ...
def choose(
    path: str,
    direction: Literal["forward", "backward"],
    dtype: Literal["fp16", "bf16", "fp32", "fp8"],
    head_dim: int,
    head_dim_v: int,
    features: int,
    device: int,
    /,
) -> Kernel | str: ...
def probe(path: str, tensor: Tensor, value: float, /) -> None: ...
def kernels(path: str, /) -> list[Kernel]: ...
def available_paths() -> list[str]: ...
def library_dir() -> str: ...
def library_file(path: str, /) -> str: ...
def device_info(path: str, device: int, /) -> Device: ...
def path_serves(path: str, major: int, minor: int, /) -> bool: ...
def path_gpus(path: str, /) -> str: ...
def build_info() -> dict[str, object]: ...
def library_build_info(path: str, /) -> dict[str, object]: ...
def plain_forward(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], deterministic: bool, /
) -> tuple[Tensor, Tensor] | None: ...
def set_plain_path(
    path: str, dtype: Literal["fp16", "bf16"], device: int, head_dim: int, head_dim_v: int, features: int, /
) -> None: ...
def set_output_allocator(allocator: Callable[..., tuple[Tensor, Tensor]], /) -> None: ...
def set_allocator(allocator: Callable[[int, Tensor], Tensor], /) -> None: ...
def packing_reason(tensor: Tensor, /) -> str: ...
def tensor_info(tensor: Tensor, /) -> TensorInfo: ...
