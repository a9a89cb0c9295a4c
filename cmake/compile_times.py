"""Writes what each unit of the libraries costs to compile: a table in Markdown, of the build under build/.

    CCACHE_DISABLE=1 FLASH_EXT_PATHS=sm80,sm90,sm100 python setup.py --quiet build_ext --inplace --force
    python cmake/compile_times.py benchmarks/results/build/compile_times.md

CPU seconds (user and system, of nvcc and all that it starts) depend little on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import native_build
import report
import toolchain


def machine() -> str:
    """The processor's name and the number of threads that the build may use."""
    name = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {toolchain.read_options({'FLASH_EXT_PATHS': 'none'}).jobs} threads"


def table(reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """A sum for each path, then the units, slowest first.

    Parameters
    ----------
    reports : mapping of str to sequence of mapping
        Path to the reports of its units.

    Returns
    -------
    list of str
        Lines of Markdown.
    """
    lines = ["| path | units | CPU s | KB of objects |", "|---|---|---|---|"]
    for path, units in reports.items():
        seconds, size = (sum(unit[key] for unit in units) for key in ("seconds", "bytes"))
        lines.append(f"| {path} | {len(units)} | {seconds:.0f} | {size / 1024:.0f} |")
    everything = [unit for units in reports.values() for unit in units]
    seconds = sum(unit["seconds"] for unit in everything)
    lines += [f"| all | {len(everything)} | {seconds:.0f} | {sum(u['bytes'] for u in everything) / 1024:.0f} |", ""]
    lines += ["| unit | CPU s | KB | registers (architecture) |", "|---|---|---|---|"]
    for unit in sorted(everything, key=lambda unit: (-unit["seconds"], unit["unit"])):
        largest: dict[str, int] = {}
        for kernel in unit["kernels"]:
            arch = kernel["arch"].removeprefix("sm_")
            largest[arch] = max(largest.get(arch, 0), kernel["registers"])
        registers = ", ".join(f"{count} ({arch})" for arch, count in largest.items())
        lines.append(f"| {unit['unit']} | {unit['seconds']:.1f} | {unit['bytes'] / 1024:.0f} | {registers} |")
    return lines


def main() -> int:
    """Write the file; refuse a build whose objects came from a compiler cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--build", type=Path, default=native_build.BUILD_DIR, help="default: build/ of this checkout")
    arguments = parser.parse_args()
    reports: dict[str, list[dict[str, Any]]] = {}
    for path in toolchain.PATHS:
        manifest = arguments.build / path / "manifest.json"
        if manifest.is_file():
            units = [entry["unit"] for entry in json.loads(manifest.read_text(encoding="utf-8"))["units"]]
            reports[path] = report.read_reports(arguments.build / path, units)
    cached = [unit["unit"] for units in reports.values() for unit in units if unit["cached"]]
    if cached or not reports:
        what = f"{len(cached)} units came from the compiler cache" if cached else f"{arguments.build} holds no build"
        print(f"flash_ext: {what}; build as --help says", file=sys.stderr)
        return 1
    tools = json.loads((arguments.build / "toolchain" / "toolchain.json").read_text(encoding="utf-8"))
    lines = [
        "# Compile times",
        "",
        f"Commit {native_build.read_commit(arguments.build.parent)}; nvcc {tools['cuda_version']}, "
        f"{tools['host_version']}, CUTLASS {tools['cutlass_version'] or 'none'}; {machine()}. "
        "Written by cmake/compile_times.py.",
        "",
        *table(reports),
    ]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
