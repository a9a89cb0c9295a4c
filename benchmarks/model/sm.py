"""One SM, event by event: actors that work, wait and give work to queues, and units that they share.

An actor is a generator (a warpgroup, a warp that issues products). It yields `Work` (instructions of its own) or an
`Event` to wait for. What is under way at one time shares each unit: all slow down together, as far as the busiest of
the units they need makes them (progressive filling), and none is faster than alone.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field

from .demand import Demand

_NEVER = 1e30
_TINY = 1e-9


@dataclass
class Event:
    """Something that happens once. ``arrivals`` of them are needed."""

    arrivals: int = 1
    waiting: list[Callable[[], None]] = field(default_factory=list)

    @property
    def happened(self) -> bool:
        return self.arrivals <= 0


@dataclass
class Work:
    """Instructions of an actor: what they ask of the units, and the clocks they take at least."""

    demand: Demand
    least: float = 0.0


Actor = Generator["Work | Event", None, None]


@dataclass
class _Task:
    demand: Demand
    alone: float  # clocks, with the SM to itself
    done: Callable[[], None]
    left: float = 1.0
    rate: float = 0.0


class Simulation:
    """Runs actors on the units of one SM.

    Parameters
    ----------
    rates : mapping of str to float
        Amount of each unit per clock.
    """

    def __init__(self, rates: Mapping[str, float]) -> None:
        self.rates = dict(rates)
        self.now = 0.0
        self.busy: Demand = {}
        self._tasks: list[_Task] = []
        self._queues: dict[str, deque[_Task]] = {}
        self._timers: list[tuple[float, int, Event]] = []
        self._number = 0
        self._events: dict[tuple[object, ...], Event] = {}

    def event(self, *key: object, arrivals: int = 1) -> Event:
        """The event of a name, made when it is first asked for."""
        if key not in self._events:
            self._events[key] = Event(arrivals)
        return self._events[key]

    def arrive(self, event: Event) -> None:
        event.arrivals -= 1
        if event.happened:
            waiting, event.waiting = event.waiting, []
            for resume in waiting:
                resume()

    def after(self, clocks: float, event: Event) -> None:
        """An arrival in so many clocks."""
        self._number += 1
        heapq.heappush(self._timers, (self.now + clocks, self._number, event))

    def start(self, actor: Actor) -> None:
        self._advance(actor)

    def submit(self, queue: str, demand: Demand, latency: float, after: Event | None = None) -> Event:
        """Work for a unit that does one thing after another, such as the tensor cores; its result is there ``latency``
        clocks after the unit is done with it."""
        result = Event()
        task = _Task(demand, max(self._alone(demand), _TINY), lambda: None)

        def done() -> None:
            self.after(latency, result)
            line = self._queues[queue]
            line.popleft()
            if line:
                self._tasks.append(line[0])

        task.done = done
        line = self._queues.setdefault(queue, deque())
        line.append(task)
        if len(line) == 1:
            self._tasks.append(task)
        return result

    def copy(self, demand: Demand, latency: float, then: Event) -> None:
        """A copy that shares bandwidth with what else is under way and takes at least ``latency`` clocks."""
        self._tasks.append(_Task(demand, max(self._alone(demand), latency, _TINY), lambda: self.arrive(then)))

    def run(self) -> float:
        """Until nothing is left to do; returns the clocks it took.

        Raises
        ------
        RuntimeError
            Actors wait for what will not happen.
        """
        while self._tasks or self._timers:
            self._share()
            step = min((task.left / task.rate for task in self._tasks), default=_NEVER)
            if self._timers:
                step = min(step, self._timers[0][0] - self.now)
            step = max(step, 0.0)
            self.now += step
            finished = []
            for task in self._tasks:
                progress = min(task.left, task.rate * step)
                task.left -= progress
                for unit, amount in task.demand.items():
                    self.busy[unit] = self.busy.get(unit, 0.0) + amount * progress
                if task.left <= _TINY:
                    finished.append(task)
            for task in finished:
                self._tasks.remove(task)
            for task in finished:
                task.done()
            while self._timers and self._timers[0][0] <= self.now + _TINY:
                self.arrive(heapq.heappop(self._timers)[2])
        stuck = [key for key, event in self._events.items() if event.waiting]
        if stuck:
            raise RuntimeError(f"the schedule waits for ever for {stuck[:4]}")
        return self.now

    def _alone(self, demand: Demand) -> float:
        return max((amount / self.rates[unit] for unit, amount in demand.items() if unit in self.rates), default=0.0)

    def _advance(self, actor: Actor) -> None:
        def resume() -> None:
            self._advance(actor)

        for request in actor:
            if isinstance(request, Event):
                if request.happened:
                    continue
                request.waiting.append(resume)
                return
            alone = max(self._alone(request.demand), request.least)
            if alone <= _TINY:
                continue
            self._tasks.append(_Task(request.demand, alone, resume))
            return

    def _share(self) -> None:
        """The rate of each task: raised together, until a unit that some of them need is full; those stay."""
        rising = list(self._tasks)
        room = dict(self.rates)
        for task in rising:
            task.rate = 0.0
        level = 0.0
        while rising:
            load: Demand = {}
            for task in rising:
                for unit, amount in task.demand.items():
                    if amount and unit in room:
                        load[unit] = load.get(unit, 0.0) + amount / task.alone
            more = 1.0 - level
            full: str | None = None
            for unit, amount in load.items():
                if room[unit] / amount < more:
                    more, full = max(room[unit] / amount, 0.0), unit
            level += more
            for unit, amount in load.items():
                room[unit] -= amount * more
            for task in rising:
                task.rate = level / task.alone
            if full is None:
                return
            rising = [task for task in rising if not task.demand.get(full)]
