"""FlashAttention-4's forward as counts, from flash_attention_4.toml."""

from __future__ import annotations

import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from .demand import WARP, Demand
from .hardware import FOLDER
from .kernels import Kernel


def load() -> tuple[Kernel, dict[str, Any], float]:
    """The kernel, its counts as `counting.fit` gives them, and the published TFLOP/s."""
    table = tomllib.loads((FOLDER / "flash_attention_4.toml").read_text(encoding="utf-8"))
    head_dim = table["head_dim"]
    kernel = Kernel("sm100", "forward", head_dim, head_dim, table["tile"], "full")
    share = table["polynomial_share"]
    keys, pairs = kernel.block_n, kernel.block_n / 2
    packed = pairs * (table["pair"]["fma"] + share * table["polynomial"]["fma"])
    alu = pairs * (table["pair"]["alu"] + share * table["polynomial"]["alu"])
    mufu = keys * (1 - share)
    warps = 4 * kernel.walkers
    softmax: Demand = {
        "issue": warps * (packed + alu + mufu + table["step"]["other"]),
        "fma": warps * 2 * WARP * packed,
        "alu": warps * WARP * alu,
        "mufu": warps * WARP * mufu,
        "tmem_load": warps * WARP * 4.0 * keys,
        "tmem_store": warps * WARP * 2.0 * keys,
    }
    # Both query tiles of a CTA: multiply-adds, and bytes of shared memory. Q K reads rows of Q and half of those of K,
    # P V half of V.
    rows = 128 * kernel.walkers
    multiply_adds = float(rows * keys * head_dim)
    steps = head_dim // 16
    qk: Demand = {
        "issue": float(steps),
        "tensor": multiply_adds,
        "shared": 2.0 * head_dim * (rows + kernel.walkers * keys / 2),
    }
    pv: Demand = {
        "issue": float(keys // 16),
        "tensor": multiply_adds,
        "shared": 2.0 * head_dim * kernel.walkers * keys / 2,
    }
    block = 2.0 * keys * head_dim / 2  # bytes of half a block of K or V
    roles = {
        "walker": {"full": {"scalar": softmax}, "tile": {"scalar": {"issue": warps * 60.0}}},
        "correction": {
            "full": {"scalar": {"issue": 4 * 15.0 * kernel.walkers}},
            "tile": {"scalar": {"issue": 4 * 2.2 * head_dim * kernel.walkers}},
        },
        "products": {"full": {"ss": qk, "rs": pv}},
        "producer": {"full": {"copy": {"l2": 2 * block, "shared": 2 * block}}},
    }
    counts = {
        "kernel": "FlashAttention-4",
        "causal": False,
        "roles": roles,
        "residual": 0.0,
        "helpers": {"bytes_per_row": 0.0, "launches": 0.0},
    }
    return kernel, counts, float(table["published"])
