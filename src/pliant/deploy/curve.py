"""How long a mini-batch takes on a device, by its share of the full network's MACs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pliant.devices.draws import FloatArray

LEAST = 4  # mini-batches in a group whose median corrects the curve
GROUPS = 4
TRUST = 0.5  # in what one round says; the rest is in what was known


@dataclass(frozen=True, eq=False)
class Curve:
    """Seconds of a full mini-batch over its cost as a share of the full network's.

    >>> import numpy as np
    >>> from pliant.deploy.curve import Curve
    >>> curve = Curve(np.array([0.25, 1.0]), np.array([0.5, 1.0]))  # half the time, a quarter of it
    >>> curve.at(1.0), curve.within(0.5), curve.within(2.0), curve.within(0.25)
    (1.0, 0.25, 2.0, 0.125)
    """

    shares: FloatArray
    seconds: FloatArray

    def at(self, share: float) -> float:
        """Return the seconds that a share takes."""
        return float(np.interp(share, self.shares, self.seconds))

    def within(self, seconds: float) -> float:
        """Return the share that fits into a time; in proportion where the curve has ended."""
        for end in (0, -1):
            if (seconds <= self.seconds[end]) == (end == 0):
                return float(self.shares[end] * seconds / self.seconds[end])
        return float(np.interp(seconds, self.seconds, self.shares))

    def slowed(self, factor: float) -> "Curve":
        """Return the curve of a machine that is slower by a factor."""
        return Curve(self.shares, self.seconds * factor)

    def refined(self, shares: Sequence[float], seconds: FloatArray) -> "Curve":
        """Return the curve half-way to what mini-batches have taken, in groups of like shares.

        >>> import numpy as np
        >>> from pliant.deploy.curve import Curve
        >>> Curve(np.array([0.5, 1.0]), np.array([1.0, 2.0])).refined([1.0] * 4, np.full(4, 4.0))
        Curve(shares=array([0.5, 1. ]), seconds=array([1.5, 3. ]))
        """
        order = np.argsort(np.asarray(shares), kind="stable")
        count = min(GROUPS, len(order) // LEAST)
        if not count:
            return self
        ratios = np.asarray(seconds) / [self.at(share) for share in shares]
        groups = np.array_split(order, count)
        where = [float(np.median(np.asarray(shares)[group])) for group in groups]
        found = [float(np.median(ratios[group])) for group in groups]
        factor = 1 + TRUST * (np.interp(self.shares, where, found) - 1)
        return Curve(self.shares, np.maximum.accumulate(self.seconds * factor))


def curve_from(points: Sequence[tuple[float, float]]) -> Curve | None:
    """Return the curve that a device tells of itself, if it makes sense."""
    table = np.array(points, np.float64)
    if table.ndim != 2 or table.shape[1] != 2 or not np.isfinite(table).all():
        return None
    is_rising = bool((np.diff(table, axis=0) >= 0).all() and (table > 0).all())
    return Curve(table[:, 0], table[:, 1]) if is_rising else None
