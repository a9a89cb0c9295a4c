"""Links a path's kernels against the PTX emulator instead of cudart.

``python -m tests.ptx_emulator.build --path sm80`` takes the object files and the PTX that the normal build
left under ``build/<path>`` (its ``manifest.json``); nothing is compiled but the emulator itself, once. With
``FLASH_EXT_LIBRARY_DIR=build/emulator/sm80 FLASH_EXT_EMULATE=sm80`` the installed flash_ext then runs on CPU tensors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).parent / "src"
ROOT = Path(__file__).parents[2]
# What a path is emulated as unless FLASH_EXT_EMULATE_CC says otherwise. sm80 is the fallback of every GPU; the largest
# shared memory lets every tile of its table run.
DEFAULT_CAPABILITY = {"sm80": "9.0", "sm90": "9.0", "sm100": "10.0"}
# Processor flags of /proc/cpuinfo that a -march needs, the best first; the interpreter's loops are written to be
# vectorised.
_ARCHITECTURES = {
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "x86-64-v3": ("avx2", "fma", "f16c", "bmi2", "movbe"),
}
# Warnings are errors in the tests' own build of the emulator; -fno-math-errno lets sqrt vectorise.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
)


class EmulatorBuildError(RuntimeError):
    """The emulator or a library against it could not be built; the message has the compiler's output."""


def cuda_include(build_dir: Path | None = None) -> Path:
    """Folder of the CUDA headers: the one the kernels were built with, else that of the nvcc on PATH."""
    toolchain = (build_dir or ROOT / "build") / "toolchain" / "toolchain.json"
    if toolchain.exists():
        include = Path(json.loads(toolchain.read_text(encoding="utf-8"))["cuda_include"])
        if (include / "cuda_runtime_api.h").exists():
            return include
    nvcc = nvcc_command()
    text = subprocess.run(
        [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull], capture_output=True, text=True, check=True
    ).stderr
    for line in text.splitlines():
        if line.startswith("#$ INCLUDES="):
            for word in line.split("=", 1)[1].replace('"', " ").split():
                folder = Path(word.removeprefix("-I"))
                if (folder / "cuda_runtime_api.h").exists():
                    return folder.resolve()
    raise EmulatorBuildError("cannot find cuda_runtime_api.h")


def nvcc_command() -> str:
    """The CUDA compiler: of CUDA_HOME if set, else of PATH."""
    home = os.environ.get("CUDA_HOME", "")
    return str(Path(home) / "bin" / "nvcc") if home else "nvcc"


def architecture_flag() -> str:
    """``-march``: what this processor has, x86-64-v4 at most."""
    if platform.machine() != "x86_64":
        return "-O3"
    flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    for name, needed in _ARCHITECTURES.items():
        # A level has what those below it have.
        if flags.issuperset(needed) and flags.issuperset(_ARCHITECTURES["x86-64-v3"]):
            return f"-march={name}"
    return "-march=x86-64"


def _run(command: Sequence[str | Path]) -> None:
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if result.returncode != 0:
        shown = " ".join(map(str, command if len(command) < 20 else [*command[:8], "...", *command[-4:]]))
        raise EmulatorBuildError(f"{shown}\n{result.stdout}{result.stderr}")


def build_objects(cache_dir: Path | None = None, jobs: int = 1, include: Path | None = None) -> list[Path]:
    """Compile the emulator's sources into object files, those that changed only.

    Returns the objects, in a folder named after compiler and flags below ``cache_dir`` (``build/emulator``).
    """
    include = include or cuda_include()
    compiler = os.environ.get("CXX", "g++")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    flags = [*FLAGS, architecture_flag(), "-isystem", str(include)]
    key = hashlib.sha256("\n".join([version, *flags]).encode()).hexdigest()[:12]
    folder = (cache_dir or ROOT / "build" / "emulator") / key
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(SOURCE.glob("*.cpp"))
    stale = [source for source in sources if _is_stale(folder / f"{source.stem}.o")]

    def compile_one(source: Path) -> None:
        target = folder / f"{source.stem}.o"
        scratch = folder / f"{source.stem}.{os.getpid()}.o"
        _run([compiler, *flags, "-MD", "-MF", folder / f"{source.stem}.d", "-c", source, "-o", scratch])
        scratch.replace(target)

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        list(pool.map(compile_one, stale))
    return [folder / f"{source.stem}.o" for source in sources]


def _is_stale(target: Path) -> bool:
    dependencies = target.with_suffix(".d")
    if not target.exists() or not dependencies.exists():
        return True
    words = dependencies.read_text(encoding="utf-8").replace("\\\n", " ").split()[1:]
    built = target.stat().st_mtime
    return any(not Path(word).exists() or Path(word).stat().st_mtime > built for word in words)


def link(library: Path, objects: Sequence[Path], kernels: dict[str, Path], capability: str, jobs: int = 1) -> None:
    """Link objects of kernels with the emulator into ``library`` and write the index of its PTX beside it.

    Parameters
    ----------
    library : Path
        The shared library to write; its index has the suffix ``.ptx_index``.
    objects : sequence of Path
        nvcc's and the host compiler's object files.
    kernels : dict
        Mangled kernel name to the PTX file that has it.
    capability : str
        Compute capability of the device model, ``"9.0"``.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    exports = ROOT / "cmake" / "exports.map"
    script = [f"-Wl,--version-script={exports}"] if exports.exists() else []
    scratch = library.with_suffix(f".{os.getpid()}.so")
    command: list[str | Path] = [os.environ.get("CXX", "g++"), "-shared", *objects, *build_objects(jobs=jobs), *script]
    _run([*command, "-Wl,--no-undefined", "-ldl", "-lpthread", "-o", scratch])
    lines = [f"compute_capability\t{capability}"]
    # Relative to the index, so that the folder which holds library and PTX may be moved or copied.
    folder = library.parent.resolve()
    lines += [f"{name}\t{os.path.relpath(path.resolve(), folder)}" for name, path in sorted(kernels.items())]
    library.with_suffix(".ptx_index").write_text("\n".join(lines) + "\n", encoding="utf-8")
    scratch.replace(library)


def read_index(library: Path) -> dict[str, Path]:
    """The PTX file of each kernel of a library that `link` made, by mangled name."""
    index = library.with_suffix(".ptx_index")
    entries = (line.split("\t") for line in index.read_text(encoding="utf-8").splitlines())
    return {name: index.parent / value for name, value in entries if name != "compute_capability"}


def build_path(path: str, out: Path, build_dir: Path | None = None, jobs: int = 1) -> Path:
    """Link the library of one path, from the manifest of its normal build. Returns the library."""
    manifest_file = (build_dir or ROOT / "build") / path / "manifest.json"
    if not manifest_file.exists():
        raise EmulatorBuildError(f"{manifest_file} does not exist: build flash_ext with FLASH_EXT_PATHS={path} first")
    manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
    folder = manifest_file.parent
    objects = [folder / unit["object"] for unit in manifest["units"]]
    objects += [folder / name for name in manifest["host_objects"]]
    kernels = {kernel: folder / unit["ptx"] for unit in manifest["units"] for kernel in unit["kernels"]}
    library = out / f"libflash_ext_{path}.so"
    link(library, objects, kernels, DEFAULT_CAPABILITY[path], jobs)
    return library


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.ptx_emulator.build", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the libraries (default: build/emulator/<path>)")
    parser.add_argument(
        "--path", action="append", choices=sorted(DEFAULT_CAPABILITY), help="default: all that are built"
    )
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build", help="the normal build (default: build/)")
    parser.add_argument("--jobs", type=int, default=1, help="compilers that run at once (default 1)")
    arguments = parser.parse_args()
    built = [path for path in DEFAULT_CAPABILITY if (arguments.build_dir / path / "manifest.json").exists()]
    try:
        for path in arguments.path or built:
            out = arguments.out or ROOT / "build" / "emulator" / path
            print(build_path(path, out, arguments.build_dir, arguments.jobs))
    except EmulatorBuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
