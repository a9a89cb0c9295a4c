"""Holds a GPU against the emulator: the same kernels, inputs, tiles and SM count.

``python -m tests.ptx_emulator.compare --path sm80 --write FILE`` runs every bf16 kernel of a path, and the fp16 ones of
head dim 128, and keeps what they return; ``--against FILE`` runs them where it is started and compares. One of the two
runs on a GPU, the other with FLASH_EXT_LIBRARY_DIR and FLASH_EXT_EMULATE set. Gradients are deterministic, the tile and
the number of SMs are forced, so what differs is the order of sums inside of the tensor cores and the approximations of
exp2: lse may differ by 1e-5 max(1, |lse|), other results by 2 ulp of the largest magnitude of their row and by half the
type's epsilon in norm.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .settings import forced_tile

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[Any]

SM_COUNT = 4
LSE_TOLERANCE = 1e-5
ULPS = 2.0
_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


def calls(kernel: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and options of the calls that a kernel is compared on."""
    options: dict[str, Any] = {"softcap": 20.0} if "softcap" in kernel["features"] else {}
    yield "full", options
    yield "causal", {**options, "causal": True}


def inputs(kernel: dict[str, Any]) -> dict[str, Array]:
    """q, k, v and dout in fp32, the same on every machine: 2 query heads, 1 key head, uneven lengths."""
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(kernel["name"].encode())))
    rows, keys = kernel["block_m"] + 37, 2 * kernel["block_n"] + 21
    shapes = {
        "q": (1, rows, 2, kernel["head_dim"]),
        "k": (1, keys, 1, kernel["head_dim"]),
        "v": (1, keys, 1, kernel["head_dim_v"]),
        "dout": (1, rows, 2, kernel["head_dim_v"]),
    }
    # Sums of uniform numbers: what np.random makes of them does not depend on the processor's log and cos.
    return {name: (rng.random((4, *shape)).sum(0) - 2).astype(np.float32) for name, shape in shapes.items()}


def run(kernel: dict[str, Any], options: dict[str, Any], device: str) -> dict[str, Tensor]:
    """The results of one call on the tile of a kernel."""
    import torch

    import flash_ext

    dtype = getattr(torch, _DTYPES[kernel["dtype"]])
    tensors = {name: torch.from_numpy(array).to(device, dtype) for name, array in inputs(kernel).items()}
    dout = tensors.pop("dout")
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    forced = forced_tile(kernel["block_m"], kernel["block_n"])
    if kernel["direction"] == "forward":
        with forced:
            out, lse = flash_ext.flash_attn_func(q, k, v, return_lse=True, **options)
        return {"out": out, "lse": lse}
    for tensor in tensors.values():
        tensor.requires_grad_()
    out = flash_ext.flash_attn_func(q, k, v, deterministic=True, **options)
    with forced:
        out.backward(dout)
    return {f"d{name}": tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}


def results(path: str) -> Iterator[tuple[str, str, Array]]:
    """Name, type and values of everything that the kernels of a path return; 16-bit floats as their bits."""
    import torch

    import flash_ext

    device = "cpu" if os.environ.get("FLASH_EXT_EMULATE") else "cuda"
    for kernel in flash_ext.kernels():
        if kernel["path"] != path or (kernel["dtype"] == "fp16" and kernel["head_dim"] != 128):
            continue
        for name, options in calls(kernel):
            try:
                tensors = run(kernel, options, device)
            except NotImplementedError:  # the row is for masked calls alone, or for others
                continue
            for result, tensor in tensors.items():
                key = f"{kernel['name']}/{name}/{result}"
                values = tensor.detach().cpu()
                if result == "lse":
                    yield key, "fp32", values.numpy()
                else:
                    yield key, kernel["dtype"], values.view(torch.int16).numpy()


def widen(kind: str, values: Array) -> Array:
    """Bits of a 16-bit float type, or fp32, as fp64."""
    if kind == "fp32":
        return values.astype(np.float64)
    if kind == "fp16":
        return values.view(np.float16).astype(np.float64)
    return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def difference(kind: str, ours: Array, theirs: Array) -> dict[str, float]:
    """How far two results are apart, over what is allowed: 1 is the limit."""
    a, b = widen(kind, ours), widen(kind, theirs)
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return {"largest": float("inf"), "norm": float("inf")}
    a, b = np.where(np.isfinite(a), a, 0.0), np.where(np.isfinite(b), b, 0.0)
    if kind == "fp32":
        allowed = LSE_TOLERANCE * np.maximum(1.0, np.abs(b))
        return {"largest": float(np.max(np.abs(a - b) / allowed)), "norm": 0.0}
    epsilon = 2.0**-10 if kind == "fp16" else 2.0**-7
    row = np.max(np.abs(b), axis=-1, keepdims=True)
    ulp = epsilon * 2.0 ** np.floor(np.log2(np.maximum(row, 2.0**-14)))
    norm = float(np.linalg.norm(b))
    return {
        "largest": float(np.max(np.abs(a - b) / (ULPS * ulp))),
        "norm": float(np.linalg.norm(a - b)) / (0.5 * epsilon * norm) if norm else 0.0,
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.ptx_emulator.compare", description=__doc__)
    parser.add_argument("--path", required=True, choices=("sm80", "sm90", "sm100"))
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE", help="keep the results")
    what.add_argument("--against", type=Path, metavar="FILE", help="compare with the results kept in FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --against: also write the differences")
    arguments = parser.parse_args()
    os.environ.update(FLASH_EXT_PATH=arguments.path, FLASH_EXT_SM_COUNT=str(SM_COUNT), FLASH_EXT_POISON="1")
    found = {f"{kind}/{key}": values for key, kind, values in results(arguments.path)}
    if arguments.write:
        np.savez_compressed(arguments.write, **found)  # type: ignore[arg-type]
        print(f"{arguments.write}: {len(found)} results of {arguments.path}")
        return 0

    kept = np.load(arguments.against)
    missing = sorted(set(kept.files) ^ set(found))
    rows = {key: difference(key.split("/")[0], values, kept[key]) for key, values in found.items() if key in kept.files}
    beyond = [key for key, row in rows.items() if max(row.values()) > 1]
    identical = sum(np.array_equal(values, kept[key]) for key, values in found.items() if key in kept.files)
    for key in beyond:
        print(f"BEYOND {key}: {rows[key]}")
    for key in missing:
        print(f"ONLY ON ONE SIDE {key}")
    summary = {
        "path": arguments.path,
        "results": len(rows),
        "bit-identical": identical,
        "beyond": beyond,
        "missing": missing,
        "largest": {kind: _largest(rows, kind, "largest") for kind in ("fp32", "bf16", "fp16")},
        "norm": {kind: _largest(rows, kind, "norm") for kind in ("bf16", "fp16")},
    }
    print(json.dumps(summary, indent=1))
    if arguments.json:
        document = {"tolerance": "1 is the limit", **summary, "differences": rows}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if beyond or missing or not rows else 0


def _largest(rows: dict[str, dict[str, float]], kind: str, what: str) -> float:
    return max((row[what] for key, row in rows.items() if key.startswith(f"{kind}/")), default=0.0)


if __name__ == "__main__":
    sys.exit(main())
