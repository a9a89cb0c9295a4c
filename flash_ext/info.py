"""What this installation and this machine are: versions, GPUs, paths, kernels."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import flash_ext
from flash_ext import _C
from flash_ext.environment import VARIABLES
from flash_ext.support_table import kernels_of_source, replace_table, support_table


def first_line(command: list[str]) -> str:
    """First line a command prints; empty if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = result.stdout.strip().splitlines()
    return lines[0].strip() if result.returncode == 0 and lines else ""


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def module_version(name: str) -> str:
    """Version of an importable module, or ``not installed``."""
    if importlib.util.find_spec(name) is None:
        return "not installed"
    return str(getattr(importlib.import_module(name), "__version__", "unknown"))


def gpus() -> list[dict[str, Any]]:
    """Name, compute capability, SMs and memory (GiB) of every GPU that PyTorch sees."""
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "sm_count": properties.multi_processor_count,
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    return found


def driver_version() -> str:
    """Version of the NVIDIA driver, or an empty string."""
    return first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])


def machine() -> dict[str, Any]:
    """Hardware and software under flash_ext, as plain data."""
    on_gpu = torch.cuda.is_available()
    cudnn = torch.backends.cudnn.version() if on_gpu else None
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "cpu_count": os.cpu_count(),
        "gpus": gpus() if on_gpu else [],
        "driver": driver_version() if on_gpu else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "cudnn": str(cudnn) if cudnn else "",
        "triton": module_version("triton"),
        "flash_ext": flash_ext.__version__,
    }


def machine_lines(description: dict[str, Any]) -> list[tuple[str, str]]:
    """The machine as (what, value) pairs for a reader."""
    lines = [("flash_ext", description["flash_ext"]), ("Python", description["python"])]
    cuda = f", CUDA {description['cuda']}" if description["cuda"] else ", built without CUDA"
    cudnn = f", cuDNN {description['cudnn']}" if description["cudnn"] else ""
    lines.append(("PyTorch", f"{description['torch']}{cuda}{cudnn}"))
    lines.append(("System", description["system"]))
    lines.append(("CPU", f"{description['cpu']} ({description['cpu_count']} threads)"))
    for index, gpu in enumerate(description["gpus"]):
        facts = f"compute capability {gpu['compute_capability']}, {gpu['sm_count']} SMs, {gpu['memory_gib']} GiB"
        lines.append((f"GPU {index}", f"{gpu['name']}: {facts}"))
    if not description["gpus"]:
        lines.append(("GPU", "none that PyTorch can use"))
    if description["driver"]:
        lines.append(("Driver", description["driver"]))
    return lines


def print_pairs(pairs: list[tuple[str, str]]) -> None:
    """Two aligned columns."""
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        print(f"  {name:<{width}}  {value}")


def unusable_libraries() -> dict[str, str]:
    """For each path whose library is there and cannot be loaded, why."""
    reasons = {}
    for path in _C.available_paths():
        try:
            _C.kernels(path)
        except RuntimeError as error:
            reasons[path] = str(error).removeprefix("flash_ext: ")
    return reasons


def path_lines(unusable: dict[str, str]) -> list[tuple[str, str]]:
    """Each path with its GPUs, and its library or why there is none."""
    available = _C.available_paths()
    lines = []
    for path in _C.PATHS:
        if path in unusable:
            state = f"unusable: {unusable[path]}"
        elif path in available:
            count = len(_C.kernels(path))
            build = _C.library_build_info(path)
            state = f"{count} kernel{'' if count == 1 else 's'}, CUDA {build.get('cuda', 'unknown')}"
        else:
            state = f"not built ({_C.library_file(path)} does not exist)"
        lines.append((path, f"compute capability {_C.path_gpus(path)}: {state}"))
    lines.append(("cpu", "any machine: through PyTorch"))
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``info``."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="everything as JSON")
    form.add_argument("--support-table", action="store_true", help="only the support table, as markdown")
    parser.add_argument("--source", type=Path, metavar="DIR", help="--support-table: of this source tree, not as built")
    parser.add_argument(
        "--update", type=Path, metavar="README.md", help="--support-table: put it into this file of a source tree"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints what was asked for; returns the exit code: 1 if a path's library is there and cannot be loaded."""
    if (arguments.source or arguments.update) and not arguments.support_table:
        raise ValueError("flash_ext: --source and --update go with --support-table")
    if arguments.support_table:
        source = arguments.source or (arguments.update.resolve().parent if arguments.update else None)
        try:
            table = support_table(kernels_of_source(source) if source else flash_ext.kernels())
        except RuntimeError as error:  # a library cannot be loaded
            print(error, file=sys.stderr)
            return 1
        if arguments.update:
            text = arguments.update.read_text(encoding="utf-8")
            arguments.update.write_text(replace_table(text, table), encoding="utf-8")
        else:
            print(table)
        return 0
    description = machine()
    set_variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    unusable = unusable_libraries()
    usable = [path for path in _C.available_paths() if path not in unusable]
    kernels = [kernel for path in usable for kernel in _C.kernels(path)]
    if arguments.json:
        everything = {
            "machine": description,
            "environment": set_variables,
            "build": {
                "module": _C.build_info(),
                "library_dir": _C.library_dir(),
                "libraries": {path: _C.library_build_info(path) for path in usable},
                "unusable": unusable,
            },
            "kernels": kernels,
        }
        print(json.dumps(everything, indent=1))
        return 1 if unusable else 0
    print("Machine")
    version, *others = machine_lines(description)
    print_pairs([version, ("Commit", str(_C.build_info()["commit"])), *others])
    print("\nPaths")
    print_pairs(path_lines(unusable))
    if set_variables:
        print("\nEnvironment")
        print_pairs(list(set_variables.items()))
    print(f"\nKernels ({len(kernels)} built, from {_C.library_dir()})")
    for kernel in kernels:
        print(f"  {kernel['name']:<52} {kernel['shared_memory'] / 1024:6.1f} KB  {', '.join(kernel['features'])}")
    return 1 if unusable else 0
