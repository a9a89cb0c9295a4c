"""What a benchmark run recorded, and what follows from it: speeds, ratios, verdicts.

A recording is one JSON file. Times are stored as measured, one per round and provider, none discarded; everything else
here is computed from them.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1

OURS = "flash_ext"

# Two runs of the same kernel differ by up to 2 %, so 0.98 of a floor is a tie.
TIE = 0.98

# The reference of a recording of the deterministic mode: flash_ext without it. What that mode may cost, in the mean and
# in any row.
DEFAULT = "default"
DETERMINISTIC_MEAN = 0.85
DETERMINISTIC_ROW = 0.75

# Fewer rounds than this are for a first look: they meet no floor.
MIN_ROUNDS = 3


@dataclass
class Measurement:
    """One row in one direction, every provider.

    Attributes
    ----------
    row, group, direction : str
        Which problem (`rows.Row.name`, `rows.Row.group`) and ``forward`` or ``backward``.
    flop : float
        Floating-point operations of one call.
    seconds : dict
        Provider to the median time of a call in each round, in seconds.
    unavailable : dict
        Provider to the reason why it was not measured.
    difference : dict
        Provider to the largest relative RMS difference of its results from those of the first PyTorch provider.
    reference : str
        The provider that ratios are taken to.
    floor : float or None
        The ratio to the reference that flash_ext is held to.
    share_of : tuple of (str, float) or None
        Another row, and the share of flash_ext's own speed there that this row is held to if it has no floor, or if the
        reference cannot serve it.
    kernel : str
        What flash_ext runs: a kernel's name, ``cpu``, or empty if it refuses.
    """

    row: str
    group: str
    direction: str
    flop: float
    reference: str
    floor: float | None = None
    share_of: tuple[str, float] | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    difference: dict[str, float] = field(default_factory=dict)
    kernel: str = ""

    @property
    def held_to_share(self) -> bool:
        """Judged by flash_ext's own speed on another row rather than by the reference's on this one."""
        return self.share_of is not None and (self.floor is None or self.reference not in self.seconds)

    def tflops(self, provider: str) -> float | None:
        """TFLOP/s at the median over the rounds, or None if the provider was not measured."""
        times = self.seconds.get(provider)
        return self.flop / statistics.median(times) / 1e12 if times else None

    def ratio(self, provider: str, to: str) -> float | None:
        """Median over the rounds of ``speed(provider) / speed(to)``, each taken within one round."""
        ours, theirs = self.seconds.get(provider), self.seconds.get(to)
        if not ours or not theirs:
            return None
        return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


@dataclass
class Recording:
    """A benchmark run: where, how and what."""

    machine: dict[str, Any]
    options: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    created: str = ""
    # Provider to host seconds per call in each round, and why another was not measured (`bench --host`).
    host: dict[str, list[float]] = field(default_factory=dict)
    host_unavailable: dict[str, str] = field(default_factory=dict)

    def find(self, row: str, direction: str) -> Measurement | None:
        return next((m for m in self.measurements if m.row == row and m.direction == direction), None)

    def providers(self) -> list[str]:
        """Every provider measured at least once, flash_ext first, then in the order of appearance."""
        names = list(dict.fromkeys(name for m in self.measurements for name in m.seconds))
        return sorted(names, key=lambda name: name != OURS)


@dataclass(frozen=True)
class Verdict:
    """How flash_ext stands in one measurement.

    Attributes
    ----------
    goal : float or None
        The ratio it is held to; None: the row has no goal, or what the goal is taken from was not measured.
    reached : float or None
        The ratio it has.
    score : float or None
        ``reached / goal``.
    word : str
        ``pass`` (score at least 1), ``tie`` (at least 0.98), ``below``, ``-`` (no goal) or ``not run``.
    """

    goal: float | None
    reached: float | None
    score: float | None
    word: str


def judge(measurement: Measurement, recording: Recording) -> Verdict:
    """The verdict on one measurement; a row held to a share of another is looked up in the same recording."""
    if OURS not in measurement.seconds:
        return Verdict(measurement.floor, None, None, "not run")
    goal = measurement.floor
    reached = measurement.ratio(OURS, measurement.reference)
    if measurement.share_of is not None and measurement.held_to_share:
        other = recording.find(measurement.share_of[0], measurement.direction)
        speed, other_speed = measurement.tflops(OURS), other.tflops(OURS) if other else None
        goal = measurement.share_of[1] if other_speed else None
        reached = speed / other_speed if speed and other_speed else None
    if goal is None or reached is None:
        return Verdict(goal, reached, None, "-")
    score = reached / goal
    tie = 1.0 if measurement.reference == DEFAULT else TIE
    return Verdict(goal, reached, score, "pass" if score >= 1.0 else "tie" if score >= tie else "below")


def geometric_mean(values: list[float]) -> float | None:
    """Geometric mean of positive numbers; None of none."""
    return math.exp(statistics.fmean(math.log(value) for value in values)) if values else None


@dataclass(frozen=True)
class Summary:
    """How one direction stands against its floors (rows held to a share of another row are not in the mean).

    Attributes
    ----------
    mean_score, mean_ratio : float or None
        Geometric means of ``ratio / floor`` and of the ratios to the reference; for the deterministic mode the first
        is the second over `DETERMINISTIC_MEAN`.
    counts : dict
        Verdict to number of rows.
    meets : bool
        The mean score is at least 1.00, no row is below a tie or without a result, and there were enough rounds.
    """

    direction: str
    mean_score: float | None
    mean_ratio: float | None
    counts: dict[str, int]
    meets: bool


def summarise(recording: Recording) -> list[Summary]:
    """One summary per measured direction."""
    summaries = []
    for direction in dict.fromkeys(m.direction for m in recording.measurements):
        scores, ratios = [], []
        counts: dict[str, int] = {}
        measurements = [m for m in recording.measurements if m.direction == direction]
        for measurement in measurements:
            verdict = judge(measurement, recording)
            counts[verdict.word] = counts.get(verdict.word, 0) + 1
            if verdict.score is not None and not measurement.held_to_share:
                scores.append(verdict.score)
            ratio = measurement.ratio(OURS, measurement.reference)
            if ratio is not None and not measurement.held_to_share:
                ratios.append(ratio)
        mean, mean_ratio = geometric_mean(scores), geometric_mean(ratios)
        if mean_ratio is not None and all(m.reference == DEFAULT for m in measurements):
            mean = mean_ratio / DETERMINISTIC_MEAN
        # A row without a verdict counts against it: what was not measured is not met.
        meets = mean is not None and mean >= 1.0 and set(counts) <= {"pass", "tie"}
        meets = meets and all(len(m.seconds[OURS]) >= MIN_ROUNDS for m in measurements)
        summaries.append(Summary(direction, mean, mean_ratio, counts, meets))
    return summaries


def save(recording: Recording, path: Path) -> None:
    """Writes the recording as JSON, with the derived numbers beside the measured ones for readers of the file."""
    rows = []
    for measurement in recording.measurements:
        derived = {
            "tflops": {name: measurement.tflops(name) for name in measurement.seconds},
            "ratio": measurement.ratio(OURS, measurement.reference),
            "verdict": asdict(judge(measurement, recording)),
        }
        rows.append({**asdict(measurement), "derived": derived})
    document = {
        "format": FORMAT,
        "created": recording.created,
        "machine": recording.machine,
        "options": recording.options,
        "measurements": rows,
        "host": recording.host,
        "host_unavailable": recording.host_unavailable,
        "summary": [asdict(summary) for summary in summarise(recording)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Recording:
    """Reads a recording; the derived numbers in the file are ignored and computed anew.

    Raises
    ------
    ValueError
        If the file is no recording of this format.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"flash_ext: {path} has format {document['format']}, this version reads {FORMAT}")
        measurements = []
        for entry in document["measurements"]:
            entry.pop("derived", None)
            if entry["share_of"] is not None:
                entry["share_of"] = tuple(entry["share_of"])
            measurements.append(Measurement(**entry))
        return Recording(
            document["machine"],
            document["options"],
            measurements,
            document["created"],
            document["host"],
            document["host_unavailable"],
        )
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"flash_ext: {path} is no recording of `python -m flash_ext bench`: {error!r}") from None
