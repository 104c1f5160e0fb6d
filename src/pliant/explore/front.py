"""Fronts of two objectives, both to be small: which points no other dominates, and their area."""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
REFERENCE = (1.0, 1.0)  # the full network's cost, and the loss at the highest rates


def front(costs: FloatArray, losses: FloatArray) -> IntArray:
    """Return the places of the points that no other dominates, by rising cost, equals once.

    >>> import numpy as np
    >>> from pliant.explore.front import front
    >>> front(np.array([0.0, 1.0, 0.5, 0.5]), np.array([1.0, 0.0, 0.2, 0.3])).tolist()
    [0, 2, 1]
    """
    order = np.lexsort((losses, costs))
    best = np.minimum.accumulate(losses[order])
    is_new = np.concatenate([[True], best[1:] < best[:-1]]) if len(order) else np.array([], bool)
    found: IntArray = order[is_new]
    return found


def hypervolume(
    costs: FloatArray, losses: FloatArray, reference: tuple[float, float] = REFERENCE
) -> float:
    """Return the area between a front and a reference point that it should dominate.

    >>> import numpy as np
    >>> from pliant.explore.front import hypervolume
    >>> hypervolume(np.array([0.0, 0.5]), np.array([0.5, 0.25]))
    0.625
    """
    inside = (costs < reference[0]) & (losses < reference[1])
    costs, losses = costs[inside], losses[inside]
    chosen = front(costs, losses)
    rights = np.append(costs[chosen][1:], reference[0])
    return float(((rights - costs[chosen]) * (reference[1] - losses[chosen])).sum())


def served(costs: FloatArray, losses: FloatArray) -> float:
    """Return the mean of 1 - loss over budgets from 0 to 1 of devices that take what fits.

    Rows are in the order of their costs and each is taken as it is, also where a cheaper one is
    better: so this is linear in the losses, and noise in them does not flatter it as it flatters
    the hypervolume.
    """
    edges = np.append(np.clip(costs, 0.0, 1.0), 1.0)
    return float(((edges[1:] - edges[:-1]) * (1.0 - losses)).sum())
