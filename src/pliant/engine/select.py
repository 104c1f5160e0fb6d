"""Selection: which devices take part in a round."""

from typing import Literal

import numpy as np

from pliant.devices import Fleet
from pliant.devices.draws import IntArray
from pliant.rng import stream

Selection = Literal["uniform", "available"]


def selected(
    fleet: Fleet, count: int, how: Selection, *, seed: int, round: int, now: float
) -> IntArray:
    """Draw devices without replacement, in rising order; fewer if fewer are available.

    It costs the devices drawn, not the fleet: candidates are drawn in growing handfuls.
    """
    count = min(count, fleet.size)
    rng = stream(seed, "select", round)
    if how == "uniform":
        return np.sort(rng.choice(fleet.size, count, replace=False, shuffle=False))
    found: list[int] = []
    seen: set[int] = set()
    handful = 2 * count
    while len(found) < count and len(seen) < fleet.size:
        if handful * 2 > fleet.size:  # nearly all are wanted: go through the rest in random order
            drawn = np.array([d for d in rng.permutation(fleet.size).tolist() if d not in seen])
        else:
            fresh = dict.fromkeys(rng.integers(fleet.size, size=handful).tolist())
            drawn = np.array([device for device in fresh if device not in seen], np.int64)
            handful *= 2
        if not len(drawn):
            continue
        seen.update(drawn.tolist())
        awake = fleet.speeds(drawn, now, seed=seed) > 0
        found.extend(drawn[awake].tolist())
    return np.sort(np.array(found[:count], np.int64))
