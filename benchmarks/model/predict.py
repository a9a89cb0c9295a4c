"""From the counts of a kernel to the time of a row: one SM simulated, tiles dealt to all of them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .demand import Demand, add, scaled
from .hardware import Calibration, Gpu
from .kernels import Kernel, Steps, tiles_of
from .schedules import FULL, GROUPS, MASKED, SCHEDULES, Machine, Problem, RoleDemands, busiest_unit
from .sm import Simulation

# Steps of the tiles that are simulated; what a step and a tile cost follows from the differences.
_SHORT, _LONG, _MASKED_STEPS, _FEW, _MANY = 4, 10, 2, 3, 5


@dataclass(frozen=True)
class Row:
    """An attention problem: sequences of equal query and key lengths, heads of one size."""

    lengths: tuple[int, ...]
    heads: int
    heads_k: int
    head_dim: int
    causal: bool
    head_dim_v: int = 0  # 0: head_dim

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim_v or self.head_dim


@dataclass
class TileCost:
    """Clocks on an SM: what its first tile takes beyond any other, a tile without its steps, and each step."""

    start: float
    tile: float
    full: float
    masked: float

    def of(self, steps: Steps) -> float:
        return self.tile + self.full * steps.full + self.masked * steps.masked


@dataclass
class Prediction:
    """Of one row.

    Attributes
    ----------
    seconds : float
    clocks : float
        Of the kernel, from the first CTA's start to the last one's end.
    cost : TileCost
    step_units : dict
        Unit -> clocks that it is busy in an unmasked step of a CTA, all CTAs of an SM together.
    busy : dict
        Unit -> share of the kernel's clocks that it is busy, over all SMs.
    tensor_share : float
        Of the kernel's time that the tensor cores are at work, at the rate of their asynchronous instructions.
    helper_seconds : float
        Of the kernels launched beside it.
    clock : float
        Hz.
    instructions : float
        Warp instructions of the kernel.
    """

    seconds: float
    clocks: float
    cost: TileCost
    step_units: dict[str, float]
    busy: dict[str, float]
    tensor_share: float
    helper_seconds: float
    clock: float
    instructions: float


_costs: dict[tuple[int, Machine, str], tuple[dict[str, Any], TileCost]] = {}


def problem_of(kernel: Kernel, counts: dict[str, Any]) -> Problem:
    """The demands of a kernel's roles, its tiles still to be filled in."""
    roles = {}
    warps = kernel.roles()
    for name, parts in counts["roles"].items():
        share = 1 / kernel.walkers if name == "walker" else 1.0
        demands = {
            part: {group: _positive(scaled(demand, share)) for group, demand in groups.items()}
            for part, groups in parts.items()
        }
        if not any(demands.get(MASKED, {}).values()):
            demands[MASKED] = demands.get(FULL, {})
        phases = counts.get("phases", ()) if name == "walker" else ()
        roles[name] = RoleDemands(demands, max(int(len(warps[name]) * share), 1), phases)
    return Problem(kernel, roles)


def _positive(demand: Demand) -> Demand:
    """Without what a fit left below nothing."""
    return {unit: amount for unit, amount in demand.items() if amount > 0}


def simulate(kernel: Kernel, problem: Problem, tiles: Sequence[Sequence[str]], machine: Machine, gpu: Gpu) -> float:
    """Clocks of an SM for some tiles, one after another."""
    simulation = Simulation(gpu.rates)
    schedule = SCHEDULES.get((kernel.path, kernel.direction), busiest_unit)
    schedule(simulation, replace(problem, tiles=tiles), machine)
    return simulation.run()


def tile_cost(kernel: Kernel, problem: Problem, machine: Machine, gpu: Gpu) -> TileCost:
    """What a tile and its steps cost where an SM takes tile after tile."""

    def clocks(count: int, full: int, masked: int) -> float:
        return simulate(kernel, problem, [[MASKED] * masked + [FULL] * full] * count, machine, gpu)

    few, many = clocks(_FEW, _SHORT, 0), clocks(_MANY, _SHORT, 0)
    each = (many - few) / (_MANY - _FEW)
    full = (clocks(_MANY, _LONG, 0) - many) / (_MANY * (_LONG - _SHORT))
    masked = (clocks(_MANY, _SHORT, _MASKED_STEPS) - many) / (_MANY * _MASKED_STEPS)
    tile = each - _SHORT * full
    # Slots of an SM that run at once take so much longer each: the cost is that of a slot.
    return TileCost(max(few - _FEW * each, 0.0), tile, full, masked)


def makespan(costs: Sequence[float], workers: int, start: float) -> float:
    """The longest tiles first, each to the worker that is free first."""
    free = [start] * min(workers, max(len(costs), 1))
    heapq.heapify(free)
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def step_demand(problem: Problem, part: str) -> Demand:
    """Of a CTA's step or tile, all roles together."""
    demand: Demand = {}
    for name, role in problem.roles.items():
        times = problem.walkers if name == "walker" else 1
        add(demand, role.of(part, *GROUPS), times)
    return demand


def predict(kernel: Kernel, counts: dict[str, Any], row: Row, gpu: Gpu, calibration: Calibration) -> Prediction:
    """The time of a row on a GPU.

    Parameters
    ----------
    kernel : Kernel
    counts : dict
        `counting.Counts` of the kernel, for causal calls if the row is.
    row : Row
    gpu : Gpu
    calibration : Calibration
    """
    machine = Machine(calibration.cycles_per_instruction, calibration.handover, gpu.load_latency)
    problem = problem_of(kernel, counts)
    # Rows of one kernel share its costs; the counts are kept with them, so that their id stays theirs.
    key = (id(counts), machine, gpu.name)
    if key not in _costs:
        _costs[key] = (counts, tile_cost(kernel, problem, machine, gpu))
    cost = _costs[key][1]
    heads = row.heads
    group = row.heads // row.heads_k
    tiles: list[Steps] = []
    for length in row.lengths:
        mine = list(tiles_of(kernel, length, length, row.causal))
        if kernel.direction == "backward" and group > 1:
            # A CTA walks the queries of all heads of its key head.
            mine = [Steps(tuple((full * group, masked * group) for full, masked in tile.walkers)) for tile in mine]
            tiles += mine * row.heads_k
        else:
            tiles += mine * heads
    clocks = makespan([cost.of(tile) for tile in tiles], gpu.sm_count * problem.ctas, cost.start)
    demand: Demand = {}
    for part, times in (
        ("tile", float(len(tiles))),
        (FULL, sum(tile.full for tile in tiles)),
        (MASKED, sum(tile.masked for tile in tiles)),
    ):
        add(demand, step_demand(problem, part), times)
    busy = {
        unit: amount / gpu.rates[unit] / gpu.sm_count / clocks for unit, amount in demand.items() if unit in gpu.rates
    }
    synchronous = busy.get("tensor_sync", 0.0) * gpu.rates.get("tensor_sync", 0.0) / gpu.rates["tensor"]
    share = max(busy.get("tensor", 0.0), synchronous)
    clock = calibration.clock(gpu.clock, share)
    helpers = counts["helpers"]
    moved = helpers["bytes_per_row"] * heads * sum(row.lengths)
    helper_seconds = moved / gpu.memory + helpers["launches"] * calibration.launch_seconds
    seconds = clocks / clock + calibration.launch_seconds + helper_seconds
    units = {
        unit: amount * problem.ctas / gpu.rates[unit]
        for unit, amount in step_demand(problem, FULL).items()
        if unit in gpu.rates
    }
    # What a launch asks for is known apart from a tile only where CTAs stay.
    instructions = demand["issue"] + step_demand(problem, "launch").get("issue", 0.0) * gpu.sm_count
    return Prediction(seconds, clocks, cost, units, busy, share, helper_seconds, clock, instructions)
