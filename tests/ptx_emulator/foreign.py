"""Compiles CUTLASS's examples against the emulator: known-good kernels, none of them part of this repository.

The sources come from the ``nvidia-cutlass`` wheel: the folder FLASH_EXT_CUTLASS_SOURCE if set (the wheel's
``cutlass_library/source``), else the wheel is downloaded into ``build/emulator/foreign``. A compilation takes minutes
and gigabytes and is kept.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from ptx_emulator import build

WHEEL = "nvidia-cutlass==4.2.0.0"
SOURCES = Path(__file__).parent / "foreign"
FOLDER = build.ROOT / "build" / "emulator" / "foreign"


def cutlass_source() -> Path:
    """The folder that holds CUTLASS's ``include`` and ``examples``."""
    given = os.environ.get("FLASH_EXT_CUTLASS_SOURCE", "")
    if given:
        return Path(given)
    source = FOLDER / "cutlass_library" / "source"
    if not (source / "examples").exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(FOLDER), WHEEL]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(FOLDER.glob("nvidia_cutlass-*.whl"))) as wheel:
            wheel.extractall(FOLDER)
    return source


def build_example(
    wrapper: str, architecture: str, capability: str, example: str = "", flags: tuple[str, ...] = ()
) -> Path:
    """Compile ``foreign/<wrapper>`` and link it with the emulator.

    Parameters
    ----------
    wrapper : str
        A file of ``foreign/``.
    architecture, capability : str
        What nvcc compiles for (``"100a"``) and what the device model pretends to be (``"10.0"``).
    example : str
        For ``example.cu``: the file below CUTLASS's ``examples``.
    flags : tuple of str
        More for nvcc.

    Returns
    -------
    The library.
    """
    source = cutlass_source()
    options = ["-std=c++17", "-O1", "-w", "--expt-relaxed-constexpr", *flags]
    options += ["-gencode", f"arch=compute_{architecture},code=compute_{architecture}"]
    if example:
        options += [f'-DFLASH_EXT_EXAMPLE="{example}"']
    text = (SOURCES / wrapper).read_text(encoding="utf-8")
    key = hashlib.sha256("\n".join([text, *options]).encode()).hexdigest()[:12]
    folder = FOLDER / f"{Path(example or wrapper).stem}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    unit = folder / "unit.o"
    if not unit.exists():
        includes = [source / "include", source / "tools/util/include", source / "examples"]
        if example:
            includes.append((source / "examples" / example).parent)
        command = ["nice", "-n", "10", build.nvcc_command(), *options, *(f"-I{folder}" for folder in includes)]
        command += ["-Xcompiler", "-fPIC", "--keep", "--keep-dir", str(folder), "-c", str(SOURCES / wrapper)]
        scratch = folder / "scratch.o"
        subprocess.run([*command, "-o", str(scratch)], check=True)
        for file in folder.iterdir():  # nvcc's intermediate files are a hundred times the object
            if file.suffix not in (".ptx", ".o"):
                file.unlink()
        scratch.replace(unit)
    ptx = next(folder.glob("*.ptx"))
    kernels = {name: ptx for name in re.findall(r"\.entry\s+([\w$]+)", ptx.read_text(encoding="utf-8"))}
    library = folder / "libexample.so"
    build.link(library, [unit], kernels, capability)
    return library
