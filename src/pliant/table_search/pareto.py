"""Pareto fronts of objectives that are all minimised, and the hypervolume of two."""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def find_pareto_front(costs: FloatArray, losses: FloatArray) -> IntArray:
    """Return the indices of the undominated points by rising cost, each of equal points once.

    >>> import numpy as np
    >>> from pliant.table_search.pareto import find_pareto_front
    >>> costs, losses = np.array([0.0, 1.0, 0.5, 0.5]), np.array([1.0, 0.0, 0.2, 0.3])
    >>> find_pareto_front(costs, losses).tolist()
    [0, 2, 1]
    """
    order = np.lexsort((losses, costs))
    best = np.minimum.accumulate(losses[order])
    is_new = np.concatenate([[True], best[1:] < best[:-1]]) if len(order) else np.array([], bool)
    front: IntArray = order[is_new]
    return front


def find_undominated(costs: FloatArray) -> list[bool]:
    """Return for each row whether no other is as low everywhere and lower somewhere."""
    return [not ((costs <= row).all(axis=1) & (costs < row).any(axis=1)).any() for row in costs]


def hypervolume(costs: FloatArray, losses: FloatArray) -> float:
    """Return the area between a front and the point (1, 1), which it should dominate.

    At this point a vector costs as much as the full network and loses as the highest rates do.

    >>> import numpy as np
    >>> from pliant.table_search.pareto import hypervolume
    >>> hypervolume(np.array([0.0, 0.5]), np.array([0.5, 0.25]))
    0.625
    """
    inside = (costs < 1.0) & (losses < 1.0)
    costs, losses = costs[inside], losses[inside]
    front = find_pareto_front(costs, losses)
    rights = np.append(costs[front][1:], 1.0)
    return float(((rights - costs[front]) * (1.0 - losses[front])).sum())
