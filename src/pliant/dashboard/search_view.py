"""Read the trials of a search for the page: cost and accuracy of each vector, and the front."""

from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from pliant.storage.tail import FileTail

MAX_POINTS = 1500  # of the cloud behind the front: the newest
COST_LABEL = "MACs of a step, share of the full network's"  # short enough for a phone
KEPT_LABEL = "mean share of filters kept"  # where records lack the MACs


class _TrialFields(msgspec.Struct):
    context: str = ""
    rates: tuple[float, ...] = ()
    side: int | None = None
    batch: float = 1.0
    accuracy: float | None = None
    cost: float | None = None


_trial_decoder = msgspec.json.Decoder(_TrialFields)


Step = tuple[tuple[float, ...], int | None, float]  # rates, image side, batch share


class SearchView:
    """The short trainings of a search so far, by the step they measure, at its latest stage."""

    def __init__(self, path: Path) -> None:
        self._tail = FileTail(path)
        self._trial_count = 0
        self._context = ""  # of the latest stage
        self._accuracy_sums: dict[Step, tuple[float, int]] = {}
        self._costs: dict[Step, float | None] = {}

    def __len__(self) -> int:
        return self._trial_count

    def read_more(self) -> bool:
        """Read the next part of the file and return whether there was one."""
        is_cut, text = self._tail.read_new_lines()
        if is_cut:
            self._trial_count = 0
            self._accuracy_sums.clear()
            self._costs.clear()
        for line in text.splitlines():
            try:
                trial = _trial_decoder.decode(line)
            except msgspec.DecodeError:
                continue  # damaged: the search ignores it too
            if trial.accuracy is not None and trial.rates:
                if trial.context != self._context:  # accuracies of two stages do not compare
                    self._context = trial.context
                    self._accuracy_sums.clear()
                    self._costs.clear()
                step = trial.rates, trial.side, trial.batch
                total, count = self._accuracy_sums.get(step, (0.0, 0))
                self._accuracy_sums[step] = (total + trial.accuracy, count + 1)
                self._costs[step] = trial.cost
                self._trial_count += 1
        return bool(text)

    def get_front_data(self) -> dict[str, Any]:
        """Return the newest vectors, the front of all vectors, and those with equal rates."""
        label = COST_LABEL
        costs = [cost for cost in self._costs.values() if cost is not None]
        if len(costs) < len(self._accuracy_sums):  # all points need the same axis
            label = KEPT_LABEL
            costs = [1 - sum(rates) / len(rates) for rates, _, _ in self._accuracy_sums]
        accuracies = [total / count for total, count in self._accuracy_sums.values()]
        points = list(zip(costs, accuracies, strict=True))
        equal = sorted(
            point
            for (rates, side, batch), point in zip(self._accuracy_sums, points, strict=True)
            if len(set(rates)) == 1 and side is None and batch == 1.0
        )
        return {
            "cost": label,
            "points": points[-MAX_POINTS:],
            "front": select_pareto_front(points),
            "equal": equal if len(equal) > 2 else [],  # every search measures both ends
        }


def select_pareto_front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no cheaper one equals or beats, by rising cost.

    >>> from pliant.dashboard.search_view import select_pareto_front
    >>> select_pareto_front([(0.5, 0.6), (0.5, 0.7), (1.0, 0.65), (0.9, 0.8)])
    [(0.5, 0.7), (0.9, 0.8)]
    """
    order = sorted(points, key=lambda point: (point[0], -point[1]))
    best = [-1.0, *accumulate((gain for _, gain in order), max)]
    return [point for point, before in zip(order, best, strict=False) if point[1] > before]
