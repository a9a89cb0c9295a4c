"""The table, the plot and the recording of the model."""

from __future__ import annotations

import importlib
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

UNITS = ("tensor", "tensor_sync", "mufu", "fma", "alu", "issue", "shared", "tmem_load", "tmem_store", "l2")


def mean_error(rows: Iterable[dict[str, Any]]) -> float:
    """Mean of the absolute relative errors of time."""
    return statistics.fmean(abs(row["error"]) for row in rows)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def markdown(document: dict[str, Any]) -> str:
    """The whole report."""
    parts = [
        "# The performance model: what it says\n",
        "Made by `python -m benchmarks.model`; what it is: ../../model/README.md.\n",
    ]
    parts.append("## Errors on the H200\n")
    groups = document["errors"]
    parts.append(
        _table(
            ["rows", "how many", "mean absolute error", "largest", "mean signed", "used to fit"],
            [
                [
                    g["group"],
                    str(g["count"]),
                    f"{g['mean']:.1%}",
                    f"{g['largest']:+.1%}",
                    f"{g['signed']:+.1%}",
                    g["fitted"],
                ]
                for g in groups
            ],
        )
    )
    constants = document["calibration"]
    parts.append(
        "\nFitted constants: " + ", ".join(f"{name} = {value:.4g}" for name, value in constants.items()) + ".\n"
        "A positive error: the model takes longer than the GPU.\n"
    )
    parts.append("## Rows\n")
    parts.append(
        _table(
            [
                "path",
                "direction",
                "row",
                "measured us",
                "model us",
                "error",
                "TFLOP/s measured",
                "model",
                "GHz",
                "busiest unit",
            ],
            [
                [
                    row["path"],
                    row["direction"],
                    row["row"] + (" *" if row["fitted"] else ""),
                    f"{row['measured'] * 1e6:.0f}",
                    f"{row['seconds'] * 1e6:.0f}",
                    f"{row['error']:+.1%}",
                    f"{row['flop'] / row['measured'] / 1e12:.0f}",
                    f"{row['flop'] / row['seconds'] / 1e12:.0f}",
                    f"{row['clock'] / 1e9:.2f}",
                    "{} {:.0%}".format(*max(row["busy"].items(), key=lambda item: item[1])),
                ]
                for row in document["rows"]
            ],
        )
    )
    parts.append("\n`*`: the constants were fitted on it.\n")
    parts.append("## Against counters of the H200\n")
    parts.append(
        "Instructions and clocks of one launch under Nsight Compute (`h200-counters.json`), and the clock rate while "
        "rows were timed, of those at the power limit (`h200-clocks.json`). Recorded with earlier forms of the "
        "kernels: ../../model/README.md says what has changed since.\n"
    )
    parts.append(
        _table(
            ["what", "rows", "how many", "mean absolute error", "mean signed"],
            [
                [g["what"], g["group"], str(g["count"]), f"{g['mean']:.1%}", f"{g['signed']:+.1%}"]
                for g in document["counters"]
            ],
        )
    )
    parts.append("\n## Clocks of a step\n")
    parts.append(
        "An unmasked step of all CTAs of an SM: clocks for which each unit is busy, by count and rate, and what the "
        "simulation of the schedule makes of them. Residual: the largest difference of fit and count in any launch.\n"
    )
    units = [unit for unit in UNITS if any(unit in step["units"] for step in document["steps"])]
    parts.append(
        _table(
            ["kernel", *units, "step", "residual"],
            [
                [
                    step["kernel"],
                    *(f"{step['units'].get(unit, 0):.0f}" for unit in units),
                    f"{step['clocks']:.0f}",
                    f"{step['residual']:.2%}",
                ]
                for step in document["steps"]
            ],
        )
    )
    parts.append("\n## B200: *predicted*\n")
    parts.append(
        "No Blackwell was measured. Every figure of this section is predicted, by a model whose error is known on "
        "another GPU only; so none carries an error bar.\n"
    )
    parts.append(
        _table(
            [
                "what",
                "predicted TFLOP/s at 1.85 GHz",
                "with the H200's loss of clock",
                "at 1.85 GHz, were the busiest unit never idle",
                "published",
            ],
            [
                [
                    row["what"],
                    f"{row['boost']:.0f}",
                    f"{row['derated']:.0f}",
                    "{:.0f} ({})".format(row["bound"], max(row["busy"], key=lambda unit: row["busy"][unit])),
                    f"{row['published']:.0f}" if row["published"] else "-",
                ]
                for row in document["b200"]
            ],
        )
    )
    names = list(document["b200"][0]["variants"])
    parts.append(
        "\nWhat that hangs on: predicted TFLOP/s at 1.85 GHz if one constant that no published measurement says for "
        "B200 were another.\n"
    )
    parts.append(
        _table(
            ["what", "as above", *names],
            [
                [row["what"], f"{row['boost']:.0f}", *(f"{row['variants'][name]:.0f}" for name in names)]
                for row in document["b200"]
            ],
        )
    )
    return "\n".join(parts) + "\n"


def plot(document: dict[str, Any], file: Path) -> None:
    """Model against measurement, row by row, and the predictions for B200."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(15, 7.5), layout="constrained", width_ratios=(1, 1.1))
    colours = {"sm80": "#56B4E9", "sm90": "#D55E00"}
    for path, colour in colours.items():
        for direction, marker in (("forward", "o"), ("backward", "s")):
            for fitted in (True, False):
                rows = [
                    row
                    for row in document["rows"]
                    if (row["path"], row["direction"], row["fitted"]) == (path, direction, fitted)
                ]
                if not rows:
                    continue
                left.plot(
                    [row["flop"] / row["measured"] / 1e12 for row in rows],
                    [row["flop"] / row["seconds"] / 1e12 for row in rows],
                    marker,
                    color=colour,
                    markerfacecolor="none" if fitted else colour,
                    label=f"{path} {direction}{', fitted on' if fitted else ''}",
                )
    limit = 850
    left.plot([0, limit], [0, limit], color="black", linewidth=1)
    left.fill_between([0, limit], [0, 0.9 * limit], [0, 1.1 * limit], color="black", alpha=0.07, label="10 %")
    left.set(xlim=(150, limit), ylim=(150, limit), xlabel="measured TFLOP/s, H200", ylabel="model TFLOP/s")
    left.legend(fontsize=8, loc="upper left")
    left.grid(alpha=0.3)
    rows = document["b200"]
    places = range(len(rows))
    right.barh(places, [row["boost"] for row in rows], 0.7, color="#0072B2", alpha=0.35, label="predicted, 1.85 GHz")
    right.barh(
        places, [row["derated"] for row in rows], 0.4, color="#0072B2", label="predicted, the H200's loss of clock"
    )
    for place, row in zip(places, rows, strict=True):
        if row["published"]:
            right.plot([row["published"]] * 2, [place - 0.4, place + 0.4], color="black", linewidth=2.5)
    right.plot([], [], color="black", linewidth=2.5, label="published")
    right.set_yticks(places, [row["what"] for row in rows], fontsize=8)
    right.invert_yaxis()
    right.set(xlabel="TFLOP/s, B200: predicted, not measured")
    right.grid(axis="x", alpha=0.3)
    right.legend(fontsize=8, loc="lower right")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def write(document: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (folder / "model.md").write_text(markdown(document), encoding="utf-8")
    plot(document, folder / "model.png")
