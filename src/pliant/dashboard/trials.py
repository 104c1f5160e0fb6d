"""What the page needs of a search: how much each vector costs and learns, and the front so far."""

from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from pliant.dashboard.tail import Tail

POINTS = 1500  # of the cloud behind the front, the newest ones
COST = "expected MACs of a step, share of the full network's"
KEPT = "mean share of filters that are kept"  # where the file does not tell the MACs


class _Trial(msgspec.Struct):
    rates: tuple[float, ...] = ()
    accuracy: float | None = None
    cost: float | None = None


_trials = msgspec.json.Decoder(_Trial)


class Search:
    """One search: the short trainings so far, by their vector of rates."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._known = 0
        self._found: dict[tuple[float, ...], tuple[float, int]] = {}
        self._costs: dict[tuple[float, ...], float | None] = {}

    def __len__(self) -> int:
        return self._known

    def feed(self) -> bool:
        """Take in the next part of the file; tell whether there was something."""
        is_cut, text = self._tail.look()
        if is_cut:
            self._known = 0
            self._found.clear()
            self._costs.clear()
        for raw in text.splitlines():
            try:
                trial = _trials.decode(raw)
            except msgspec.DecodeError:
                continue  # damaged: the search leaves it out too
            if trial.accuracy is not None and trial.rates:
                total, count = self._found.get(trial.rates, (0.0, 0))
                self._found[trial.rates] = (total + trial.accuracy, count + 1)
                self._costs[trial.rates] = trial.cost
                self._known += 1
        return bool(text)

    def shown(self) -> dict[str, Any]:
        """Return the newest vectors and the front of all; both come whole each time."""
        told = [cost for cost in self._costs.values() if cost is not None]
        is_told = len(told) == len(self._found)  # one axis for all, or the picture would lie
        costs = told if is_told else [1 - sum(rates) / len(rates) for rates in self._found]
        gains = [total / count for total, count in self._found.values()]
        points = list(zip(costs, gains, strict=True))
        label = COST if is_told else KEPT
        return {"cost": label, "points": points[-POINTS:], "front": front(points)}


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no cheaper one equals or beats, by rising cost.

    >>> from pliant.dashboard.trials import front
    >>> front([(0.5, 0.6), (0.5, 0.7), (1.0, 0.65), (0.9, 0.8)])
    [(0.5, 0.7), (0.9, 0.8)]
    """
    order = sorted(points, key=lambda point: (point[0], -point[1]))
    best = [-1.0, *accumulate((gain for _, gain in order), max)]
    return [point for point, before in zip(order, best, strict=False) if point[1] > before]
