"""How the roles of each kernel follow one another: the loops of csrc as actors of `sm.Simulation`.

A schedule gets the demands of one step and of one tile (`Problem`), and runs some tiles, one behind the other, on one
SM. Everything that is not a wait stands in the counts; what is written here is only who waits for whom.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .demand import WARP, Demand, add, scaled, total
from .kernels import Kernel
from .sm import Actor, Event, Simulation, Work

MASKED, FULL = "masked", "full"
GROUPS = ("scalar", "matrix", "ss", "rs", "copy", "reduce")
Tile = Sequence[str]  # the kinds of its steps, in order


@dataclass
class RoleDemands:
    """Of one role in one CTA (``walker``: of one walker): kind of step or ``tile`` -> group -> demand. ``phases``: of
    a step, unit -> share of the scalar demand."""

    parts: dict[str, dict[str, Demand]] = field(default_factory=dict)
    warps: int = 4
    phases: Sequence[Mapping[str, float]] = ()

    def of(self, part: str, *groups: str) -> Demand:
        return total(self.parts.get(part, {}).get(group, {}) for group in groups)

    def scalar_phases(self, kind: str) -> list[Demand]:
        """The scalar demand of a step, phase by phase; what no phase has a share of belongs to the first."""
        demand = self.of(kind, "scalar")
        first = {unit: 1.0 for unit in demand if not any(unit in phase for phase in self.phases)}
        return [
            {unit: amount * ({**phase, **(first if i == 0 else {})}).get(unit, 0.0) for unit, amount in demand.items()}
            for i, phase in enumerate(self.phases)
        ]


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
    kernel : Kernel
    roles : dict
        Role -> demands. ``walker`` is one of ``walkers`` equal ones.
    tiles : sequence of Tile
        One after another.
    """

    kernel: Kernel
    roles: dict[str, RoleDemands]
    tiles: Sequence[Tile] = ()

    @property
    def walkers(self) -> int:
        return self.kernel.walkers

    @property
    def stages(self) -> int:
        """Buffers of K and of V (forward), of Q (backward)."""
        return self.kernel.tile["stages"]

    @property
    def dout_stages(self) -> int:
        """Buffers of dO."""
        return self.kernel.tile.get("dout_stages") or self.stages

    @property
    def ctas(self) -> int:
        """CTAs that share the SM, each with tiles like these."""
        return self.kernel.tile.get("ctas", 1) if self.kernel.path == "sm80" else 1

    @property
    def share_qk(self) -> float:
        """Of the multiply-adds of a forward step, those of Q K; of the bytes of Q and dO, those of Q."""
        return self.kernel.head_dim / (self.kernel.head_dim + self.kernel.head_dim_v)

    def without_issue(self, role: str, group: str) -> Demand:
        """Copies of a step: what they ask of bandwidths."""
        demand = self.roles[role].of(FULL, group)
        demand.pop("issue", None)
        return demand


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
    copies = problem.without_issue("producer", "copy")
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


@dataclass(frozen=True)
class _Ring:
    """Buffers that are loaded step by step, each handed back by so many arrivals at the event ``(free, step)``."""

    name: str
    demand: Demand
    stages: int
    free: str
    arrivals: int


class _Backward:
    """What all backwards have: a CTA for each tile, which loads in a fixed order. It starts when all roles of the one
    before have ended, for it needs their shared memory."""

    def __init__(self, simulation: Simulation, machine: Machine, problem: Problem, roles: int) -> None:
        self.simulation = simulation
        self.machine = machine
        self.tiles = problem.tiles
        self._roles = roles
        simulation.after(machine.load_latency, self.started(0))

    def started(self, tile: int) -> Event:
        """The CTA runs and has its barriers. As much later as a load takes, as its work and the maps must come."""
        return self.simulation.event("started", tile)

    def end(self, tile: int) -> None:
        """A role has done all it does in the tile."""
        ended = self.simulation.event("ended", tile, arrivals=self._roles)
        if ended.arrivals == 1 and tile + 1 < len(self.tiles):
            self.simulation.after(self.machine.load_latency, self.started(tile + 1))
        self.simulation.arrive(ended)

    def load(self, rings: Sequence[_Ring]) -> None:
        """One warp, ring by ring. K and V, which come first, take as long as what comes with them."""
        simulation = self.simulation

        def loader() -> Actor:
            number = 0
            for place, tile in enumerate(self.tiles):
                yield self.started(place)
                for step in range(len(tile)):
                    for ring in rings:
                        if step >= ring.stages:
                            yield simulation.event(ring.free, number - ring.stages, arrivals=ring.arrivals)
                        full = simulation.event(f"{ring.name} full", number)
                        simulation.copy(ring.demand, self.machine.load_latency, full)
                    number += 1

        simulation.start(loader())


def sm90_backward(simulation: Simulation, problem: Problem, machine: Machine) -> None:
    """csrc/sm90/backward_keys.cuh: the step of its header; backward_roles.cuh: see `sm90_backward_roles`."""
    if problem.kernel.has_gradient_roles:
        sm90_backward_roles(simulation, problem, machine)
        return
    walker, count = problem.roles["walker"], problem.walkers
    latency = machine.handover
    backward = _Backward(simulation, machine, problem, count)
    copies, outgoing = problem.without_issue("producer", "copy"), problem.without_issue("producer", "reduce")
    backward.load(
        (
            _Ring("q", scaled(copies, problem.share_qk), problem.stages, "q free", count),
            _Ring("dout", scaled(copies, 1 - problem.share_qk), problem.stages, "q free", count),
        )
    )
    # S and dP, and dQ; dV and dK.
    d, d_v = problem.kernel.head_dim, problem.kernel.head_dim_v

    def consumer(index: int) -> Actor:
        number = 0
        for place, tile in enumerate(problem.tiles):
            yield backward.started(place)
            for kind in tile:
                ss, rs = walker.of(kind, "ss"), walker.of(kind, "rs")
                begin, p, ds, dq_out = walker.scalar_phases(kind)
                yield simulation.event("q full", number)
                yield from work(machine, begin, walker.warps)
                s = simulation.submit("tensor", scaled(ss, d / (2 * d + d_v)), latency)
                yield simulation.event("dout full", number)
                dp = simulation.submit("tensor", scaled(ss, d_v / (2 * d + d_v)), latency)
                yield s
                yield from work(machine, p, walker.warps)
                yield dp
                yield from work(machine, ds, walker.warps)
                dv = simulation.submit("tensor", scaled(rs, d_v / (d + d_v)), latency)
                meet = simulation.event("ds stored", number, arrivals=count)
                simulation.arrive(meet)
                yield meet
                dq = simulation.submit("tensor", scaled(ss, d / (2 * d + d_v)), latency)
                dk = simulation.submit("tensor", scaled(rs, d / (d + d_v)), latency)
                yield dv
                yield dq
                if number:
                    yield simulation.event("dq read", index, number - 1)
                yield from work(machine, dq_out, walker.warps)
                simulation.copy(scaled(outgoing, 1 / count), latency, simulation.event("dq read", index, number))
                yield dk
                simulation.arrive(simulation.event("q free", number, arrivals=count))  # and dO
                number += 1
            yield from work(machine, walker.of("tile", "scalar"), walker.warps)
            backward.end(place)

    for index in range(count):
        simulation.start(consumer(index))


def sm90_backward_roles(simulation: Simulation, problem: Problem, machine: Machine) -> None:
    """csrc/sm90/backward_roles.cuh: a warpgroup each for S, P and dV, for dP, dS and dK, and for dQ."""
    latency = machine.handover
    tile_of = problem.kernel.tile
    scores, gradients, queries = (problem.roles[name] for name in ("scores", "gradients", "queries"))
    backward = _Backward(simulation, machine, problem, 3)
    copies, outgoing = problem.without_issue("producer", "copy"), problem.without_issue("producer", "reduce")
    backward.load(
        (
            _Ring("q", scaled(copies, problem.share_qk), problem.stages, "q free", 1),
            _Ring("dout", scaled(copies, 1 - problem.share_qk), problem.dout_stages, "dout free", 2),
        )
    )
    chunks = problem.kernel.head_dim // 64  # of dQ, on their way to shared memory
    slices = problem.kernel.head_dim // tile_of["dq_slice"]  # products
    ds_buffers = 2

    def free_dout(number: int) -> None:
        simulation.arrive(simulation.event("dout free", number, arrivals=2))

    def scores_of() -> Actor:
        number = 0
        for place, tile in enumerate(problem.tiles):
            yield backward.started(place)
            yield simulation.event("q full", number)
            s = simulation.submit("tensor", scores.of(tile[0], "ss"), latency)
            yield s
            for step, kind in enumerate(tile):
                yield from work(machine, scores.of(kind, "scalar"), scores.warps)
                if number:
                    yield simulation.event("p taken", number - 1)
                simulation.arrive(simulation.event("p full", number))
                yield simulation.event("dout full", number)
                dv = simulation.submit("tensor", scores.of(kind, "rs"), latency)
                if step + 1 < len(tile):
                    yield simulation.event("q full", number + 1)
                    s = simulation.submit("tensor", scores.of(tile[step + 1], "ss"), latency)
                yield dv
                free_dout(number)
                yield s
                number += 1
            yield from work(machine, scores.of("tile", "scalar"), scores.warps)
            backward.end(place)

    def gradients_of() -> Actor:
        number = 0
        for place, tile in enumerate(problem.tiles):
            yield backward.started(place)
            yield simulation.event("dout full", number)
            yield simulation.submit("tensor", gradients.of(tile[0], "ss"), latency)
            free_dout(number)
            for step, kind in enumerate(tile):
                is_last = step + 1 == len(tile)
                yield simulation.event("p full", number)
                yield from work(machine, gradients.of(kind, "scalar"), gradients.warps)
                simulation.arrive(simulation.event("p taken", number))
                if number >= ds_buffers:
                    yield simulation.event("ds free", number - ds_buffers)
                simulation.after(latency, simulation.event("ds full", number))
                dk = simulation.submit("tensor", gradients.of(kind, "rs"), latency)
                dp: Event | None = None
                if not is_last and problem.dout_stages > 1:
                    yield simulation.event("dout full", number + 1)
                    dp = simulation.submit("tensor", gradients.of(tile[step + 1], "ss"), latency)
                yield dk
                simulation.arrive(simulation.event("q free", number))
                number += 1
                if is_last:
                    continue
                if dp is None:
                    yield simulation.event("dout full", number)
                    dp = simulation.submit("tensor", gradients.of(tile[step + 1], "ss"), latency)
                yield dp
                free_dout(number)
            yield from work(machine, gradients.of("tile", "scalar"), gradients.warps)
            backward.end(place)

    def queries_of() -> Actor:
        number = written = 0
        for place, tile in enumerate(problem.tiles):
            yield backward.started(place)
            for kind in tile:
                product = scaled(queries.of(kind, "ss"), 1 / slices)
                out = scaled(queries.of(kind, "scalar"), 1 / chunks)
                yield simulation.event("ds full", number)
                for index in range(slices):
                    yield simulation.submit("tensor", product, latency)
                    if index + 1 == slices:
                        simulation.arrive(simulation.event("ds free", number))
                    for _ in range(chunks // slices):
                        if written >= tile_of["dq_buffers"]:
                            yield simulation.event("dq read", written - tile_of["dq_buffers"])
                        yield from work(machine, out, queries.warps)
                        simulation.copy(scaled(outgoing, 1 / chunks), latency, simulation.event("dq read", written))
                        written += 1
                number += 1
            backward.end(place)

    for actor in (scores_of(), gradients_of(), queries_of()):
        simulation.start(actor)


def _synchronous(
    simulation: Simulation, problem: Problem, machine: Machine, phases: Sequence[tuple[str, float]], barriers: int
) -> None:
    """CTAs whose warps do everything themselves: a step is phases of mma.sync (a share of it) and of the rest, and
    barriers. What the next step reads is copied meanwhile."""
    walker = problem.roles["walker"]

    def cta(index: int) -> Actor:
        def copied(step: int) -> Event:
            return simulation.event("copied", index, step)

        number = 0
        for tile in problem.tiles:
            yield Work({}, machine.load_latency)  # the CTA starts
            simulation.copy(problem.without_issue("walker", "copy"), machine.load_latency, copied(number))
            for step, kind in enumerate(tile):
                yield copied(number)
                number += 1
                if step + 1 < len(tile):
                    simulation.copy(problem.without_issue("walker", "copy"), machine.load_latency, copied(number))
                for group, share in phases:
                    demand = walker.of(kind, group)
                    if group == "scalar":
                        add(demand, {"issue": walker.of(kind, "copy").get("issue", 0.0)})
                    yield from work(machine, scaled(demand, share), walker.warps)
                yield Work({}, barriers * machine.handover)
            yield from work(machine, walker.of("tile", "scalar", "matrix", "copy"), walker.warps)

    for index in range(problem.ctas):
        simulation.start(cta(index))


def sm80_forward(simulation: Simulation, problem: Problem, machine: Machine) -> None:
    """csrc/sm80/forward.cuh: S, softmax, O."""
    share = problem.share_qk
    _synchronous(simulation, problem, machine, (("matrix", share), ("scalar", 1.0), ("matrix", 1 - share)), 1)


def sm80_backward(simulation: Simulation, problem: Problem, machine: Machine) -> None:
    """csrc/sm80/backward.cuh: S and dP, P and dS, then dV, dK and dQ."""
    d, d_v, tile = problem.kernel.head_dim, problem.kernel.head_dim_v, problem.kernel.tile
    share = (d + d_v) / (3 * d + 2 * d_v)
    barriers = 3 if tile.get("split", 1) > 1 and tile["stages"] == 1 else 2
    _synchronous(simulation, problem, machine, (("matrix", share), ("scalar", 1.0), ("matrix", 1 - share)), barriers)


# Of the instructions of a softmax step of sm100, those before the correction is told, and before the first 3/4 of P are
# there: 97 and 446 of 571 at d 128. All exponentials come behind the first.
MAXIMUM, HEAD = 0.17, 0.78


def _softmax_parts(demand: Demand) -> tuple[Demand, Demand, Demand]:
    """The search for the maximum, the first 3/4 of P, the rest."""
    ends = (0.0, MAXIMUM, HEAD, 1.0)
    parts = [scaled(demand, end - begin) for begin, end in zip(ends, ends[1:], strict=False)]
    if "mufu" in demand:
        for part, share in zip(parts, (0.0, 0.75, 0.25), strict=True):
            part["mufu"] = share * demand["mufu"]
    return parts[0], parts[1], parts[2]


def sm100_forward(simulation: Simulation, problem: Problem, machine: Machine) -> None:
    """csrc/sm100/forward.cuh, and FlashAttention-4 likewise: query tiles half a step apart, products issued by a warp
    in the order  O[t] += P[t] V, S[t] of the next block  for each tile t in turn."""
    walker, correction = problem.roles["walker"], problem.roles["correction"]
    latency = machine.handover
    copies = problem.without_issue("producer", "copy")
    share = problem.share_qk
    _loads(simulation, problem, machine, {"k": scaled(copies, share), "v": scaled(copies, 1 - share)}, "free")
    products = problem.roles["products"]
    count = problem.walkers

    def softmax(tile_index: int) -> Actor:
        number = 0
        for tile in problem.tiles:
            for kind in tile:
                maximum, head, tail = _softmax_parts(walker.of(kind, "scalar"))
                yield simulation.event("s full", tile_index, number)
                yield from work(machine, maximum, walker.warps)
                simulation.arrive(simulation.event("maximum", tile_index, number))
                yield from work(machine, head, walker.warps)
                simulation.after(latency, simulation.event("p head", tile_index, number))
                yield from work(machine, tail, walker.warps)
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


def sm100_backward(simulation: Simulation, problem: Problem, machine: Machine) -> None:
    """csrc/sm100/backward.cuh: P and dS of half of the queries by each of two warpgroups, dQ by a third, products by a
    warp in the order of the header. A pair of CTAs is one of them with its half of everything."""
    kernel = problem.kernel
    walker, queries, products = (problem.roles[name] for name in ("walker", "queries", "products"))
    count, latency = problem.walkers, machine.handover
    d, d_v = kernel.head_dim, kernel.head_dim_v
    is_pair = kernel.ctas_per_tile == 2
    # Where dP and dQ have their columns (backward_shape.cuh).
    dp_is_over_s = 2 * kernel.block_m + d + d_v > 512
    dq_is_apart = not is_pair and 2 * kernel.block_m + d_v + 2 * d <= 512
    slices = d // kernel.ctas_per_tile // 32
    buffers = kernel.tile.get("slice_buffers", 2)
    backward = _Backward(simulation, machine, problem, count + 2)
    copies, outgoing = problem.without_issue("producer", "copy"), problem.without_issue("queries", "reduce")
    q, dout = scaled(copies, problem.share_qk), scaled(copies, 1 - problem.share_qk)
    exchange = problem.without_issue("walker", "copy")  # of dS, in a pair
    if is_pair:  # half of Q and dO by rows, half by columns
        backward.load(
            (
                _Ring("q", scaled(q, 0.5), problem.stages, "s done", 1),
                _Ring("dout", scaled(dout, 0.5), problem.dout_stages, "dp done", 1),
                _Ring("dout columns", scaled(dout, 0.5), 1, "dv done", 1),
                _Ring("q columns", scaled(q, 0.5), 1, "dk done", 1),
            )
        )
    else:
        backward.load(
            (
                _Ring("q", q, problem.stages, "dk done", 1),
                _Ring("dout", dout, problem.dout_stages, "dv done", 1),
            )
        )

    def then(product: Event, *key: object) -> None:
        """A commit: the event happens when the product, and with it all before it, is done."""
        product.waiting.append(lambda: simulation.arrive(simulation.event(*key)))

    def scores_of() -> Actor:
        number = 0
        for place, tile in enumerate(problem.tiles):
            yield backward.started(place)
            for kind in tile:
                p, ds = walker.scalar_phases(kind)
                yield simulation.event("s full", number)
                yield from work(machine, p, walker.warps)
                simulation.after(latency, simulation.event("p full", number, arrivals=count))
                yield simulation.event("dp full", number)
                yield from work(machine, ds, walker.warps)
                simulation.after(latency, simulation.event("ds full", number, arrivals=count))
                if is_pair:  # half of dS goes into the other CTA, whose relay passes it on
                    exchanged = simulation.event("ds exchanged", number, arrivals=count)
                    simulation.copy(exchange, machine.load_latency + latency, exchanged)
                number += 1
            yield simulation.event("sums full", place)
            yield from work(machine, walker.of("tile", "scalar"), walker.warps)
            backward.end(place)

    def queries_of() -> Actor:
        number = written = 0
        for place, tile in enumerate(problem.tiles):
            yield backward.started(place)
            for kind in tile:
                out = scaled(queries.of(kind, "scalar"), 1 / slices)
                yield simulation.event("dq full", number)
                for index in range(slices):
                    if index == (slices - 1) // 2 * 2:  # two slices at once are in registers
                        simulation.after(latency, simulation.event("dq empty", number))
                    if written >= buffers:
                        yield simulation.event("dq read", written - buffers)
                    yield from work(machine, out, queries.warps)
                    simulation.copy(scaled(outgoing, 1 / slices), latency, simulation.event("dq read", written))
                    written += 1
                number += 1
            backward.end(place)

    def issue() -> Actor:
        number = 0  # of the step

        def submit(kind: str, group: str, share: float) -> Event:
            return simulation.submit("tensor", scaled(products.of(kind, group), share), latency)

        s_share, dp_share, dv_share = d / (2 * d + d_v), d_v / (2 * d + d_v), d_v / (d + d_v)

        def issue_s(kind: str, of: int) -> Actor:
            yield simulation.event("q full", of)
            s = submit(kind, "ss", s_share)
            then(s, "s full", of)
            then(s, "s done", of)

        def issue_dp(kind: str, of: int) -> Actor:
            yield simulation.event("dout full", of)
            if dp_is_over_s:
                submit(kind, "ss", dp_share / 2)
                return
            dp = submit(kind, "ss", dp_share)
            then(dp, "dp full", of)
            then(dp, "dp done", of)

        for place, tile in enumerate(problem.tiles):
            yield backward.started(place)
            yield from issue_s(tile[0], number)
            yield from issue_dp(tile[0], number)
            for step, kind in enumerate(tile):
                is_last = step + 1 == len(tile)
                if is_pair:
                    yield simulation.event("dout columns full", number)
                yield simulation.event("p full", number, arrivals=count)
                if dp_is_over_s:
                    then(submit(kind, "ss", dp_share / 2), "dp full", number)
                then(submit(kind, "rs", dv_share), "dv done", number)
                if not dp_is_over_s and not is_last:
                    yield from issue_s(tile[step + 1], number + 1)
                if is_pair:
                    yield simulation.event("q columns full", number)
                yield simulation.event("ds full", number, arrivals=count)
                then(submit(kind, "rs", 1 - dv_share), "dk done", number)
                if dq_is_apart and step:
                    yield simulation.event("dq empty", number - 1)
                if is_pair:
                    yield simulation.event("ds exchanged", number, arrivals=count)
                dq = submit(kind, "ss", s_share)
                then(dq, "dq full", number)
                if is_last:
                    then(dq, "sums full", place)
                else:
                    if not dq_is_apart:
                        yield simulation.event("dq empty", number)
                    if dp_is_over_s:
                        yield from issue_s(tile[step + 1], number + 1)
                    yield from issue_dp(tile[step + 1], number + 1)
                number += 1
            backward.end(place)

    for _ in range(count):
        simulation.start(scores_of())
    simulation.start(queries_of())
    simulation.start(issue())


def busiest_unit(simulation: Simulation, problem: Problem, machine: Machine) -> None:
    """For a kernel without a schedule here: everything at once, which bounds it from below."""
    demand: Demand = {}
    for tile in problem.tiles:
        for part in (*tile, "tile"):
            for name, role in problem.roles.items():
                times = problem.walkers if name == "walker" else 1
                add(demand, role.of(part, *GROUPS), times)

    def everything() -> Actor:
        yield Work(demand)

    simulation.start(everything())


SCHEDULES = {
    ("sm80", "forward"): sm80_forward,
    ("sm80", "backward"): sm80_backward,
    ("sm90", "forward"): sm90_forward,
    ("sm90", "backward"): sm90_backward,
    ("sm100", "forward"): sm100_forward,
    ("sm100", "backward"): sm100_backward,
}
