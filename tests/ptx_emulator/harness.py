"""Runs the emulator's unit kernels (``kernels/*.cu``) on numpy arrays."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from . import build
from .counts import LaunchCounts, take_counts
from .settings import environment

KERNELS = Path(__file__).parent / "kernels"

Argument = npt.NDArray[np.generic] | int | float


class LaunchError(RuntimeError):
    """A launch failed; ``code`` is the cudaError_t, the message holds the emulator's report."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Statistics:
    """What the latest launch did: CTAs started, CTAs resident at once at most, warp instructions."""

    ctas: int
    resident: int
    instructions: int


@contextmanager
def emulator_options(**variables: str | int) -> Iterator[None]:
    """Set environment variables of the emulator (``schedule="pct"`` is FLASH_EXT_EMULATOR_SCHEDULE) for a while."""
    names = {
        "cc": "FLASH_EXT_EMULATE_CC",
        "sm_count": "FLASH_EXT_EMULATE_SM_COUNT",
    }
    changed = {names.get(key, f"FLASH_EXT_EMULATOR_{key.upper()}"): str(value) for key, value in variables.items()}
    with environment(**changed):
        yield


class UnitKernels:
    """A library of unit kernels linked with the emulator.

    Parameters
    ----------
    source : str
        File in ``kernels/`` with the entry functions ``flash_ext_test_launch`` and ``flash_ext_test_error``.
    architecture : str
        What nvcc compiles for, ``"80"`` or ``"90a"``.
    capability : str
        Compute capability of the device model.
    library_file : Path, optional
        A library that is already linked; the other arguments are then not used.
    """

    def __init__(
        self,
        source: str = "entry.cu",
        architecture: str = "80",
        capability: str = "9.0",
        library_file: Path | None = None,
    ) -> None:
        self.file = library_file or build_unit_library(source, architecture, capability)
        self.library = ctypes.CDLL(str(self.file))
        self.library.flash_ext_test_error.restype = ctypes.c_char_p

    def launch(
        self, name: str, grid: int | Sequence[int], block: int | Sequence[int], *arguments: Argument, shared: int = 0
    ) -> None:
        """Run a kernel; arrays go by address, int as int32 and float as float32. Raises `LaunchError`."""
        holders: list[ctypes._SimpleCData[object]] = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                holders.append(ctypes.c_void_p(argument.ctypes.data))  # type: ignore[arg-type]
            elif isinstance(argument, float):
                holders.append(ctypes.c_float(argument))  # type: ignore[arg-type]
            else:
                holders.append(ctypes.c_int32(int(argument)))  # type: ignore[arg-type]
        pointers = (ctypes.c_void_p * max(1, len(holders)))(*(ctypes.addressof(holder) for holder in holders))
        code = self.library.flash_ext_test_launch(
            name.encode(), _dimensions(grid), _dimensions(block), ctypes.c_uint64(shared), pointers
        )
        if code != 0:
            raise LaunchError(code, self.library.flash_ext_test_error(code).decode())

    def with_ptx(self, folder: Path, edit: Callable[[str], str]) -> UnitKernels:
        """The same kernels, their PTX edited: in a copy of the library in ``folder``."""
        return UnitKernels(library_file=edit_ptx(self.file, folder, edit))

    def statistics(self) -> Statistics:
        """Of the latest launch."""
        ctas, resident, instructions = ctypes.c_uint32(), ctypes.c_uint32(), ctypes.c_uint64()
        self.library.flash_ext_emulator_statistics(*map(ctypes.byref, (ctas, resident, instructions)))
        return Statistics(ctas.value, resident.value, instructions.value)

    def counts(self) -> list[LaunchCounts]:
        """What the launches since the last call executed under ``emulator_options(count=1)``."""
        return take_counts(self.library)


def edit_ptx(library: Path, folder: Path, edit: Callable[[str], str]) -> Path:
    """A copy of a library and its PTX in ``folder``, the PTX edited. Returns the copy."""
    copy = folder / library.name
    shutil.copy(library, copy)
    edited: dict[Path, Path] = {}
    lines = library.with_suffix(".ptx_index").read_text(encoding="utf-8").splitlines()[:1]  # compute_capability
    for name, ptx in build.read_index(library).items():
        if ptx not in edited:
            edited[ptx] = folder / f"edited_{len(edited)}.ptx"
            edited[ptx].write_text(edit(ptx.read_text(encoding="utf-8")), encoding="utf-8")
        lines.append(f"{name}\t{edited[ptx].resolve()}")
    copy.with_suffix(".ptx_index").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return copy


def _dimensions(value: int | Sequence[int]) -> ctypes.Array[ctypes.c_uint32]:
    sizes = [value] if isinstance(value, int) else list(value)
    return (ctypes.c_uint32 * 3)(*(sizes + [1] * (3 - len(sizes))))


def build_unit_library(source: str, architecture: str, capability: str) -> Path:
    """Compile a file of ``kernels/`` with nvcc, once, and link it with the emulator. Returns the library."""
    text = "".join(file.read_text(encoding="utf-8") for file in sorted(KERNELS.glob("*.cu*")))
    flags = ["-std=c++20", "-gencode", f"arch=compute_{architecture},code=sm_{architecture}", "-lineinfo"]
    key = hashlib.sha256("\n".join([text, source, *flags]).encode()).hexdigest()[:12]
    folder = build.ROOT / "build" / "emulator" / "units" / f"{Path(source).stem}-{key}"
    library = folder / "libunit.so"
    objects = build.build_objects()
    newest = max(file.stat().st_mtime for file in objects)
    if library.exists() and library.stat().st_mtime > newest:
        return library
    folder.mkdir(parents=True, exist_ok=True)
    object_file, ptx = folder / "unit.o", folder / "unit.ptx"
    common = [build.nvcc_command(), *flags[:-1], str(KERNELS / source)]
    if not object_file.exists():
        subprocess.run([*common, flags[-1], "-ptx", "-o", str(ptx)], check=True)
        scratch = folder / f"unit.{os.getpid()}.o"
        subprocess.run([*common, "-Xcompiler", "-fPIC", "-c", "-o", str(scratch)], check=True)
        scratch.replace(object_file)
    kernels = {name: ptx for name in re.findall(r"\.entry\s+([\w$]+)", ptx.read_text(encoding="utf-8"))}
    build.link(library, [object_file], kernels, capability)
    return library
