"""Measures tiles of the sm90 forward beside cuDNN and prints the table row of the best.

    python benchmarks/sweep_sm90_forward.py build FOLDER [--head-dim D DV] [--cutlass INCLUDE]     # needs nvcc, no GPU
    python benchmarks/sweep_sm90_forward.py measure FOLDER [--head-dim D DV] [--rounds N]          # needs a Hopper GPU

`build` compiles one library per candidate (all of `CANDIDATES`, or those of one pair of head dims) and reports spills
and serialised wgmma; `measure` checks each against cuDNN's result, then times all of them and cuDNN in turns, over
lengths 1k, 4k and 16k, full and causal, and prints TFLOP/s, the ratio to cuDNN and the line for csrc/kernels.toml.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT / "cmake"))

Tile = dict[str, int]


def _tile(block_m: int, block_n: int, q_buffers: int, **options: int) -> Tile:
    warps = 4 + block_m // 16
    return {"block_m": block_m, "block_n": block_n, "stages": 2, "warps": warps, "q_buffers": q_buffers, **options}


CANDIDATES: dict[tuple[int, int], list[Tile]] = {
    (64, 64): [
        _tile(192, 128, 2, cross_tile=1),
        _tile(192, 128, 2),
        _tile(128, 128, 2, cross_tile=1),
        _tile(128, 192, 2, cross_tile=1),
    ],
    (96, 96): [
        _tile(192, 96, 2, cross_tile=1),
        _tile(192, 80, 2, cross_tile=1),
        _tile(128, 128, 2, cross_tile=1),
        _tile(128, 144, 2, cross_tile=1),
    ],
    (128, 128): [
        _tile(128, 128, 2, cross_tile=1),
        _tile(128, 128, 2, cross_tile=1, cluster=2),
        _tile(128, 160, 2, cross_tile=1),
        _tile(128, 176, 1, cross_tile=1, cluster=2),
    ],
    (192, 192): [
        _tile(128, 96, 1, cross_tile=1),
        _tile(128, 96, 1, cross_tile=1, cluster=2),
        _tile(128, 112, 1, cross_tile=1),
        _tile(128, 80, 2, cross_tile=1),
    ],
    (192, 128): [
        _tile(128, 128, 1, cross_tile=1),
        _tile(128, 112, 1, cross_tile=1),
        _tile(128, 96, 2, cross_tile=1),
    ],
    (256, 256): [
        _tile(128, 80, 1, cross_tile=1),
        _tile(128, 80, 1, cross_tile=1, cluster=2),
        _tile(128, 64, 1, cross_tile=1),
    ],
}
_HEADS = {64: 32, 96: 16, 128: 16, 192: 16, 256: 8}
_SHAPES = ((16, 1024), (4, 4096), (1, 16384))


@dataclass(frozen=True, eq=False)
class Candidate:
    """One tile of one pair of head dims, and the library that holds its bf16 plain kernel."""

    head_dim: int
    head_dim_v: int
    tile: Tile

    @property
    def name(self) -> str:
        options = "".join(f"_{key}{value}" for key, value in self.tile.items() if key not in ("stages", "warps"))
        return f"d{self.head_dim}x{self.head_dim_v}{options}"

    @property
    def toml(self) -> str:
        return "{ " + ", ".join(f"{key} = {value}" for key, value in self.tile.items()) + " }"

    @property
    def source(self) -> str:
        fields = ", ".join(f".{key} = {value}" for key, value in self.tile.items())
        return f"""#include "sm90/forward.cuh"
namespace flash_ext {{
constexpr sm90::ForwardTile kTile{{{fields}}};
using Kernel_ = sm90::Forward<DataType::kBFloat16, {self.head_dim}, {self.head_dim_v}, kTile, false>;
extern "C" int64_t sweep_workspace(const void* p, const LaunchContext* c) {{ return Kernel_::workspace(p, c); }}
extern "C" int32_t sweep_launch(const void* p, const LaunchContext* c) {{ return Kernel_::launch(p, c); }}
}}  // namespace flash_ext
"""


def candidates(head_dims: tuple[int, int] | None) -> Iterator[Candidate]:
    for (head_dim, head_dim_v), tiles in CANDIDATES.items():
        if head_dims in (None, (head_dim, head_dim_v)):
            for tile in tiles:
                yield Candidate(head_dim, head_dim_v, tile)


def build(candidate: Candidate, folder: Path, cutlass: Path) -> str:
    """Compile one candidate; the report is what ptxas says of its registers.

    Raises
    ------
    subprocess.CalledProcessError
        nvcc failed (a tile that does not fit fails in a static_assert).
    """
    source = folder / f"{candidate.name}.cu"
    source.write_text(candidate.source, encoding="utf-8")
    command = ["nvcc", "-std=c++20", "-O3", "-shared", "-Xcompiler", "-fPIC", "-cudart", "static", "-Xptxas", "-v"]
    command += ["-gencode", "arch=compute_90a,code=sm_90a", f"-I{_ROOT / 'csrc'}", "-isystem", str(cutlass)]
    command += [str(source), "-o", str(folder / f"{candidate.name}.so")]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spills = sum(int(number) for number in re.findall(r"(\d+) bytes spill", output))
    notes = sorted(set(re.findall(r"C75\d\d", output)))
    return f"{spills} bytes spilled{', notes ' + ' '.join(notes) if notes else ''}"


class _TensorView(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in ("batch", "row", "head")]


class _Parameters(ctypes.Structure):
    """csrc/params.h, ForwardParams."""

    _fields_ = (
        [(name, _TensorView) for name in ("q", "k", "v", "out")]
        + [(name, ctypes.c_void_p) for name in ("lse", "cu_q", "cu_k", "used_q", "used_k", "alibi", "sinks", "rng")]
        + [("alibi_stride", ctypes.c_int64)]
        + [(name, ctypes.c_int32) for name in ("dtype", "sinks_dtype", "batch", "seqlen_q", "seqlen_k")]
        + [(name, ctypes.c_int32) for name in ("heads_q", "heads_k", "head_dim", "head_dim_v")]
        + [("scale", ctypes.c_float), ("softcap", ctypes.c_float)]
        + [(name, ctypes.c_int32) for name in ("causal", "left", "right")]
        + [("dropout", ctypes.c_uint32)]
        + [(name, ctypes.c_int32) for name in ("deterministic", "splits", "margin")]
    )


class _Context(ctypes.Structure):
    """csrc/params.h, LaunchContext."""

    _fields_ = [
        ("stream", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_int64),
        ("device", ctypes.c_int32),
        ("sm_count", ctypes.c_int32),
    ]


def measure(head_dims: tuple[int, int] | None, folder: Path, rounds: int) -> None:
    """Time every built candidate beside cuDNN, in turns, and print a line per shape and the best tile's row."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    do_bench = importlib.import_module("triton.testing").do_bench

    def cudnn_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal
            )

    sm_count = torch.cuda.get_device_properties(0).multi_processor_count

    def caller(
        library: ctypes.CDLL, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
    ) -> tuple[Callable[[], None], torch.Tensor]:
        out = torch.full((*q.shape[:-1], v.shape[-1]), math.nan, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device)
        views = [_TensorView(x.data_ptr(), *x.stride()[:3]) for x in (q, k, v, out)]
        parameters = _Parameters(*views, lse.data_ptr(), dtype=1, batch=q.shape[0], seqlen_q=q.shape[1])
        parameters.seqlen_k, parameters.heads_q, parameters.heads_k = k.shape[1], q.shape[2], k.shape[2]
        parameters.head_dim, parameters.head_dim_v = q.shape[3], v.shape[3]
        parameters.scale, parameters.causal = q.shape[3] ** -0.5, int(causal)
        parameters.left = parameters.right = -1
        context = _Context(stream=torch.cuda.current_stream().cuda_stream, sm_count=sm_count)
        library.sweep_workspace.restype = ctypes.c_int64
        size = library.sweep_workspace(ctypes.byref(parameters), ctypes.byref(context))
        workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=q.device)
        context.workspace, context.workspace_size = workspace.data_ptr(), size
        keep = (q, k, v, out, lse, workspace)

        def call() -> None:
            error = library.sweep_launch(ctypes.byref(parameters), ctypes.byref(context))
            if error:
                raise RuntimeError(f"launch failed with CUDA error {error} on {keep[0].shape}")

        return call, out

    scores: dict[Candidate, list[float]] = {}
    for head_dim, head_dim_v in CANDIDATES:
        built = [c for c in candidates((head_dim, head_dim_v)) if (folder / f"{c.name}.so").is_file()]
        if head_dims not in (None, (head_dim, head_dim_v)) or not built:
            continue
        libraries = {c: ctypes.CDLL(str((folder / f"{c.name}.so").resolve())) for c in built}
        heads = _HEADS[head_dim]
        for batch, length in _SHAPES:
            q, k = (torch.randn(batch, length, heads, head_dim, device="cuda").bfloat16() for _ in range(2))
            v = torch.randn(batch, length, heads, head_dim_v, device="cuda").bfloat16()
            for causal in (False, True):
                cudnn = functools.partial(cudnn_attention, q, k, v, causal)
                expected = cudnn().transpose(1, 2).float()
                calls: dict[str, Callable[[], object]] = {"cudnn": cudnn}
                for c in built:
                    call, out = caller(libraries[c], q, k, v, causal)
                    call()
                    error = ((out.float() - expected).norm() / expected.norm()).item()
                    if not error < 0.01:
                        raise RuntimeError(f"{c.name} is wrong: relative error {error} at {batch} x {length}")
                    calls[c.name] = call
                times: dict[str, list[float]] = {name: [] for name in calls}
                for turn in range(rounds):
                    for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
                        times[name].append(do_bench(calls[name], warmup=10, rep=40, return_mode="median"))
                flops = 2 * batch * heads * length**2 * (head_dim + head_dim_v) / (2 if causal else 1)
                print(f"d {head_dim}, {head_dim_v}  {batch} x {length} {'causal' if causal else 'full'}")
                for name, values in times.items():
                    ratio = statistics.median(a / b for a, b in zip(times["cudnn"], values, strict=True))
                    print(f"    {flops / statistics.median(values) / 1e9:7.0f} TFLOP/s  {ratio:.3f}  {name}")
                for c in built:
                    pairs = zip(times["cudnn"], times[c.name], strict=True)
                    scores.setdefault(c, []).append(statistics.median(a / b for a, b in pairs))
        best = max(built, key=lambda c: statistics.geometric_mean(scores[c]))
        ratio = statistics.geometric_mean(scores[best])
        print(f"best of d {head_dim}, {head_dim_v}: {ratio:.3f} of cuDNN\n    {best.toml}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("build", "measure"))
    parser.add_argument("folder", type=Path, help="where the libraries are")
    parser.add_argument("--head-dim", type=int, nargs=2, metavar=("D", "DV"), help="one pair (default: all)")
    parser.add_argument("--cutlass", type=Path, help="CUTLASS's include folder (default: the build's)")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    head_dims = tuple(arguments.head_dim) if arguments.head_dim else None
    if arguments.what == "measure":
        measure(head_dims, arguments.folder, arguments.rounds)
        return 0
    cutlass = arguments.cutlass
    if cutlass is None:
        from toolchain import find_cutlass

        cutlass = Path(find_cutlass(_ROOT / "build" / "toolchain")[0])
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for candidate in candidates(head_dims):
        print(f"{candidate.name}: {build(candidate, arguments.folder, cutlass)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
