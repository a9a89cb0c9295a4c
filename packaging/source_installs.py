"""Installs flash_ext from source in every supported way, each into an environment of its own, and asks what is there.

    python packaging/source_installs.py                          # every way, with the paths of FLASH_EXT_PATHS
    python packaging/source_installs.py --only no-toolkit/sdist --keep build/installs

Ways: the CUDA toolkit is PyPI's (this machine's is hidden), this machine's, this machine's without any network, or
there is none and no kernels are built (FLASH_EXT_PATHS=none). Each is tried from a clean clone of this checkout's
commit and from its source distribution, unpacked without git. This machine must have g++, git and a CUDA toolkit; torch
is that of the Python that runs this. A compiler cache serves all builds but the first; --source names another checkout,
for instance one with a commit that leaves a few kernels in csrc/kernels.toml.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cmake"))

import toolchain

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("no-toolkit", "toolkit", "offline", "none")
SOURCES = ("checkout", "sdist")
BUILD_REQUIREMENTS = ("setuptools>=77", "pybind11>=3.0,<4", "cmake>=3.25", "ninja")  # of pyproject.toml


def run(command: list[str], cwd: Path, environment: dict[str, str]) -> str:
    """Run a command and return what it printed; show it if it fails."""
    print(f"$ {' '.join(command)}", flush=True)
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        print(result.stdout + result.stderr, flush=True)
        result.check_returncode()
    return result.stdout


def clean_environment() -> dict[str, str]:
    """This process's without settings of Python and of a CUDA toolkit; those of flash_ext's build stay."""
    dropped = ("PYTHON", "CUDA_HOME", "CUTLASS_PATH", "FLASH_EXT_PYTHONS")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def without_nvcc(path: str, folder: Path) -> str:
    """A PATH of the same programs but nvcc: a folder of links stands in for each that holds one."""
    folders = []
    for number, entry in enumerate(filter(None, path.split(os.pathsep))):
        if not (Path(entry) / "nvcc").exists():
            folders.append(entry)
            continue
        links = folder / f"path{number}"
        links.mkdir(parents=True)
        for program in Path(entry).iterdir():
            if program.name != "nvcc":
                (links / program.name).symlink_to(program)
        folders.append(str(links))
    return os.pathsep.join(folders)


def no_network() -> list[str]:
    """The prefix of a command that then sees no network; nothing where the system does not allow it."""
    command = ["unshare", "--map-root-user", "--net"]
    try:
        allowed = subprocess.run([*command, "true"], capture_output=True).returncode == 0
    except OSError:
        allowed = False
    if not allowed:
        print("unshare does not work here: offline means PIP_NO_INDEX=1 alone", flush=True)
    return command if allowed else []


def make_venv(folder: Path) -> Path:
    """An environment that sees the packages of the running Python, torch among them; returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    # A folder that a .pth file names has its .pth files unread: no editable flash_ext comes with it.
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def install(way: str, source: Path, folder: Path) -> dict[str, Any]:
    """Install in one way; returns what ``python -m flash_ext info --json`` says."""
    environment = clean_environment()
    python = make_venv(folder / "venv")
    options, prefix = [], []
    if way == "no-toolkit":
        environment["PATH"] = without_nvcc(environment["PATH"], folder)
    elif way == "none":
        environment["FLASH_EXT_PATHS"] = "none"
    elif way == "offline":
        run([str(python), "-m", "pip", "install", "--quiet", *BUILD_REQUIREMENTS], folder, environment)
        tools = toolchain.find_toolchain(True, ROOT / "build" / "toolchain")
        environment["CUDA_HOME"] = str(Path(tools.nvcc).parent.parent)
        environment["CUTLASS_PATH"] = str(Path(tools.cutlass_include).parent)
        environment["PATH"] = without_nvcc(environment["PATH"], folder)
        environment["PIP_NO_INDEX"] = "1"
        options, prefix = ["--no-build-isolation"], no_network()
    command = [*prefix, str(python), "-m", "pip", "--disable-pip-version-check", "install", "-v"]
    printed = run([*command, *options, str(source)], folder, environment)
    for line in printed.splitlines():
        if "flash_ext: " in line:  # which toolkit, what was built
            print(line.strip(), flush=True)
    info: dict[str, Any] = json.loads(run([str(python), "-m", "flash_ext", "info", "--json"], folder, environment))
    return info


def main() -> int:
    """Try every way; print a table at the end and fail if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [f"{way}/{source}" for way in WAYS for source in SOURCES]
    parser.add_argument("--only", action="append", choices=names, help="may be repeated")
    parser.add_argument("--source", type=Path, default=ROOT, help="the checkout; default: this one")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="make the environments here and leave them")
    arguments = parser.parse_args()
    temporary = None if arguments.keep else tempfile.TemporaryDirectory()
    folder = Path(temporary.name) if temporary else arguments.keep.resolve()
    folder.mkdir(parents=True, exist_ok=True)

    clone = folder / "checkout"
    shutil.rmtree(clone, ignore_errors=True)
    environment = clean_environment()
    run(["git", "clone", "--quiet", str(arguments.source.resolve()), str(clone)], folder, environment)
    python = make_venv(folder / "sdist")
    command = [str(python), "-m", "pip", "install", "--quiet", "build"]
    run(command, folder, environment)
    run([str(python), "-m", "build", "--sdist", "--outdir", str(folder), str(clone)], folder, environment)
    (sdist,) = folder.glob("flash_ext-*.tar.gz")

    expected = set(toolchain.read_options().paths)
    rows = []
    for name in arguments.only or names:
        print(f"\n== {name}", flush=True)
        way, kind = name.split("/")
        place = folder / name.replace("/", "-")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        start = time.perf_counter()
        try:
            info = install(way, clone if kind == "checkout" else sdist, place)
            paths = {kernel["path"] for kernel in info["kernels"]}
            print(f"built: {json.dumps(info['build']['module'])}, kernels: {len(info['kernels'])}", flush=True)
            outcome = "passed" if paths == (set() if way == "none" else expected) else f"FAILED: kernels of {paths}"
        except subprocess.CalledProcessError as error:
            outcome = f"FAILED: {' '.join(map(str, error.cmd))[:100]}"
        rows.append((name, time.perf_counter() - start, outcome))
    print()
    for name, seconds, outcome in rows:
        print(f"{name:24} {seconds:6.0f} s  {outcome}")
    if temporary:
        temporary.cleanup()
    return 0 if all(outcome == "passed" for _, _, outcome in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
