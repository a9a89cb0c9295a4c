"""Builds the path libraries and flash_ext._C with CMake and Ninja: called by setup.py, which copies the results.

Everything lies under ``build/`` of the source folder and is kept between builds:

    build/toolchain/    downloaded headers, and what the units are compiled with
    build/cmake/        CMake's folder for the libraries
    build/<path>/       generated sources, objects, PTX, manifest.json and libflash_ext_<path>.so
    build/binding/<tag>/    CMake's folder and the module for one Python
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import generate
import glibc
import report
import toolchain
from cmake_ninja import configure, run_ninja
from toolchain import BuildError, Options, Python

SOURCE_DIR = Path(__file__).resolve().parent.parent
BUILD_DIR = SOURCE_DIR / "build"
COMMIT_FILE = "COMMIT"  # in a source distribution
ARCHIVE_FILE = ".git_archival.txt"  # `git archive` writes the commit into it (.gitattributes)


def read_version(source_dir: Path = SOURCE_DIR) -> str:
    """The version of flash_ext/_version.py, without importing the package."""
    text = (source_dir / "flash_ext" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise BuildError('flash_ext/_version.py has no line __version__ = "..."')
    return match.group(1)


def read_commit(source_dir: Path = SOURCE_DIR) -> str:
    """What ``git describe`` says of the source folder; in a source distribution, what it said when that was made.

    What ``git archive`` wrote knows its commit as well; of any other copy it is ``unknown``.
    """
    if not (source_dir / ".git").exists():
        for name in (COMMIT_FILE, ARCHIVE_FILE):
            file = source_dir / name
            text = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
            if re.fullmatch(r"[0-9a-f]{40}", text):
                return text[:12]
            if text and "$" not in text:  # git has not filled in the other
                return text
        return "unknown"
    command = ["git", "-C", str(source_dir), "describe", "--always", "--dirty", "--tags", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def build(options: Options, force: bool = False) -> dict[str, Path]:
    """Build everything the options ask for.

    Parameters
    ----------
    options : Options
        What `toolchain.read_options` returned.
    force : bool
        Compile everything again.

    Returns
    -------
    dict of str to Path
        File name inside the package to the built file.

    Raises
    ------
    BuildError
        With one message that says what is wrong and what to do.
    """
    start = time.perf_counter()
    with exclusive(BUILD_DIR):
        if options.glibc:
            glibc.write_stubs(options.glibc, stubs_dir(options), cxx_command())
        results = build_libraries(options, force) if options.paths else {}
        for python in toolchain.read_pythons() or [toolchain.running_python()]:
            module = build_binding(options, force, python)
            results[module.name] = module
        for file in results.values() if options.glibc else ():
            glibc.check_imports(file, options.glibc)
    print(f"flash_ext: built {', '.join(results)} in {time.perf_counter() - start:.0f} s", flush=True)
    return results


@contextlib.contextmanager
def exclusive(build_dir: Path) -> Iterator[None]:
    """Keep other builds out of the build folder: Ninja itself takes no lock."""
    build_dir.mkdir(parents=True, exist_ok=True)
    with open(build_dir / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            toolchain.note("another build runs in this folder; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_libraries(options: Options, force: bool) -> dict[str, Path]:
    """Build, check and describe the libraries of ``options.paths``."""
    try:
        table, _ = generate.load(SOURCE_DIR)
    except generate.TableError as error:
        raise BuildError(str(error)) from error
    for path in options.paths:
        if path not in table.paths:
            raise BuildError(f"csrc/kernels.toml has no [path.{path}]")
    tools = toolchain.find_toolchain(
        any(table.paths[path].needs_cutlass for path in options.paths), BUILD_DIR / "toolchain"
    )
    print(
        f"flash_ext: paths {', '.join(options.paths)}; CUDA {tools.cuda_version} ({tools.nvcc}); "
        + (f"CUTLASS {tools.cutlass_version}; " if tools.cutlass_version else "")
        + f"{'ccache; ' if tools.ccache else ''}{options.jobs} jobs",
        flush=True,
    )
    write_toolchain(tools)

    units: dict[str, dict[str, str]] = {}
    for path in options.paths:
        info = build_info(options, tools.host_version) | {
            "cuda": tools.cuda_version,
            "gencode": table.paths[path].gencode,
        }
        names = generate.generate(SOURCE_DIR, BUILD_DIR / path, path, info)
        units[path] = {name: f"build/{path}/generated/{name}.cu" for name in names} | hand_written_units(path)
        generate.write_if_changed(
            BUILD_DIR / path / "units.cmake",
            f'set(unit_gencode "{table.paths[path].gencode}")\n'
            f"set(unit_needs_cutlass {'ON' if table.paths[path].needs_cutlass else 'OFF'})\n"
            f"set(units {' '.join(units[path])})\n"
            f"set(unit_sources {' '.join(units[path].values())})\n",
        )
        remove_stale_units(BUILD_DIR / path / "units", units[path])

    cmake_dir = BUILD_DIR / "cmake"
    configure(
        SOURCE_DIR,
        cmake_dir,
        {
            "FLASH_EXT_BUILD_DIR": str(BUILD_DIR),
            "FLASH_EXT_COMPONENT": "libraries",
            "FLASH_EXT_PATHS": ";".join(options.paths),
            "FLASH_EXT_LINEINFO": "ON" if options.lineinfo else "OFF",
            "FLASH_EXT_CUDA_INCLUDE": tools.cuda_include,
            "FLASH_EXT_CUDART": tools.cudart,
            "FLASH_EXT_GLIBC_STUBS": str(stubs_dir(options)) if options.glibc else "",
        },
    )
    run_ninja(cmake_dir, options.jobs, force, seconds_of_unit)
    return check_libraries(options, table, units)


def hand_written_units(path: str) -> dict[str, str]:
    """The .cu files of csrc/<path> and, for every path, of csrc/common: unit name to source file."""
    files = [file for folder in ("common", path) for file in sorted((SOURCE_DIR / "csrc" / folder).glob("*.cu"))]
    return {f"{path}_{file.stem}": str(file.relative_to(SOURCE_DIR)) for file in files}


def seconds_of_unit(unit: str) -> str:
    """The CPU seconds that a unit took, from its report; empty if it failed or is no unit."""
    file = BUILD_DIR / unit.partition("_")[0] / "units" / unit / "report.json"
    if not file.is_file():
        return ""
    values = json.loads(file.read_text(encoding="utf-8"))
    return f"{values['seconds']:.1f} s{' (cached)' if values['cached'] else ''}"


def check_libraries(options: Options, table: generate.Table, units: Mapping[str, Mapping[str, str]]) -> dict[str, Path]:
    """Write the manifests, print the table of kernels, and refuse what must not ship."""
    found: list[str] = []
    reports: list[dict[str, Any]] = []
    shared_memory: dict[str, int] = {}
    libraries: dict[str, Path] = {}
    for path in options.paths:
        library = BUILD_DIR / path / f"libflash_ext_{path}.so"
        libraries[library.name] = library
        objects = Path("..", "cmake", "CMakeFiles", f"flash_ext_{path}.dir")
        host_sources = [f"csrc/api/{file.name}" for file in sorted((SOURCE_DIR / "csrc" / "api").glob("*.cpp"))]
        host_objects = [f"{objects}/{source}.o" for source in [*host_sources, f"build/{path}/generated/registry.cpp"]]
        try:
            report.write_manifest(BUILD_DIR / path, path, table.paths[path].gencode, units[path], host_objects)
        except report.ManifestError as error:
            raise BuildError(str(error)) from error
        own = report.read_reports(BUILD_DIR / path, list(units[path]))
        for unit in own:
            found += report.problems(unit["unit"], unit["kernels"])
        kernels = report.library_kernels(library)
        shared_memory |= {kernel["name"]: kernel["shared_memory"] for kernel in kernels}
        if path == "sm80":
            found += report.fallback_problems(kernels)
        reports += own
    print("\n" + "\n".join(report.table(reports, shared_memory)))
    sizes = [f"{name} {library.stat().st_size / 1024:.0f} KB" for name, library in libraries.items()]
    print("\n" + ", ".join(sizes), flush=True)
    if found:
        raise BuildError("kernels that must not ship:\n" + "\n".join(f"  - {problem}" for problem in found))
    return libraries


def build_binding(options: Options, force: bool, python: Python) -> Path:
    """Build flash_ext._C for a Python; returns the module's file."""
    try:
        import pybind11
    except ImportError:
        raise BuildError(
            "pybind11 is missing; install the build requirements of pyproject.toml, or build with pip's build isolation"
        ) from None
    folder = BUILD_DIR / "binding" / python.tag
    info = build_info(options, cxx_version())
    text = f'#pragma once\n#define FLASH_EXT_BUILD_INFO R"json({json.dumps(info, sort_keys=True)})json"\n'
    generate.write_if_changed(folder / "build_info.h", text)
    configure(
        SOURCE_DIR,
        folder,
        {
            "FLASH_EXT_BUILD_DIR": str(BUILD_DIR),
            "FLASH_EXT_COMPONENT": "binding",
            "FLASH_EXT_PYTHON": python.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "FLASH_EXT_GLIBC_STUBS": str(stubs_dir(options)) if options.glibc else "",
        },
    )
    run_ninja(folder, options.jobs, force)
    return folder / f"_C{python.suffix}"


def build_info(options: Options, compiler: str) -> dict[str, Any]:
    """What a library or the module answers when asked how it was built; the same for every build folder."""
    return {
        "version": read_version(),
        "commit": read_commit(),
        "compiler": compiler,
        "options": {
            "paths": list(options.paths),
            "lineinfo": options.lineinfo,
            "glibc": ".".join(map(str, options.glibc)),
        },
    }


def stubs_dir(options: Options) -> Path:
    """Where the stubs of an older glibc lie."""
    return BUILD_DIR / "toolchain" / f"glibc-{'.'.join(map(str, options.glibc))}"


def cxx_command() -> list[str]:
    """The C++ compiler that CMake takes."""
    return find_cxx()[0]


def cxx_version() -> str:
    """First line of its ``--version``."""
    return find_cxx()[1]


def find_cxx() -> tuple[list[str], str]:
    """The first C++ compiler that runs, and the first line it prints for ``--version``."""
    commands = [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else [["c++"], ["g++"], ["clang++"]]
    for command in commands:
        with contextlib.suppress(OSError, subprocess.CalledProcessError, IndexError):
            result = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
            return command, result.stdout.splitlines()[0]
    raise BuildError("no C++17 compiler was found; install g++ or clang++, or set CXX")


def write_toolchain(tools: toolchain.Toolchain) -> None:
    """Write what cmake/compile_unit.py reads, and the script through which Ninja calls it.

    Ninja compiles again when a command changes: so commands name neither the interpreter nor the toolkit, whose folders
    differ between isolated builds, but this script and a file that holds their versions.
    """
    folder = BUILD_DIR / "toolchain"
    generate.write_if_changed(folder / "toolchain.json", tools.to_json())
    generate.write_if_changed(folder / "fingerprint.txt", tools.fingerprint)
    python = getattr(sys, "_base_executable", sys.executable)
    command = [python, "-E", "-s", str(SOURCE_DIR / "cmake" / "compile_unit.py"), str(folder / "toolchain.json")]
    script = folder / "compile_unit"
    generate.write_if_changed(script, f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    script.chmod(0o755)


def replace_file(source: Path, destination: Path) -> None:
    """Copy a built file unless it is there already; a process that has the old one loaded keeps it."""
    if destination.is_file():
        old, new = destination.stat(), source.stat()
        if (old.st_size, old.st_mtime_ns) == (new.st_size, new.st_mtime_ns):
            return
    partial = destination.with_name(f".{destination.name}.partial")
    shutil.copy2(source, partial)
    partial.replace(destination)


def remove_stale_units(folder: Path, units: Mapping[str, str]) -> None:
    """Delete the folders of units that left the table."""
    if folder.is_dir():
        for unit in folder.iterdir():
            if unit.name not in units:
                shutil.rmtree(unit)
