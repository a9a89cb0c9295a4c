"""benchmarks/model: what instructions ask for, how tiles are walked, how an SM shares its units, what is predicted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ptx_emulator.counts import CountedInstruction, LaunchCounts, parse_counts

from benchmarks.model import counting, demand, fa4, schedules
from benchmarks.model.__main__ import Counted, measured_rows, parse_row, predict_rows
from benchmarks.model.hardware import Calibration, Gpu, load_calibration, load_gpu
from benchmarks.model.kernels import Kernel, choose, load_kernels, tiles_of
from benchmarks.model.predict import Row, makespan, predict, problem_of, tile_cost
from benchmarks.model.schedules import Machine
from benchmarks.model.sm import Actor, Event, Simulation, Work

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "model"


def hopper(head_dim: int = 128, direction: str = "forward") -> Kernel:
    tile = {"block_m": 128, "block_n": 128, "stages": 2, "warps": 12}
    return Kernel("sm90", direction, head_dim, head_dim, tile)


@pytest.mark.parametrize(
    ("text", "group", "per_warp", "per_lane"),
    [
        ("mov.b32 %r1, %r2;", "scalar", {}, {}),
        ("ld.param.u64 %rd1, [p];", "scalar", {}, {}),
        ("shl.b32 %r1, %r2, 4;", "scalar", {}, {}),
        ("fma.rn.f32 %f1, %f2, %f3, %f4;", "scalar", {"issue": 1, "fma": 32}, {}),
        ("fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;", "scalar", {"issue": 1, "fma": 64}, {}),
        ("@%p1 ex2.approx.ftz.f32 %f1, %f2;", "scalar", {"issue": 1, "mufu": 32}, {}),
        ("max.f32 %f1, %f2, %f3;", "scalar", {"issue": 1, "alu": 32}, {}),
        ("cvt.rn.bf16x2.f32 %r1, %f1, %f2;", "scalar", {"issue": 1, "alu": 32}, {}),
        ("@%p2 bra $L__BB0_2;", "scalar", {"issue": 1}, {}),
        ("st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5};", "scalar", {"issue": 1}, {}),
        (
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%rd1], [%r1], 4096, %rd2;",
            "reduce",
            {"issue": 1},
            {},
        ),
        ("ld.global.nc.v2.f32 {%f1, %f2}, [%rd1];", "scalar", {"issue": 1}, {"l2": 8, "memory": 8}),
        (
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];",
            "matrix",
            {"issue": 1, "shared": 512},
            {},
        ),
        (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};",
            "matrix",
            {"issue": 1, "tensor_sync": 2048},
            {},
        ),
        (
            "cp.async.cg.shared.global [%r1], [%rd1], 16, %r2;",
            "copy",
            {"issue": 1},
            {"shared": 16, "l2": 16, "memory": 16},
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1, %f2}, %rd1, %rd2, p, 1, 1, 0, 0;",
            "ss",
            {"issue": 1, "tensor": 64 * 128 * 16 / 4, "shared": (64 + 128) * 32 / 4},
            {},
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, {%r1, %r2, %r3, %r4}, %rd2, p, 1, 1, 1;",
            "rs",
            {"issue": 1, "tensor": 64 * 128 * 16 / 4, "shared": 128 * 32 / 4},
            {},
        ),
        (
            "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%r1, %r2}, [%r3];",
            "scalar",
            {"issue": 1, "tmem_load": 32 * 4 * 32},
            {},
        ),
    ],
)
def test_demand(text: str, group: str, per_warp: dict[str, float], per_lane: dict[str, float]) -> None:
    """Units, amounts and group of an instruction."""
    assert demand.group_of(text) == group
    assert demand.per_warp(text) == per_warp
    assert demand.per_lane(text) == per_lane


def test_demand_of_sizes() -> None:
    """tcgen05.mma by M and N, A in shared or in tensor memory; a multicast copy is read once, written to each CTA; what
    banks make of a load; a reduction is read from shared memory once; what leaves for the other CTA comes, too."""
    assert demand.per_size("ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];", 2, 1) == {"shared": 256}
    reduction = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r1], 4096;"
    assert demand.per_size(reduction, 4096, 1) == {"l2": 4096, "memory": 4096, "shared": 4096}
    both = "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, p;"
    assert demand.group_of(both) == "ss"
    assert demand.per_size(both, 128, 64) == {"tensor": 128 * 64 * 16, "shared": (128 + 64) * 32}
    memory = "tcgen05.mma.cta_group::1.kind::f16 [%r1], [%r3], %rd2, %r2, p;"
    assert demand.group_of(memory) == "rs"
    assert demand.per_size(memory, 128, 64)["shared"] == 64 * 32
    copy = "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%r1];"
    assert demand.per_size(copy, 4096, 2) == {"l2": 4096, "memory": 4096, "shared": 8192}
    exchange = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r2], 4096, [%r3];"
    assert demand.group_of(exchange) == "copy"
    assert demand.per_size(exchange, 4096, 1) == {"shared": 8192}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("rows", "keys"), [(128, 128), (384, 384), (300, 300), (200, 520), (520, 200), (1, 129)])
def test_tiles_are_walked_as_the_mask_says(direction: str, causal: bool, rows: int, keys: int) -> None:
    """Each block of which something is seen is a step; it is masked unless all of it is seen."""
    kernel = hopper(direction=direction)

    def is_seen(i: int, j: int) -> bool:
        return i < rows and j < keys and (not causal or j <= i + keys - rows)

    expected = []
    if direction == "forward":
        for first in range(0, rows, 128):
            walks = []
            for row in range(first, first + 128, 64):
                lines = range(row, min(row + 64, rows))
                blocks = [
                    [is_seen(i, j) for i in lines for j in range(block, block + 128)] for block in range(0, keys, 128)
                ]
                walks.append((sum(bool(b) and all(b) for b in blocks), sum(any(b) and not all(b) for b in blocks)))
            expected.append(tuple(walks))
    else:
        for first in range(0, keys, 128):
            full = masked = 0
            for block in range(0, rows, 128):
                seen = [is_seen(i, j) for i in range(block, block + 128) for j in range(first, first + 128)]
                full += all(seen)
                masked += any(seen) and not all(seen)
            expected.append(((full, masked),) * 2)
    found = [tile.walkers for tile in tiles_of(kernel, rows, keys, causal)]
    assert found == expected


def test_units_are_shared() -> None:
    """Two actors at one unit take twice as long; what needs another unit is not held up; a queue keeps its order."""
    simulation = Simulation({"mufu": 16.0, "fma": 128.0})
    ended: dict[str, float] = {}

    def actor(name: str, request: Work) -> Actor:
        yield request
        ended[name] = simulation.now

    simulation.start(actor("a", Work({"mufu": 1600.0})))
    simulation.start(actor("b", Work({"mufu": 1600.0})))
    simulation.start(actor("c", Work({"fma": 12800.0}, least=150.0)))
    assert simulation.run() == pytest.approx(200)
    assert ended == pytest.approx({"a": 200, "b": 200, "c": 150})

    simulation = Simulation({"tensor": 2048.0})
    order: list[tuple[str, float]] = []

    def waiter(name: str, event: Event) -> Actor:
        yield event
        order.append((name, simulation.now))

    for name, clocks in (("first", 30), ("second", 10)):
        simulation.start(waiter(name, simulation.submit("tensor", {"tensor": 2048.0 * clocks}, latency=5)))
    simulation.run()
    assert [name for name, _ in order] == ["first", "second"]
    assert [clocks for _, clocks in order] == pytest.approx([35, 45])


def test_a_schedule_that_waits_for_ever_is_an_error() -> None:
    """Instead of a time that means nothing."""
    simulation = Simulation({"issue": 4.0})

    def actor() -> Actor:
        yield simulation.event("never")

    simulation.start(actor())
    with pytest.raises(RuntimeError, match="never"):
        simulation.run()


def test_makespan() -> None:
    """Longest first: 7, 5, 4, 4 on two workers end at 11 and 9."""
    assert makespan([4, 7, 4, 5], workers=2, start=100) == 111


def test_polling_does_not_count() -> None:
    """A wait is one instruction and one branch, however often its loop went round; other branches all count."""
    texts = (("mbarrier.try_wait.parity.shared::cta.b64 p, [%r1], %r2;", 3), ("@p bra DONE;", 20), ("bra AGAIN;", 17))
    launch = LaunchCounts("k", 1)
    for number, (text, times) in enumerate((*texts, ("add.s32 %r1, %r2, 1;", 3), ("@p bra LOOP;", 3))):
        launch.instructions.append(CountedInstruction(number, number, "", text, {0: times}, {0: 32 * times}, {}))
    assert counting.demand_of_launch(launch, range(1), False)["scalar"] == {"issue": 3 + 3 + 3 + 3, "alu": 3 * 32}


def test_three_input_maxima() -> None:
    """Two maxima are one instruction where there is one for three numbers."""
    launch = LaunchCounts("k", 1, [CountedInstruction(0, 0, "", "max.f32 %f1, %f2, %f3;", {0: 8}, {0: 256}, {})])
    for has_it, issue in ((False, 8), (True, 4)):
        assert counting.demand_of_launch(launch, range(1), has_it)["scalar"]["issue"] == issue


ISSUE = "add.f32 %f1, %f2, %f3;"
COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 64, [%r2];"


class KnownKernel:
    """Stands in for the emulator: each walker adds 3 times a launch, 5 a tile, 7 a full step, 11 a masked one."""

    def launches(self, kernel: Kernel, call: counting.Call) -> dict[str, list[LaunchCounts]]:
        ctas, tiles, full, masked = counting.features(kernel, call, 2)
        times = round(2 * (3 * ctas + 5 * tiles + 7 * full + 11 * masked))
        launch = LaunchCounts(kernel.name, 2)
        launch.instructions.append(CountedInstruction(0, 1, "", ISSUE, {4: times}, {4: 32 * times}, {}))
        copies = {(2, 64, 1): round(full + masked)}
        launch.instructions.append(CountedInstruction(1, 2, "", COPY, {2: copies[2, 64, 1]}, {2: 1}, copies))
        return {kernel.name: [launch]}


@pytest.mark.parametrize("causal", [False, True])
def test_fit(causal: bool) -> None:
    """Launch, tile and steps are told apart, roles by their warps."""
    counts = counting.fit(hopper(), causal, KnownKernel())  # type: ignore[arg-type]
    assert counts.residual < 1e-9
    walker = counts.roles["walker"]
    issue = {part: walker[part]["scalar"].get("issue", 0.0) for part in counting.PARTS}
    expected = {"launch": 6, "tile": 10, "full": 14, "masked": 22 if causal else 0}
    assert issue == pytest.approx(expected, abs=1e-6)
    assert walker["full"]["scalar"]["fma"] == pytest.approx(14 * 32)
    assert counts.roles["producer"]["full"]["copy"]["l2"] == pytest.approx(64)


def simple_counts(**scalar: float) -> dict[str, Any]:
    """A forward step of 128 x 128 scores at head dim 128 with these other instructions in each step."""
    products = {"tensor": 128.0 * 128 * 128, "issue": 0.0}
    return {
        "kernel": "x",
        "causal": False,
        "roles": {
            "walker": {"full": {"scalar": dict(scalar), "ss": products, "rs": products}, "tile": {}},
            "producer": {"full": {"copy": {}}, "tile": {}},
        },
        "helpers": {"bytes_per_row": 0.0, "launches": 0.0},
    }


def test_cost_of_a_step() -> None:
    """With nothing but products a step takes their clocks; with a long softmax, at least the MUFU's."""
    gpu = load_gpu("h200")
    machine = Machine(cycles_per_instruction=1.0, handover=0.0, load_latency=1.0)
    cost = tile_cost(hopper(), problem_of(hopper(), simple_counts()), machine, gpu)
    assert cost.full == pytest.approx(2 * 128**3 / 2048, rel=1e-3)
    slow = simple_counts(mufu=16.0 * 5000, issue=2500.0)
    assert tile_cost(hopper(), problem_of(hopper(), slow), machine, gpu).full >= 5000 * 0.999


BACKWARDS = {
    "keys": ("sm90", 128, 128, {"block_m": 64, "block_n": 128, "stages": 2, "warps": 12}),
    "roles": (
        "sm90",
        192,
        192,
        {"block_m": 64, "block_n": 64, "stages": 2, "warps": 16}
        | {"roles": 1, "dout_stages": 2, "dq_slice": 192, "dq_buffers": 3},
    ),
    "one buffer of dO": (
        "sm90",
        256,
        256,
        {"block_m": 64, "block_n": 64, "stages": 2, "warps": 16}
        | {"roles": 1, "dout_stages": 1, "dq_slice": 64, "dq_buffers": 2},
    ),
    "dQ apart": ("sm100", 64, 64, {"block_m": 128, "block_n": 128, "stages": 2, "warps": 16, "dout_stages": 2}),
    "dQ over dP": ("sm100", 128, 128, {"block_m": 128, "block_n": 128, "stages": 2, "warps": 16, "dout_stages": 1}),
    "dQ over S": ("sm100", 192, 128, {"block_m": 128, "block_n": 128, "stages": 1, "warps": 16, "dout_stages": 1}),
    "a pair": (
        "sm100",
        128,
        128,
        {"block_m": 128, "block_n": 256, "stages": 1, "warps": 16}
        | {"dout_stages": 1, "slice_buffers": 1, "cluster": 2},
    ),
}
PRODUCT = 2048.0 * 1000  # multiply-adds: 1000 clocks of the H200


def backward_counts(kernel: Kernel, **scalar: float) -> dict[str, Any]:
    """A step of five products of 1000 clocks each, on an SM of the H200, and these other instructions of P."""

    def step(ss: float, rs: float, **others: float) -> dict[str, Any]:
        products = {"ss": {"tensor": ss * PRODUCT}, "rs": {"tensor": rs * PRODUCT}}
        return {"full": {"scalar": others, **products, "copy": {}, "reduce": {}}, "tile": {}}

    if kernel.has_gradient_roles:
        roles = {"scores": step(1, 1, **scalar), "gradients": step(1, 1), "queries": step(1, 0)}
    elif kernel.path == "sm90":
        roles = {"walker": step(3, 2, **scalar)}
    else:
        roles = {"walker": step(0, 0, **scalar), "queries": step(0, 0), "products": step(3, 2)}
    # All of it in P: the first phase, or the second of the four of sm90.
    phases = [dict.fromkeys(("issue", "mufu"), float(i == 1)) for i in range(4)]
    return {
        "roles": {**roles, "producer": step(0, 0)},
        "phases": phases if kernel.path == "sm90" else [phases[1], phases[0]],
    }


@pytest.mark.parametrize("name", BACKWARDS)
def test_backward_schedules(name: str) -> None:
    """Products alone run one behind the other where nothing has to wait for dQ's or dO's place; a long P stands for
    itself, and for the products that no order can put under it."""
    path, d, d_v, tile = BACKWARDS[name]
    kernel = Kernel(path, "backward", d, d_v, tile)
    machine = Machine(cycles_per_instruction=1.0, handover=0.0, load_latency=1.0)
    gpu = load_gpu("h200")
    clocks = tile_cost(kernel, problem_of(kernel, backward_counts(kernel)), machine, gpu).full
    assert clocks == pytest.approx(5000, rel=0.02)
    long = backward_counts(kernel, mufu=16.0 * 9000, issue=2 * 16 * 9000 / 32)
    clocks = tile_cost(kernel, problem_of(kernel, long), machine, gpu).full
    assert 9000 * 0.999 <= clocks <= 9000 + 5000


def test_more_buffers_are_not_slower() -> None:
    """A second buffer of dO takes the gradients' wait for it away."""
    machine = Machine(cycles_per_instruction=1.0, handover=100.0, load_latency=6000.0)
    clocks = []
    for stages in (1, 2):
        path, d, d_v, tile = BACKWARDS["roles"]
        kernel = Kernel(path, "backward", d, d_v, {**tile, "dout_stages": stages})
        clocks.append(tile_cost(kernel, problem_of(kernel, backward_counts(kernel)), machine, load_gpu("h200")).full)
    assert clocks[0] > 1.1 * clocks[1] >= 1.1 * 4999


def test_no_step_is_faster_than_its_busiest_unit() -> None:
    """Of every kernel that was counted, with and without a mask; and every schedule comes to its end."""
    entries = json.loads((RESULTS / "counts.json").read_text(encoding="utf-8"))
    kernels = {kernel.name: kernel for kernel in load_kernels()}
    assert {(kernel.path, kernel.direction) for kernel in kernels.values()} == {
        (kernels[entry["kernel"]].path, kernels[entry["kernel"]].direction) for entry in entries
    }
    for entry in entries:
        kernel = kernels[entry["kernel"]]
        row = Row((4096,), 8, 8, kernel.head_dim, entry["causal"], kernel.head_dim_v)
        gpu = load_gpu("b200" if kernel.path == "sm100" else "h200")
        prediction = predict(kernel, entry, row, gpu, load_calibration())
        assert prediction.cost.full >= 0.98 * max(prediction.step_units.values()), kernel.name
        assert 0 < max(prediction.busy.values()) <= 1.02, kernel.name


def test_rows_measured_on_another_kernel_are_left_out() -> None:
    """A recording says nothing of a kernel that serves its rows only since."""
    counted = Counted(json.loads((RESULTS / "counts.json").read_text(encoding="utf-8")))
    gpu, calibration = load_gpu("h200"), load_calibration()
    row = next(row for row in measured_rows() if row["path"] == "sm90")
    assert [each["kernel"] for each in predict_rows(counted, [row], gpu, calibration)] == [row["kernel"]]
    assert predict_rows(counted, [{**row, "kernel": row["kernel"] + "_before"}], gpu, calibration) == []


def test_phases() -> None:
    """Instructions of the loop by the waits between them; what is executed more or less often is not of the loop."""
    texts = ["add.f32 %f1, %f2, %f3;", "wgmma.commit_group.sync.aligned;", "wgmma.commit_group.sync.aligned;"]
    texts += ["ex2.approx.ftz.f32 %f1, %f2;", "wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 0;"]
    launch = LaunchCounts("k", 1)
    for number, (text, times) in enumerate((*((text, 7) for text in texts), ("add.f32 %f1, %f2, %f3;", 1))):
        launch.instructions.append(CountedInstruction(number, number, "", text, {4: times}, {4: 32 * times}, {}))
    phases = counting.phases_of(hopper(direction="backward"), launch)
    assert len(phases) == 4
    # 3 of 6 instructions, the commits among them, before S and dP are issued, 3 up to P.
    assert [phase["issue"] for phase in phases] == pytest.approx([0.5, 0.5, 0, 0])
    assert [phase["mufu"] for phase in phases] == [0, 1, 0, 0]
    assert counting.phases_of(hopper(), launch) == []


def test_twice_the_heads_take_twice_as_long() -> None:
    """And the clock that a load leaves is the calibration's."""
    gpu = Gpu("a", 4, 1e9, 1e12, load_gpu("h200").rates, 100.0)
    calibration = Calibration(1.0, 10.0, 0.0, 0.5e9, 0.0)
    counts = simple_counts(issue=100.0)
    one, two = (predict(hopper(), counts, Row((4096,), heads, heads, 128, False), gpu, calibration) for heads in (4, 8))
    assert two.clocks - two.cost.start == pytest.approx(2 * (one.clocks - one.cost.start))
    assert one.seconds == pytest.approx(one.clocks / 0.5e9)


def test_softmax_parts() -> None:
    """Together they are the step; no exponential before the maximum is known."""
    parts = schedules._softmax_parts({"issue": 571.0, "mufu": 128.0})
    assert demand.total(parts) == pytest.approx({"issue": 571, "mufu": 128})
    assert [part["mufu"] for part in parts] == [0, 96, 32]
    assert [part["issue"] for part in parts] == pytest.approx([97, 446 - 97, 571 - 446], rel=0.02)


def test_flash_attention_4() -> None:
    """Its step keeps the tensor cores busy for 2048 clocks, as the paper says: 1024 for each of two query tiles."""
    kernel, counts, published = fa4.load()
    prediction = predict(kernel, counts, Row((16384,), 16, 16, 128, False), load_gpu("b200"), load_calibration())
    assert prediction.step_units["tensor"] == pytest.approx(2048)
    assert prediction.step_units["mufu"] == pytest.approx(2048 * 0.81)
    assert published == 1613


def test_parse_counts() -> None:
    """The lines of the emulator."""
    text = "launch\tkernel\t3\n5\t12\tfile.cuh:7\tmov.b32 %r1, 0;\t0:2:64 3:1:32\t0:128x16:4\n"
    (launch,) = parse_counts(text)
    assert (launch.kernel, launch.ctas) == ("kernel", 3)
    assert launch.instructions == [
        CountedInstruction(5, 12, "file.cuh:7", "mov.b32 %r1, 0;", {0: 2, 3: 1}, {0: 64, 3: 32}, {(0, 128, 16): 4})
    ]


def test_rows_and_kernels() -> None:
    """Rows by the names of recordings; the kernel of a head dim is the smallest tile that holds it."""
    assert parse_row("b2 s8192 h32/8 d128 causal") == Row((8192, 8192), 32, 8, 128, True)
    assert parse_row("varlen 64 x 64..8192 h16 d128 causal") is None
    kernels = load_kernels()
    for head_dim in (64, 128):
        chosen = choose(kernels, "sm90", "forward", (head_dim, head_dim), True)
        assert chosen is not None and chosen.head_dim == head_dim
    assert choose(kernels, "sm90", "forward", (300, 300), True) is None
    for head_dims, native in (((192, 128), (192, 128)), ((192, 192), (192, 192)), ((160, 128), (192, 128))):
        chosen = choose(kernels, "sm90", "backward", head_dims, False)
        assert chosen is not None and (chosen.head_dim, chosen.head_dim_v) == native


def test_recorded_report_is_what_the_model_says() -> None:
    """The recorded times follow from the recorded counts and the tables: `python -m benchmarks.model --recorded`."""
    document = json.loads((RESULTS / "model.json").read_text(encoding="utf-8"))
    entries = json.loads((RESULTS / "counts.json").read_text(encoding="utf-8"))
    counts = {(entry["kernel"], entry["causal"]): entry for entry in entries}
    kernels = {kernel.name: kernel for kernel in load_kernels()}
    checked = 0
    for recorded in document["rows"][::9]:
        row = parse_row(recorded["row"])
        assert row is not None
        kernel = kernels.get(recorded["kernel"])
        if kernel is None:  # no longer built
            continue
        prediction = predict(kernel, counts[kernel.name, row.causal], row, load_gpu("h200"), load_calibration())
        assert prediction.seconds == pytest.approx(recorded["seconds"], rel=1e-6), recorded["row"]
        assert recorded["error"] == pytest.approx(recorded["seconds"] / recorded["measured"] - 1)
        checked += 1
    assert checked >= 2
    text = (RESULTS / "model.md").read_text(encoding="utf-8")
    section = text[text.index("## B200: *predicted*") :]
    assert "1613" in section and not re.search("±|\\+-", section)
