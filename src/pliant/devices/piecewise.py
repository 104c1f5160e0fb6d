"""Piecewise-constant speeds of several devices over a span of time, with exact integrals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pliant.devices.vector_rng import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class PiecewiseConstant:
    """The speeds of n devices over `length` seconds from a common start.

    Times count from the start, so a run of many rounds loses no precision. Device i has speed
    `levels[i, j]` from `times[i, j]` on; the first time is 0 and unused columns hold infinity.

    >>> import numpy as np
    >>> from pliant.devices.piecewise import PiecewiseConstant
    >>> speeds = PiecewiseConstant(np.array([[0.0, 2.0]]), np.array([[1.0, 0.5]]), length=4.0)
    >>> float(speeds.work(np.array([3.0]))[0])
    2.5
    >>> float(speeds.finish_time(np.array([1.0]), np.array([1.5]))[0])
    3.0
    """

    times: FloatArray  # (device, segment)
    levels: FloatArray  # (device, segment)
    length: float

    @cached_property
    def cumulative_work(self) -> FloatArray:  # (device, segment + 1): at each change and at the end
        shape = len(self.times), self.times.shape[1] + 1
        bounds, work = np.full(shape, self.length), np.zeros(shape)
        np.minimum(self.times, self.length, out=bounds[:, :-1])
        widths = bounds[:, 1:] - bounds[:, :-1]
        np.cumsum(widths * self.levels, axis=1, out=work[:, 1:])
        return work

    @cached_property
    def total(self) -> FloatArray:
        """Return each device's work over the whole length."""
        is_constant = self.times.shape[1] == 1
        return self.length * self.levels[:, 0] if is_constant else self.cumulative_work[:, -1]

    def select(self, index: IntArray) -> "PiecewiseConstant":
        return PiecewiseConstant(self.times[index], self.levels[index], self.length)

    def scale(self, factor: FloatArray | float) -> "PiecewiseConstant":
        """Multiply each device's speed by its factor."""
        factors = np.asarray(factor, np.float64).reshape(-1, 1)
        return PiecewiseConstant(self.times, self.levels * factors, self.length)

    def speed(self, at: FloatArray) -> FloatArray:
        """Return each device's speed at its own time; a change applies from its instant on."""
        is_constant = self.times.shape[1] == 1
        return self.levels[:, 0] if is_constant else self._pick(self.levels, self._find_segment(at))

    def work(self, at: FloatArray) -> FloatArray:
        """Return each device's work from the start to its own time."""
        at = np.minimum(at, self.length)
        if self.times.shape[1] == 1:  # the speeds never change
            return at * self.levels[:, 0]
        segment = self._find_segment(at)
        since = at - self._pick(self.times, segment)
        return self._pick(self.cumulative_work, segment) + since * self._pick(self.levels, segment)

    def finish_time(self, at: FloatArray, work: FloatArray) -> FloatArray:
        """Return the first time by which each device has done `work` after `at`, or infinity."""
        target = self.work(at) + work
        if self.times.shape[1] == 1:
            end = target / self._divisor
        else:
            # strictly below: work that ends at a pause is done when the pause starts
            behind = self.cumulative_work[:, :-1] < target[:, None]
            segment = np.maximum(_count_true(behind) - 1, 0)
            level = self._pick(self.levels, segment)
            rest = target - self._pick(self.cumulative_work, segment)
            end = self._pick(self.times, segment) + rest / np.where(level == 0, 1.0, level)
        end = np.where(work > 0, np.maximum(end, at), at)
        return np.where(target > self.total, np.inf, end)

    def start_time(self, end: FloatArray, work: FloatArray) -> FloatArray:
        """Return the last time from which each device does `work` by `end`, or minus infinity."""
        target = self.work(end) - work  # the work done before that time
        segment = np.maximum(_count_true(self.cumulative_work[:, :-1] <= target[:, None]) - 1, 0)
        level = self._pick(self.levels, segment)
        since = (target - self._pick(self.cumulative_work, segment)) / np.where(level > 0, level, 1)
        start = np.minimum(self._pick(self.times, segment) + since, end)
        return np.where(target < 0, -np.inf, np.where(work > 0, start, end))

    def finish_time_held(self, at: FloatArray, work: FloatArray) -> FloatArray:
        """Return when each device has done `work` if it keeps the speed that it starts with.

        A paused device starts when its pause ends.
        """
        start = self._find_active(at)
        speed = np.where(np.isfinite(start), self.speed(start), 1.0)
        return start + work / speed

    def held_work(self, start: FloatArray, end: FloatArray) -> FloatArray:
        """Return the work of each device from start to end at the speed that it starts with."""
        active = np.minimum(self._find_active(start), end)
        return self.speed(active) * (end - active)

    def _find_active(self, at: FloatArray) -> FloatArray:
        """Return the first time from `at` on when each device's speed is above 0, or infinity."""
        is_later = (self.times > at[:, None]) & (self.levels > 0)
        later = np.where(is_later, self.times, np.inf).min(axis=1)
        return np.where(self.speed(at) > 0, at, later)

    @cached_property
    def _divisor(self) -> FloatArray:  # of constant speeds
        level = self.levels[:, 0]
        return np.where(level == 0, 1.0, level)

    @cached_property
    def _all_devices(self) -> IntArray:
        return np.arange(len(self.times))

    def _find_segment(self, at: FloatArray) -> IntArray:
        return _count_true(self.times <= at[:, None]) - 1

    def _pick(self, table: FloatArray, column: IntArray) -> FloatArray:
        return np.asarray(table[self._all_devices, column])


def _count_true(flags: NDArray[np.bool_]) -> IntArray:
    return np.asarray(flags.sum(axis=1, dtype=np.int64))


def make_constant(levels: FloatArray, length: float) -> PiecewiseConstant:
    """Return devices that each keep one speed.

    >>> import numpy as np
    >>> from pliant.devices.piecewise import make_constant
    >>> make_constant(np.array([0.5, 1.0]), length=2.0).total.tolist()
    [1.0, 2.0]
    """
    return PiecewiseConstant(np.zeros((len(levels), 1)), levels[:, None], length)


def multiply(a: PiecewiseConstant, b: PiecewiseConstant) -> PiecewiseConstant:
    """Return the product of two speeds of the same devices over the same length.

    >>> import numpy as np
    >>> from pliant.devices.piecewise import PiecewiseConstant, make_constant, multiply
    >>> half = make_constant(np.array([0.5]), length=2.0)
    >>> later = PiecewiseConstant(np.array([[0.0, 1.0]]), np.array([[0.0, 1.0]]), length=2.0)
    >>> multiply(half, later).total.tolist()
    [0.5]
    """
    times = np.concatenate([a.times, b.times], axis=1)
    order = np.argsort(times, axis=1, kind="stable")
    is_first = order < a.times.shape[1]
    # in order of time, the current segment of a factor is the number of its changes so far
    in_a = np.maximum(np.cumsum(is_first, axis=1) - 1, 0)
    in_b = np.maximum(np.cumsum(~is_first, axis=1) - 1, 0)
    levels = np.take_along_axis(a.levels, in_a, 1) * np.take_along_axis(b.levels, in_b, 1)
    return trim_columns(np.take_along_axis(times, order, 1), levels, a.length)


def trim_columns(times: FloatArray, levels: FloatArray, length: float) -> PiecewiseConstant:
    """Drop the last columns in which no device changes."""
    used = np.flatnonzero((times < length).any(axis=0))
    width = int(used[-1]) + 1 if len(used) else 1
    return PiecewiseConstant(times[:, :width], levels[:, :width], length)


def stack_devices(parts: list[PiecewiseConstant], positions: list[IntArray]) -> PiecewiseConstant:
    """Join the devices of several parts, each at its positions in the result."""
    shape = sum(map(len, positions)), max(part.times.shape[1] for part in parts)
    times, levels = np.full(shape, np.inf), np.zeros(shape)
    for part, rows in zip(parts, positions, strict=True):
        times[rows, : part.times.shape[1]] = part.times
        levels[rows, : part.times.shape[1]] = part.levels
    return PiecewiseConstant(times, levels, parts[0].length)


class SpeedPattern(NamedTuple):
    """One device's speeds from time 0, repeated after `period` seconds (infinity: never)."""

    times: FloatArray  # ascending from 0
    levels: FloatArray
    period: float = math.inf


def make_on_off_pattern(
    windows: tuple[tuple[float, float], ...], period: float, where: str
) -> SpeedPattern:
    """Return the pattern with speed 1 inside the windows and 0 outside."""
    if not period > 0:
        raise ValueError(f"{where}: expected a period above 0, got {period}")
    times, levels, last = [0.0], [0.0], 0.0
    for on, off in windows:
        if not last <= on <= off <= period:
            raise ValueError(
                f"{where}: expected windows in order, none past {period}, "
                f"got {on} to {off} after {last}"
            )
        times += [on, off]
        levels += [1.0, 0.0]
        last = off
    return SpeedPattern(np.array(times), np.array(levels), period)


def expand_patterns(
    patterns: Sequence[SpeedPattern], devices: IntArray, start: float, length: float
) -> PiecewiseConstant:
    """Return the speeds of devices of which number i follows pattern i modulo their number."""
    chosen, inverse = np.unique(devices % len(patterns), return_inverse=True)
    slices = [_slice_pattern(patterns[number], start, length) for number in chosen]
    rows = np.split(np.arange(len(slices)), len(slices))
    return stack_devices(slices, rows).select(inverse)


def _slice_pattern(pattern: SpeedPattern, start: float, length: float) -> PiecewiseConstant:
    times, levels, period = pattern
    if math.isfinite(period):
        cycles = np.arange(math.floor(start / period), math.floor((start + length) / period) + 1)
        # rounding must not put the end of a cycle after the start of the next
        times = np.maximum.accumulate((cycles[:, None] * period + times).ravel())
        levels = np.tile(levels, len(cycles))
    first = max(int(np.searchsorted(times, start, side="right")) - 1, 0)
    last = max(int(np.searchsorted(times, start + length, side="left")), first + 1)
    times = np.maximum(times[first:last] - start, 0.0)
    return PiecewiseConstant(times[None], levels[None, first:last], length)
