"""Compiles CUTLASS's examples against the emulator: known-good kernels, none of them part of this repository.

The sources come from the ``nvidia-cutlass`` wheel that the build takes its headers from: the folder
FLASH_EXT_CUTLASS_SOURCE if set (the wheel's ``cutlass_library/source``), else the wheel is downloaded into
``build/emulator/foreign``. A compilation takes minutes and gigabytes and is kept.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import toolchain
from ptx_emulator import build, harness

PREFIX = "cutlass_library/source/"
SOURCES = Path(__file__).parent / "foreign"
FOLDER = build.ROOT / "build" / "emulator" / "foreign"


def cutlass_source() -> Path:
    """The folder that holds CUTLASS's ``include`` and ``examples``."""
    given = os.environ.get("FLASH_EXT_CUTLASS_SOURCE", "")
    if given:
        return Path(given)
    source = FOLDER / toolchain.CUTLASS_REQUIREMENT.replace("==", "-")
    if not source.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
            subprocess.run([*command, toolchain.CUTLASS_REQUIREMENT], check=True)
            (wheel,) = Path(folder).glob("*.whl")
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            if digest != toolchain.CUTLASS_SHA256:
                raise RuntimeError(f"{wheel.name} has sha256 {digest}, not the pinned {toolchain.CUTLASS_SHA256}")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, [name for name in archive.namelist() if name.startswith(PREFIX)])
            (Path(folder) / PREFIX).rename(source)
    return source


def instance_of(example: Path, runner: str) -> str:
    """An example's text, its launches through ``flash_ext_launch`` (``examine.h``).

    With ``runner``, for ``runner.cu``: without its ``main_single``, which names every kernel it has; the class of the
    one kernel is FlashExtRunner.
    """
    text = example.read_text(encoding="utf-8")
    text, launches = re.subn(r"\b(?:op|gemm)\.run\(\)", r"flash_ext_launch([&] { return \g<0>; })", text)
    if not launches:
        raise ValueError(f"{example} does not launch as other examples do")
    if not runner:
        return text
    text, main, _ = text.partition("int main_single(")
    if not main:
        raise ValueError(f"{example} is not an example that runner.cu was written for")
    return f"{text}\nusing FlashExtRunner = {runner};\n"


def build_example(
    wrapper: str,
    architecture: str,
    capability: str,
    example: str = "",
    runner: str = "",
    examine: bool = False,
    flags: tuple[str, ...] = (),
) -> Path:
    """Compile ``foreign/<wrapper>`` and link it with the emulator.

    Parameters
    ----------
    wrapper : str
        A file of ``foreign/``.
    architecture, capability : str
        What nvcc compiles for (``"100a"``) and what the device model pretends to be (``"10.0"``).
    example : str
        For ``example.cu`` and ``runner.cu``: the file below CUTLASS's ``examples``.
    runner : str
        For ``runner.cu``: the class whose kernel is compiled.
    examine : bool
        For ``example.cu``: run the kernel under test alone as the environment says (always so for ``runner.cu``).
    flags : tuple of str
        More for nvcc.

    Returns
    -------
    The library.
    """
    source = cutlass_source()
    options = ["-std=c++17", "-O1", "-w", "--expt-relaxed-constexpr", *flags]
    options += ["-gencode", f"arch=compute_{architecture},code=compute_{architecture}"]
    edited = bool(runner) or examine
    if edited:
        options.append("-DFLASH_EXT_EXAMINE")
    if example:
        options.append(f'-DFLASH_EXT_EXAMPLE="{"instance.cuh" if edited else example}"')
    text = instance_of(source / "examples" / example, runner) if edited else ""
    ours = (wrapper, "curand_kernel.h", "examine.h")
    key_text = text + "".join((SOURCES / name).read_text(encoding="utf-8") for name in ours)
    key = hashlib.sha256("\n".join([key_text, *options]).encode()).hexdigest()[:12]
    folder = FOLDER / f"{Path(example or wrapper).stem}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    unit = folder / "unit.o"
    if not unit.exists():
        includes = [SOURCES, source / "include", source / "tools/util/include", source / "examples"]
        if example:
            includes += [(source / "examples" / example).parent, source / "examples" / "common"]
        if edited:
            (folder / "instance.cuh").write_text(text, encoding="utf-8")
            includes.append(folder)
        command = ["nice", "-n", "10", build.nvcc_command(), *options, *(f"-I{folder}" for folder in includes)]
        command += ["-Xcompiler", "-fPIC", "--keep", "--keep-dir", str(folder), "-c", str(SOURCES / wrapper)]
        scratch = folder / "scratch.o"
        subprocess.run([*command, "-o", str(scratch)], check=True)
        for file in folder.iterdir():  # nvcc's intermediate files are a hundred times the object
            if file.suffix not in (".ptx", ".o"):
                file.unlink()
        scratch.replace(unit)
    (ptx,) = folder.glob("*.ptx")
    kernels = {name: ptx for name in re.findall(r"\.entry\s+([\w$]+)", ptx.read_text(encoding="utf-8"))}
    library = folder / "libexample.so"
    build.link(library, [unit], kernels, capability)
    return library


def with_waits(library: Path) -> Path:
    """A copy of a library whose kernels wait for each load and store of tensor memory where they issue it."""
    folder = library.parent / "with_waits"
    folder.mkdir(exist_ok=True)
    return harness.edit_ptx(
        library,
        folder,
        lambda ptx: re.sub(r"(\btcgen05\.(ld|st)\.sync[^;]*;)", r"\1 tcgen05.wait::\2.sync.aligned;", ptx),
    )


def with_barriers(library: Path) -> Path:
    """A copy of a library whose warpgroups meet after each proxy fence, at a named barrier of their own."""
    folder = library.parent / "with_barriers"
    folder.mkdir(exist_ok=True)
    barrier = """{
        .reg .u32 %warpgroup_barrier;
        mov.u32 %warpgroup_barrier, %tid.x;
        shr.u32 %warpgroup_barrier, %warpgroup_barrier, 7;
        add.u32 %warpgroup_barrier, %warpgroup_barrier, 12;
        bar.sync %warpgroup_barrier, 128;
        }"""
    return harness.edit_ptx(
        library, folder, lambda ptx: re.sub(r"\bfence\.proxy\.async\.shared::cta;", rf"\g<0> {barrier}", ptx)
    )
