"""The tables of constants."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Gpu:
    """A row of hardware.toml: see there for units and sources."""

    name: str
    sm_count: int
    clock: float
    memory: float
    rates: Mapping[str, float]
    load_latency: float


@dataclass(frozen=True)
class Calibration:
    """A row of calibration.toml: see there."""

    cycles_per_instruction: float
    handover: float
    launch_seconds: float
    clock_idle: float
    clock_slope: float

    def clock(self, highest: float, tensor_share: float) -> float:
        """Clock under a load that keeps the tensor cores busy for a share of the time, in Hz."""
        return min(highest, self.clock_idle - self.clock_slope * tensor_share)


def load_gpu(name: str) -> Gpu:
    table = tomllib.loads((FOLDER / "hardware.toml").read_text(encoding="utf-8"))
    return Gpu(**table[name])


def load_calibration(name: str = "h200") -> Calibration:
    table = tomllib.loads((FOLDER / "calibration.toml").read_text(encoding="utf-8"))
    return Calibration(**table[name])
