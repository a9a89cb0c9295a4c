"""The checker reports hazards in any schedule, is silent on their correct twins, and faults become errors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ptx_emulator.harness import LaunchError, UnitKernels, emulator_options

# The first test of a run may have to compile the emulator.
pytestmark = [
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
    pytest.mark.timeout(600),
]

SCHEDULES = ("eager", "lazy", "random", "pct")
ILLEGAL_ADDRESS, MISALIGNED, LAUNCH_FAILURE, TIMEOUT, INVALID_CONFIGURATION = 700, 716, 719, 702, 9


@pytest.fixture(scope="module")
def kernels() -> UnitKernels:
    """The unit kernels, linked with the emulator."""
    return UnitKernels()


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each schedule in turn."""
    with emulator_options(schedule=request.param, seed=5):
        yield request.param


def error_of(kernels: UnitKernels, *arguments: Any, **keywords: Any) -> LaunchError:
    """The LaunchError of a launch that must fail."""
    with pytest.raises(LaunchError) as info:
        kernels.launch(*arguments, **keywords)
    return info.value


@pytest.mark.parametrize(
    ("name", "threads", "missing"),
    [
        ("shared_exchange", 128, "a barrier"),
        ("lane_exchange", 32, "bar.warp.sync"),
        ("write_after_read", 128, "a barrier"),
        ("volatile_read", 128, "a barrier"),
    ],
)
def test_shared_memory_races(kernels: UnitKernels, schedule: str, name: str, threads: int, missing: str) -> None:
    """Between warps, between lanes, and a write that overtakes a read."""
    values, out = np.arange(threads, dtype=np.int32), np.zeros(threads, np.int32)
    kernels.launch(name, 1, threads, values, out, 1)
    error = error_of(kernels, name, 1, threads, values, out, 0)
    assert error.code == LAUNCH_FAILURE
    assert "hazard: race on shared address" in str(error)
    assert missing in str(error)
    assert "races.cu:" in str(error)


@pytest.mark.parametrize("skip", [1, 2, 3])
def test_copy_pipeline_needs_each_wait(kernels: UnitKernels, schedule: str, skip: int) -> None:
    """A pipeline without its wait, or without one of its two barriers."""
    values, out = np.ones((6, 512), np.float32), np.zeros(512, np.float32)
    error = error_of(kernels, "copy_pipeline", 1, 128, values, out, 6, skip)
    assert error.code == LAUNCH_FAILURE
    assert "hazard: race on shared address" in str(error)


def test_global_memory_races(kernels: UnitKernels, schedule: str) -> None:
    """Plain adds of two CTAs; and a flag without release and acquire."""
    out = np.zeros(1, np.int32)
    kernels.launch("global_add", 2, 32, out, 1)
    assert out[0] == 2
    error = error_of(kernels, "global_add", 2, 32, out, 0)
    assert error.code == LAUNCH_FAILURE
    assert "hazard: race on global address" in str(error)


def test_sums_of_floats_in_no_fixed_order(kernels: UnitKernels, schedule: str) -> None:
    """Atomic adds of floats do not race, but under FLASH_EXT_EMULATOR_DETERMINISTIC their order must be fixed."""
    for deterministic in (0, 1):
        with emulator_options(deterministic=deterministic):
            out, turn = np.zeros(1, np.float32), np.zeros(1, np.int32)
            kernels.launch("float_add", 2, 32, out, turn, 1)
            assert out[0] == 2
    kernels.launch("float_add", 2, 32, out, turn, 0)
    with emulator_options(deterministic=1):
        error = error_of(kernels, "float_add", 2, 32, out, turn, 0)
    assert error.code == LAUNCH_FAILURE
    assert "the sum is not deterministic" in str(error)


@pytest.mark.parametrize("correct", [1, 2])
def test_hand_over_between_ctas(kernels: UnitKernels, schedule: str, correct: int) -> None:
    """st.release with ld.acquire, and relaxed accesses between fences, order what they guard."""
    data, flag, out = (np.zeros(1, np.int32) for _ in range(3))
    kernels.launch("hand_over", 2, 32, data, flag, out, correct)
    assert out[0] == 42
    flag[0] = 0
    error = error_of(kernels, "hand_over", 2, 32, data, flag, out, 0)
    assert error.code == LAUNCH_FAILURE
    assert "hazard: race on global address" in str(error)


def test_unwritten_shared_memory(kernels: UnitKernels, schedule: str) -> None:
    """Reading shared memory that nothing wrote is reported, even where its value does not matter."""
    out = np.zeros(64, np.int32)
    kernels.launch("unwritten_shared", 1, 64, out, 1, shared=256)
    assert not out.any()
    error = error_of(kernels, "unwritten_shared", 1, 64, out, 0, shared=256)
    assert error.code == LAUNCH_FAILURE
    assert "nothing has written it" in str(error)


def test_checker_can_be_switched_off(kernels: UnitKernels) -> None:
    """FLASH_EXT_EMULATOR_CHECK=0 leaves the results."""
    values, out = np.arange(128, dtype=np.int32), np.zeros(128, np.int32)
    with emulator_options(check=0):
        kernels.launch("shared_exchange", 1, 128, values, out, 0)


def test_faults_become_errors(kernels: UnitKernels, schedule: str) -> None:
    """Bounds, alignment and wild pointers: an error with a report, and the process goes on."""
    out = np.zeros(64, np.int32)
    error = error_of(kernels, "out_of_shared", 1, 32, out, 4096)
    assert error.code == ILLEGAL_ADDRESS
    assert "beyond the CTA's 128 bytes" in str(error)
    error = error_of(kernels, "wild_pointer", 1, 32, out)
    assert error.code == ILLEGAL_ADDRESS
    assert "illegal access of global memory" in str(error)
    error = error_of(kernels, "misaligned", 1, 1, out, out)
    assert error.code == MISALIGNED
    kernels.launch("global_add", 1, 32, out, 1)
    assert out[0] == 1


def test_deadlock_report(kernels: UnitKernels, schedule: str) -> None:
    """Who waits where, and for how many."""
    error = error_of(kernels, "deadlock", 1, 64, np.zeros(64, np.int32))
    assert error.code == TIMEOUT
    assert "waits at barrier 1: 32 of 64 threads have arrived" in str(error)
    assert "waits at barrier 2: 32 of 64 threads have arrived" in str(error)


def test_ctas_beyond_the_device_wait(kernels: UnitKernels, schedule: str) -> None:
    """A chain that needs more CTAs resident than fit never ends; with enough room it does."""
    with emulator_options(stall_limit=200_000):
        fits, too_many = 2 * 2, 2 * 2 + 1  # 1024 threads a CTA, 2048 an SM, 2 SMs
        flag, out = np.zeros(1, np.int32), np.zeros(too_many, np.int32)
        kernels.launch("wait_for_last", fits, 1024, flag, out)
        assert kernels.statistics().resident == fits
        flag[0] = 0
        error = error_of(kernels, "wait_for_last", too_many, 1024, flag, out)
        assert error.code == TIMEOUT
        with emulator_options(sm_count=3):
            flag[0] = 0
            kernels.launch("wait_for_last", too_many, 1024, flag, out)


@pytest.mark.parametrize(("cc", "limit"), [("8.0", 163), ("8.6", 99), ("9.0", 227), ("12.0", 99)])
def test_device_limits(kernels: UnitKernels, cc: str, limit: int) -> None:
    """Threads per CTA as everywhere; an unknown capability is refused by name."""
    out = np.zeros(1, np.int32)
    with emulator_options(cc=cc):
        kernels.launch("global_add", 1, 32, out, 1)
        assert error_of(kernels, "global_add", 1, 2048, out, 1).code == INVALID_CONFIGURATION
        error = error_of(kernels, "global_add", 1, 32, out, 1, shared=(limit + 1) * 1024)
        assert error.code == INVALID_CONFIGURATION
    with emulator_options(cc="7.5"):
        assert "known are" in str(error_of(kernels, "global_add", 1, 32, out, 1))


ALL_SCHEDULES = "eager,lazy,random,pct"


def test_several_schedules_run_from_the_same_memory(kernels: UnitKernels) -> None:
    """A launch under four schedules leaves what one launch leaves, additions to memory included."""
    values = np.arange(6 * 512, dtype=np.float32).reshape(6, 512)
    out = np.full(512, np.nan, np.float32)
    counts = np.full(4, 7, np.int32)
    with emulator_options(schedule=ALL_SCHEDULES, seed=3):
        kernels.launch("copy_pipeline", 1, 128, values, out, 6, 0)
        kernels.launch("histogram", 2, 64, np.arange(128, dtype=np.int32) % 4, counts, 128)
    np.testing.assert_array_equal(out, np.roll(values.sum(0), -16))
    np.testing.assert_array_equal(counts, [39] * 4)


def test_results_that_depend_on_the_schedule_are_reported(kernels: UnitKernels) -> None:
    """Without the wait for its copies, and without the checker, the pipeline gives two results."""
    values, out = np.ones((6, 512), np.float32), np.zeros(512, np.float32)
    with emulator_options(schedule="eager,lazy", check=0), pytest.raises(LaunchError) as info:
        kernels.launch("copy_pipeline", 1, 128, values, out, 6, 1)
    assert "depend on the schedule, eager or lazy" in str(info.value)
