"""What one PTX instruction asks of the units of an SM.

The PTX that is counted is the text that ptxas gets, so what ptxas drops, folds or splits is estimated here by rule:
moves, parameter loads, shifts and address conversions cost nothing (they become operands of the instructions that use
them), everything else one issue slot, but two maxima are one instruction with three inputs from compute capability 10.0
on. README.md compares the sums with the machine code.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping

# Amounts by unit: issue (warp instructions), fma, alu, mufu (results), shared, l2, memory, tmem_load, tmem_store
# (bytes), tensor, tensor_sync (multiply-adds).
Demand = dict[str, float]

WARP = 32

# Gone after ptxas: renaming, parameters in the constant bank, addresses.
_FREE = re.compile(
    r"(mov|cvta|shl|ld\.param|ld\.const|ret|isspacep|pragma)\b|cvt\.(u64\.u32|s64\.s32|u32\.u64|u16\.u32|u32\.u16)\b"
)
_MUFU = re.compile(r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh)\.")
_FLOAT = re.compile(r"(fma|mul|add|sub)\.(rn\.|rz\.|rm\.|rp\.)?(ftz\.)?(sat\.)?(f32x2|f32)\b")
_MULTIPLY = re.compile(r"(mad|mul)\.(lo|hi|wide)")
_MMA = re.compile(r"mma\.sync\.aligned\.m(\d+)n(\d+)k(\d+)")
_WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m(\d+)n(\d+)k(\d+)")
_TCGEN05 = re.compile(r"tcgen05\.(ld|st)\.sync\.aligned\.(\d+)x(\d+)b\.x(\d+)")
_LDMATRIX = re.compile(r"(ldmatrix|stmatrix)\.sync\.aligned\.(?:m8n8\.)?x([124])")
_WORD = re.compile(r"\.[a-z]?(8|16|32|64|128)$")


def add(into: Demand, amounts: Mapping[str, float], times: float = 1.0) -> None:
    """``into += times * amounts``."""
    for unit, amount in amounts.items():
        into[unit] = into.get(unit, 0.0) + times * amount


def total(demands: Iterable[Mapping[str, float]]) -> Demand:
    """The sum of several."""
    result: Demand = {}
    for demand in demands:
        add(result, demand)
    return result


def scaled(demand: Mapping[str, float], factor: float) -> Demand:
    return {unit: amount * factor for unit, amount in demand.items()}


def opcode_of(text: str) -> str:
    words = text.split()
    return words[1] if words[0].startswith("@") else words[0]


def _access_bytes(opcode: str) -> int:
    """Of one lane, of a load or store like ld.global.nc.v4.b32."""
    word = _WORD.search(opcode)
    vector = re.search(r"\.v(\d)", opcode)
    return (int(word[1]) // 8 if word else 4) * (int(vector[1]) if vector else 1)


@functools.cache
def group_of(text: str) -> str:
    """Which part of a kernel's work an instruction belongs to.

    ``ss``: asynchronous products with both operands in shared memory; ``rs``: with A in registers or tensor memory;
    ``matrix``: mma.sync and the ldmatrix that feed it; ``copy``: asynchronous copies; ``reduce``: bulk reductions;
    ``scalar``: everything else.
    """
    opcode = opcode_of(text)
    if opcode.startswith("wgmma.mma_async"):
        # D is a list in braces; A is a list of registers as well, or a descriptor.
        return "rs" if text.count("{") > 1 else "ss"
    if opcode.startswith("tcgen05.mma"):
        return "rs" if text.count("[") > 1 else "ss"
    if opcode.startswith(("mma.sync", "ldmatrix")):
        return "matrix"
    if opcode.startswith("cp.reduce"):
        return "reduce"
    if opcode.startswith("cp.async"):
        return "copy"
    return "scalar"


@functools.cache
def per_warp(text: str) -> Demand:
    """Of one warp that executes an instruction, whatever its lanes and sizes."""
    opcode = opcode_of(text)
    if _FREE.match(opcode):
        return {}
    demand: Demand = {"issue": 1.0}
    if match := _WGMMA.match(opcode):
        m, n, k = map(int, match.groups())
        operands = n * k * 2 + (m * k * 2 if group_of(text) == "ss" else 0)
        # Four warps execute it for one product.
        return {"issue": 1.0, "tensor": m * n * k / 4, "shared": operands / 4}
    if match := _MMA.match(opcode):
        m, n, k = map(int, match.groups())
        return {"issue": 1.0, "tensor_sync": float(m * n * k)}
    if match := _LDMATRIX.match(opcode):
        return {"issue": 1.0, "shared": 128.0 * int(match[2])}
    if match := _TCGEN05.match(opcode):
        lanes, bits, repeat = int(match[2]), int(match[3]), int(match[4])
        return {"issue": 1.0, "tmem_load" if match[1] == "ld" else "tmem_store": lanes * bits / 8 * repeat}
    if match := _FLOAT.match(opcode):
        demand["fma"] = WARP * (2.0 if match[5] == "f32x2" else 1.0)
    elif _MUFU.match(opcode):
        demand["mufu"] = float(WARP)
    elif _MULTIPLY.match(opcode):
        demand["alu"] = float(WARP)  # IMAD: half rate as well
    elif opcode.startswith("shfl"):
        demand["shared"] = 128.0
    elif not opcode.startswith(
        ("bra", "ld", "st", "red", "atom", "bar", "mbarrier", "fence", "cp", "tcgen05", "wgmma")
    ):
        demand["alu"] = float(WARP)
    return demand


@functools.cache
def per_lane(text: str) -> Demand:
    """Of each lane that executes it: bytes."""
    opcode = opcode_of(text)
    if opcode.startswith("cp.async.cg.shared") or opcode.startswith("cp.async.ca.shared"):
        return {"shared": 16.0, "l2": 16.0, "memory": 16.0}
    if opcode.startswith(("ld.global", "st.global", "red.global", "atom.global", "ld.volatile.global")):
        return {"l2": float(_access_bytes(opcode)), "memory": float(_access_bytes(opcode))}
    return {}


@functools.cache
def per_size(text: str, a: int, b: int) -> Demand:
    """Of an instruction whose operands say how much it does: see `ptx_emulator.counts`."""
    opcode = opcode_of(text)
    if opcode.startswith(("ld.", "st.")):
        return {"shared": 128.0 * a}
    if opcode.startswith("tcgen05.mma"):
        k = 16
        return {"tensor": float(a * b * k), "shared": 2.0 * k * (b + (a if group_of(text) == "ss" else 0))}
    if opcode.startswith("cp.async.bulk.shared::cluster.shared::cta"):
        return {"shared": 2.0 * a}  # read here; as much comes from the other CTA
    return {"l2": float(a), "memory": float(a), "shared": float(a * b)}
