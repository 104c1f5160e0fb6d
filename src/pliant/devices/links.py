"""Links of devices: bytes per second that may change over time, with exact transfer times."""

from dataclasses import dataclass

import numpy as np

from pliant.devices.piecewise import PiecewiseConstant
from pliant.devices.vector_rng import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class LinkRates:
    """The bytes per second of n links from a common start; times count from there.

    Links of constant rate, infinite ones included, are kept apart: a transfer over them takes
    size / rate.

    >>> import numpy as np
    >>> from pliant.devices import DeviceClass, Fleet, SteppedTrace
    >>> link = DeviceClass(up=SteppedTrace(times=(0.0, 2.0), speeds=(100.0, 50.0)))
    >>> rates = Fleet(size=1, classes=(link,)).compute_links(np.array([0]), "up", 0.0, 9.0)
    >>> rates.finish_time(np.array([1.0]), np.array([150.0])).tolist()
    [3.0]
    >>> rates.latest_start(np.array([3.0]), np.array([150.0])).tolist()
    [1.0]
    """

    constant: FloatArray  # (link,): the rate if it is constant
    changing: IntArray  # which links change
    rates: PiecewiseConstant | None = None  # of the links that change

    def rate(self, at: FloatArray) -> FloatArray:
        """Return the rate of each link at its own time."""
        if self.rates is None:
            return self.constant
        return self._replace_changing(self.constant, self.rates.speed(at[self.changing]))

    def finish_time(self, start: FloatArray, size: FloatArray) -> FloatArray:
        """Return when each transfer that starts at `start` ends, or infinity."""
        end = start + self._divide(size)
        if self.rates is None:
            return end
        pair = start[self.changing], size[self.changing]
        return self._replace_changing(end, self.rates.finish_time(*pair))

    def latest_start(self, end: FloatArray, size: FloatArray) -> FloatArray:
        """Return the last time from which each transfer is done by `end`, or minus infinity."""
        start = end - self._divide(size)
        if self.rates is None:
            return start
        pair = end[self.changing], size[self.changing]
        return self._replace_changing(start, self.rates.start_time(*pair))

    def transferred(self, start: FloatArray, end: FloatArray) -> FloatArray:
        """Return the bytes that each link carries from start to end, or 0 if it ends before."""
        seconds = np.maximum(end - start, 0.0)
        with np.errstate(invalid="ignore"):  # no time on an infinite link
            size = np.where(seconds > 0, seconds * self.constant, 0.0)
        if self.rates is None:
            return size
        first, last = start[self.changing], np.maximum(start, end)[self.changing]
        return self._replace_changing(size, self.rates.work(last) - self.rates.work(first))

    def hold(self) -> "LinkRates":
        """Return the links as if each kept the rate that it starts with."""
        if self.rates is None:
            return self
        return LinkRates(self.rate(np.zeros(len(self.constant))), self.changing[:0])

    def _divide(self, size: FloatArray) -> FloatArray:
        with np.errstate(divide="ignore", invalid="ignore"):  # a link may be held at rate 0
            return np.where(size > 0, size / self.constant, 0.0)

    def _replace_changing(self, values: FloatArray, changing: FloatArray) -> FloatArray:
        values = values.copy()
        values[self.changing] = changing
        return values
