"""Speeds of several devices over one stretch of time, piecewise constant, with exact integrals."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pliant.devices.draws import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Path:
    """How fast each of n devices is from a common start until `length` seconds later.

    Times count from the start, so that a run of many rounds loses no precision. Device i has the
    speed `levels[i, j]` from `times[i, j]` on; the first time is 0, unused places at the end hold
    infinity.

    >>> import numpy as np
    >>> from pliant.devices.path import Path
    >>> path = Path(np.array([[0.0, 2.0]]), np.array([[1.0, 0.5]]), length=4.0)
    >>> float(path.work(np.array([3.0]))[0])
    2.5
    >>> float(path.finish(np.array([1.0]), np.array([1.5]))[0])
    3.0
    """

    times: FloatArray  # (device, segment)
    levels: FloatArray  # (device, segment)
    length: float

    @cached_property
    def done(self) -> FloatArray:  # (device, segment + 1): work at each change, and at the end
        ends = np.minimum(self.times, self.length)
        widths = np.diff(ends, axis=1, append=self.length)
        zero = np.zeros((len(self.times), 1))
        return np.concatenate([zero, np.cumsum(widths * self.levels, axis=1)], axis=1)

    @property
    def total(self) -> FloatArray:
        """Return each device's work over the whole length."""
        return self.done[:, -1]

    def rows(self, index: IntArray) -> "Path":
        """Return the path of these devices only."""
        return Path(self.times[index], self.levels[index], self.length)

    def scaled(self, factor: FloatArray | float) -> "Path":
        """Return the path with each device's speed multiplied by its factor."""
        factors = np.broadcast_to(np.asarray(factor, np.float64), len(self.times))
        return Path(self.times, self.levels * factors[:, None], self.length)

    def speed(self, at: FloatArray) -> FloatArray:
        """Return each device's speed at its own time; a change counts from its instant on."""
        return self._pick(self.levels, _count(self.times <= at[:, None]) - 1)

    def work(self, at: FloatArray) -> FloatArray:
        """Return each device's work from the start to its own time."""
        at = np.minimum(at, self.length)
        segment = _count(self.times <= at[:, None]) - 1
        since = at - self._pick(self.times, segment)
        return self._pick(self.done, segment) + since * self._pick(self.levels, segment)

    def finish(self, at: FloatArray, work: FloatArray) -> FloatArray:
        """Return when each device has done this much after `at`: the first time, or infinity."""
        target = self.work(at) + work
        # strictly below: over a stretch of zero speed the work was done when the stretch began
        behind = _count(self.done < target[:, None])
        is_never = behind == self.done.shape[1]
        segment = np.maximum(behind - 1 - is_never, 0)
        level = self._pick(self.levels, segment)
        level = np.where(is_never | (level == 0), 1.0, level)
        end = self._pick(self.times, segment) + (target - self._pick(self.done, segment)) / level
        end = np.where(work > 0, np.maximum(end, at), at)
        return np.where(is_never, np.inf, end)

    @cached_property
    def _everyone(self) -> IntArray:
        return np.arange(len(self.times))

    def _pick(self, table: FloatArray, column: IntArray) -> FloatArray:
        return np.asarray(table[self._everyone, column])


def _count(flags: NDArray[np.bool_]) -> IntArray:
    return np.asarray(flags.sum(axis=1, dtype=np.int64))


def constant(levels: FloatArray, length: float) -> Path:
    """Return the path of devices that each keep one speed.

    >>> import numpy as np
    >>> from pliant.devices.path import constant
    >>> constant(np.array([0.5, 1.0]), length=2.0).total.tolist()
    [1.0, 2.0]
    """
    return Path(np.zeros((len(levels), 1)), levels[:, None], length)


def product(a: Path, b: Path) -> Path:
    """Return the path whose speed is the product of two paths of the same devices and length.

    >>> import numpy as np
    >>> from pliant.devices.path import Path, constant, product
    >>> half = constant(np.array([0.5]), length=2.0)
    >>> later = Path(np.array([[0.0, 1.0]]), np.array([[0.0, 1.0]]), length=2.0)
    >>> product(half, later).total.tolist()
    [0.5]
    """
    times = np.concatenate([a.times, b.times], axis=1)
    order = np.argsort(times, axis=1, kind="stable")
    is_first = order < a.times.shape[1]
    # in order of time, the segment that holds in a path is the number of its changes so far
    in_a = np.maximum(np.cumsum(is_first, axis=1) - 1, 0)
    in_b = np.maximum(np.cumsum(~is_first, axis=1) - 1, 0)
    levels = np.take_along_axis(a.levels, in_a, 1) * np.take_along_axis(b.levels, in_b, 1)
    return trimmed(np.take_along_axis(times, order, 1), levels, a.length)


def trimmed(times: FloatArray, levels: FloatArray, length: float) -> Path:
    """Return a path without the columns at the end in which no device changes."""
    used = np.flatnonzero((times < length).any(axis=0))
    width = int(used[-1]) + 1 if len(used) else 1
    return Path(times[:, :width], levels[:, :width], length)


def stacked(parts: list[Path], places: list[IntArray]) -> Path:
    """Return one path from several, each with the places of its devices in the whole."""
    width = max(part.times.shape[1] for part in parts)
    count = sum(len(place) for place in places)
    times = np.full((count, width), np.inf)
    levels = np.zeros((count, width))
    for part, place in zip(parts, places, strict=True):
        times[place, : part.times.shape[1]] = part.times
        levels[place, : part.times.shape[1]] = part.levels
    return Path(times, levels, parts[0].length)
