"""Rows of a table from measured vectors: monotone, ends kept, gaps filled by interpolation."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pliant.explore.front import FloatArray

HALVINGS = 40


class Rows(NamedTuple):
    """Vectors by rising cost, with gains that rise too."""

    vectors: FloatArray  # (row, site)
    costs: FloatArray
    gains: FloatArray


def monotone(vectors: FloatArray, costs: FloatArray, gains: FloatArray) -> Rows:
    """Leave out what costs more and gains less; the cheapest and the dearest row stay.

    The dearest is the full network. Where a cheaper vector came out better, by luck or because
    dropout helps, both count the same.
    """
    order = np.lexsort((-gains, -vectors.sum(axis=1), costs))
    kept, best = [], -np.inf
    for place in order[:-1].tolist():
        if gains[place] > best:
            kept.append(place)
            best = float(gains[place])
    last = int(order[-1])
    if kept and costs[kept[-1]] == costs[last]:
        kept.pop()
    kept.append(last)
    risen = np.maximum.accumulate(gains[kept])
    return Rows(vectors[kept], costs[kept], risen)


def filled(rows: Rows, count: int, cost: Callable[[FloatArray], FloatArray]) -> Rows:
    """Put rows between those that lie furthest apart, until there are `count` of them.

    The vector between two others is the one on the line from one to the other that costs the mean
    of both; where the cost on that line leaves the interval, the gap stays.
    """
    found, is_closed = rows, np.zeros(max(0, len(rows.costs) - 1), np.bool_)
    while len(found.costs) < count and not is_closed.all():
        gaps = np.where(is_closed, -np.inf, np.diff(found.costs))
        place = int(gaps.argmax())
        between = _between(found, place, cost)
        if between is None:
            is_closed[place] = True
            continue
        vector, reached, gain = between
        at = place + 1
        found = Rows(
            np.insert(found.vectors, at, vector, axis=0),
            np.insert(found.costs, at, reached),
            np.insert(found.gains, at, gain),
        )
        is_closed = np.insert(is_closed, at, False)
    return found


def _between(
    rows: Rows, place: int, cost: Callable[[FloatArray], FloatArray]
) -> tuple[FloatArray, float, float] | None:
    low, high = rows.vectors[place], rows.vectors[place + 1]
    below, above = float(rows.costs[place]), float(rows.costs[place + 1])
    wanted, start, end = (below + above) / 2, 0.0, 1.0
    for _ in range(HALVINGS):
        share = (start + end) / 2
        reached = float(cost(rounded((1 - share) * low + share * high)[None])[0])
        start, end = (share, end) if reached < wanted else (start, share)
    vector = rounded((1 - end) * low + end * high)
    reached = float(cost(vector[None])[0])
    if not below < reached < above:
        return None
    part = (reached - below) / (above - below)
    gain = float((1 - part) * rows.gains[place] + part * rows.gains[place + 1])
    return vector, reached, gain


def rounded(vectors: FloatArray) -> FloatArray:
    """Round rates to what a table's file holds: 32 bits."""
    return vectors.astype(np.float32).astype(np.float64)
