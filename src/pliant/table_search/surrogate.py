"""A surrogate for short trainings: the loss as a quadratic form of the rates, fitted to few trials.

Coordinates are genes divided by the highest rate, from 0 to 1. The loss has a linear and a
quadratic term per gene and one quadratic term for all genes together. No coefficient is negative,
because a cheaper step never teaches more. With little data the fit shrinks towards equal genes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pliant.table_search.pareto import FloatArray

MAX_SWEEPS = 200
TOLERANCE = 1e-4  # of a coefficient or a coordinate, at which sweeps stop
RIDGE_STRENGTHS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1.0, 10.0)
FOLDS = 5


@dataclass(frozen=True, eq=False)
class Quadratic:
    """The form constant + linear · u + u · square · u."""

    linear: FloatArray  # (gene,)
    square: FloatArray  # (gene, gene), symmetric
    constant: float = 0.0

    def __call__(self, points: FloatArray) -> FloatArray:
        """Return the value at each point."""
        squares = ((points @ self.square) * points).sum(axis=1)
        return np.asarray(points @ self.linear + squares + self.constant)

    def fix_last(self, values: tuple[float, ...]) -> "Quadratic":
        """Return the form of the other coordinates, with the last ones at these values."""
        if not values:
            return self
        count, last = len(self.linear) - len(values), np.array(values)
        linear = self.linear[:count] + 2 * self.square[:count, count:] @ last
        rest = Quadratic(self.linear[count:], self.square[count:, count:], self.constant)
        return Quadratic(linear, self.square[:count, :count], float(rest(last[None])[0]))


def probe_quadratic(cost: Callable[[FloatArray], FloatArray], sites: int) -> Quadratic:
    """Determine the quadratic form of a cost from its values at single sites and pairs.

    Exact where each layer's cost is a product of what two sites keep. Elsewhere it only guides the
    search: the cost of the vectors found is computed exactly.
    """
    unit = np.eye(sites)
    origin = float(cost(np.zeros((1, sites)))[0])
    half, full = cost(0.5 * unit) - origin, cost(unit) - origin
    curvature = 2 * full - 4 * half  # f(1) - 2 f(1/2) + f(0), times two
    square = np.diag(curvature)
    first, second = np.triu_indices(sites, 1)
    both = cost(unit[first] + unit[second]) - origin if len(first) else np.zeros(0)
    square[first, second] = square[second, first] = (both - full[first] - full[second]) / 2
    return Quadratic(full - curvature, square, origin)


def fit_quadratic(points: FloatArray, losses: FloatArray, fold_order: FloatArray) -> Quadratic:
    """Fit a form to losses; cross-validation chooses how strongly it shrinks to equal sites."""
    sites = points.shape[1]
    features = np.column_stack([points, points**2, points.mean(axis=1) ** 2])
    # at equal rates u the loss is u/3 + u²/3 + u²/3, which is 1 at the highest rates
    equal = np.concatenate([np.full(2 * sites, 1 / (3 * sites)), [1 / 3]])
    fold_index = np.argsort(np.argsort(fold_order)) % FOLDS
    errors = []
    for strength in RIDGE_STRENGTHS:
        error = 0.0
        for fold in range(FOLDS):
            train = fold_index != fold
            fitted = _solve_ridge(features[train], losses[train], equal, strength)
            error += float(np.square(features[~train] @ fitted - losses[~train]).sum())
        errors.append(error)
    fitted = _solve_ridge(features, losses, equal, RIDGE_STRENGTHS[int(np.argmin(errors))])
    square = np.diag(fitted[sites : 2 * sites]) + fitted[-1] / sites**2
    return Quadratic(fitted[:sites], square)


def _solve_ridge(
    features: FloatArray, losses: FloatArray, centre: FloatArray, strength: float
) -> FloatArray:
    """Solve non-negative least squares with a ridge penalty towards a centre."""
    scaled = features * centre  # the penalty is relative to each coefficient of the centre
    gram = scaled.T @ scaled + strength * np.eye(len(centre))
    target = scaled.T @ losses + strength
    solution = np.ones(len(centre))
    for _ in range(MAX_SWEEPS):
        before = solution.copy()
        for i in range(len(solution)):
            change = float(target[i] - gram[i] @ solution) / gram[i, i]
            solution[i] = max(0.0, solution[i] + change)
        if np.abs(solution - before).max() < TOLERANCE:
            break
    return solution * centre


def minimise_trade_off(loss: Quadratic, cost: Quadratic, prices: FloatArray) -> FloatArray:
    """Return for each price a point that minimises loss + price · cost.

    Coordinate descent runs from both corners; the better result counts.
    """
    low, high = (_descend_coordinates(loss, cost, prices, start) for start in (0.0, 1.0))
    is_low_better = loss(low) + prices * cost(low) <= loss(high) + prices * cost(high)
    return np.where(is_low_better[:, None], low, high)


def _descend_coordinates(
    loss: Quadratic, cost: Quadratic, prices: FloatArray, start: float
) -> FloatArray:
    sites = len(loss.linear)
    points = np.full((len(prices), sites), start)
    for _ in range(MAX_SWEEPS):
        before = points.copy()
        for site in range(sites):
            others = points.copy()
            others[:, site] = 0.0
            slope = loss.linear[site] + 2 * others @ loss.square[:, site]
            slope = slope + prices * (cost.linear[site] + 2 * others @ cost.square[:, site])
            curvature = loss.square[site, site] + prices * cost.square[site, site]
            with np.errstate(divide="ignore", invalid="ignore"):
                minimum = np.clip(-slope / (2 * curvature), 0.0, 1.0)
            points[:, site] = np.where(
                curvature > 0, minimum, (slope + curvature < 0).astype(float)
            )
        if np.abs(points - before).max() < TOLERANCE:
            break
    return points
