"""Compiles one unit of a path's library: object, PTX and a report, in a folder of its own.

    compile_unit.py TOOLCHAIN.json --unit NAME --source FILE.cu --folder build/sm80/units/NAME -- NVCC FLAGS

Runs in the source folder and hands nvcc relative paths only, so that objects do not depend on where the source lies and
a compiler cache serves every clone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

from report import parse_ptxas


def main() -> int:
    """Compile the unit given on the command line; returns nvcc's exit status."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("toolchain", type=Path)
    parser.add_argument("--unit", required=True)
    parser.add_argument("--source", required=True)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--cutlass", action="store_true", help="include the CUTLASS headers")
    parser.add_argument("flags", nargs="+")
    arguments = parser.parse_args()
    toolchain = json.loads(arguments.toolchain.read_text(encoding="utf-8"))
    unit, folder = arguments.unit, arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    remove_all_but(folder, keep=())

    object_file, ptx_file, depfile = (folder / f"{unit}{suffix}" for suffix in (".o", ".ptx", ".d"))
    nvcc = [toolchain["nvcc"]]
    if toolchain["host_compiler"]:
        nvcc += ["-ccbin", toolchain["host_compiler"]]
    nvcc += arguments.flags
    if arguments.cutlass:
        nvcc += ["-isystem", relative_if_inside(toolchain["cutlass_include"])]

    # --objdir-as-tempdir: else names of temporary files enter the object. It makes --keep write beside the object, too.
    command = [*nvcc, "-Xptxas", "-v", "--keep", "--objdir-as-tempdir"]
    command += ["-MD", "-MF", str(depfile), "-c", arguments.source, "-o", str(object_file)]
    environment = dict(os.environ)
    if toolchain["ccache"]:
        command.insert(0, toolchain["ccache"])
        # nvcc alone does not tell which cicc and ptxas lie beside it; its modification time changes with every install.
        fingerprint = (arguments.toolchain.parent / "fingerprint.txt").read_bytes()
        environment["CCACHE_COMPILERCHECK"] = f"string:{hashlib.sha256(fingerprint).hexdigest()}"
        if "-lineinfo" not in arguments.flags:  # which is all that names the folder
            environment["CCACHE_NOHASHDIR"] = "1"
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    kernels, messages = parse_ptxas(result.stderr)
    sys.stdout.write(result.stdout + messages)
    if result.returncode != 0:
        remove_all_but(folder, keep=())
        return result.returncode

    kept = sorted(folder.glob("*.ptx"))
    cached = not kept
    if cached:
        # A hit of the compiler cache restores the object alone. The front end makes the PTX again, from the same flags
        # (0.4 s of a probe's 2 s); on a miss nvcc has just kept it, which costs nothing.
        status = subprocess.run([*nvcc, "-ptx", arguments.source, "-o", str(ptx_file)]).returncode
        if status != 0:
            return status
    else:
        kept[0].replace(ptx_file)
    os.utime(ptx_file)  # it was written before ptxas and the host compiler ran; older than its object would mean stale

    remove_all_but(folder, keep=(object_file, ptx_file, depfile))
    keep_own_dependencies(depfile, object_file)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = {
        "unit": unit,
        "seconds": round(children.ru_utime + children.ru_stime, 2),  # of a CPU: the same whatever else runs
        "cached": cached,
        "bytes": object_file.stat().st_size,
        "kernels": [kernel.to_dict() for kernel in kernels],
    }
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def relative_if_inside(folder: str) -> str:
    """A folder of the source tree relative to it, any other as it is."""
    relative = os.path.relpath(folder)
    return folder if relative.startswith("..") else relative


def remove_all_but(folder: Path, keep: tuple[Path, ...]) -> None:
    """Delete nvcc's intermediate files, which are a hundred times the object."""
    for file in folder.iterdir():
        if file not in keep:
            file.unlink()


def keep_own_dependencies(depfile: Path, target: Path) -> None:
    """Reduce a dependency file to this project's sources, absolute, for the target's absolute path.

    For the toolkit's and CUTLASS's headers their version stands, which the build tracks by fingerprint: an isolated
    build unpacks them anew each time.
    """
    text = depfile.read_text(encoding="utf-8").replace("\\\n", " ")
    names = re.split(r"\s*:\s", text, maxsplit=1)[1]  # nvcc writes "target : names", ccache "target: names"
    own = [os.path.abspath(name) for name in names.split() if not os.path.isabs(name)]
    escaped = [name.replace(" ", "\\ ") for name in [str(target.resolve()), *own]]
    depfile.write_text(f"{escaped[0]}: {' '.join(escaped[1:])}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
