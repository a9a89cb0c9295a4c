"""Tables for the terminal: a recording, its summary, and a comparison of two."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from flash_ext.bench.providers import LABELS
from flash_ext.bench.results import OURS, Measurement, Recording, geometric_mean, judge, summarise

_STYLE = {"pass": "green", "tie": "yellow", "below": "red", "not run": "red"}


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _speed(value: float | None) -> str:
    """TFLOP/s with three significant digits: GPUs reach hundreds, CPUs less than one."""
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def print_recording(recording: Recording, console: Console) -> None:
    """One table per direction and one line of summary for each."""
    providers = recording.providers()
    references = list(dict.fromkeys(m.reference for m in recording.measurements))
    # The ratio to FlashAttention-2 is of interest beside the one to cuDNN.
    compared = [name for name in dict.fromkeys([*references, "fa2"]) if name in providers]
    for summary in summarise(recording):
        table = Table(title=f"{summary.direction}, TFLOP/s (median of the rounds)", title_justify="left")
        table.add_column("row", no_wrap=True)
        for name in providers:
            table.add_column(name, justify="right")
        for name in compared:
            table.add_column(f"/ {name}", justify="right")
        judged = any(word != "-" for word in summary.counts)
        for title in ("goal", "of goal", "verdict") if judged else ():
            table.add_column(title, justify="right")
        for measurement in recording.measurements:
            if measurement.direction != summary.direction:
                continue
            verdict = judge(measurement, recording)
            style = _STYLE.get(verdict.word, "")
            word = f"[{style}]{verdict.word}[/]" if style else verdict.word
            table.add_row(
                measurement.row,
                *(_speed(measurement.tflops(name)) for name in providers),
                *(_number(measurement.ratio(OURS, name), 3) for name in compared),
                *((_number(verdict.goal, 2), _number(verdict.score, 3), word) if judged else ()),
            )
        console.print(table)
        counts = ", ".join(f"{count} {word}" for word, count in summary.counts.items() if word != "-")
        mean = f"geometric mean {_number(summary.mean_ratio, 3)} of {' / '.join(references)}"
        if summary.mean_score is not None:
            mean += f", {summary.mean_score:.3f} of the floors"
        verdict_line = f"; {counts}; floors {'met' if summary.meets else 'not met'}" if counts else ""
        console.print(f"{summary.direction}: {mean}{verdict_line}\n", highlight=False)
    _print_unavailable(recording.measurements, console)


def _print_unavailable(measurements: list[Measurement], console: Console) -> None:
    """What was not measured and why, one line for each provider and reason."""
    where: dict[tuple[str, str], list[str]] = {}
    for measurement in measurements:
        for name, reason in measurement.unavailable.items():
            where.setdefault((name, reason), []).append(f"{measurement.row} {measurement.direction}")
    for (name, reason), rows in where.items():
        place = rows[0] if len(rows) == 1 else f"{len(rows)} rows"
        console.print(f"not measured: {LABELS.get(name, name)}, {place}: {reason}", highlight=False, markup=False)


def print_comparison(before: Recording, after: Recording, names: tuple[str, str], console: Console) -> int:
    """Compares two recordings row by row; returns how many rows they share.

    The speeds of two runs differ by a few percent for every provider, so the change of the ratio to the reference,
    taken within each run, stands beside the change of the speed.
    """
    console.print(f"A: {names[0]} ({before.created}, {_device(before)})", highlight=False, markup=False)
    console.print(f"B: {names[1]} ({after.created}, {_device(after)})", highlight=False, markup=False)
    shared = [(m, after.find(m.row, m.direction)) for m in before.measurements]
    pairs = [(a, b) for a, b in shared if b is not None]
    for direction in dict.fromkeys(a.direction for a, _ in pairs):
        table = Table(title=f"{direction}, B over A", title_justify="left")
        table.add_column("row", no_wrap=True)
        for title in ("A TFLOP/s", "B TFLOP/s", "speed", "A ratio", "B ratio", "ratio", "reference speed"):
            table.add_column(title, justify="right")
        speeds, ratios = [], []
        for a, b in pairs:
            if a.direction != direction:
                continue
            speed = _quotient(b.tflops(OURS), a.tflops(OURS))
            ratio_a, ratio_b = a.ratio(OURS, a.reference), b.ratio(OURS, b.reference)
            ratio = _quotient(ratio_b, ratio_a) if a.reference == b.reference else None
            reference = _quotient(b.tflops(a.reference), a.tflops(a.reference))
            speeds += [speed] if speed else []
            ratios += [ratio] if ratio else []
            table.add_row(
                a.row,
                _speed(a.tflops(OURS)),
                _speed(b.tflops(OURS)),
                *(_number(value, 3) for value in (speed, ratio_a, ratio_b, ratio, reference)),
            )
        console.print(table)
        console.print(
            f"{direction}: geometric mean of B over A: speed {_number(geometric_mean(speeds), 3)}, "
            f"ratio to the reference {_number(geometric_mean(ratios), 3)}\n",
            highlight=False,
        )
    return len(pairs)


def _device(recording: Recording) -> str:
    gpus = recording.machine.get("gpus") or []
    return str(gpus[0]["name"] if gpus else recording.machine.get("cpu", "unknown machine"))


def _quotient(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None
