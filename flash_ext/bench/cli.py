"""``python -m flash_ext bench``: measures, prints, records, plots, compares."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import flash_ext
from flash_ext import info
from flash_ext.bench import results
from flash_ext.bench.host import TWO_ALLOCATIONS, measure_host
from flash_ext.bench.plots import plot_recording
from flash_ext.bench.providers import (
    DEFAULT,
    DETERMINISTIC,
    LABELS,
    Provider,
    make_inputs,
    providers_for,
    reference_for,
)
from flash_ext.bench.report import print_comparison, print_recording
from flash_ext.bench.rows import DIRECTIONS, Row, load_rows, select_rows
from flash_ext.bench.runner import measure
from flash_ext.bench.timing import Timer
from flash_ext.environment import VARIABLES
from flash_ext.selection import FORCED_PATH

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# (warmup, measured) milliseconds of one turn. On a GPU 200 ms hold 15 repetitions of the longest row and thousands of
# the shortest.
_TURN_MS = {"cuda": (50, 200), "cpu": (20, 100)}
_QUICK_TURN_MS = {"cuda": (10, 50), "cpu": (5, 20)}

# What a turn and a row cost beside the repetitions: estimating their number, clearing the L2 cache, making tensors,
# comparing results. Seconds; only for the printed estimate.
_TURN_OVERHEAD = 0.15
_ROW_OVERHEAD = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bench``."""
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if PyTorch can use a GPU")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--direction", choices=(*DIRECTIONS, "both"), default="both")
    parser.add_argument("--rows", default="", metavar="REGEX", help="only rows whose name matches, e.g. 'd128 causal'")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each provider (default 3)")
    parser.add_argument("--quick", action="store_true", help="few rows and short turns, for a first look")
    parser.add_argument(
        "--deterministic", action="store_true", help="measure the deterministic backward beside the default one instead"
    )
    parser.add_argument("--host", action="store_true", help="measure the host time of a call instead")
    parser.add_argument("--list", action="store_true", help="print the rows and leave")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the recording")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw forward.png and backward.png")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a floor is not met")
    parser.add_argument("--read", type=Path, metavar="FILE", help="show (and plot) a recording instead of measuring")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="compare two recordings")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit code.

    0: done. 1: flash_ext was not measured in some row (no kernel, or a wrong result), or a floor is not met under
    ``--strict``, or the recordings compared have no row in common.
    """
    console = Console(width=None if os.isatty(1) else 200)
    if arguments.compare:
        first, second = arguments.compare
        recordings = (results.load(first), results.load(second))
        return 0 if print_comparison(*recordings, (first.name, second.name), console) else 1
    if arguments.list:
        for row in load_rows():
            console.print(f"{row.group:<9} {row.name}", highlight=False)
        return 0
    if arguments.read:
        recording = results.load(arguments.read)
    else:
        if arguments.rounds < 1:
            raise ValueError(f"flash_ext: --rounds={arguments.rounds}; expected 1 or more")
        recording = _measure_host(arguments, console) if arguments.host else _measure(arguments, console)
    if recording.measurements:
        print_recording(recording, console)
    if recording.host:
        _print_host(recording, console)
    if arguments.json and not arguments.read:
        results.save(recording, arguments.json)
        console.print(f"recording: {arguments.json}", highlight=False)
    if arguments.plot:
        for path in plot_recording(recording, arguments.plot):
            console.print(f"plot: {path}", highlight=False)
    return _exit_code(recording, arguments.strict)


def _exit_code(recording: results.Recording, strict: bool) -> int:
    if recording.host:
        return 0 if results.OURS in recording.host else 1
    if any(results.OURS not in m.seconds for m in recording.measurements):
        return 1
    return 1 if strict and not all(summary.meets for summary in results.summarise(recording)) else 0


def _device(arguments: argparse.Namespace) -> torch.device:
    chosen = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen == "cuda" and not torch.cuda.is_available():
        raise ValueError("flash_ext: --device=cuda; PyTorch can use no GPU here, expected cpu")
    return torch.device(chosen)


def _serving_path(rows: list[Row], device: torch.device, dtype: torch.dtype) -> str:
    """The path that flash_ext takes on this device: the forced one, else that of the first row it can serve."""
    if FORCED_PATH is not None:
        return FORCED_PATH
    for row in rows:
        small = dataclasses.replace(row, lengths=(64,))
        inputs = make_inputs(small, device, dtype, requires_grad=False)
        path = flash_ext.explain(
            inputs.q,
            inputs.k,
            inputs.v,
            cu_seqlens_q=inputs.cu_seqlens,
            cu_seqlens_k=inputs.cu_seqlens,
            causal=row.causal,
        ).path
        if path is not None:
            return path
    return "none"


def _new_recording(arguments: argparse.Namespace, device: torch.device, path: str) -> results.Recording:
    options: dict[str, Any] = {
        "path": path,
        "device": device.type,
        "dtype": arguments.dtype,
        "rounds": arguments.rounds,
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        # Where the libraries lie says nothing about a measurement, and is nobody else's business.
        "build": {key: value for key, value in flash_ext.build_info().items() if key != "library_dir"},
        "commit": _commit(),
    }
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return results.Recording(info.machine(), options, created=now)


def _commit() -> str:
    """Commit of the source tree this package is imported from, ``+`` appended if it is changed; of a wheel, or a tree
    without git, what flash_ext._C was built from."""
    root = Path(flash_ext.__file__).resolve().parent.parent
    built_from = str(flash_ext.build_info()["module"]["commit"])
    if not (root / ".git").exists():
        return built_from
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return built_from
    return result.stdout.strip() or built_from


def _measure(arguments: argparse.Namespace, console: Console) -> results.Recording:
    device, dtype = _device(arguments), DTYPES[arguments.dtype]
    rows = select_rows(device.type, arguments.rows, arguments.quick)
    directions = DIRECTIONS if arguments.direction == "both" else (arguments.direction,)
    path = _serving_path(rows, device, dtype)
    providers, reference = providers_for(device.type), reference_for(device.type, path)
    if arguments.deterministic:
        directions, providers, reference = ("backward",), [DETERMINISTIC, DEFAULT], DEFAULT.name
    warmup_ms, rep_ms = (_QUICK_TURN_MS if arguments.quick else _TURN_MS)[device.type]
    timer = Timer(device.type, warmup_ms, rep_ms)
    recording = _new_recording(arguments, device, path)
    recording.options["timer"] = timer.description
    if arguments.deterministic:
        recording.options["deterministic"] = True
    recording.machine["clocks_before"] = gpu_state()

    turns = len(rows) * len(directions) * len(providers) * arguments.rounds
    estimate = turns * ((warmup_ms + rep_ms) * 1e-3 + _TURN_OVERHEAD) + len(rows) * len(directions) * _ROW_OVERHEAD
    info.print_pairs(info.machine_lines(recording.machine))
    console.print(
        f"\nPath {path}, {arguments.dtype}, {', '.join(directions)}. Providers take turns, {arguments.rounds} rounds: "
        f"{', '.join(LABELS[p.name] for p in providers)}.\nTimer: {timer.description}. "
        f"{len(rows)} rows, about {_duration(estimate)}.\n",
        highlight=False,
    )
    with _progress(console) as progress:
        task = progress.add_task("", total=turns)
        for direction in directions:
            for row in rows:
                progress.update(task, description=f"{direction}: {row.name}")
                recording.measurements.append(
                    measure(
                        row,
                        direction,
                        providers=providers,
                        reference=reference,
                        device=device,
                        dtype=dtype,
                        rounds=arguments.rounds,
                        timer=timer,
                        on_turn=lambda: progress.advance(task),
                    )
                )
    recording.machine["clocks_after"] = gpu_state()
    return recording


def _measure_host(arguments: argparse.Namespace, console: Console) -> results.Recording:
    device, dtype = _device(arguments), DTYPES[arguments.dtype]
    providers: list[Provider] = providers_for(device.type)
    path = _serving_path(load_rows(), device, dtype)
    recording = _new_recording(arguments, device, path)
    info.print_pairs(info.machine_lines(recording.machine))
    console.print(f"\nPath {path}: host time of a forward call without gradients, (1, 64, 1, 64).\n", highlight=False)
    recording.host, recording.host_unavailable = measure_host(providers, device, dtype, arguments.rounds)
    return recording


def _print_host(recording: results.Recording, console: Console) -> None:
    table = Table(title="host time per call, microseconds", title_justify="left")
    for title in ("call", "median of the rounds", "above two allocations"):
        table.add_column(title, justify="left" if title == "call" else "right")
    floor = statistics.median(recording.host[TWO_ALLOCATIONS])
    for name, seconds in recording.host.items():
        median = statistics.median(seconds)
        table.add_row(LABELS.get(name, name), f"{median * 1e6:.2f}", f"{(median - floor) * 1e6:.2f}")
    console.print(table)
    for name, reason in recording.host_unavailable.items():
        console.print(f"not measured: {LABELS.get(name, name)}: {reason}", highlight=False, markup=False)


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=console.is_terminal)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def gpu_state() -> dict[str, str]:
    """Clocks, power and temperature of GPU 0 as nvidia-smi reports them; empty without it."""
    names = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")
    line = info.first_line(["nvidia-smi", "-i", "0", f"--query-gpu={','.join(names)}", "--format=csv,noheader"])
    values = [value.strip() for value in line.split(",")]
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}
