"""The PTX emulator runs small kernels of one mechanism each and gets the right answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from ptx_emulator.harness import UnitKernels, emulator_options

# The first test of a run may have to compile the emulator.
pytestmark = [
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
    pytest.mark.timeout(600),
]

SCHEDULES = ("eager", "lazy", "random", "pct")


@pytest.fixture(scope="module")
def kernels() -> UnitKernels:
    """The unit kernels, linked with the emulator."""
    return UnitKernels()


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each schedule in turn."""
    with emulator_options(schedule=request.param, seed=3):
        yield request.param


@pytest.mark.parametrize("count", [1, 31, 128, 1000])
def test_vector_add(kernels: UnitKernels, schedule: str, count: int) -> None:
    """Predicated lanes, global loads and stores, a grid with a ragged end."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(count).astype(np.float32) for _ in range(2))
    out = np.full(count + 8, np.nan, np.float32)
    kernels.launch("vector_add", -(-count // 128), 128, a, b, out, count)
    np.testing.assert_array_equal(out[:count], a + b)
    assert np.isnan(out[count:]).all()


def test_row_sum(kernels: UnitKernels, schedule: str) -> None:
    """Butterfly shuffles."""
    rows, per_lane = 12, 5
    values = np.random.default_rng(1).integers(-50, 50, (rows, per_lane, 32)).astype(np.float32)
    out = np.zeros(rows, np.float32)
    kernels.launch("row_sum", rows // 4, 128, values, out, per_lane)
    np.testing.assert_array_equal(out, values.sum((1, 2)))


def test_divergent_loop(kernels: UnitKernels, schedule: str) -> None:
    """Lanes leave a loop at different times."""

    def collatz(value: int) -> int:
        steps = 0
        while value != 1:
            value = value // 2 if value % 2 == 0 else 3 * value + 1
            steps += 1
        return steps

    start = np.arange(1, 71, dtype=np.int32)
    steps = np.zeros_like(start)
    kernels.launch("collatz", 2, 48, start, steps, start.size)
    np.testing.assert_array_equal(steps, [collatz(int(value)) for value in start])


def test_atomics(kernels: UnitKernels, schedule: str) -> None:
    """Atomic adds from several CTAs."""
    values = np.random.default_rng(2).integers(0, 7, 1000).astype(np.int32)
    counts = np.zeros(7, np.int32)
    kernels.launch("histogram", 8, 128, values, counts, values.size)
    np.testing.assert_array_equal(counts, np.bincount(values, minlength=7))


def test_persistent_ctas_take_several_tiles(kernels: UnitKernels, schedule: str) -> None:
    """Two SMs by default: of two CTAs that share 11 tiles, one runs at least 3."""
    counter, taken = np.zeros(1, np.int32), np.full(11, -1, np.int32)
    kernels.launch("take_tiles", 2, 64, counter, taken, taken.size)
    assert set(taken) <= {0, 1}
    assert np.max(np.bincount(taken)) >= 3
    assert counter[0] == taken.size + 2


def ulps(value: np.ndarray, exact: np.ndarray) -> float:
    """Largest distance in units of the last place of the exact result."""
    exact32 = exact.astype(np.float32)
    spacing = np.spacing(np.abs(exact32)).astype(np.float64)
    return float(np.max(np.abs(value.astype(np.float64) - exact) / spacing))


@pytest.mark.parametrize(
    ("number", "function", "low", "high", "bound"),
    [
        (0, np.exp2, -120, 120, 1.5),
        (1, np.log2, 1e-6, 1e6, 1.0),
        (2, lambda x: 1 / x, 0.01, 1e6, 0.5),
        (3, np.tanh, -6, 6, 1.5),
        (4, np.sqrt, 0, 1e6, 0.5),
        (8, np.exp, -80, 80, 2.5),
        (9, np.sin, -60, 60, 2.5),
    ],
)
def test_functions_to_the_last_ulps(
    kernels: UnitKernels, number: int, function: Callable[..., np.ndarray], low: float, high: float, bound: float
) -> None:
    """Approximate functions are computed to the last ulps."""
    x = np.random.default_rng(number).uniform(low, high, 4096).astype(np.float32)
    out = np.empty_like(x)
    kernels.launch("unary_float", 32, 128, x, out, x.size, number)
    assert ulps(out, function(x.astype(np.float64))) <= bound


def test_exp2_at_the_edges(kernels: UnitKernels) -> None:
    """Overflow, underflow with .ftz, zero and NaN."""
    x = np.array([0, -0.0, 128, 127, -126, -127, -200, np.inf, -np.inf, np.nan, 1, 500], np.float32)
    out = np.empty_like(x)
    kernels.launch("unary_float", 1, 32, x, out, x.size, 0)
    expected = [1, 1, np.inf, 2.0**127, 2.0**-126, 0, 0, np.inf, 0, np.nan, 2, np.inf]
    np.testing.assert_array_equal(out, np.array(expected, np.float32))


def test_half_conversions_round_to_nearest_even(kernels: UnitKernels) -> None:
    """fp16 and bf16 agree with numpy and torch on ties, subnormals, overflow and NaN."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 2**32, 20000, dtype=np.uint64).astype(np.uint32)
    bits[:2000] = (bits[:2000] & 0xFFFF0000) | 0x8000  # ties of bf16
    bits[2000:4000] = (bits[2000:4000] & 0xFFFFE000) | 0x1000  # ties of fp16
    x = bits.view(np.float32)
    x = x[~np.isnan(x)]
    for number, dtype in ((5, torch.float16), (6, torch.bfloat16)):
        out = np.empty_like(x)
        kernels.launch("unary_float", -(-x.size // 128), 128, x, out, x.size, number)
        np.testing.assert_array_equal(out, torch.from_numpy(x).to(dtype).float().numpy())


def test_float_to_integer_rounds_down(kernels: UnitKernels) -> None:
    """cvt.rmi with saturation."""
    x = np.array([1.5, -1.5, 2.0, -0.25, 3e9, -3e9, 0], np.float32)
    out = np.empty_like(x)
    kernels.launch("unary_float", 1, 32, x, out, x.size, 7)
    np.testing.assert_array_equal(out, np.array([1, -2, 2, -1, 2147483647, -2147483648, 0], np.float32))


def integer_reference(number: int, a: int, b: int) -> int:
    """What `binary_integer` computes, on Python integers."""
    sa, sb = a - (a >> 31 << 32), b - (b >> 31 << 32)
    low32, low64 = 2**32 - 1, 2**64 - 1
    if number == 0:
        return a * b
    if number == 1:
        return sa * sb & low64
    if number == 2:
        return a * b >> 32
    if number == 3:
        return (sa * sb >> 32) & low32
    if number == 4:
        return a // b if b else 0
    if number == 5:
        return (abs(sa) % abs(sb)) * (1 if sa >= 0 else -1) & low32 if sb else 0
    if number == 6:
        return ((b << 32 | a) << (b & 31) >> 32) & low32
    if number == 7:
        return ((b << 32 | a) >> 24) & low32
    if number == 8:
        return bin(a).count("1") * 64 + (32 - b.bit_length())
    if number == 9:
        return ((a & b) ^ (~a & (b >> 3))) & low32
    if number == 10:
        return (min(sa, sb) & low32) + (max(a, b) << 32) & low64
    return (a + (b << 31) - 7 * a) & low64


@pytest.mark.parametrize("number", range(12))
def test_integer_operations(kernels: UnitKernels, number: int) -> None:
    """Products, quotients, shifts, bits, against Python's integers."""
    rng = np.random.default_rng(number)
    special = [0, 1, 2, 31, 32, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFF, 0x10000]
    a = np.concatenate([np.repeat(special, len(special)), rng.integers(0, 2**32, 500)]).astype(np.uint32)
    b = np.concatenate([np.tile(special, len(special)), rng.integers(0, 2**32, 500)]).astype(np.uint32)
    if number == 5:  # INT_MIN % -1 is undefined in C++
        b[(a == 0x80000000) & (b == 0xFFFFFFFF)] = 3
    out = np.zeros(a.size, np.uint64)
    kernels.launch("binary_integer", -(-a.size // 128), 128, a, b, out, a.size, number)
    np.testing.assert_array_equal(out, [integer_reference(number, int(x), int(y)) for x, y in zip(a, b, strict=True)])


def test_mma_against_fp64(kernels: UnitKernels, schedule: str) -> None:
    """ldmatrix and mma.m16n8k16: fragments in their places, fp32 accumulation."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(7)
    a, b = (torch.from_numpy(rng.standard_normal(shape)).bfloat16() for shape in ((16, 16), (8, 16)))
    d = np.empty((16, 8), np.float32)
    kernels.launch("mma_tile", 1, 32, a.view(torch.int16).numpy(), b.view(torch.int16).numpy(), d)
    np.testing.assert_allclose(d, (a.double() @ b.double().T).numpy(), atol=2e-6 * 16)


def test_copy_pipeline(kernels: UnitKernels, schedule: str) -> None:
    """cp.async groups in a ring of two stages, under the checker."""
    tiles = 6
    values = np.random.default_rng(8).integers(-9, 9, (tiles, 512)).astype(np.float32)
    out = np.zeros(512, np.float32)
    kernels.launch("copy_pipeline", 1, 128, values, out, tiles, 0)
    np.testing.assert_array_equal(out, np.roll(values.sum(0), -16))


def test_counts(kernels: UnitKernels) -> None:
    """How often each instruction was executed, per warp, and with how many lanes: of 1000 elements in 8 CTAs of 4 warps
    the last warp has 8, and the one before all."""
    a, b, out = (np.zeros(1000, np.float32) for _ in range(3))
    with emulator_options(count=1, schedule="eager,pct"):
        kernels.launch("vector_add", 8, 128, a, b, out, out.size)
        statistics = kernels.statistics()
        (launch,) = kernels.counts()
    assert launch.ctas == 8 and "vector_add" in launch.kernel
    (store,) = (each for each in launch.instructions if each.opcode.startswith("st.global"))
    assert store.times == {0: 8, 1: 8, 2: 8, 3: 8}
    assert store.lanes == {0: 256, 1: 256, 2: 256, 3: 232}
    assert not store.sizes
    # Nothing waits in this kernel, so that every step counts, once though the launch ran twice.
    assert sum(sum(each.times.values()) for each in launch.instructions) == statistics.instructions
    kernels.launch("vector_add", 8, 128, a, b, out, out.size)
    assert kernels.counts() == []  # neither kept nor counted without the option


@pytest.mark.parametrize(
    ("stride", "shift", "word_clocks", "vector_clocks"),
    [
        (1, 0, 1, 4),  # a register a clock
        (2, 1, 2, 2),  # words of one bank; 256 bytes, and two registers a clock, for neighbours want the same
        (31, 2, 1, 2),  # still two registers a clock at most
        (32, 5, 32, 2),  # all in one bank; all lanes the same
        (0, 0, 1, 4),
    ],
)
def test_counts_of_shared_memory(
    kernels: UnitKernels, stride: int, shift: int, word_clocks: int, vector_clocks: int
) -> None:
    """Clocks of the banks of shared memory."""
    values, out = np.arange(1024, dtype=np.float32), np.zeros(32, np.float32)
    with emulator_options(count=1):
        kernels.launch("shared_banks", 1, 32, values, out, stride, shift)
        (launch,) = kernels.counts()
    lanes = np.arange(32)
    np.testing.assert_array_equal(out, values[lanes * stride] + values.reshape(-1, 4)[lanes >> shift].sum(1))
    shared = [each for each in launch.instructions if "shared" in each.opcode and each.times]
    loads = [each for each in shared if each.opcode.startswith("ld")]
    assert [each.sizes for each in loads if ".v4" not in each.opcode] == [{(0, word_clocks, 1): 1}]
    assert [each.sizes for each in loads if ".v4" in each.opcode] == [{(0, vector_clocks, 1): 1}]
    stores = [each for each in shared if each.opcode.startswith("st")]
    assert stores and all(each.sizes == {(0, 1, 1): each.times[0]} for each in stores)


def test_counts_of_waits(kernels: UnitKernels, schedule: str) -> None:
    """A barrier counts once for each warp, however often the warp looked."""
    values, out = np.arange(128, dtype=np.int32), np.zeros(128, np.int32)
    with emulator_options(count=1):
        kernels.launch("shared_exchange", 1, 128, values, out, 1)
        (launch,) = kernels.counts()
    barriers = [each for each in launch.instructions if each.opcode.startswith(("bar.sync", "barrier.sync"))]
    assert barriers and all(each.times == dict.fromkeys(range(4), 1) for each in barriers)
