"""Timing one call, and letting several providers take turns."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass


@dataclass(frozen=True)
class Timer:
    """Median time of a call.

    Attributes
    ----------
    device_type : str
        ``cuda``: `triton.testing.do_bench`, CUDA events around each call, the L2 cache flushed between calls.
        Else the wall clock.
    warmup_ms, rep_ms : int
        How long a call is repeated before and while it is measured.
    """

    device_type: str
    warmup_ms: int
    rep_ms: int

    def __call__(self, call: Callable[[], object]) -> float:
        """Seconds of one call, the median over the repetitions."""
        if self.device_type == "cuda":
            do_bench = importlib.import_module("triton.testing").do_bench
            return float(do_bench(call, warmup=self.warmup_ms, rep=self.rep_ms, return_mode="median")) * 1e-3
        return self._wall_clock(call)

    def _wall_clock(self, call: Callable[[], object]) -> float:
        self._repeat(call, self.warmup_ms * 1e-3, at_least=1)
        return statistics.median(self._repeat(call, self.rep_ms * 1e-3, at_least=3))

    @staticmethod
    def _repeat(call: Callable[[], object], budget: float, at_least: int) -> list[float]:
        times: list[float] = []
        while len(times) < at_least or sum(times) < budget:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return times

    @property
    def description(self) -> str:
        how = "triton.testing.do_bench, L2 flushed" if self.device_type == "cuda" else "wall clock"
        return f"{how}, median over {self.rep_ms} ms after {self.warmup_ms} ms"


def order_of_turns(names: list[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, provider) in the order of measuring: A B C, C B A, A B C, ...

    Reversing every other round gives each provider the same average place, so that a card that warms up or slows down
    within a round favours none.
    """
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            yield turn, name


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    contexts: Mapping[str, Callable[[], AbstractContextManager[object]]],
    rounds: int,
    timer: Timer,
    on_turn: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Times every call in every round.

    Parameters
    ----------
    calls : mapping of str to callable
        What to time, by provider.
    contexts : mapping of str to callable
        Makes the context that a provider's calls run in (the choice of a backend, say); entered outside the timing.
    rounds : int
        How often each provider has its turn.
    timer : Timer
    on_turn : callable
        Called after each turn, for a progress bar.

    Returns
    -------
    dict of str to list of float
        Seconds of one call, by provider and round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _, name in order_of_turns(list(calls), rounds):
        with contexts[name]():
            seconds[name].append(timer(calls[name]))
        on_turn()
    return seconds
