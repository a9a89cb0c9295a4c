"""What one can ask: which kernel a call would run and why, which kernels were built, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_ext import _C
from flash_ext.arguments import bound, check_result_form, flag, is_tensor_hint, number, window_bounds
from flash_ext.checks import MAX_HEAD_DIM, check_forward, check_operand, check_probability
from flash_ext.checks import refusal as refused
from flash_ext.selection import FORCED_PATH, Direction, call_of, choose, refusal, uses_reference

if TYPE_CHECKING:
    from flash_ext._C import Kernel

__all__ = ["Explanation", "build_info", "explain", "kernels"]

_HEAD_DIM_STEP = 8  # the public functions pad head dims up to a multiple of this


@dataclass(frozen=True)
class Explanation:
    """Which kernel a call would run, and why not the others.

    Attributes
    ----------
    direction : str
        forward or backward.
    device : str
        Of the tensors.
    path : str or None
        sm80, sm90, sm100 or cpu; None if the call would be refused.
    kernel : str or None
        Name of the kernel; None for the cpu path.
    tile : (int, int) or None
        Query rows and key rows of a tile.
    stages, warps : int or None
        Depth of the key/value pipeline; warps of a CTA.
    splits : int
        Passes that the keys are split into.
    shared_memory : int or None
        Bytes per CTA.
    features : tuple of str
        What the call asks for beyond plain dense attention, by the names of csrc/kernels.toml.
    copies : dict of str to str
        Arguments that a kernel cannot use where they lie, with the reason: each is copied once.
    passed_over : dict of str to str
        For each other path, the reason.
    error : str or None
        What the call would raise.
    """

    direction: Direction
    device: str
    path: str | None
    kernel: str | None = None
    tile: tuple[int, int] | None = None
    stages: int | None = None
    warps: int | None = None
    splits: int = 1
    shared_memory: int | None = None
    features: tuple[str, ...] = ()
    copies: dict[str, str] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)
    error: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.direction} on {self.device}: {self.path or 'refused'}"]
        if self.kernel is not None and self.tile is not None:
            lines.append(f"  kernel         {self.kernel}")
            rows, keys = self.tile
            lines.append(f"  tile           {rows} query rows x {keys} keys, {self.stages} stages, {self.warps} warps")
            lines.append(f"  shared memory  {self.shared_memory} bytes per CTA")
            lines.append(f"  splits         {self.splits}")
        elif self.path == "cpu":
            lines.append("  kernel         none: flash_ext.reference, through PyTorch")
        if self.error is not None:
            lines.append(f"  error          {self.error}")
        lines.append(f"  features       {', '.join(self.features) or 'none'}")
        lines += [f"  copy of        {name}: {reason}" for name, reason in self.copies.items()]
        lines += [f"  not {path:<11}{reason}" for path, reason in self.passed_over.items()]
        return "\n".join(lines)


def _padded(size: int) -> int:
    return -(-size // _HEAD_DIM_STEP) * _HEAD_DIM_STEP if size <= MAX_HEAD_DIM else size


def _stand_in(tensor: Tensor) -> Tensor:
    """A tensor without memory of its own, shaped as the public functions pad this one."""
    if tensor.ndim == 0:
        return tensor
    shape = (*tensor.shape[:-1], _padded(tensor.shape[-1]))
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(shape)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_lse: bool = False,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    sm_margin: int = 0,
    direction: Direction = "forward",
) -> Explanation:
    """Say which kernel a call of `flash_attn_func` or `flash_attn_varlen_func` would run, without running it.

    Parameters
    ----------
    q, k, v : Tensor
        (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with ``cu_seqlens_q`` and ``cu_seqlens_k``.
    direction : str
        "forward", or "backward" for the kernel of the gradients.
    **keywords
        Those of `flash_attn_func` and `flash_attn_varlen_func`.

    Returns
    -------
    Explanation
        With path, kernel, tile, stages, splits, shared memory, copies, and for each path passed over the reason. A call
        that no path can serve has path None and the error's text.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        The arguments are not those of a valid call: the error that the call itself would raise.
    """
    if direction not in ("forward", "backward"):
        raise ValueError(f"flash_ext: direction is {direction!r}; expected 'forward' or 'backward'")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_operand(name, tensor)
    if q.ndim > 0 and k.ndim > 0 and q.shape[-1] != k.shape[-1]:  # padding could hide it
        raise refused(ValueError, "k", f"has head_dim {k.shape[-1]}", f"the head_dim of q, {q.shape[-1]}")
    check_result_form(flag(return_attn_probs), flag(return_lse))
    window_left, window_right = map(bound, window_bounds(window_size))
    max_seqlen_q = None if is_tensor_hint(max_seqlen_q) else bound(max_seqlen_q)
    max_seqlen_k = None if is_tensor_hint(max_seqlen_k) else bound(max_seqlen_k)
    causal, deterministic = flag(causal), flag(deterministic)
    softmax_scale, softcap, dropout_p, num_splits, sm_margin = map(
        number, (softmax_scale, softcap, dropout_p, num_splits, sm_margin)
    )
    check_probability(dropout_p)
    rng_state = torch.empty(2, dtype=torch.int64, device=q.device) if dropout_p > 0 else None
    check_forward(
        _stand_in(q), _stand_in(k), _stand_in(v),
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q, seqused_k=seqused_k, block_table=block_table, softmax_scale=softmax_scale, causal=causal,
        window_left=window_left, window_right=window_right, softcap=softcap, alibi_slopes=alibi_slopes,
        sinks=learnable_sink, dropout_p=dropout_p, rng_state=rng_state, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, num_splits=num_splits, sm_margin=sm_margin, deterministic=deterministic,
    )  # fmt: skip
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    features = _C.features(
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, learnable_sink,
        softmax_scale, causal, window_left, window_right, softcap, dropout_p, deterministic,
    )  # fmt: skip
    names = tuple(name for name, bit in _C.FEATURES.items() if features & bit)
    if uses_reference(q):
        cpu_reason = "FLASH_EXT_PATH=cpu" if FORCED_PATH == "cpu" else "its kernels need CUDA tensors"
        return Explanation(
            direction, str(q.device), "cpu", features=names,
            copies=_padding_copies(q, k, v), passed_over={path: cpu_reason for path in _C.PATHS},
        )  # fmt: skip

    call = call_of(direction, q, _padded(q.shape[-1]), _padded(v.shape[-1]), features)
    chosen: Kernel | None = None
    passed_over: dict[str, str] = {}
    for path in _C.PATHS:
        if FORCED_PATH is not None and path != FORCED_PATH:
            passed_over[path] = f"FLASH_EXT_PATH={FORCED_PATH}"
        elif FORCED_PATH is None and not _C.path_serves(path, *call.compute_capability()):
            major, minor = call.compute_capability()
            passed_over[path] = f"serves compute capability {_C.path_gpus(path)}; this GPU has {major}.{minor}"
        elif chosen is not None:
            passed_over[path] = f"{chosen['path']} comes first"
        else:
            try:
                kernel = choose(call, path)
            except RuntimeError as error:  # the library is there but cannot be loaded; the call would raise this too
                kernel = str(error).removeprefix("flash_ext: ")
            if isinstance(kernel, str):
                passed_over[path] = kernel
            else:
                chosen = kernel
    passed_over["cpu"] = "serves CUDA tensors only with FLASH_EXT_PATH=cpu"
    if chosen is None:
        return Explanation(
            direction, call.describe_device(), None, features=names, passed_over=passed_over, error=str(refusal(call))
        )
    copies = _padding_copies(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if name not in copies and (reason := _C.packing_reason(tensor)):
            copies[name] = reason
    for name, vector in (("learnable_sink", learnable_sink), ("alibi_slopes", alibi_slopes)):
        if vector is not None and vector.stride(-1) != 1 and vector.shape[-1] > 1:
            copies[name] = f"it is not contiguous (stride {vector.stride(-1)})"
    return Explanation(
        direction,
        call.describe_device(),
        chosen["path"],
        chosen["name"],
        (chosen["block_m"], chosen["block_n"]),
        chosen["stages"],
        chosen["warps"],
        1,
        chosen["shared_memory"],
        names,
        copies,
        passed_over,
    )


def _padding_copies(q: Tensor, k: Tensor, v: Tensor) -> dict[str, str]:
    """Arguments that the public functions pad."""
    return {
        name: f"head_dim {tensor.shape[-1]} is padded to {_padded(tensor.shape[-1])}"
        for name, tensor in (("q", q), ("k", k), ("v", v))
        if tensor.shape[-1] % _HEAD_DIM_STEP
    }


def kernels() -> list[dict[str, Any]]:
    """Every built kernel of every path whose library exists, in the order of csrc/kernels.toml within a path.

    Returns
    -------
    list of dict
        name, path, direction, dtype, head_dim, head_dim_v, block_m, block_n, stages, warps, shared_memory (bytes per
        CTA) and features (names) of each.

    Raises
    ------
    RuntimeError
        A library cannot be loaded.
    """
    return [dict(kernel) for path in _C.available_paths() for kernel in _C.kernels(path)]


def build_info() -> dict[str, Any]:
    """How this installation was built.

    Returns
    -------
    dict
        ``module``: version, commit, compiler and options of `flash_ext._C`; ``library_dir``; ``libraries``: the same
        and the CUDA version of each path's library.

    Raises
    ------
    RuntimeError
        A library cannot be loaded.
    """
    return {
        "module": _C.build_info(),
        "library_dir": _C.library_dir(),
        "libraries": {path: _C.library_build_info(path) for path in _C.available_paths()},
    }
