"""The time of a mini-batch on a device as a function of its share of the full network's MACs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pliant.devices.vector_rng import FloatArray

MIN_GROUP_SIZE = 4  # mini-batches per group; a group's median corrects the curve
MAX_GROUPS = 4
MEASUREMENT_WEIGHT = 0.5  # of one round's measurements against the previous curve

CurvePoints = tuple[tuple[float, float], ...]  # share of the full MACs, seconds per mini-batch


@dataclass(frozen=True, eq=False)
class StepTimeCurve:
    """Seconds per full mini-batch over its cost as a share of the full network's.

    >>> import numpy as np
    >>> from pliant.deploy.step_times import StepTimeCurve
    >>> curve = StepTimeCurve(np.array([0.25, 1.0]), np.array([0.5, 1.0]))
    >>> curve.seconds_for(1.0), *(curve.share_within(seconds) for seconds in (0.5, 2.0, 0.25))
    (1.0, 0.25, 2.0, 0.125)
    """

    shares: FloatArray
    seconds: FloatArray

    @property
    def points(self) -> CurvePoints:
        return tuple(zip(self.shares.tolist(), self.seconds.tolist(), strict=True))

    def seconds_for(self, share: float) -> float:
        return float(np.interp(share, self.shares, self.seconds))

    def share_within(self, seconds: float) -> float:
        """Return the share that fits into a time; beyond the curve's ends, in proportion."""
        for end in (0, -1):
            if (seconds <= self.seconds[end]) == (end == 0):
                return float(self.shares[end] * seconds / self.seconds[end])
        return float(np.interp(seconds, self.seconds, self.shares))

    def scale(self, factor: float) -> "StepTimeCurve":
        """Return the curve of a machine slower by a factor."""
        return StepTimeCurve(self.shares, self.seconds * factor)

    def refine(self, shares: Sequence[float], seconds: FloatArray) -> "StepTimeCurve":
        """Move the curve halfway towards measured times, in groups of similar shares.

        >>> import numpy as np
        >>> from pliant.deploy.step_times import StepTimeCurve
        >>> curve = StepTimeCurve(np.array([0.5, 1.0]), np.array([1.0, 2.0]))
        >>> curve.refine([1.0] * 4, np.full(4, 4.0))
        StepTimeCurve(shares=array([0.5, 1. ]), seconds=array([1.5, 3. ]))
        """
        order = np.argsort(np.asarray(shares), kind="stable")
        count = min(MAX_GROUPS, len(order) // MIN_GROUP_SIZE)
        if not count:
            return self
        ratios = np.asarray(seconds) / [self.seconds_for(share) for share in shares]
        groups = np.array_split(order, count)
        group_shares = [float(np.median(np.asarray(shares)[group])) for group in groups]
        group_ratios = [float(np.median(ratios[group])) for group in groups]
        correction = np.interp(self.shares, group_shares, group_ratios)
        factor = 1 + MEASUREMENT_WEIGHT * (correction - 1)
        return StepTimeCurve(self.shares, np.maximum.accumulate(self.seconds * factor))


def parse_curve(points: Sequence[tuple[float, float]]) -> StepTimeCurve | None:
    """Return the curve that a device reports, or None if it is implausible."""
    table = np.array(points, np.float64)
    if table.ndim != 2 or table.shape[1] != 2 or not np.isfinite(table).all():
        return None
    is_rising = bool((np.diff(table, axis=0) >= 0).all() and (table > 0).all())
    return StepTimeCurve(table[:, 0], table[:, 1]) if is_rising else None
