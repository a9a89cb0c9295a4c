"""Removing one synchronisation instruction is noticed: in a unit kernel, and in a kernel of each path and direction."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import emulated_library_dir
from ptx_emulator.harness import LaunchError, UnitKernels, emulator_options
from ptx_emulator.mutate import EmulatedLibrary

# The first test of a run may have to compile the emulator.
pytestmark = [
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).parents[1]
# One kernel of each path and direction: the first of the registry with these properties.
SHORT = {"dtype": "bf16", "head_dim": 64, "head_dim_v": 64}


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_each_removal_in_the_copy_pipeline_is_noticed(schedule: str) -> None:
    """All waits, commits and barriers of the unit kernel, whether or not the result comes out wrong."""
    kernels = UnitKernels()
    values, out = np.ones((6, 512), np.float32), np.zeros(512, np.float32)
    kernels.launch("copy_pipeline", 1, 128, values, out, 6, 0)
    instructions = EmulatedLibrary(kernels.file).synchronization("copy_pipeline")
    assert {instruction.opcode for instruction in instructions} == {
        "cp.async.commit_group",
        "cp.async.wait_group",
        "bar.sync",
    }
    unnoticed = []
    for instruction in instructions:
        with emulator_options(schedule=schedule, remove=instruction.number, remove_kernel="copy_pipeline", quiet=1):
            try:
                kernels.launch("copy_pipeline", 1, 128, values, out, 6, 0)
            except LaunchError:
                continue
            unnoticed.append(instruction)
    # The compiler peels the first turn of the loop, where nothing has been read yet, and the last wait finds no copies.
    assert [(instruction.opcode, instruction.number) for instruction in unnoticed] == [
        ("bar.sync", next(i.number for i in instructions if i.opcode == "bar.sync")),
        ("cp.async.wait_group", instructions[-1].number),
    ]


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_an_access_that_orders_others_becomes_relaxed(schedule: str) -> None:
    """Without its value or its effect a flag would be noticed whatever it orders: the waiting CTA would never end."""
    kernels = UnitKernels()
    data, flag, out = (np.zeros(1, np.int32) for _ in range(3))
    library = EmulatedLibrary(kernels.file)
    library.synchronization("hand_over")  # forgets what other tests have executed
    kernels.launch("hand_over", 2, 32, data, flag, out, 1)
    instructions = library.synchronization("hand_over")
    executed = [instruction for instruction in instructions if instruction.executed]
    assert {each.opcode for each in executed} == {"st.release.gpu.global.s32", "ld.acquire.gpu.global.s32"}
    for instruction in executed:
        flag[0] = 0
        relaxed = emulator_options(schedule=schedule, remove=instruction.number, remove_kernel="hand_over", quiet=1)
        with relaxed, pytest.raises(LaunchError, match="hazard: race on global address"):
            kernels.launch("hand_over", 2, 32, data, flag, out, 1)
    flag[0] = 0
    kernels.launch("hand_over", 2, 32, data, flag, out, 1)  # each is put back


def test_a_kernel_that_is_not_there_is_refused() -> None:
    """A name that was mistyped is no kernel without a finding."""
    folder = emulated_library_dir("sm80")
    if folder is None:
        pytest.skip("libflash_ext_sm80.so is not linked with the emulator")
    command = [sys.executable, "-m", "tests.ptx_emulator.mutate", "--path", "sm80", "--library-dir", str(folder)]
    run = subprocess.run([*command, "--kernel", "sm80_forward"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 2
    assert "--kernel is 'sm80_forward'; " in run.stderr


# Whose unnoticed removals redundant_synchronization.toml lists.
MUTATED = (("sm80", "forward"), ("sm80", "backward"), ("sm90", "forward"))


@pytest.mark.parametrize(("library", "direction"), MUTATED)
def test_each_removal_in_a_kernel_is_noticed(library: str, direction: str) -> None:
    """One kernel through `python -m tests.ptx_emulator.mutate`; the full run takes all."""
    folder = emulated_library_dir(library)
    if folder is None:
        pytest.skip(f"libflash_ext_{library}.so is not linked with the emulator")
    environment = dict(os.environ, FLASH_EXT_LIBRARY_DIR=str(folder), FLASH_EXT_EMULATE=library)
    environment.pop("FLASH_EXT_PATH", None)
    list_kernels = "import json, flash_ext; print(json.dumps(flash_ext.kernels()))"
    rows = json.loads(
        subprocess.run(
            [sys.executable, "-c", list_kernels], env=environment, cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
    )
    wanted = {"path": library, "direction": direction, **SHORT}
    names = [row["name"] for row in rows if all(row[key] == value for key, value in wanted.items())]
    if not names:
        pytest.skip(f"no {direction} kernel of {library} is built")
    command = [sys.executable, "-m", "tests.ptx_emulator.mutate", "--path", library]
    command += ["--library-dir", str(folder), "--kernel", names[0]]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "removals noticed" in result.stdout
