"""How the roles of each kernel follow one another: the loops of csrc as actors of `sm.Simulation`.

A schedule gets the demands of one step and of one tile (`Problem`), and runs some tiles, one behind the other, on one
SM. Everything that is not a wait stands in the counts; what is written here is only who waits for whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .demand import WARP, Demand, add, scaled, total
from .sm import Actor, Event, Simulation, Work

MASKED, FULL = "masked", "full"
Tile = Sequence[str]  # the kinds of its steps, in order


@dataclass
class RoleDemands:
    """Of one role in one CTA (``walker``: of one walker): kind of step or ``tile`` -> group -> demand."""

    parts: dict[str, dict[str, Demand]] = field(default_factory=dict)
    warps: int = 4

    def of(self, part: str, *groups: str) -> Demand:
        return total(self.parts.get(part, {}).get(group, {}) for group in groups)


@dataclass(frozen=True)
class Machine:
    """What a schedule needs to know of the SM: see hardware.toml and calibration.toml."""

    cycles_per_instruction: float
    handover: float
    load_latency: float


@dataclass
class Problem:
    """Tiles of one SM.

    Attributes
    ----------
    roles : dict
        Role -> demands. ``walker`` is one of ``walkers`` equal ones.
    tiles : sequence of Tile
        One after another.
    stages : int
        Buffers of K and of V (forward), of Q and of dO (backward).
    ctas : int
        CTAs that share the SM, each with tiles like these.
    share_qk : float
        Of the multiply-adds of a forward step, those of Q K.
    """

    roles: dict[str, RoleDemands]
    walkers: int
    tiles: Sequence[Tile]
    stages: int
    ctas: int = 1
    share_qk: float = 0.5


# Results of MUFU per clock for one warp: a quarter of an SM's 16.
_MUFU_OF_WARP = 4.0


def work(machine: Machine, demand: Demand, warps: int) -> Actor:
    """Instructions of some warps. First the exponentials, each with the multiply-add that feeds it: alone they take
    what their unit needs. Then the others: alone so many clocks each, for they depend on one another."""
    mufu = demand.get("mufu", 0.0)
    if mufu:
        pairs = {"mufu": mufu, "issue": 2 * mufu / WARP, "fma": min(mufu, demand.get("fma", 0.0))}
        yield Work(pairs, mufu / _MUFU_OF_WARP / max(warps, 1))
        demand = {unit: amount - pairs.get(unit, 0.0) for unit, amount in demand.items()}
    issue = max(demand.get("issue", 0.0), 0.0)
    yield Work({**demand, "issue": issue}, machine.cycles_per_instruction * issue / max(warps, 1))


def _loads(
    simulation: Simulation, problem: Problem, machine: Machine, bytes_of: dict[str, Demand], free_key: str
) -> None:
    """An actor for each ring that copies a block into the next stage as soon as all walkers are done with it."""

    def ring(name: str) -> Actor:
        number = 0
        for tile in problem.tiles:
            for _ in tile:
                if number >= problem.stages:
                    yield simulation.event(f"{name} {free_key}", number - problem.stages, arrivals=problem.walkers)
                simulation.copy(bytes_of[name], machine.load_latency, simulation.event(f"{name} full", number))
                number += 1

    for name in bytes_of:
        simulation.start(ring(name))


def sm90_forward(simulation: Simulation, problem: Problem, machine: Machine) -> None:
    """csrc/sm90/forward_consumer.cuh: S of the next block, then O of this one, issued in turns by the warpgroups;
    softmax of the next under O."""
    walker = problem.roles["walker"]
    latency = machine.handover
    copies = problem.roles["producer"].of(FULL, "copy")
    copies.pop("issue", None)
    share = problem.share_qk
    _loads(simulation, problem, machine, {"k": scaled(copies, share), "v": scaled(copies, 1 - share)}, "free")

    def consumer(index: int) -> Actor:
        turn = index  # of all warpgroups, in their order
        number = 0

        def wait_turn() -> Event:
            return simulation.event("turn", turn)

        for place, tile in enumerate(problem.tiles):
            for step, kind in enumerate(tile):
                qk, pv = walker.of(kind, "ss"), walker.of(kind, "rs")
                yield simulation.event("k full", number + step)
                yield wait_turn()
                s = simulation.submit("tensor", qk, latency)
                o = None
                if step:
                    yield simulation.event("v full", number + step - 1)
                    o = simulation.submit("tensor", pv, latency)
                turn += problem.walkers
                simulation.arrive(simulation.event("turn", turn - problem.walkers + 1))
                if place and step == 0:
                    yield from work(machine, walker.of("tile", "scalar"), walker.warps)  # O of the tile before
                yield s
                simulation.arrive(simulation.event("k free", number + step, arrivals=problem.walkers))
                yield from work(machine, walker.of(kind, "scalar"), walker.warps)
                if o:
                    yield o
                    simulation.arrive(simulation.event("v free", number + step - 1, arrivals=problem.walkers))
            number += len(tile)
            yield simulation.event("v full", number - 1)
            yield simulation.submit("tensor", walker.of(tile[-1], "rs"), latency)
            simulation.arrive(simulation.event("v free", number - 1, arrivals=problem.walkers))
        yield from work(machine, walker.of("tile", "scalar"), walker.warps)

    simulation.arrive(simulation.event("turn", 0))
    for index in range(problem.walkers):
        simulation.start(consumer(index))


def sm90_backward(simulation: Simulation, problem: Problem, machine: Machine) -> None:
    """csrc/sm90/backward.cuh: the step of its header. A tile is a CTA of its own: K and V are loaded first."""
    walker = problem.roles["walker"]
    latency = machine.handover
    producer = problem.roles["producer"]
    copies = producer.of(FULL, "copy")
    copies.pop("issue", None)
    # Q and dO come in; dQ goes out by bulk reductions: read from shared memory once, like what comes in.
    incoming, outgoing = scaled(copies, 0.5), scaled(copies, 0.5)
    _loads(simulation, problem, machine, {"q": scaled(incoming, 0.5), "dout": scaled(incoming, 0.5)}, "free")

    def consumer(index: int) -> Actor:
        number = 0
        for tile in problem.tiles:
            yield Work({}, 2 * machine.load_latency)  # the CTA starts, K and V land
            ss, rs = walker.of(tile[0], "ss"), walker.of(tile[0], "rs")
            product, accumulate = scaled(ss, 1 / 3), scaled(rs, 1 / 2)
            for kind in tile:
                scalar = walker.of(kind, "scalar")
                p, ds, dq_out = scaled(scalar, 0.4), scaled(scalar, 0.4), scaled(scalar, 0.2)
                yield simulation.event("q full", number)
                s = simulation.submit("tensor", product, latency)
                yield simulation.event("dout full", number)
                dp = simulation.submit("tensor", product, latency)
                yield s
                yield from work(machine, p, walker.warps)
                yield dp
                yield from work(machine, ds, walker.warps)
                dv = simulation.submit("tensor", accumulate, latency)
                meet = simulation.event("ds stored", number, arrivals=problem.walkers)
                simulation.arrive(meet)
                yield meet
                dq = simulation.submit("tensor", product, latency)
                dk = simulation.submit("tensor", accumulate, latency)
                yield dv
                simulation.arrive(simulation.event("dout free", number, arrivals=problem.walkers))
                yield dq
                yield from work(machine, dq_out, walker.warps)
                simulation.copy(scaled(outgoing, 1 / problem.walkers), machine.load_latency, Event())
                yield dk
                simulation.arrive(simulation.event("q free", number, arrivals=problem.walkers))
                number += 1
            yield from work(machine, walker.of("tile", "scalar"), walker.warps)

    for index in range(problem.walkers):
        simulation.start(consumer(index))


def _synchronous(
    simulation: Simulation, problem: Problem, machine: Machine, phases: Sequence[tuple[str, float]]
) -> None:
    """CTAs whose warps do everything themselves: a step is phases of mma.sync (a share of it) and of the rest."""
    walker = problem.roles["walker"]

    def cta(index: int) -> Actor:
        for tile in problem.tiles:
            yield Work({}, 2 * machine.load_latency)  # the CTA starts, its first tiles land
            for kind in tile:
                for group, share in phases:
                    parts = ("scalar", "copy") if group == "scalar" else (group,)
                    yield from work(machine, scaled(walker.of(kind, *parts), share), walker.warps)
                yield Work({}, machine.handover)  # the barriers of a step
            yield from work(machine, walker.of("tile", "scalar", "matrix", "copy"), walker.warps)

    for index in range(problem.ctas):
        simulation.start(cta(index))


def sm80_forward(simulation: Simulation, problem: Problem, machine: Machine) -> None:
    """csrc/sm80/forward.cuh: S, softmax, O."""
    share = problem.share_qk
    _synchronous(simulation, problem, machine, (("matrix", share), ("scalar", 1.0), ("matrix", 1 - share)))


def sm80_backward(simulation: Simulation, problem: Problem, machine: Machine) -> None:
    """csrc/sm80/backward.cuh: S and dP, P and dS, then dV, dK and dQ."""
    _synchronous(simulation, problem, machine, (("matrix", 0.4), ("scalar", 1.0), ("matrix", 0.6)))


# Of a softmax step of sm100, before the correction is told and before the first 3/4 of P are there.
MAXIMUM, HEAD = 0.2, 0.8


def sm100_forward(simulation: Simulation, problem: Problem, machine: Machine) -> None:
    """csrc/sm100/forward.cuh, and FlashAttention-4 likewise: query tiles half a step apart, products issued by a warp
    in the order  O[t] += P[t] V, S[t] of the next block  for each tile t in turn."""
    walker, correction = problem.roles["walker"], problem.roles["correction"]
    latency = machine.handover
    copies = problem.roles["producer"].of(FULL, "copy")
    copies.pop("issue", None)
    share = problem.share_qk
    _loads(simulation, problem, machine, {"k": scaled(copies, share), "v": scaled(copies, 1 - share)}, "free")
    products = problem.roles["products"]
    count = problem.walkers

    def softmax(tile_index: int) -> Actor:
        number = 0
        for tile in problem.tiles:
            for kind in tile:
                demand = walker.of(kind, "scalar")
                yield simulation.event("s full", tile_index, number)
                yield from work(machine, scaled(demand, MAXIMUM), walker.warps)
                simulation.arrive(simulation.event("maximum", tile_index, number))
                yield from work(machine, scaled(demand, HEAD - MAXIMUM), walker.warps)
                simulation.after(latency, simulation.event("p head", tile_index, number))
                yield from work(machine, scaled(demand, 1 - HEAD), walker.warps)
                simulation.after(latency, simulation.event("p tail", tile_index, number))
                number += 1
            yield from work(machine, walker.of("tile", "scalar"), walker.warps)

    def correct() -> Actor:
        number = 0
        for place, tile in enumerate(problem.tiles):
            for step, kind in enumerate(tile):
                for t in range(count):
                    if step:
                        yield simulation.event("maximum", t, number)
                        yield simulation.event("o full", t, number - 1)
                        yield from work(machine, scaled(correction.of(kind, "scalar"), 1 / count), correction.warps)
                    if step or not place:
                        simulation.arrive(simulation.event("o ready", t, number))
                number += 1
            for t in range(count):
                yield simulation.event("o full", t, number - 1)
                yield from work(machine, scaled(correction.of("tile", "scalar"), 1 / count), correction.warps)
                simulation.arrive(simulation.event("o ready", t, number))

    def issue() -> Actor:
        steps = [kind for tile in problem.tiles for kind in tile]
        # The demands of products are those of all walkers together.
        for number in range(len(steps) + 1):
            for t in range(count):
                if number:
                    pv = scaled(products.of(steps[number - 1], "rs"), 1 / count)
                    yield simulation.event("o ready", t, number - 1)
                    yield simulation.event("v full", number - 1)
                    yield simulation.event("p head", t, number - 1)
                    simulation.submit("tensor", scaled(pv, 0.75), latency)
                    yield simulation.event("p tail", t, number - 1)
                    done = simulation.submit("tensor", scaled(pv, 0.25), latency)
                    done.waiting.append(lambda t=t, n=number - 1: simulation.arrive(simulation.event("o full", t, n)))  # type: ignore[misc]
                    if t + 1 == count:
                        done.waiting.append(lambda n=number - 1: _free(simulation, "v", n, count))  # type: ignore[misc]
                if number < len(steps):
                    yield simulation.event("k full", number)
                    s = simulation.submit("tensor", scaled(products.of(steps[number], "ss"), 1 / count), latency)
                    s.waiting.append(lambda t=t, n=number: simulation.arrive(simulation.event("s full", t, n)))  # type: ignore[misc]
                    if t + 1 == count:
                        s.waiting.append(lambda n=number: _free(simulation, "k", n, count))  # type: ignore[misc]

    for t in range(count):
        simulation.start(softmax(t))
    simulation.start(correct())
    simulation.start(issue())


def _free(simulation: Simulation, ring: str, number: int, arrivals: int) -> None:
    for _ in range(arrivals):
        simulation.arrive(simulation.event(f"{ring} free", number, arrivals=arrivals))


def busiest_unit(simulation: Simulation, problem: Problem, machine: Machine) -> None:
    """For a kernel without a schedule here: everything at once, which bounds it from below."""
    demand: Demand = {}
    for tile in problem.tiles:
        for part in (*tile, "tile"):
            for name, role in problem.roles.items():
                times = problem.walkers if name == "walker" else 1
                add(demand, role.of(part, "scalar", "matrix", "ss", "rs", "copy"), times)

    def everything() -> Actor:
        yield Work(demand)

    simulation.start(everything())


SCHEDULES = {
    ("sm80", "forward"): sm80_forward,
    ("sm80", "backward"): sm80_backward,
    ("sm90", "forward"): sm90_forward,
    ("sm90", "backward"): sm90_backward,
    ("sm100", "forward"): sm100_forward,
}
