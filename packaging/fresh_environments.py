"""Installs a wheel into fresh virtual environments, one Python and one torch at a time, and runs the cpu tests there.

    python packaging/fresh_environments.py dist/flash_ext-*.whl
    python packaging/fresh_environments.py dist/flash_ext-*.whl --environment 3.10=torch==2.4.1 --keep build/fresh

Each environment holds the wheel, torch, and what the tests need; no compiler is on PATH while the wheel is installed
and tried, and nothing of this checkout is importable but the tests and what they read. pip takes its settings (an
index, a cache) from the user's environment as always: torch's default Linux builds are some gigabytes each. So does
pytest: on a busy machine PYTEST_ADDOPTS=--timeout=900 and PYTEST_XDIST_AUTO_NUM_WORKERS=1 help.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Every Python of the wheel; torch without the DLPack exchange API (2.4), the first with it (2.10), and a recent one.
ENVIRONMENTS = ("3.10=torch==2.4.1", "3.11=torch==2.10.0", "3.12=torch==2.13.0", "3.13=torch==2.13.0")
# What the tests read of the checkout; flash_ext itself stays out.
TREE = ("tests", "benchmarks", "cmake", "csrc", "pyproject.toml", "README.md")
TEST_REQUIREMENTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "numpy", "rich>=13")


@dataclass(frozen=True)
class Environment:
    """A Python and the torch that goes with it."""

    python: str
    torch: str

    @property
    def name(self) -> str:
        """Fit for a folder."""
        return re.sub(r"[^\w.]+", "-", f"{Path(self.python).name}-{self.torch}")


def parse(text: str) -> Environment:
    """``3.10=torch==2.4.1`` or ``/usr/bin/python3.10=torch==2.4.1``."""
    python, equals, torch = text.partition("=")
    if not equals or not torch:
        raise argparse.ArgumentTypeError(f"{text!r}: expected PYTHON=TORCH, for example 3.10=torch==2.4.1")
    command = f"python{python}" if re.fullmatch(r"3\.\d+", python) else python
    found = shutil.which(command)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: {command} is not on PATH")
    return Environment(found, torch)


def run(command: list[str], cwd: Path, path: str) -> None:
    """Run a command with nothing of Python's or flash_ext's variables in its environment."""
    print(f"$ {' '.join(command)}", flush=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FLASH_EXT_"))}
    subprocess.run(command, cwd=cwd, env={**kept, "PATH": path}, check=True)


def try_environment(environment: Environment, wheel: Path, folder: Path, tests: list[str]) -> None:
    """Make an environment in a folder, install the wheel, and run ``info`` and the tests."""
    everything = os.environ.get("PATH", os.defpath)
    run([environment.python, "-m", "venv", str(folder / "venv")], folder, everything)
    python = str(folder / "venv" / "bin" / "python")
    no_compiler = str(folder / "venv" / "bin")
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--only-binary=:all:"]
    run([*install, environment.torch], folder, no_compiler)
    run([*install, str(wheel)], folder, no_compiler)
    run([python, "-m", "flash_ext", "info"], folder, no_compiler)

    run([*install, *TEST_REQUIREMENTS], folder, no_compiler)
    tree = folder / "tree"
    tree.mkdir()
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy2(source, tree / name)
    run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "auto", "--path", "cpu", *tests],
        tree,
        everything,
    )


def main() -> int:
    """Try every environment; print a table at the end and fail if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--environment",
        action="append",
        type=parse,
        metavar="PYTHON=TORCH",
        help=f"may be repeated; default: {' '.join(ENVIRONMENTS)}",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="make the environments here and leave them")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="what pytest gets; default: tests")
    arguments = parser.parse_args()
    wheel = arguments.wheel.resolve(strict=True)

    results: list[tuple[str, str, float]] = []
    for environment in arguments.environment or [parse(text) for text in ENVIRONMENTS]:
        print(f"\n== {environment.python}, {environment.torch}", flush=True)
        start = time.perf_counter()
        temporary = None if arguments.keep else tempfile.TemporaryDirectory()
        folder = Path(temporary.name) if temporary else (arguments.keep / environment.name).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            try_environment(environment, wheel, folder, arguments.tests)
            outcome = "passed"
        except subprocess.CalledProcessError as error:
            outcome = f"FAILED: {' '.join(map(str, error.cmd))[:100]}"
        finally:
            if temporary:
                temporary.cleanup()
        results.append((environment.name, outcome, time.perf_counter() - start))

    print(f"\n{wheel.name}")
    for name, outcome, seconds in results:
        print(f"{name:40} {seconds:6.0f} s  {outcome}")
    return 0 if all(outcome == "passed" for _, outcome, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
