"""The emulator's Hopper instructions: right answers on unit kernels, and a report for each twin that lacks a step."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ptx_emulator.device_arrays import BFLOAT16, CHUNKS_OF_32, FLOAT32, SWIZZLES, aligned_array, tensor_map
from ptx_emulator.harness import LaunchError, UnitKernels, emulator_options

Array = np.ndarray[Any, np.dtype[Any]]

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")

SCHEDULES = ("eager", "lazy", "random", "pct")
TIMEOUT = 702


@pytest.fixture(scope="module")
def kernels() -> UnitKernels:
    """The unit kernels, linked with the emulator."""
    return UnitKernels("entry_sm90.cu", "90a", "9.0")


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each schedule in turn."""
    with emulator_options(schedule=request.param, seed=11):
        yield request.param


def error_of(kernels: UnitKernels, *arguments: Any, **keywords: Any) -> LaunchError:
    """The LaunchError of a launch that must fail."""
    with pytest.raises(LaunchError) as info:
        kernels.launch(*arguments, **keywords)
    return info.value


def bfloat16(values: Array) -> tuple[Array, Array]:
    """The nearest bf16 numbers: (their bits, their values)."""
    torch = pytest.importorskip("torch")
    rounded = torch.from_numpy(values).bfloat16()
    return rounded.view(torch.int16).numpy(), rounded.double().numpy()


@pytest.mark.parametrize("b_mn", [0, 1])
@pytest.mark.parametrize("a_mn", [0, 1])
@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_products_of_every_layout(kernels: UnitKernels, schedule: str, swizzle: int, a_mn: int, b_mn: int) -> None:
    """wgmma on what TMA wrote, every swizzle and both majors of both operands, against fp64."""
    rng = np.random.default_rng(swizzle + 2 * a_mn + b_mn)
    (a_bits, a), (b_bits, b) = (bfloat16(rng.standard_normal((64, 64))) for _ in range(2))
    a_global, b_global = (
        aligned_array(np.ascontiguousarray(bits.T if mn else bits)) for bits, mn in ((a_bits, a_mn), (b_bits, b_mn))
    )
    box = ((swizzle or 16) // 2, 64)
    maps = [tensor_map(kernels, tensor, BFLOAT16, box, swizzle) for tensor in (a_global, b_global)]
    out = np.full((64, 64), np.nan, np.float32)
    kernels.launch(f"product_{swizzle}_{a_mn}{b_mn}", 1, 128, *maps, out, shared=16384)
    np.testing.assert_allclose(out, a @ b.T, atol=2e-5)


def fp8_tile(rng: np.random.Generator) -> Any:
    """64 x 32 numbers of e4m3: (bytes, values)."""
    torch = pytest.importorskip("torch")
    values = torch.from_numpy(rng.standard_normal((64, 32)).astype(np.float32)).to(torch.float8_e4m3fn)
    return values.view(torch.uint8).numpy(), values.double().numpy()


def test_product_of_fp8_and_signs(kernels: UnitKernels, schedule: str) -> None:
    """m64n64k32 of e4m3, -1 as the sign of A, added to accumulators."""
    rng = np.random.default_rng(1)
    (a_bits, a), (b_bits, b) = fp8_tile(rng), fp8_tile(rng)
    start = rng.standard_normal((64, 64)).astype(np.float32)
    out = start.copy()
    kernels.launch("product_fp8", 1, 128, a_bits, b_bits, out, 0)
    np.testing.assert_allclose(out, start - a @ b.T, atol=2e-5)


@pytest.mark.parametrize(
    ("skip", "report"),
    [
        (1, "wgmma without any wgmma.fence"),
        (2, "no fence.proxy.async"),
        (3, "a register in flight is read before the wait"),
        (4, "a barrier"),
    ],
)
def test_product_needs_each_step(kernels: UnitKernels, schedule: str, skip: int, report: str) -> None:
    """wgmma.fence, the proxy fence, wait_group and the barrier."""
    rng = np.random.default_rng(1)
    a, b, out = fp8_tile(rng)[0], fp8_tile(rng)[0], np.zeros((64, 64), np.float32)
    error = error_of(kernels, "product_fp8", 1, 128, a, b, out, skip)
    assert "hazard: " in str(error)
    assert report in str(error)
    assert "sm90.cu:" in str(error)


def test_reading_an_accumulator_needs_a_fence(kernels: UnitKernels, schedule: str) -> None:
    """PTX ISA 9.7.15.7.1: between any access of a register and a product that accesses it, not only a write."""
    rng = np.random.default_rng(1)
    (a_bits, a), (b_bits, b) = fp8_tile(rng), fp8_tile(rng)
    out = np.zeros(64 * 64 + 128, np.float32)
    kernels.launch("product_and_read", 1, 128, a_bits, b_bits, out, 0)
    np.testing.assert_allclose(out[: 64 * 64].reshape(64, 64), a @ b.T, atol=2e-5)
    error = error_of(kernels, "product_and_read", 1, 128, a_bits, b_bits, out, 1)
    assert "hazard: wgmma.fence is missing between another access of an accumulator and wgmma" in str(error)


def test_waits_are_aligned(kernels: UnitKernels, schedule: str) -> None:
    """PTX ISA 9.7.15.7: a wgmma instruction is one and the same for the four warps, a wait too."""
    rng = np.random.default_rng(1)
    a, b, out = fp8_tile(rng)[0], fp8_tile(rng)[0], np.zeros((64, 64), np.float32)
    error = error_of(kernels, "product_fp8", 1, 128, a, b, out, 5)
    assert "the warps of a warpgroup execute different wgmma instructions" in str(error)


def test_product_with_a_in_registers(kernels: UnitKernels, schedule: str) -> None:
    """The RS form; A must stay as it is until the wait."""
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((64, 16)).astype(np.float16) for _ in range(2))
    out = np.full((64, 64), np.nan, np.float32)
    kernels.launch("product_registers", 1, 128, a, b, out, 0)
    np.testing.assert_allclose(out, a.astype(np.float64) @ b.astype(np.float64).T, atol=1e-5)
    error = error_of(kernels, "product_registers", 1, 128, a, b, out, 1)
    assert "a register in flight is written before the wait" in str(error)


def test_bulk_ring(kernels: UnitKernels, schedule: str) -> None:
    """Bulk copies, phases of mbarriers over several rounds of a ring."""
    values = aligned_array(np.random.default_rng(3).integers(-9, 9, (7, 128)).astype(np.float32))
    out = np.zeros(128, np.float32)
    kernels.launch("bulk_ring", 1, 160, values, out, 7, 0)
    np.testing.assert_array_equal(out, np.roll(values.sum(0), -32))


def test_counts_of_copies(kernels: UnitKernels, schedule: str) -> None:
    """The bytes of bulk copies; waits on an mbarrier count once for each phase, whatever the schedule."""
    values, out = aligned_array(np.ones((7, 128), np.float32)), np.zeros(128, np.float32)
    with emulator_options(count=1):
        kernels.launch("bulk_ring", 1, 160, values, out, 7, 0)
        (launch,) = kernels.counts()
    copies = [each for each in launch.instructions if each.opcode.startswith("cp.async.bulk.shared") and each.times]
    for copy in copies:
        assert copy.times == copy.lanes == {4: copy.times[4]} and copy.sizes == {(4, 512, 1): copy.times[4]}
    assert sum(copy.times[4] for copy in copies) == 7
    waits = [each for each in launch.instructions if each.opcode.startswith("mbarrier.try_wait")]
    assert [sum(each.times.get(warp, 0) for each in waits) for warp in range(5)] == [7] * 5


@pytest.mark.parametrize(
    ("skip", "report"),
    [
        (1, "nothing orders|arrivals at the mbarrier|deadlock"),  # the phases may fall out of step first
        (2, "nothing orders|arrivals at the mbarrier|deadlock"),
        (3, "fence.mbarrier_init"),
        (4, "nothing orders|deadlock"),  # a warp that lags by a whole ring takes the phase for the one before
        (5, "nothing orders"),
        (6, "nothing orders|arrivals at the mbarrier|deadlock"),
    ],
)
def test_bulk_ring_needs_each_step(kernels: UnitKernels, schedule: str, skip: int, report: str) -> None:
    """Waits for free and full stages, the fence of the initialisation, an arrival of each warp, after all its lanes and
    in the phase it is meant for."""
    values, out = aligned_array(np.ones((7, 128), np.float32)), np.zeros(128, np.float32)
    assert re.search(report, str(error_of(kernels, "bulk_ring", 1, 160, values, out, 7, skip)))


@pytest.mark.parametrize("mode", range(5))
@pytest.mark.parametrize(("x", "y"), [(8, 2), (-4, -3), (28, 9)])
def test_boxes_inside_and_across_the_edge(kernels: UnitKernels, schedule: str, mode: int, x: int, y: int) -> None:
    """A 16 x 16 box loaded with zeros outside, stored or added with nothing written outside; and plain bytes.

    Lanes that store the same bytes to the same place (mode 4) do not race.
    """
    rng = np.random.default_rng(4)
    source, target = (aligned_array(rng.integers(-9, 9, (12, 32)).astype(np.float32)) for _ in range(2))
    plain = aligned_array(rng.integers(-9, 9, 256).astype(np.float32))
    expected, expected_plain, before = target.copy(), plain.copy(), source.copy()
    box = np.zeros((16, 16), np.float32)
    for row in range(16):
        for column in range(16):
            if 0 <= y + row < 12 and 0 <= x + column < 32:
                box[row, column] = 2 * source[y + row, x + column]
                if mode in (0, 1, 4):
                    old = expected[y + row, x + column] if mode == 1 else 0
                    expected[y + row, x + column] = old + box[row, column]
    if mode in (2, 3):
        expected_plain = box.reshape(-1) + (expected_plain if mode == 3 else 0)
    maps = [tensor_map(kernels, tensor, FLOAT32, (16, 16)) for tensor in (source, target)]
    kernels.launch("box_and_back", 1, 256, *maps, plain, x, y, mode, 0)
    np.testing.assert_array_equal(target, expected)
    np.testing.assert_array_equal(plain, expected_plain)
    np.testing.assert_array_equal(source, before)


@pytest.mark.parametrize("swizzle", [128, CHUNKS_OF_32])
def test_swizzles_of_copies(kernels: UnitKernels, schedule: str, swizzle: int) -> None:
    """A box loaded with a swizzle and stored without: address bits 4 to 6 (or 5, 6) change by bits 7 to 9 (7, 8)."""
    source = aligned_array(np.arange(16 * 16, dtype=np.float32).reshape(16, 16))
    target = aligned_array(np.zeros((16, 16), np.float32))
    maps = [tensor_map(kernels, source, FLOAT32, (16, 16), swizzle), tensor_map(kernels, target, FLOAT32, (16, 16))]
    kernels.launch("box_and_back", 1, 256, *maps, source, 0, 0, 0, 0)
    address = np.arange(256) * 4
    change = (address >> 7 & 7) << 4 if swizzle == 128 else (address >> 7 & 3) << 5
    np.testing.assert_array_equal(target.reshape(-1)[(address ^ change) // 4], 2 * source.reshape(-1))


@pytest.mark.parametrize(
    ("skip", "report"),
    [(1, "no fence.proxy.async"), (2, "nothing orders"), (3, "nothing orders"), (4, "nothing waited for")],
)
def test_bulk_stores_need_each_step(kernels: UnitKernels, schedule: str, skip: int, report: str) -> None:
    """The proxy fence and the barrier before, the wait after a store out of shared memory."""
    source, target = (aligned_array(np.ones((12, 32), np.float32)) for _ in range(2))
    plain = aligned_array(np.ones(256, np.float32))
    maps = [tensor_map(kernels, tensor, FLOAT32, (16, 16)) for tensor in (source, target)]
    assert report in str(error_of(kernels, "box_and_back", 1, 256, *maps, plain, 0, 0, 0, skip))


# who 3, all lanes wait for the groups of one: of groups only.
@pytest.mark.parametrize(("what", "who"), [(what, who) for what in range(4) for who in range(4 if what < 2 else 3)])
def test_what_one_lane_waits_for_orders_that_lane(kernels: UnitKernels, schedule: str, what: int, who: int) -> None:
    """Bulk groups, their reads, an mbarrier, and its own writes: others follow behind bar.warp.sync or a barrier."""
    values = aligned_array(np.arange(32, dtype=np.int32))
    out, result = aligned_array(np.zeros(32, np.int32)), np.zeros(32, np.int32)
    kernels.launch("one_lane_waits", 1, 64, values, out, result, what, who, 0)
    np.testing.assert_array_equal(result, values)
    error = str(error_of(kernels, "one_lane_waits", 1, 64, values, out, result, what, who, 1))
    assert "hazard: race on " + ("global" if what == 1 else "shared") in error
    assert "nothing orders" in error or "without bar.warp.sync between them" in error


def test_tensor_map_rules(kernels: UnitKernels) -> None:
    """What cuTensorMapEncodeTiled refuses: alignment, pitch, width of the box, width of the swizzle."""
    tensor = aligned_array(np.zeros((8, 64), np.float32))
    assert not isinstance(tensor_map(kernels, tensor, FLOAT32, (8, 8), 32), int)
    for bad, box, swizzle in [
        (tensor, (16, 8), 32),  # 64 bytes in a swizzle of 32
        (tensor, (3, 8), 0),  # 12 bytes
        (tensor, (8, 257), 0),
        (tensor[:, 1:], (8, 8), 0),  # base
        (aligned_array(np.zeros((8, 65), np.float32)), (8, 8), 0),  # pitch
        (tensor, (0, 8), 0),
        (tensor[:0], (8, 8), 0),  # no rows
    ]:
        assert tensor_map(kernels, bad, FLOAT32, box, swizzle) == 1
    assert tensor_map(kernels, tensor, 99, (8, 8)) == 1  # type


def test_copies_that_complete_on_a_barrier(kernels: UnitKernels, schedule: str) -> None:
    """cp.async.mbarrier.arrive.noinc."""
    values, out = np.arange(128, dtype=np.int32), np.zeros(128, np.int32)
    kernels.launch("copies_on_barrier", 1, 128, values, out, 0)
    np.testing.assert_array_equal(out, values[::-1])
    assert "nothing orders" in str(error_of(kernels, "copies_on_barrier", 1, 128, values, out, 1))


def test_cluster_of_two(kernels: UnitKernels, schedule: str) -> None:
    """Remote stores, remote arrivals, a multicast copy, barrier.cluster."""
    values, out = aligned_array(np.arange(128, dtype=np.float32)), np.zeros((2, 128), np.float32)
    kernels.launch("pair_exchange", 2, 128, values, out, 0)
    np.testing.assert_array_equal(out, values * 2 + np.array([[100], [0]], np.float32))


@pytest.mark.parametrize("skip", [1, 2])
def test_cluster_needs_each_step(kernels: UnitKernels, schedule: str, skip: int) -> None:
    """The cluster barrier before the first remote access, the wait before reading what came."""
    values, out = aligned_array(np.arange(128, dtype=np.float32)), np.zeros((2, 128), np.float32)
    error = error_of(kernels, "pair_exchange", 2, 128, values, out, skip)
    assert "hazard: race" in str(error) or "no initialised mbarrier" in str(error)


def test_bulk_copies_between_ctas(kernels: UnitKernels, schedule: str) -> None:
    """cp.async.bulk from shared memory into that of the other CTA, whose mbarrier says that it has landed."""
    out = np.zeros((2, 128), np.float32)
    kernels.launch("bulk_exchange", 2, 128, out, 0)
    np.testing.assert_array_equal(out, np.arange(128, dtype=np.float32) + np.array([[100], [0]], np.float32))


@pytest.mark.parametrize(
    ("skip", "report"),
    [
        (1, "hazard: race.*async proxy"),
        (2, "hazard: race"),
        (3, "from shared memory into the own CTA"),
        (4, "the destination and the mbarrier of a bulk copy are in two CTAs"),
    ],
)
def test_bulk_copies_between_ctas_need_each_step(kernels: UnitKernels, schedule: str, skip: int, report: str) -> None:
    """The proxy fence before the copy reads, the wait before what came is read; another CTA, and its own barrier."""
    error = error_of(kernels, "bulk_exchange", 2, 128, np.zeros((2, 128), np.float32), skip)
    assert re.search(report, str(error), re.DOTALL)


def test_bulk_reduction_behind_a_bulk_store(kernels: UnitKernels, schedule: str) -> None:
    """One CTA's store, another's addition to it: a release, an acquire, and a proxy fence of global memory."""
    out, flag = aligned_array(np.zeros(128, np.float32)), np.zeros(1, np.int32)
    kernels.launch("store_then_add", 2, 128, out, flag, 0)
    np.testing.assert_array_equal(out, 2 * np.arange(128) + 1000)


@pytest.mark.parametrize(
    ("skip", "report"),
    [(1, "hazard: race"), (2, "no fence.proxy.async of global"), (3, "no fence.proxy.async of global")],
)
def test_bulk_reduction_behind_a_bulk_store_needs_each_step(
    kernels: UnitKernels, schedule: str, skip: int, report: str
) -> None:
    """The wait for the store, the fence behind the acquire; one of shared memory does not do."""
    out, flag = aligned_array(np.zeros(128, np.float32)), np.zeros(1, np.int32)
    assert report in str(error_of(kernels, "store_then_add", 2, 128, out, flag, skip))


def test_remote_access_to_an_ended_cta(kernels: UnitKernels, schedule: str) -> None:
    """A CTA must not end before the others of the cluster have finished with its shared memory."""
    assert "which has ended" in str(error_of(kernels, "write_to_ended", 2, 32, 100_000))


def test_registers_move_between_warpgroups(kernels: UnitKernels, schedule: str) -> None:
    """setmaxnreg.inc waits for .dec of other warps, and hangs when the CTA has too few registers."""
    out = np.zeros(384, np.int32)
    kernels.launch("move_registers", 1, 384, out, 0)
    np.testing.assert_array_equal(out, np.repeat([1, 2, 2], 128))
    error = error_of(kernels, "move_registers", 1, 384, out, 1)
    assert error.code == TIMEOUT
    assert "waits for registers" in str(error)


def test_dependent_grid(kernels: UnitKernels, schedule: str) -> None:
    """With a programmatic launch, reading what the primary writes before griddepcontrol.wait is a race."""
    data, out = np.zeros(64, np.int32), np.zeros(64, np.int32)
    set_programmatic = kernels.library.flash_ext_test_programmatic
    try:
        for programmatic in (0, 1):
            for skip in (0, 1):
                set_programmatic(0)
                kernels.launch("primary_grid", 1, 64, data)
                set_programmatic(programmatic)
                if programmatic and skip:
                    error = error_of(kernels, "dependent_grid", 1, 64, data, out, skip)
                    assert "griddepcontrol.wait is missing" in str(error)
                else:
                    kernels.launch("dependent_grid", 1, 64, data, out, skip)
                    np.testing.assert_array_equal(out, np.arange(64) + 1)
    finally:
        set_programmatic(0)


def test_deadlock_report_names_the_phase(kernels: UnitKernels, schedule: str) -> None:
    """Who waits for which barrier, in which phase, and what the phase lacks."""
    error = error_of(kernels, "barrier_deadlock", 1, 32, 2)
    assert error.code == TIMEOUT
    assert "waits for parity 0 of the mbarrier at shared offset" in str(error)
    assert "phase 0 (parity 0), which waits for 1 of 2 arrivals" in str(error)


@pytest.mark.parametrize(
    ("what", "threads", "report"),
    [
        (0, 32, "2 arrivals at"),
        (1, 32, "no initialised mbarrier"),
        (2, 32, "was overwritten"),
        (3, 32, "must be a multiple of 128"),
        (4, 32, "wgmma needs four warps"),
        (5, 128, "a swizzle of 128 bytes repeats every 1024 bytes"),
    ],
)
def test_misuse(kernels: UnitKernels, what: int, threads: int, report: str) -> None:
    """Counts, initialisation, alignment, issue by a whole warpgroup, starts of swizzled tiles."""
    tensor = aligned_array(np.zeros((16, 16), np.float32))
    error = error_of(kernels, "misuse", 1, threads, tensor_map(kernels, tensor, FLOAT32, (16, 16)), what)
    assert report in str(error)
