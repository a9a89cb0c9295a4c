"""The Blackwell instructions of the emulator: right answers, and a report for each twin that lacks a step."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ptx_emulator.device_arrays import BFLOAT16, SWIZZLES, aligned_array, tensor_map
from ptx_emulator.forms import without_hints
from ptx_emulator.harness import LaunchError, UnitKernels, emulator_options

Array = np.ndarray[Any, np.dtype[Any]]

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")

SCHEDULES = ("eager", "lazy", "random", "pct")


@pytest.fixture(scope="module")
def kernels() -> UnitKernels:
    """The unit kernels, linked with the emulator."""
    return UnitKernels("entry_sm100.cu", "100a", "10.0")


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each schedule in turn."""
    with emulator_options(schedule=request.param, seed=17):
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


def operands(kernels: UnitKernels, swizzle: int, a_mn: int, b_mn: int) -> tuple[Array, Array, list[Any], list[Array]]:
    """A (128 x 64), B (64 x 64): their values and the tensor maps of the layout."""
    rng = np.random.default_rng(swizzle + 2 * a_mn + b_mn)
    (a_bits, a), (b_bits, b) = (bfloat16(rng.standard_normal((rows, 64))) for rows in (128, 64))
    tensors = [
        aligned_array(np.ascontiguousarray(bits.T if mn else bits)) for bits, mn in ((a_bits, a_mn), (b_bits, b_mn))
    ]
    width = (swizzle or 16) // 2
    maps = [
        tensor_map(kernels, tensor, BFLOAT16, (width, 64 if mn else rows), swizzle)
        for tensor, mn, rows in zip(tensors, (a_mn, b_mn), (128, 64), strict=True)
    ]
    return a, b, maps, tensors


@pytest.mark.parametrize("b_mn", [0, 1])
@pytest.mark.parametrize("a_mn", [0, 1])
@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_products_of_every_layout(kernels: UnitKernels, schedule: str, swizzle: int, a_mn: int, b_mn: int) -> None:
    """tcgen05.mma on what TMA wrote, every swizzle and both majors of both operands, against fp64."""
    a, b, maps, _tensors = operands(kernels, swizzle, a_mn, b_mn)
    out = np.full((128, 64), np.nan, np.float32)
    kernels.launch(f"tensor_{swizzle}_{a_mn}{b_mn}", 1, 128, *maps, out, 0, shared=24576)
    np.testing.assert_allclose(out, a @ b.T, atol=2e-5)


@pytest.mark.parametrize("skip", [1, 2])
def test_products_need_each_wait(kernels: UnitKernels, schedule: str, skip: int) -> None:
    """The wait for the products before they are read, the wait for the operands before they are used."""
    _a, _b, maps, _tensors = operands(kernels, 128, 0, 0)
    error = error_of(kernels, "tensor_128_00", 1, 128, *maps, np.zeros((128, 64), np.float32), skip, shared=24576)
    assert "hazard: race on " + ("tensor memory" if skip == 1 else "shared") in str(error)
    assert "sm100.cu:" in str(error)


def test_commit_that_nothing_waits_for(kernels: UnitKernels, tmp_path: Path) -> None:
    """A CTA that ends before its last commit: the checker reports it; without the checker it does no harm."""
    a, b, maps, _tensors = operands(kernels, 128, 0, 0)
    doubled = kernels.with_ptx(tmp_path, lambda text: re.sub(r"tcgen05\.commit[^;]*;", r"\g<0> \g<0>", text))
    out = np.full((128, 64), np.nan, np.float32)
    with emulator_options(schedule="lazy"):
        error = error_of(doubled, "tensor_128_00", 1, 128, *maps, out, 0, shared=24576)
    assert "ends with tensor core operations outstanding: tcgen05.commit" in str(error)
    with emulator_options(schedule="lazy", check=0):
        doubled.launch("tensor_128_00", 1, 128, *maps, out, 0, shared=24576)
    np.testing.assert_allclose(out, a @ b.T, atol=2e-5)


@pytest.mark.parametrize("m", [64, 128])
def test_product_of_fp8(kernels: UnitKernels, schedule: str, m: int) -> None:
    """kind::f8f6f4; with M = 64 the rows lie in every second 16 lanes."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(m)
    a, b = (
        torch.from_numpy(rng.standard_normal((rows, 32)).astype(np.float32)).to(torch.float8_e4m3fn) for rows in (m, 32)
    )
    out = np.full((128, 32), np.nan, np.float32)
    bits = [x.view(torch.uint8).numpy() for x in (a, b)]
    kernels.launch("tensor_fp8", 1, 128, *bits, out, m, 0)
    rows = out if m == 128 else out.reshape(4, 32, 32)[:, :16].reshape(64, 32)
    np.testing.assert_allclose(rows, (a.double() @ b.double().T).numpy(), atol=1e-5)
    if m == 64:
        assert (out.reshape(4, 32, 32)[:, 16:] == 0).all()
    assert "no fence.proxy.async" in str(error_of(kernels, "tensor_fp8", 1, 128, *bits, out, m, 1))


@pytest.mark.parametrize("variant", [0, 5])
def test_a_in_tensor_memory(kernels: UnitKernels, schedule: str, variant: int) -> None:
    """The TS form, accumulation, and a result that is read between two products."""
    rng = np.random.default_rng(3)
    (a_bits, a), (b_bits, b) = (bfloat16(rng.standard_normal((rows, 16))) for rows in (128, 16))
    out = np.full((2, 128, 16), np.nan, np.float32)
    kernels.launch("tensor_a_in_memory", 1, 128, a_bits, b_bits, out, variant)
    np.testing.assert_allclose(out, np.stack([a @ b.T, 2 * (a @ b.T)]), atol=1e-5)


def test_counts_of_products(kernels: UnitKernels) -> None:
    """M and N of tcgen05.mma, which its descriptor holds and not its opcode."""
    a, b, out = np.zeros((128, 16), np.int16), np.zeros((16, 16), np.int16), np.zeros((2, 128, 16), np.float32)
    with emulator_options(count=1):
        kernels.launch("tensor_a_in_memory", 1, 128, a, b, out, 0)
        (launch,) = kernels.counts()
    products = [each for each in launch.instructions if each.opcode.startswith("tcgen05.mma")]
    assert [each.sizes for each in products] == [{(0, 128, 16): 1}] * 2


@pytest.mark.parametrize("skip", [1, 2, 3, 4])
def test_tensor_memory_needs_each_step(kernels: UnitKernels, schedule: str, skip: int) -> None:
    """wait::st before a product reads, wait::ld and a barrier before a product overwrites, of all lanes."""
    a, b, out = np.zeros((128, 16), np.int16), np.zeros((16, 16), np.int16), np.zeros((2, 128, 16), np.float32)
    error = error_of(kernels, "tensor_a_in_memory", 1, 128, a, b, out, skip)
    assert re.search("hazard: race on tensor memory|deadlock", str(error))  # the phases may fall out of step first


@pytest.mark.parametrize(
    ("skip", "report"),
    [
        (6, "fence::before_thread_sync is missing behind"),
        (7, "fence::before_thread_sync is missing behind"),
        (8, "fence::after_thread_sync is missing before"),
        (9, "fence::after_thread_sync is missing before"),
        (10, "fence::after_thread_sync is missing before"),
    ],
)
def test_tensor_memory_needs_each_fence(kernels: UnitKernels, schedule: str, skip: int, report: str) -> None:
    """Stores, products and loads of different threads, on both sides of a barrier (PTX ISA 9.7.16.6.4.4)."""
    a, b, out = np.zeros((128, 16), np.int16), np.zeros((16, 16), np.int16), np.zeros((2, 128, 16), np.float32)
    assert report in str(error_of(kernels, "tensor_a_in_memory", 1, 128, a, b, out, skip))
    with emulator_options(strict=0):  # the results do not depend on them here
        kernels.launch("tensor_a_in_memory", 1, 128, a, b, out, skip)


def test_shapes_of_loads(kernels: UnitKernels) -> None:
    """16x64b, 16x128b and 16x256b: which cell each register holds."""
    out = np.zeros((3, 128, 4), np.uint32)
    kernels.launch("tensor_shapes", 1, 128, out)
    thread, register = np.arange(128)[:, None], np.arange(4)[None]
    first, lane = thread // 32 * 32, thread % 32
    expected = [
        1000 * (first + lane // 4 + 8 * (lane % 2)) + lane // 2 % 2 + 2 * register,
        1000 * (first + 16 + lane // 4 + 8 * (register % 2)) + lane % 4 + 4 * (register // 2),
        1000 * (first + lane // 4 + 8 * (register // 2 % 2)) + 8 + 2 * (lane % 4) + register % 2,
    ]
    np.testing.assert_array_equal(out, np.stack(expected))


@pytest.mark.parametrize("m", [128, 256])
def test_product_of_a_pair(kernels: UnitKernels, schedule: str, m: int) -> None:
    """cta_group::2: operands from both CTAs, the result in both, a multicast commit."""
    rng = np.random.default_rng(m)
    (a_bits, a), (b_bits, b) = (bfloat16(rng.standard_normal((rows, 16))) for rows in (m, 64))
    columns = 64 if m == 256 else 32
    out = np.full((2, 128, columns), np.nan, np.float32)
    kernels.launch("pair_product", 2, 128, a_bits, b_bits, out, m, 0)
    d = a @ b.T
    if m == 256:
        expected = d.reshape(2, 128, 64)
    else:  # 64 rows per CTA; the right half of the columns lies in lanes 64 to 127
        expected = np.stack([np.concatenate([half[:, :32], half[:, 32:]]) for half in d.reshape(2, 64, 64)])
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_pair_needs_the_cluster_barrier(kernels: UnitKernels, schedule: str) -> None:
    """The leader must know that the other CTA has written its operands."""
    out = np.zeros((2, 128, 64), np.float32)
    error = error_of(
        kernels, "pair_product", 2, 128, np.zeros((256, 16), np.int16), np.zeros((64, 16), np.int16), out, 256, 1
    )
    assert re.search("hazard: race on shared|is not allocated|no initialised mbarrier", str(error))


def test_pair_must_know_of_both_allocations(kernels: UnitKernels, schedule: str) -> None:
    """The leader's product writes the other CTA's tensor memory at the address of its own, which says nothing of it."""
    out = np.zeros((2, 128, 64), np.float32)
    error = error_of(
        kernels, "pair_product", 2, 128, np.zeros((256, 16), np.int16), np.zeros((64, 16), np.int16), out, 256, 2
    )
    assert re.search("hazard: race on tensor memory address 0x[0-9a-f]+ of CTA rank 1", str(error))


@pytest.mark.parametrize("sm_count", [2, 4])
def test_clusters_take_over_others(kernels: UnitKernels, schedule: str, sm_count: int) -> None:
    """clusterlaunchcontrol: the resident clusters do the work of all, each piece once; a response in both CTAs."""
    ctas = 200  # more than are resident
    done = np.full(ctas, -1, np.int32)
    with emulator_options(sm_count=sm_count):
        kernels.launch("take_over", ctas, 32, done, 0)
    assert (done[::2] == done[1::2]).all()
    assert set(done) <= set(range(0, ctas, 2)), done
    assert len(set(done)) < ctas / 2, "no cluster took over the work of another"


def test_taking_over_needs_the_response(kernels: UnitKernels, schedule: str) -> None:
    """Its wait; and there is no first CTA of a cluster that was not cancelled."""
    done = np.zeros(20, np.int32)
    without_wait = str(error_of(kernels, "take_over", 20, 32, done, 1))
    assert re.search("race on shared|was not cancelled|outstanding|nothing has written it", without_wait)
    assert "a cluster that was not cancelled" in str(error_of(kernels, "take_over", 20, 32, done, 2))


def test_forms_are_noted(kernels: UnitKernels, tmp_path: Path) -> None:
    """FLASH_EXT_EMULATOR_FORMS: what a kernel's operands and copies look like, each form once, hints left out."""
    file = tmp_path / "forms.txt"
    _a, _b, maps, _tensors = operands(kernels, 128, 0, 1)
    with emulator_options(forms=str(file)):
        for _ in range(2):
            kernels.launch("tensor_128_01", 1, 128, *maps, np.zeros((128, 64), np.float32), 0, shared=24576)
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(set(lines))
    load = "cp.async.bulk.tensor.2d.shared::cluster.global{}.mbarrier::complete_tx::bytes"
    assert load.format(".tile") in lines
    file.write_text("\n".join([*lines, load.format("") + ".L2::cache_hint"]), encoding="utf-8")
    forms = without_hints([file])
    assert {form for form in forms if form.startswith("cp.")} == {load.format("")}
    assert {form for form in forms if " " in form} == {
        "tensor load, 2d, 2-byte elements, swizzle 128",
        "tcgen05.mma bf16 x bf16",
        "tcgen05.mma.cta_group::1 M 128 N 64",
        "tcgen05.mma.cta_group::1 A in shared memory, K-major, swizzle 128, stride",
        "tcgen05.mma.cta_group::1 A in shared memory, K-major, swizzle 128, stride, begins inside a row of the pattern",
        "tcgen05.mma.cta_group::1 B in shared memory, MN-major, swizzle 128",
    }


@pytest.mark.parametrize(
    ("what", "report"),
    [
        (0, "may access lanes"),
        (1, "is not allocated by this CTA"),
        (2, "ends with tensor memory allocated"),
        (3, "N must be a multiple"),
        (4, "bits 46 to 48 must be 1"),
        (5, "allocations must not grow"),
        (6, "must be a power of two from 32 to 512"),
        (7, "after tcgen05.dealloc"),
        (8, "stores to tensor memory that nothing waited for"),
    ],
)
def test_misuse(kernels: UnitKernels, what: int, report: str) -> None:
    """Lanes, ownership, deallocation, shapes, descriptors, stores."""
    assert report in str(error_of(kernels, "tensor_misuse", 1, 128, what))


def test_needs_a_device_with_tensor_memory(kernels: UnitKernels) -> None:
    """The device model of 9.0 has none."""
    with emulator_options(cc="9.0"):
        assert "has no tensor memory" in str(error_of(kernels, "tensor_misuse", 1, 128, 0))
