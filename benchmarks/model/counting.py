"""Runs kernels in the PTX emulator and fits what a launch, a tile and a step of each of their roles ask of the SM."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import demand as demands
from .demand import Demand
from .kernels import ROOT, Kernel, choose, load_kernels, tiles_of
from .schedules import GROUPS

sys.path.insert(0, str(ROOT / "tests"))

from ptx_emulator.counts import LaunchCounts, take_counts
from ptx_emulator.settings import forced_tile

PARTS = ("launch", "tile", "full", "masked")
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))  # of Q and K, of V


@dataclass(frozen=True)
class Call:
    """One problem of a fit."""

    rows: int
    keys: int
    heads: int
    causal: bool


@dataclass
class Counts:
    """What a kernel executes, for full or for causal calls.

    Attributes
    ----------
    kernel : str
    causal : bool
    roles : dict
        role -> part -> group -> demand, summed over the role's warps of one CTA: per launch and resident CTA, per tile,
        per unmasked and masked step of all its walkers together. Amounts of steps are those of a CTA's step: all
        walkers take it.
    phases : list
        Of a step of a walker, in order: unit -> share of the scalar instructions' demand. Empty where a schedule has
        no use for them.
    residual : float
        The largest difference of fit and count in any launch, as a share of the count: issue slots and multiply-adds.
    helpers : dict
        Of the kernels launched beside it, in bytes of global memory per row of a head (backward only), and how many
        launches they are.
    """

    kernel: str
    causal: bool
    roles: dict[str, dict[str, dict[str, Demand]]]
    phases: list[dict[str, float]]
    residual: float
    helpers: dict[str, float]


def calls_of(kernel: Kernel, causal: bool) -> list[Call]:
    """Launches from which tile and steps can be told apart: several numbers of each."""
    m, n = kernel.block_m, kernel.block_n
    if causal:
        # More keys than rows shift the diagonal within the blocks, so that tiles have unequal numbers of masked steps.
        side = max(m, n)
        sizes = (
            (1, 0, 2),
            (2, 0, 2),
            (3, 0, 2),
            (4, 0, 2),
            (2, 0, 4),
            (2, n // 4, 2),
            (3, n // 4, 2),
            (2, n // 4 + 3 * n, 2),
        )
        return [Call(side * k, side * k + extra, heads, True) for k, extra, heads in sizes]
    # Whole pairs of tiles, for CTAs of a cluster share the keys of neighbours.
    pairs = ((2, 2, 2), (5, 2, 2), (3, 4, 2), (3, 2, 6))
    if kernel.direction == "backward":
        return [Call(m * k, n * t, heads, False) for k, t, heads in pairs]
    return [Call(m * t, n * k, heads, False) for k, t, heads in pairs]


class Emulated:
    """flash_ext on an emulated path: one per process."""

    def __init__(self, path: str, folder: Path | None = None) -> None:
        folder = folder or ROOT / "build" / "emulator" / path
        os.environ.update(
            FLASH_EXT_LIBRARY_DIR=str(folder),
            FLASH_EXT_EMULATE=path,
            FLASH_EXT_EMULATOR_SCHEDULE="lazy",
            FLASH_EXT_EMULATOR_CHECK="0",
            FLASH_EXT_EMULATOR_COUNT="1",
        )
        file = folder / f"libflash_ext_{path}.so"
        self._library = ctypes.CDLL(str(file))
        lines = file.with_suffix(".ptx_index").read_text(encoding="utf-8").splitlines()
        self._units = {symbol: Path(ptx).stem for symbol, ptx in (line.split("\t") for line in lines)}

    def launches(self, kernel: Kernel, call: Call) -> dict[str, list[LaunchCounts]]:
        """What a call launches, by the unit that the kernel belongs to.

        Raises
        ------
        RuntimeError
            The call does not run on the kernel.
        """
        import torch

        import flash_ext

        torch.manual_seed(0)
        shapes = ((call.rows, kernel.head_dim), (call.keys, kernel.head_dim), (call.keys, kernel.head_dim_v))
        q, k, v = (torch.randn(1, length, call.heads, dim).bfloat16() for length, dim in shapes)
        backward = kernel.direction == "backward"
        if backward:
            for tensor in (q, k, v):
                tensor.requires_grad_()
            out = flash_ext.flash_attn_func(q, k, v, causal=call.causal)
            dout = torch.randn(out.shape).bfloat16()
            take_counts(self._library)
            with forced_tile(kernel.block_m, kernel.block_n):
                out.backward(dout)
        else:
            take_counts(self._library)
            with forced_tile(kernel.block_m, kernel.block_n):
                flash_ext.flash_attn_func(q, k, v, causal=call.causal)
        found: dict[str, list[LaunchCounts]] = {}
        for launch in take_counts(self._library):
            found.setdefault(self._units[launch.kernel], []).append(launch)
        if len(found.get(kernel.name, [])) != 1:
            raise RuntimeError(f"{call} runs on {sorted(found)}, not on {kernel.name}")
        return found


def demand_of_launch(launch: LaunchCounts, warps: range, has_three_input_max: bool) -> dict[str, Demand]:
    """What some warps of all CTAs of a launch ask of the units, by group.

    Branches right behind a ``try_wait`` belong to a polling loop: the first counts once for each wait that is over, the
    second not at all, or counts would depend on the emulator's schedule.
    """
    result: dict[str, Demand] = {group: {} for group in GROUPS}
    waits: list[int] = []  # of the latest try_wait, how often it ended, for the branches right behind it
    for instruction in launch.instructions:
        opcode = instruction.opcode
        times = sum(instruction.times.get(warp, 0) for warp in warps)
        if opcode.startswith("mbarrier.try_wait"):
            waits = [times, 0]
        elif opcode.startswith("bra") and waits:
            times = min(times, waits.pop(0))
        else:
            waits = []
        if not times:
            continue
        into = result[demands.group_of(instruction.text)]
        folded = 0.5 if has_three_input_max and opcode.startswith(("max.f32", "min.f32")) else 1.0
        demands.add(into, demands.per_warp(instruction.text), times * folded)
        lanes = sum(instruction.lanes.get(warp, 0) for warp in warps)
        demands.add(into, demands.per_lane(instruction.text), lanes)
        for (warp, a, b), count in instruction.sizes.items():
            if warp in warps:
                demands.add(into, demands.per_size(instruction.text, a, b), count)
    return result


# Where a phase of a step ends: behind so many of these instructions. See the schedules of these kernels.
_PHASES = {
    # S and dP are issued; P is there; dS is stored, and dV, dQ and dK are issued.
    ("sm90", "backward"): (re.compile(r"wgmma\.(commit|wait)_group"), (2, 4, 6)),
    # P is there, and dP waited for.
    ("sm100", "backward"): (re.compile(r"mbarrier\.try_wait"), (3,)),
}


def phases_of(kernel: Kernel, launch: LaunchCounts) -> list[dict[str, float]]:
    """How a walker's scalar instructions are shared out over a step, by their place in the loop."""
    if (kernel.path, kernel.direction) not in _PHASES or kernel.has_gradient_roles:
        return []
    marker, ends = _PHASES[kernel.path, kernel.direction]
    warps = kernel.roles()["walker"]
    executed = [sum(instruction.times.get(warp, 0) for warp in warps) for instruction in launch.instructions]
    # What every step executes.
    steps = max(times for times, each in zip(executed, launch.instructions, strict=True) if marker.match(each.opcode))
    phases: list[Demand] = [{} for _ in range(len(ends) + 1)]
    seen = 0
    for times, instruction in zip(executed, launch.instructions, strict=True):
        if times != steps:
            continue
        if demands.group_of(instruction.text) == "scalar":
            into = phases[sum(end <= seen for end in ends)]
            demands.add(into, demands.per_warp(instruction.text), times)
            lanes = sum(instruction.lanes.get(warp, 0) for warp in warps)
            demands.add(into, demands.per_lane(instruction.text), lanes)
        seen += bool(marker.match(instruction.opcode))
    whole = demands.total(phases)
    return [{unit: phase.get(unit, 0.0) / amount for unit, amount in whole.items()} for phase in phases]


def features(kernel: Kernel, call: Call, ctas: int) -> list[float]:
    """How often a launch does each of `PARTS`. A persistent CTA of the emulator's two SMs takes many tiles."""
    tiles = list(tiles_of(kernel, call.rows, call.keys, call.causal)) * call.heads
    full, masked = sum(tile.full for tile in tiles), sum(tile.masked for tile in tiles)
    return [float(ctas), float(len(tiles)), full, masked]


def fit(kernel: Kernel, causal: bool, emulated: Emulated) -> Counts:
    """Launches a kernel a few times and solves for what its parts ask for."""
    import numpy as np

    calls = calls_of(kernel, causal)
    found = [emulated.launches(kernel, call) for call in calls]
    main = [launches[kernel.name][0] for launches in found]
    table = np.array([features(kernel, call, launch.ctas) for call, launch in zip(calls, main, strict=True)])
    # Without persistent CTAs launch and tile are one thing, without a mask there are no masked steps.
    is_persistent = not np.allclose(table[:, 0], table[:, 1])
    columns = [c for c in range(4) if table[:, c].any() and (c > 0 or is_persistent)]
    roles: dict[str, dict[str, dict[str, Demand]]] = {}
    residual = 0.0
    for role, warps in kernel.roles().items():
        measured = [demand_of_launch(launch, warps, kernel.path == "sm100") for launch in main]
        parts: dict[str, dict[str, Demand]] = {part: {group: {} for group in GROUPS} for part in PARTS}
        for group in GROUPS:
            for unit in sorted({unit for each in measured for unit in each[group]}):
                amounts = np.array([each[group].get(unit, 0.0) for each in measured])
                solution = np.linalg.lstsq(table[:, columns], amounts, rcond=None)[0]
                for column, value in zip(columns, solution, strict=True):
                    if abs(value) > 1e-6 * float(amounts.max()):
                        parts[PARTS[column]][group][unit] = float(value)
                if unit in ("issue", "tensor", "tensor_sync") and role not in ("producer", "products"):
                    difference = np.abs(table[:, columns] @ solution - amounts)
                    total = sum(np.array([each[g].get(unit, 0.0) for each in measured]) for g in GROUPS)
                    residual = max(residual, float((difference / total).max()))
        roles[role] = parts
    phases = phases_of(kernel, main[-1])
    return Counts(kernel.name, causal, roles, phases, residual, _helpers(kernel, calls[-1], found[-1]))


def _helpers(kernel: Kernel, call: Call, found: dict[str, list[LaunchCounts]]) -> dict[str, float]:
    others = [launch for name, launches in found.items() if name != kernel.name for launch in launches]
    moved = 0.0
    for launch in others:
        for part in demand_of_launch(launch, range(32), False).values():
            moved += part.get("memory", 0.0)
    return {"bytes_per_row": moved / (call.rows * call.heads), "launches": float(len(others))}


def count_path(path: str, folder: Path | None = None, names: list[str] | None = None) -> list[dict[str, Any]]:
    """The counts of the kernels of a path that calls of any head dim run on (or of ``names``), as JSON."""
    emulated = Emulated(path, folder)
    counted = []
    kernels = load_kernels()
    served = [
        (direction, causal, choose(kernels, path, direction, head_dims, causal))
        for direction in ("forward", "backward")
        for head_dims in HEAD_DIMS
        for causal in (False, True)
    ]
    for kernel in kernels:
        for causal in (False, True):
            if (kernel.direction, causal, kernel) not in served or (names is not None and kernel.name not in names):
                continue
            counted.append(asdict(fit(kernel, causal, emulated)))
            print(f"{kernel.name} {'causal' if causal else 'full'}: residual {counted[-1]['residual']:.2%}", flush=True)
    return counted
