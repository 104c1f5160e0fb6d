"""A stand-in for short trainings: loss as a quadratic form of the rates, fitted to few of them.

Coordinates are rates over the highest rate, so from 0 to 1. The loss has for each site a linear and
a quadratic term, and one quadratic term for all sites together; no coefficient is negative, because
dropping more does not teach more. With little data the fit leans towards sites that all count the
same.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pliant.explore.front import FloatArray

SWEEPS = 200
CLOSE = 1e-4  # of a coefficient, or of a coordinate, when sweeps are over
LEANINGS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1.0, 10.0)
FOLDS = 5


@dataclass(frozen=True, eq=False)
class Quadratic:
    """The form linear · u + u · square · u, which is 0 at 0."""

    linear: FloatArray  # (site,)
    square: FloatArray  # (site, site), symmetric

    def __call__(self, points: FloatArray) -> FloatArray:
        """Return the value at each point."""
        return np.asarray(points @ self.linear + ((points @ self.square) * points).sum(axis=1))


def probed(cost: Callable[[FloatArray], FloatArray], sites: int) -> Quadratic:
    """Find the quadratic form of a cost by asking for single sites and pairs.

    Exact where each layer's cost is a product of what two sites keep; else close enough to look for
    vectors, whose cost is then computed exactly.
    """
    unit = np.eye(sites)
    origin = float(cost(np.zeros((1, sites)))[0])
    half, whole = cost(0.5 * unit) - origin, cost(unit) - origin
    curve = 2 * whole - 4 * half  # f(1) - 2 f(1/2) + f(0), times two
    square = np.diag(curve)
    first, second = np.triu_indices(sites, 1)
    both = cost(unit[first] + unit[second]) - origin if len(first) else np.zeros(0)
    square[first, second] = square[second, first] = (both - whole[first] - whole[second]) / 2
    return Quadratic(whole - curve, square)


def fitted(points: FloatArray, losses: FloatArray, seed_order: FloatArray) -> Quadratic:
    """Fit a form to losses; leaving parts out settles how far it leans towards equal sites."""
    columns, equal = _columns(points), _equal(points.shape[1])
    fold = np.argsort(np.argsort(seed_order)) % FOLDS
    scores = []
    for leaning in LEANINGS:
        rest = 0.0
        for number in range(FOLDS):
            kept = fold != number
            found = _solved(columns[kept], losses[kept], equal, leaning)
            rest += float(np.square(columns[~kept] @ found - losses[~kept]).sum())
        scores.append(rest)
    found = _solved(columns, losses, equal, LEANINGS[int(np.argmin(scores))])
    sites = points.shape[1]
    square = np.diag(found[sites : 2 * sites]) + found[-1] / sites**2
    return Quadratic(found[:sites], square)


def _columns(points: FloatArray) -> FloatArray:
    return np.column_stack([points, points**2, points.mean(axis=1) ** 2])


def _equal(sites: int) -> FloatArray:
    # at equal rates u: a loss of u/3 + u²/3 + u²/3, which is 1 at the highest rates
    return np.concatenate([np.full(2 * sites, 1 / (3 * sites)), [1 / 3]])


def _solved(
    columns: FloatArray, wanted: FloatArray, centre: FloatArray, leaning: float
) -> FloatArray:
    """Return the least squares that lean towards a centre, with no negative coefficient."""
    scale = centre  # a coefficient may leave the centre by as much as it is
    scaled = columns * scale
    gram = scaled.T @ scaled + leaning * np.eye(len(centre))
    target = scaled.T @ wanted + leaning
    found = np.ones(len(centre))
    for _ in range(SWEEPS):
        before = found.copy()
        for place in range(len(found)):
            rest = float(target[place] - gram[place] @ found) / gram[place, place]
            found[place] = max(0.0, found[place] + rest)
        if np.abs(found - before).max() < CLOSE:
            break
    return found * scale


def trade_off(loss: Quadratic, cost: Quadratic, prices: FloatArray) -> FloatArray:
    """Return for each price the point that minimises loss + price · cost, as far as sweeps find it.

    One coordinate after another is put where it is best for the others as they are, from both ends;
    the better end counts.
    """
    found = [_descended(loss, cost, prices, start) for start in (0.0, 1.0)]
    values = [loss(points) + prices * cost(points) for points in found]
    return np.where((values[0] <= values[1])[:, None], found[0], found[1])


def _descended(loss: Quadratic, cost: Quadratic, prices: FloatArray, start: float) -> FloatArray:
    sites = len(loss.linear)
    points = np.full((len(prices), sites), start)
    for _ in range(SWEEPS):
        before = points.copy()
        for place in range(sites):
            others = points.copy()
            others[:, place] = 0.0
            pull = loss.linear[place] + 2 * others @ loss.square[:, place]
            pull = pull + prices * (cost.linear[place] + 2 * others @ cost.square[:, place])
            curve = loss.square[place, place] + prices * cost.square[place, place]
            with np.errstate(divide="ignore", invalid="ignore"):
                inside = np.clip(-pull / (2 * curve), 0.0, 1.0)
            points[:, place] = np.where(curve > 0, inside, (pull + curve < 0).astype(float))
        if np.abs(points - before).max() < CLOSE:
            break
    return points
