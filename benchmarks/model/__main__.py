"""``python -m benchmarks.model``: count, predict, compare, report."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from . import fa4, report
from .hardware import Calibration, Gpu, load_calibration, load_gpu
from .kernels import ROOT, Kernel, choose, load_kernels
from .predict import Prediction, Row, predict

RESULTS = ROOT / "benchmarks" / "results"
RECORDINGS = ("sm90-forward", "sm90-backward", "sm80-forward", "sm80-backward")
PATHS = ("sm80", "sm90", "sm100")
# What the constants are fitted on: the long rows of one head dim, forward. All others are predicted.
FITTED = re.compile(r"d128")
# Rows for which B200 is predicted: head dims, heads. With and without a mask.
BLACKWELL_ROWS = (((64, 64), 32), ((96, 96), 16), ((128, 128), 16), ((192, 128), 16), ((256, 256), 8))
# Below this the card was not at its power limit of 700 W while a row was timed.
POWER_LIMIT = 660


def parse_row(name: str) -> Row | None:
    """The problem behind a row's name in a recording; None for packed rows, whose lengths the name does not tell."""
    match = re.fullmatch(r"b(\d+) s(\d+) h(\d+)(?:/(\d+))? d(\d+) (causal|full)", name)
    if not match:
        return None
    batch, length, heads, heads_k, head_dim, mask = match.groups()
    return Row((int(length),) * int(batch), int(heads), int(heads_k or heads), int(head_dim), mask == "causal")


def measured_rows(folder: Path = RESULTS / "h200") -> Iterator[dict[str, Any]]:
    """path, direction, row, flop, measured seconds and kernel of every row recorded on the H200 that the model can
    take."""
    for name in RECORDINGS:
        recording = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for measurement in recording["measurements"]:
            times = measurement["seconds"].get("flash_ext")
            if times and parse_row(measurement["row"]):
                yield {
                    "path": recording["options"]["path"],
                    "direction": measurement["direction"],
                    "row": measurement["row"],
                    "flop": measurement["flop"],
                    "measured": statistics.median(times),
                    "kernel": measurement["kernel"],
                }


class Counted:
    """The counts of all kernels, by name and mask."""

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        self.entries = {(entry["kernel"], entry["causal"]): entry for entry in entries}
        self.kernels = load_kernels()

    def find(self, path: str, direction: str, row: Row) -> tuple[Kernel, dict[str, Any]] | None:
        kernel = choose(self.kernels, path, direction, row.head_dims, row.causal)
        counts = self.entries.get((kernel.name, row.causal)) if kernel else None
        return (kernel, counts) if kernel and counts else None


def predict_rows(
    counted: Counted, rows: list[dict[str, Any]], gpu: Gpu, calibration: Calibration
) -> list[dict[str, Any]]:
    """The rows that a kernel was counted for, with the model's time and error. What was measured on another kernel than
    the one that serves the row now says nothing of this one."""
    found = []
    for measured in rows:
        row = parse_row(measured["row"])
        assert row is not None
        pair = counted.find(measured["path"], measured["direction"], row)
        if not pair or pair[0].name != measured["kernel"]:
            continue
        prediction = predict(*pair, row, gpu, calibration)
        found.append(
            {
                **measured,
                "seconds": prediction.seconds,
                "error": prediction.seconds / measured["measured"] - 1,
                "fitted": is_fitted(measured),
                "clock": prediction.clock,
                "clocks": prediction.clocks,
                "cost": asdict(prediction.cost),
                "busy": prediction.busy,
                "tensor_share": prediction.tensor_share,
                "helper_seconds": prediction.helper_seconds,
            }
        )
    return found


def is_fitted(measured: dict[str, Any]) -> bool:
    """Whether the constants are fitted on a row."""
    return (measured["path"], measured["direction"]) == ("sm90", "forward") and bool(FITTED.search(measured["row"]))


def calibrate(counted: Counted, gpu: Gpu, start: Calibration) -> Calibration:
    """Fits the constants that no clock was measured for: the grid point with the smallest mean error."""
    rows = [measured for measured in measured_rows() if is_fitted(measured)]
    best, best_error = start, float("inf")
    for cycles in (2.0, 3.0, 4.0, 5.0):
        for handover in (50.0, 100.0, 150.0):
            trial = replace(start, cycles_per_instruction=cycles, handover=handover)
            predicted = predict_rows(counted, rows, gpu, trial)
            # Neither of the others changes what the simulation says.
            for slope in (0.45e9, 0.5e9, 0.55e9, 0.6e9, 0.65e9, 0.7e9):
                for launch in (2e-6, 4e-6, 6e-6, 8e-6, 10e-6, 12e-6):
                    fitted = replace(trial, clock_slope=slope, launch_seconds=launch)
                    error = statistics.fmean(
                        abs(
                            (row["clocks"] / fitted.clock(gpu.clock, row["tensor_share"]) + launch) / row["measured"]
                            - 1
                        )
                        for row in predicted
                    )
                    if error < best_error:
                        best, best_error = fitted, error
    print(f"fitted on {len(rows)} rows, mean error {best_error:.1%}: {best}")
    return best


def group_errors(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Errors by path and direction, those the constants were fitted on and head dims beyond 128 apart."""
    groups: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for row in rows:
        problem = parse_row(row["row"])
        assert problem is not None
        wide = ", head dims beyond 128" if problem.head_dim > 128 else ""
        groups.setdefault((f"{row['path']} {row['direction']}{wide}", row["fitted"]), []).append(row)
    groups["all that nothing was fitted on", False] = [row for row in rows if not row["fitted"]]
    return [
        {
            "group": name,
            "count": len(members),
            "mean": report.mean_error(members),
            "largest": max((row["error"] for row in members), key=abs),
            "signed": statistics.fmean(row["error"] for row in members),
            "fitted": "yes" if fitted else "no",
        }
        for (name, fitted), members in groups.items()
        if members
    ]


def flop_of(row: Row, direction: str) -> float:
    """As the benchmarks count: two products forward, five backward, half of them with a causal mask."""
    d, d_v = row.head_dims
    columns = 3 * d + 2 * d_v if direction == "backward" else d + d_v
    return 2.0 * row.heads * columns * sum(float(n) ** 2 for n in row.lengths) / (2 if row.causal else 1)


def blackwell(counted: Counted, calibration: Calibration) -> list[dict[str, Any]]:
    """Predictions for B200: FlashAttention-4's forward and the sm100 kernels that were counted."""
    gpu = load_gpu("b200")
    h200 = load_gpu("h200")
    boost = replace(calibration, clock_idle=gpu.clock, clock_slope=0.0)
    # As much of the boost clock lost as the H200 loses of its highest.
    scale = gpu.clock / h200.clock
    derated = replace(
        calibration, clock_idle=calibration.clock_idle * scale, clock_slope=calibration.clock_slope * scale
    )
    # 16 TB/s read and 8 TB/s written, if they are the GPU's: see hardware.toml.
    slow_tmem = {**gpu.rates, "tmem_load": 58.0, "tmem_store": 29.0}
    # Of what no published measurement says for B200, one constant at a time.
    variants = {
        "3 clocks an instruction": (gpu, replace(boost, cycles_per_instruction=3.0)),
        "half the handover": (gpu, replace(boost, handover=boost.handover / 2)),
        "twice the load latency": (replace(gpu, name="b200, late", load_latency=2 * gpu.load_latency), boost),
        "tensor memory at 58 and 29 bytes": (replace(gpu, name="b200, slow", rates=slow_tmem), boost),
    }

    def line(what: str, kernel: Kernel, counts: dict[str, Any], row: Row, published: float | None) -> dict[str, Any]:
        flop = flop_of(row, kernel.direction)
        fast, slow = (predict(kernel, counts, row, gpu, each) for each in (boost, derated))
        return {
            "what": what,
            "kernel": counts["kernel"],
            "boost": flop / fast.seconds / 1e12,
            "derated": flop / slow.seconds / 1e12,
            "bound": flop / fast.seconds / 1e12 / max(fast.busy.values()),
            "published": published,
            "clocks": fast.clocks,
            "cost": asdict(fast.cost),
            "busy": fast.busy,
            "step_units": fast.step_units,
            "variants": {
                name: flop / predict(kernel, counts, row, *variant).seconds / 1e12 for name, variant in variants.items()
            },
        }

    long = Row((16384,), 16, 16, 128, False)
    kernel, counts, published = fa4.load()
    lines = [line("FlashAttention-4 forward d128 16k full", kernel, counts, long, published)]
    for direction in ("forward", "backward"):
        for (d, d_v), heads in BLACKWELL_ROWS:
            for causal in (False, True):
                row = Row((16384,), heads, heads, d, causal, d_v)
                pair = counted.find("sm100", direction, row)
                if pair and (pair[0].head_dim, pair[0].head_dim_v) == (d, d_v):
                    head_dims = f"d{d}" if d == d_v else f"d({d}, {d_v})"
                    what = f"sm100 {direction} {head_dims} 16k {'causal' if causal else 'full'}"
                    lines.append(line(what, *pair, row, None))
    return lines


def steps_of(counted: Counted, calibration: Calibration) -> list[dict[str, Any]]:
    """Clocks of an unmasked step, unit by unit, of every kernel that was counted for full calls."""
    lines = []
    for kernel in counted.kernels:
        counts = counted.entries.get((kernel.name, False))
        if not counts:
            continue
        gpu = load_gpu("b200" if kernel.path == "sm100" else "h200")
        row = Row((4096,), 16, 16, kernel.head_dim, False, kernel.head_dim_v)
        prediction: Prediction = predict(kernel, counts, row, gpu, calibration)
        lines.append(
            {
                "kernel": kernel.name,
                "units": prediction.step_units,
                "clocks": prediction.cost.full,
                "residual": max(
                    counted.entries[kernel.name, causal]["residual"]
                    for causal in (False, True)
                    if (kernel.name, causal) in counted.entries
                ),
            }
        )
    return lines


def against_counters(counted: Counted, gpu: Gpu, calibration: Calibration) -> list[dict[str, Any]]:
    """Errors of instructions, clocks and clock rate against what was counted and sampled on the H200, by group."""
    groups: dict[tuple[str, str], list[float]] = {}

    def rows(name: str) -> Iterator[tuple[str, dict[str, Any], Prediction]]:
        for measured in json.loads((RESULTS / "model" / name).read_text(encoding="utf-8"))["rows"]:
            row = parse_row(measured["row"])
            pair = counted.find(measured["path"], measured["direction"], row) if row else None
            if row and pair:
                group = f"{measured['path']} {measured['direction']}"
                if (measured["path"], row.head_dim) == ("sm90", 64):
                    group += ", d 64"
                yield group, measured, predict(*pair, row, gpu, calibration)

    for group, measured, prediction in rows("h200-counters.json"):
        for what, model in (("instructions", prediction.instructions), ("clocks", prediction.clocks)):
            of = measured["cycles" if what == "clocks" else what]
            groups.setdefault((what, group), []).append(model / of - 1)
    for group, measured, prediction in rows("h200-clocks.json"):
        if measured["watt"] >= POWER_LIMIT:
            groups.setdefault(("clock rate", group), []).append(prediction.clock / (measured["clock_mhz"] * 1e6) - 1)
    return [
        {
            "what": what,
            "group": group,
            "count": len(errors),
            "mean": statistics.fmean(map(abs, errors)),
            "signed": statistics.fmean(errors),
        }
        for (what, group), errors in sorted(groups.items(), key=lambda item: item[0])
    ]


def recount(paths: list[str], recorded: Path) -> list[dict[str, Any]]:
    """Counts of these paths from the emulator, a process for each, of the others from the recording."""
    entries = json.loads(recorded.read_text(encoding="utf-8")) if recorded.exists() else []
    for path in paths:
        command = [sys.executable, "-m", "benchmarks.model", "--count-path", path, "--counts", str(recorded)]
        subprocess.run(command, check=True, cwd=ROOT)
    return json.loads(recorded.read_text(encoding="utf-8")) if recorded.exists() else entries


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model", description=__doc__)
    parser.add_argument("--recorded", action="store_true", help="take all counts from the recording, run no emulator")
    parser.add_argument("--calibrate", action="store_true", help="fit the constants anew and print them")
    parser.add_argument("--out", type=Path, default=RESULTS / "model", help="folder of the report")
    parser.add_argument(
        "--counts", type=Path, default=RESULTS / "model" / "counts.json", help="the recording of counts"
    )
    parser.add_argument("--count-path", choices=PATHS, help="only count the kernels of this path")
    parser.add_argument("--kernel", action="append", help="with --count-path: these kernels only")
    arguments = parser.parse_args()
    if arguments.count_path:
        from .counting import count_path

        fresh = count_path(arguments.count_path, names=arguments.kernel)
        old = json.loads(arguments.counts.read_text(encoding="utf-8")) if arguments.counts.exists() else []
        new = {(entry["kernel"], entry["causal"]) for entry in fresh}
        kept = [
            entry
            for entry in old
            if (entry["kernel"], entry["causal"]) not in new
            and (arguments.kernel or not entry["kernel"].startswith(arguments.count_path))
        ]
        arguments.counts.parent.mkdir(parents=True, exist_ok=True)
        ordered = sorted(kept + fresh, key=lambda entry: (entry["kernel"], entry["causal"]))
        text = ",\n".join(json.dumps(_rounded(entry)) for entry in ordered)
        arguments.counts.write_text(f"[\n{text}\n]\n", encoding="utf-8")
        return 0
    if arguments.recorded:
        entries = json.loads(arguments.counts.read_text(encoding="utf-8"))
    else:
        built = [path for path in PATHS if (ROOT / "build/emulator" / path / f"libflash_ext_{path}.so").exists()]
        print(f"counting in the emulator: {', '.join(built) or 'nothing is built'}; the rest from {arguments.counts}")
        entries = recount(built, arguments.counts)
    counted = Counted(entries)
    gpu, calibration = load_gpu("h200"), load_calibration()
    if arguments.calibrate:
        calibration = calibrate(counted, gpu, calibration)
    rows = predict_rows(counted, list(measured_rows()), gpu, calibration)
    document = {
        "calibration": asdict(calibration),
        "errors": group_errors(rows),
        "rows": rows,
        "counters": against_counters(counted, gpu, calibration),
        "steps": steps_of(counted, calibration),
        "b200": blackwell(counted, calibration),
    }
    report.write(document, arguments.out)
    print(report.markdown(document))
    return 0


def _rounded(value: Any) -> Any:
    """Counts of a fit, to six digits."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
