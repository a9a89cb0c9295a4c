"""Known-good kernels from elsewhere give right answers in the emulator, with the checker on.

Opt-in (FLASH_EXT_FOREIGN_KERNELS=1): each compiles one of CUTLASS's examples, which takes minutes and up to 4 GB.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("FLASH_EXT_FOREIGN_KERNELS") != "1",
        reason="opt-in: FLASH_EXT_FOREIGN_KERNELS=1 compiles CUTLASS",
    ),
    pytest.mark.timeout(3600),
]

# Reports that the checker makes of these kernels: they publish their mbarriers by a cluster barrier alone, free tensor
# memory whose loads they have used but not waited for, or that other warps still read, and end without a wait for their
# last commits.
KNOWN_REPORTS = (
    r"no fence\.mbarrier_init or fence\.proxy\.async has made|write by .* tcgen05\.dealloc|after tcgen05\.dealloc"
    r"|ends with tensor core operations outstanding: tcgen05\.commit"
    r"|tcgen05\.commit signals CTA rank \d+, which has ended"
)
# Example 77 uses what tcgen05.ld has loaded and overwrites the tensor memory, without tcgen05.wait::ld between (PTX ISA
# 9.7.16.6.4.5: a register dependency does not order the accesses), and lets other warps read what tcgen05.st stores
# without tcgen05.wait::st.
MISSING_WAITS = r"race on tensor memory|stores to tensor memory that nothing waited for"
NONE = "(?!)"  # matches nothing
SCHEDULES = ("eager", "lazy", "random", "pct")
# Name, to the example and the specialization of its runner.
ATTENTION = {
    "blackwell_forward_128": (
        "77_blackwell_fmha/77_blackwell_fmha.cu",
        "FwdRunner<false, Shape<_256, _128, _128>, void, CausalMask<>, Option<Tag::kIsPersistent, true_type>>",
    ),
    "blackwell_backward_128": (
        "77_blackwell_fmha/77_blackwell_fmha_bwd.cu",
        "BwdRunner<false, false, Shape<_128, _128, _128, _128>, void, CausalForBackwardMask<>>",
    ),
    "hopper_forward_128": (
        "88_hopper_fmha/88_hopper_fmha.cu",
        "FwdRunner<Shape<_128, _128, _128>, cutlass::gemm::KernelTmaWarpSpecializedPingpong, CausalFusion>",
    ),
    "hopper_backward_128": (
        "88_hopper_fmha/88_hopper_fmha.cu",
        "BwdRunner<Shape<_64, _128, _128>, cutlass::gemm::KernelTmaWarpSpecializedCooperative, CausalFusion>",
    ),
}
RUN = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
words = [word.encode() for word in sys.argv[1:]]
sys.exit(library.flash_ext_test_main(len(words), (ctypes.c_char_p * (len(words) + 1))(*words, None)))
"""


def run_example(library: Path, *arguments: str, **variables: str | int) -> str:
    """Run an example's main in a process of its own; returns all it prints."""
    # CUTLASS leaves out what the strict checker demands of tcgen05.
    environment = {"FLASH_EXT_EMULATOR_STRICT": "0", **os.environ}
    environment.update({f"FLASH_EXT_{name.upper()}": str(value) for name, value in variables.items()})
    result = subprocess.run(
        [sys.executable, "-c", RUN, str(library), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    return result.stdout


def unknown_reports(printed: str, known: str = KNOWN_REPORTS) -> list[str]:
    """The checker's reports that are not among the known ones, and the emulator's other errors."""
    errors = [line for line in printed.splitlines() if line.startswith("PTX emulator: ")]
    errors = [line for line in errors if "the happens-before checker found" not in line]
    errors = [line for line in errors if not re.search(known, line)]
    return errors + [report for report in printed.split("hazard: ")[1:] if not re.search(known, report)]


def attention_library(name: str) -> Path:
    """An instance of one of CUTLASS's attention examples, compiled."""
    from ptx_emulator.foreign import build_example

    example, runner = ATTENTION[name]
    architecture, capability = ("90a", "9.0") if example.startswith("88") else ("100a", "10.0")
    return build_example("runner.cu", architecture, capability, example, runner, flags=("--use_fast_math",))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("transposed", [0, 1])
def test_hopper_product(schedule: str, transposed: int) -> None:
    """wgmma_tma_sm90: TMA pipeline, wgmma with f16 accumulators, K-major and MN-major operands.

    Without the checker: it ends with loads under way whose data nobody uses.
    """
    from ptx_emulator.foreign import build_example
    from ptx_emulator.harness import emulator_options

    library = ctypes.CDLL(str(build_example("hopper_product.cu", "90a", "9.0")))
    m, n, k = 256, 128, 192
    rng = np.random.default_rng(transposed)
    a, b = (rng.integers(-2, 3, (size, k)).astype(np.float16) for size in (m, n))
    layouts = [np.ascontiguousarray(x if transposed else x.T) for x in (a, b)]
    c = np.full((n, m), np.nan, np.float16)
    with emulator_options(schedule=schedule, seed=1, check=0):
        code = library.flash_ext_test_product(
            transposed, m, n, k, *(ctypes.c_void_p(x.ctypes.data) for x in (*layouts, c))
        )
    assert code == 0
    np.testing.assert_array_equal(c.T, a.astype(np.float64) @ b.astype(np.float64).T)


@pytest.mark.parametrize(
    "tutorial", ["02_mma_tma_sm100", "03_mma_tma_multicast_sm100", "04_mma_tma_2sm_sm100", "05_mma_tma_epi_sm100"]
)
def test_blackwell_tutorials(tutorial: str) -> None:
    """cute/tutorial/blackwell: TMA, multicast, pairs of CTAs; each compares with a product on the host.

    Their clusters have 16 CTAs, each of which allocates all tensor memory of an SM.
    """
    from ptx_emulator.foreign import build_example

    library = build_example("example.cu", "100a", "10.0", f"cute/tutorial/blackwell/{tutorial}.cu")
    # Nothing keeps a slow warp from missing a whole phase of an mbarrier in their loops; the schedules that find that
    # get a single step, and not 05, whose epilogue has such a loop, too.
    runs = [("lazy", "128")] + ([] if tutorial.startswith("05") else [("eager", "64"), ("pct", "64")])
    for schedule, depth in runs:
        shape = ("512", "1024", depth)
        printed = run_example(library, *shape, emulator_schedule=schedule, emulator_check=0, emulate_sm_count=16)
        assert "Execution is successful" in printed, printed[-3000:]
        printed = run_example(library, *shape, emulator_schedule=schedule, emulator_check=1, emulate_sm_count=16)
        assert unknown_reports(printed) == []


def test_blackwell_tutorial_without_proxy_fence() -> None:
    """01_mma_sm100 writes its operands by threads and lacks the proxy fence before tcgen05.mma: reported."""
    from ptx_emulator.foreign import build_example

    library = build_example("example.cu", "100a", "10.0", "cute/tutorial/blackwell/01_mma_sm100.cu")
    assert "no fence.proxy.async makes the generic write visible" in run_example(library, "256", "512", "128")


ATTENTION_SHAPE = ("--b=1", "--h=2", "--q=256", "--k=256", "--d=128", "--mask=causal")
# One launch under each schedule, from the same memory: the results must agree, and the reference runs once.
ALL_SCHEDULES = ",".join(SCHEDULES)


def test_hopper_attention_forward() -> None:
    """Example 88 forward, compared with its reference: right under every schedule, with nothing to report."""
    library = attention_library("hopper_forward_128")
    printed = run_example(library, *ATTENTION_SHAPE, emulator_schedule=ALL_SCHEDULES, emulator_check=1)
    assert unknown_reports(printed, NONE) == []
    assert "Execution is successful" in printed, printed[-3000:]


def test_hopper_attention_backward() -> None:
    """Example 88 backward, compared with its reference: right under every schedule, a barrier reported as missing.

    Its dQ product reads dS of the four warps of its own warpgroup, which have met nowhere since they wrote it.
    """
    from ptx_emulator.foreign import with_barriers

    library = attention_library("hopper_backward_128")
    shape = ("--b=1", "--h=1", "--q=128", "--k=256", "--d=128", "--mask=causal")
    printed = run_example(library, *shape, emulator_schedule=ALL_SCHEDULES, emulator_check=0)
    assert "Execution is successful" in printed, printed[-3000:]
    printed = run_example(library, *shape, emulator_schedule="eager", emulator_check=1)
    assert "hazard: race on shared address" in printed
    assert unknown_reports(printed, r"race on shared address[^@]*(st\.shared[^@]*wgmma|wgmma[^@]*st\.shared)") == []
    printed = run_example(with_barriers(library), *shape, emulator_schedule=ALL_SCHEDULES, emulator_check=1)
    assert unknown_reports(printed, NONE) == []
    assert "Execution is successful" in printed, printed[-3000:]


@pytest.mark.parametrize("name", ["blackwell_forward_128", "blackwell_backward_128"])
def test_blackwell_attention(name: str) -> None:
    """Example 77, compared with its reference, as it is: right under the eager schedule, its missing waits reported."""
    library = attention_library(name)
    printed = run_example(library, *ATTENTION_SHAPE, emulator_schedule="eager", emulator_check=0)
    assert "Execution is successful" in printed, printed[-3000:]
    for schedule in SCHEDULES:
        printed = run_example(library, *ATTENTION_SHAPE, emulator_schedule=schedule, emulator_check=1)
        assert re.search(MISSING_WAITS, printed)
        assert unknown_reports(printed, f"{KNOWN_REPORTS}|{MISSING_WAITS}") == []


@pytest.mark.parametrize("name", ["blackwell_forward_128", "blackwell_backward_128"])
def test_blackwell_attention_with_waits(name: str) -> None:
    """With the missing waits, example 77 is right under every schedule; but for them the checker has nothing new."""
    from ptx_emulator.foreign import with_waits

    library = with_waits(attention_library(name))
    printed = run_example(library, *ATTENTION_SHAPE, emulator_schedule=ALL_SCHEDULES, emulator_check=0)
    assert "Execution is successful" in printed, printed[-3000:]
    for schedule in SCHEDULES:
        printed = run_example(library, *ATTENTION_SHAPE, emulator_schedule=schedule, emulator_check=1)
        assert unknown_reports(printed) == []


def test_blackwell_product() -> None:
    """Example 70: products of pairs of CTAs in clusters of 2 x 2, which take over the work of others (try_cancel)."""
    from ptx_emulator.foreign import build_example

    example = "70_blackwell_gemm/70_blackwell_fp16_gemm.cu"
    library = build_example("example.cu", "100a", "10.0", example, examine=True)
    shape = ("--m=768", "--n=256", "--k=192", "--iterations=0")
    variables: dict[str, str | int] = {"emulator_schedule": ALL_SCHEDULES, "emulator_check": 1, "emulate_sm_count": 4}
    printed = run_example(library, *shape, "--beta=1", **variables)
    assert unknown_reports(printed, NONE) == []
    assert "Disposition: Passed" in printed, printed[-3000:]
    # Without C nothing waits for the last stores of D before the kernel ends.
    printed = run_example(library, *shape, "--beta=0", **variables)
    known = "ends with bulk copies out of shared memory that nothing waited for"
    assert known in printed
    assert unknown_reports(printed, known) == []
