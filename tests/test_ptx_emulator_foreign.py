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

# Reports that the checker makes of these kernels, which publish their mbarriers by a cluster barrier alone and free
# tensor memory whose loads they have used but not waited for.
KNOWN_REPORTS = r"no fence\.mbarrier_init or fence\.proxy\.async has made|write by .* tcgen05\.dealloc"
RUN = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
words = [word.encode() for word in sys.argv[1:]]
sys.exit(library.flash_ext_test_main(len(words), (ctypes.c_char_p * (len(words) + 1))(*words, None)))
"""


def run_example(library: Path, *arguments: str, **variables: str | int) -> str:
    """Run an example's main in a process of its own; returns all it prints."""
    environment = {**os.environ, **{f"FLASH_EXT_{name.upper()}": str(value) for name, value in variables.items()}}
    result = subprocess.run(
        [sys.executable, "-c", RUN, str(library), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    return result.stdout


def unknown_reports(printed: str) -> list[str]:
    """The checker's reports that are not among the known ones."""
    reports = [report for report in printed.split("hazard: ")[1:]]
    return [report for report in reports if not re.search(KNOWN_REPORTS, report)]


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random", "pct"])
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
