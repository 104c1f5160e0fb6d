"""Select the devices of a round."""

from typing import Literal

import numpy as np

from pliant.devices import Fleet
from pliant.devices.vector_rng import IntArray
from pliant.rng import rng_stream

Selection = Literal["uniform", "available"]


def select_devices(
    fleet: Fleet, count: int, selection: Selection, *, seed: int, round: int, now: float
) -> IntArray:
    """Draw devices without replacement, in rising order; fewer if fewer are available.

    The cost grows with `count`, not with the fleet: candidates are drawn in batches.
    """
    count = min(count, fleet.size)
    rng = rng_stream(seed, "select", round)
    if selection == "uniform":
        return np.sort(rng.choice(fleet.size, count, replace=False, shuffle=False))
    selected: list[int] = []
    seen: set[int] = set()
    batch_size = 2 * count
    while len(selected) < count and len(seen) < fleet.size:
        if batch_size * 2 > fleet.size:  # nearly all are needed: try the rest in random order
            candidates = np.array(
                [d for d in rng.permutation(fleet.size).tolist() if d not in seen]
            )
        else:
            fresh = dict.fromkeys(rng.integers(fleet.size, size=batch_size).tolist())
            candidates = np.array([device for device in fresh if device not in seen], np.int64)
            batch_size *= 2
        if not len(candidates):
            continue
        seen.update(candidates.tolist())
        is_available = fleet.speeds_at(candidates, now, seed=seed) > 0
        selected.extend(candidates[is_available].tolist())
    return np.sort(np.array(selected[:count], np.int64))
