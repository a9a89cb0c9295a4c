"""PNG plots of a recording, drawn with matplotlib."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from flash_ext.bench.providers import LABELS
from flash_ext.bench.results import OURS, Measurement, Recording, judge

# One colour per provider, the same in every plot; distinguishable with the common colour-vision deficiencies
# (Okabe and Ito).
COLOURS = {
    "flash_ext": "#D55E00",
    "fa2": "#56B4E9",
    "cudnn": "#009E73",
    "default": "#009E73",
    "sdpa": "#56B4E9",
    "fa3": "#0072B2",
}


def plot_recording(recording: Recording, folder: Path) -> list[Path]:
    """Draws ``<direction>.png`` for each direction: speeds above, ratios to the reference with the goals below.

    Parameters
    ----------
    recording : Recording
    folder : Path
        Made if it is missing.

    Returns
    -------
    list of Path
        The files written.
    """
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")  # no display needed
    pyplot = importlib.import_module("matplotlib.pyplot")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for direction in dict.fromkeys(m.direction for m in recording.measurements):
        measurements = [m for m in recording.measurements if m.direction == direction and m.seconds]
        if not measurements:
            continue
        width = max(8.0, 2.5 + 0.55 * len(measurements))
        figure, (speed, ratio) = pyplot.subplots(2, 1, figsize=(width, 9.0), sharex=True, layout="constrained")
        _draw_speeds(speed, measurements, recording.providers())
        _draw_ratios(ratio, measurements, recording)
        figure.suptitle(_title(recording, direction), fontsize=11)
        path = folder / f"{direction}.png"
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        written.append(path)
    return written


def _title(recording: Recording, direction: str) -> str:
    gpus = recording.machine.get("gpus") or []
    device = gpus[0]["name"] if gpus else recording.machine.get("cpu", "")
    options = recording.options
    return (
        f"flash_ext {recording.machine.get('flash_ext', '')}, path {options.get('path', '')}, "
        f"{'deterministic ' if options.get('deterministic') else ''}{direction}, "
        f"{options.get('dtype', '')}, {device}, PyTorch {recording.machine.get('torch', '')}"
    )


def _draw_speeds(axes: Any, measurements: list[Measurement], providers: list[str]) -> None:
    bar = 0.8 / len(providers)
    for index, name in enumerate(providers):
        places = [row - 0.4 + (index + 0.5) * bar for row in range(len(measurements))]
        heights = [m.tflops(name) or 0.0 for m in measurements]
        axes.bar(places, heights, bar * 0.92, color=COLOURS.get(name, "#999999"), label=LABELS.get(name, name))
    axes.set_ylabel("TFLOP/s (median)")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(ncols=len(providers), loc="upper left", bbox_to_anchor=(0.0, 1.12), frameon=False, fontsize=9)


def _draw_ratios(axes: Any, measurements: list[Measurement], recording: Recording) -> None:
    reference = measurements[0].reference
    colour = COLOURS[OURS]
    has_goal = False
    for row, measurement in enumerate(measurements):
        ours, theirs = measurement.seconds.get(OURS), measurement.seconds.get(reference)
        if not ours or not theirs:
            continue
        rounds = [b / a for a, b in zip(ours, theirs, strict=True)]
        median = measurement.ratio(OURS, reference)
        axes.plot([row] * len(rounds), rounds, "o", color=colour, alpha=0.4, markersize=4)
        axes.plot([row - 0.28, row + 0.28], [median] * 2, color=colour, linewidth=2.5)
        goal = None if measurement.held_to_share else judge(measurement, recording).goal
        if goal is not None:
            label = None if has_goal else "floor"
            has_goal = True
            style = {"color": "black", "linewidth": 1.2, "linestyle": (0, (3, 2))}
            axes.plot([row - 0.4, row + 0.4], [goal] * 2, zorder=3, label=label, **style)
    axes.plot([], [], color=colour, linewidth=2.5, label="flash_ext, median of the rounds (dots: each round)")
    axes.axhline(1.0, color=COLOURS.get(reference, "#999999"), linewidth=1.5, label=LABELS.get(reference, reference))
    axes.set_ylabel(f"speed over {LABELS.get(reference, reference)}")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=3, loc="upper left", bbox_to_anchor=(0.0, 1.12), frameon=False, fontsize=9)
    axes.set_xlim(-0.6, len(measurements) - 0.4)
    axes.set_xticks(range(len(measurements)), [m.row for m in measurements], rotation=55, ha="right", fontsize=8)
