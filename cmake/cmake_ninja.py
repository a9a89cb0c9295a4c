"""Runs CMake and Ninja, and shows what they do in one line a step."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

from toolchain import BuildError


def configure(source_dir: Path, folder: Path, definitions: Mapping[str, str]) -> None:
    """Run CMake in a folder of its own; its output is shown only if it fails."""
    # Given each time: an isolated build's tools lie in a folder that is gone the next time.
    command = [find_tool("cmake"), "-S", str(source_dir), "-B", str(folder), "-G", "Ninja"]
    command += [f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}"]
    command += [f"-D{name}={value}" for name, value in definitions.items()]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        raise BuildError(f"CMake failed:\n{result.stdout}")


def find_tool(name: str) -> str:
    """A program of the build requirements: from this environment, else from PATH."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        raise BuildError(
            f"{name} is missing; install it with `pip install {name}`, or build with pip's build isolation"
        )
    return found


def run_ninja(folder: Path, jobs: int, force: bool, detail: Callable[[str], str] = lambda step: "") -> None:
    """Run Ninja and print one line for each finished step.

    Parameters
    ----------
    folder : Path
        Where `configure` put the rules.
    jobs : int
        Commands that run at once.
    force : bool
        Run every step again.
    detail : callable
        What to print after the name of a step; an empty string for nothing.

    Raises
    ------
    BuildError
        A step failed; its output has been printed.
    """
    ninja = find_tool("ninja")
    if force:
        subprocess.run([ninja, "-C", str(folder), "-t", "clean"], stdout=subprocess.DEVNULL, check=True)
    process = subprocess.Popen(
        [ninja, "-C", str(folder), "-j", str(jobs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "NINJA_STATUS": "@%f/%t@"},
    )
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            text = progress_line(line.rstrip("\n"), detail)
            if text is not None:
                print(text, flush=True)
    if process.wait() != 0:
        raise BuildError("a compiler failed; its message stands above")


def progress_line(line: str, detail: Callable[[str], str]) -> str | None:
    """A line of Ninja as it is shown: ``[ 3/14] sm80_forward_...  9.8 s``; None: not shown."""
    match = re.match(r"@(\d+)/(\d+)@(.*)", line)
    if match is None:
        return None if line.startswith(("ninja: Entering", "ninja: no work", "[0/2] Re-checking")) else line
    done, total, step = match.groups()
    if step.startswith(("Re-checking", "Re-running")):  # CMake looks again at its globs
        return None
    if building := re.fullmatch(r"Building CXX object CMakeFiles/(\w+)\.dir/(.+)\.o", step):
        step = f"{building[1]}: {Path(building[2]).name}"
    elif linking := re.fullmatch(r'Linking CXX shared \w+ "?(.+?)"?', step):
        step = f"link {Path(linking[1]).name}"
    elif text := detail(step):
        step = f"{step}  {text}"
    return f"[{done.rjust(len(total))}/{total}] {step}"
