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
# Rows for which B200 is predicted: head dim, heads, causal.
BLACKWELL_ROWS = ((64, 32, False), (64, 32, True), (128, 16, False), (128, 16, True), (256, 8, False), (256, 8, True))


def parse_row(name: str) -> Row | None:
    """The problem behind a row's name in a recording; None for packed rows, whose lengths the name does not tell."""
    match = re.fullmatch(r"b(\d+) s(\d+) h(\d+)(?:/(\d+))? d(\d+) (causal|full)", name)
    if not match:
        return None
    batch, length, heads, heads_k, head_dim, mask = match.groups()
    return Row((int(length),) * int(batch), int(heads), int(heads_k or heads), int(head_dim), mask == "causal")


def measured_rows(folder: Path = RESULTS / "h200") -> Iterator[dict[str, Any]]:
    """path, direction, row, flop and measured seconds of every row recorded on the H200 that the model can take."""
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
                }


class Counted:
    """The counts of all kernels, by name and mask."""

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        self.entries = {(entry["kernel"], entry["causal"]): entry for entry in entries}
        self.kernels = load_kernels()

    def find(self, path: str, direction: str, row: Row) -> tuple[Kernel, dict[str, Any]] | None:
        kernel = choose(self.kernels, path, direction, row.head_dim, row.causal)
        counts = self.entries.get((kernel.name, row.causal)) if kernel else None
        return (kernel, counts) if kernel and counts else None


def predict_rows(
    counted: Counted, rows: list[dict[str, Any]], gpu: Gpu, calibration: Calibration
) -> list[dict[str, Any]]:
    """The rows that a kernel was counted for, with the model's time and error."""
    found = []
    for measured in rows:
        row = parse_row(measured["row"])
        assert row is not None
        pair = counted.find(measured["path"], measured["direction"], row)
        if not pair:
            continue
        prediction = predict(*pair, row, gpu, calibration)
        found.append(
            {
                **measured,
                "kernel": pair[0].name,
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
    """Errors by path and direction, those the constants were fitted on apart."""
    groups: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((f"{row['path']} {row['direction']}", row["fitted"]), []).append(row)
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

    def line(what: str, kernel: Kernel, counts: dict[str, Any], row: Row, published: float | None) -> dict[str, Any]:
        flop = 4.0 * row.heads * row.head_dim * sum(float(n) ** 2 for n in row.lengths) / (2 if row.causal else 1)
        flop *= 2.5 if kernel.direction == "backward" else 1
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
        }

    long = Row((16384,), 16, 16, 128, False)
    kernel, counts, published = fa4.load()
    lines = [line("FlashAttention-4 forward d128 16k full", kernel, counts, long, published)]
    for direction in ("forward", "backward"):
        for head_dim, heads, causal in BLACKWELL_ROWS:
            row = Row((16384,), heads, heads, head_dim, causal)
            pair = counted.find("sm100", direction, row)
            if pair and pair[0].head_dim == head_dim:
                what = f"sm100 {direction} d{head_dim} 16k {'causal' if causal else 'full'}"
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
        row = Row((4096,), 16, 16, kernel.head_dim, False)
        prediction: Prediction = predict(kernel, counts, row, gpu, calibration)
        lines.append(
            {
                "kernel": kernel.name,
                "units": prediction.step_units,
                "clocks": prediction.cost.full,
                "residual": counts["residual"],
            }
        )
    return lines


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
