"""Traces that are drawn: one speed for ever, or one that is drawn anew at exponential intervals."""

import math
from typing import NamedTuple

import numpy as np

from pliant.devices.draws import FloatArray, IntArray, uniforms
from pliant.devices.path import Path, constant, trimmed
from pliant.rng import Address
from pliant.value import NonNegative, Value

_EXPECTED = 4.0  # changes in a block: rarely none (1.8 %), and few to draw in vain
_COUNTS = np.cumsum([math.exp(-_EXPECTED) * _EXPECTED**n / math.factorial(n) for n in range(40)])
_COUNTS[-1] = 1.0


class Asked(NamedTuple):
    """Whose trace is asked for: seed, devices, and the nominal length of a round."""

    seed: int
    devices: IntArray
    round_seconds: float = 1.0
    address: tuple[Address, ...] = ("trace",)

    def draw(
        self, block: IntArray | int, draw: IntArray | int, name: str
    ) -> tuple[FloatArray, FloatArray]:
        shape = (-1,) + (1,) * max(np.ndim(block) - 1, np.ndim(draw) - 1, 0)
        return uniforms(self.seed, (*self.address, name), self.devices.reshape(shape), block, draw)


class Constant(Value, frozen=True, tag="constant"):
    """One speed for ever: the same for all, or each device's own, drawn once from low to high.

    >>> from pliant.devices import Constant, Fleet
    >>> Fleet(size=2, speed=Constant(0.5)).device(1).work(0.0, 4.0)
    2.0
    >>> 0.25 <= Fleet(size=2, speed=Constant(low=0.25, high=1.0)).device(1).speed(0.0) <= 1.0
    True
    """

    low: NonNegative = 1.0
    high: NonNegative | None = None  # None: as low

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        _check_range(self.low, self.low if self.high is None else self.high, "Constant")

    def over(self, asked: Asked, start: float, length: float) -> Path:
        if self.high is None or self.high == self.low:  # nothing to draw
            return constant(np.full(len(asked.devices), self.low), length)
        return constant(_level(self.low, self.high, asked.draw(0, 0, "level")[0]), length)


class Changing(Value, frozen=True, tag="changing"):
    """A speed drawn anew from the range after exponential intervals, `per_round` times a round.

    The changes of a device are one Poisson process over all virtual time, so the speed at the end
    of a round is that at the start of the next. With `per_round = 0` it is `Constant(low, high)`.

    >>> from pliant.devices import Changing, Fleet
    >>> device = Fleet(size=9, speed=Changing(low=0.25, high=1.0, per_round=2.0)).device(3)
    >>> device.work(5.0, 7.0) == device.work(5.0, 7.0)
    True
    """

    low: NonNegative = 0.25
    high: NonNegative = 1.0
    per_round: NonNegative = 1.0

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        _check_range(self.low, self.high, "Changing")

    def over(self, asked: Asked, start: float, length: float) -> Path:
        block_seconds = (
            _EXPECTED * asked.round_seconds / self.per_round if self.per_round else math.inf
        )
        if math.isinf(block_seconds):
            return Constant(self.low, self.high).over(asked, start, length)
        first = math.floor(start / block_seconds)
        blocks = np.arange(first, math.floor((start + length) / block_seconds) + 1)
        counts = _counts(asked, blocks[None, :])  # (device, block)
        index = np.arange(max(int(counts.max()), 1))
        places, draws = asked.draw(blocks[None, :, None], index[None, None, :], "change")
        # given their number, the changes of a block lie uniformly in it
        times = (blocks[None, :, None] + places) * block_seconds - start
        times = np.where(index < counts[:, :, None], np.maximum(times, 0.0), np.inf)
        times = np.sort(times, axis=2)  # levels are drawn independently, so they need not follow
        before = _level_before(asked, first)[:, None]
        times = np.concatenate([np.zeros((len(times), 1)), times.reshape(len(times), -1)], axis=1)
        levels = np.concatenate([before, draws.reshape(len(times), -1)], axis=1)
        order = np.argsort(times, axis=1, kind="stable")
        return trimmed(
            np.take_along_axis(times, order, 1),
            _level(self.low, self.high, np.take_along_axis(levels, order, 1)),
            length,
        )


def _check_range(low: float, high: float, owner: str) -> None:
    if not low <= high < math.inf:
        raise ValueError(f"Expected finite low <= high - in {owner}, got low {low} and high {high}")


def _level(low: float, high: float, draw: FloatArray) -> FloatArray:
    return low + (high - low) * draw


def _counts(asked: Asked, blocks: IntArray | int) -> IntArray:
    return np.searchsorted(_COUNTS, asked.draw(blocks, 0, "count")[0], side="right")


def _level_before(asked: Asked, block: int) -> FloatArray:
    """Return the draw of the last change before a block; time has no beginning."""
    found = np.zeros(len(asked.devices))
    open_places = np.arange(len(asked.devices))
    while len(open_places):
        block -= 1
        here = asked._replace(devices=asked.devices[open_places])
        counts = _counts(here, block)
        levels = here.draw(block, counts - 1, "change")[1]
        found[open_places] = levels
        open_places = open_places[counts == 0]
    return found
