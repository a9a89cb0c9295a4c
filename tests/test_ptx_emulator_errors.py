"""What the emulator does not know or cannot find is one clear error, never a crash or a silent no-op."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator import build
from ptx_emulator.harness import LaunchError, UnitKernels, emulator_options

# The first test of a run may have to compile the emulator.
pytestmark = [
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
    pytest.mark.timeout(600),
]

INVALID_PTX, INVALID_DEVICE_FUNCTION, INVALID_CONFIGURATION = 218, 98, 9


@pytest.fixture(scope="module")
def kernels() -> UnitKernels:
    """The unit kernels, linked with the emulator."""
    return UnitKernels()


def launch_error(kernels: UnitKernels) -> LaunchError:
    """The error of a launch of `vector_add`."""
    values = np.zeros(32, np.float32)
    with pytest.raises(LaunchError) as info:
        kernels.launch("vector_add", 1, 32, values, values, values.copy(), 32)
    return info.value


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("add.f32", "frobnicate.f32", "unknown opcode: opcode 'frobnicate.f32'"),
        ("add.f32", "add.quick.f32", "modifier '.quick' is not supported"),
        ("ld.global.f32", "ld.global.sideways.f32", "modifier '.sideways' is not supported"),
        ("ld.global.f32", "ld.global.f64", "the register is narrower than the memory element"),
        ("ld.global.f32", "ld.global.f32 %%", "PTX line"),
        ("ret;", "bra NOWHERE;", "no label 'NOWHERE'"),
        ("vector_add_param_0", "vector_add_param_9", "unknown symbol 'vector_add_param_0'"),
    ],
)
def test_bad_ptx(kernels: UnitKernels, tmp_path: Path, old: str, new: str, message: str) -> None:
    """Unknown opcodes, modifiers, labels and symbols fail when the kernel is loaded, with the line."""

    def edit(text: str) -> str:
        begin = text.index(".entry vector_add")
        place = text.index(old, begin)
        return text[:place] + new + text[place + len(old) :]

    error = launch_error(kernels.with_ptx(tmp_path, edit))
    assert error.code == INVALID_PTX
    assert message in str(error)
    assert "PTX line" in str(error)


def test_missing_kernel(kernels: UnitKernels, tmp_path: Path) -> None:
    """A kernel that the index does not name, or that its PTX file does not hold."""
    error = launch_error(kernels.with_ptx(tmp_path, lambda text: text.replace("vector_add", "vector_sub")))
    assert error.code == INVALID_DEVICE_FUNCTION
    assert "vector_add" in str(error)


def test_a_copied_folder_has_its_own_ptx(kernels: UnitKernels, tmp_path: Path) -> None:
    """The index names PTX from where it lies itself, so that a checkout may be moved or copied."""
    copied = tmp_path / "copied"
    shutil.copytree(kernels.file.parent, copied)
    library = copied / kernels.file.name
    assert str(kernels.file.parent) not in library.with_suffix(".ptx_index").read_text(encoding="utf-8")
    (ptx,) = set(build.read_index(library).values())
    assert ptx.parent.resolve() == copied.resolve()
    text = ptx.read_text(encoding="utf-8")
    place = text.index("add.f32", text.index(".entry vector_add"))
    ptx.write_text(text[:place] + "frobnicate.f32" + text[place + len("add.f32") :], encoding="utf-8")
    assert "unknown opcode: opcode 'frobnicate.f32'" in str(launch_error(UnitKernels(library_file=library)))


@pytest.mark.parametrize(
    ("variable", "value"),
    [("schedule", "sometimes"), ("seed", "many"), ("sm_count", "0"), ("cc", "9.9"), ("remove", "100000")],
)
def test_bad_environment(kernels: UnitKernels, variable: str, value: str) -> None:
    """A value that means nothing is refused by name."""
    with emulator_options(**{variable: value}):
        error = launch_error(kernels)
    assert error.code == INVALID_CONFIGURATION
    assert value in str(error)
