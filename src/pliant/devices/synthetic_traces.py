"""Synthetic traces: constant, randomly changing, stepped, and on/off speeds."""

import math
from typing import NamedTuple

import numpy as np

from pliant.devices.piecewise import (
    PiecewiseConstant,
    SpeedPattern,
    expand_patterns,
    make_constant,
    make_on_off_pattern,
    trim_columns,
)
from pliant.devices.vector_rng import FloatArray, IntArray, sample_uniforms
from pliant.rng import Address
from pliant.value import NonNegative, Positive, Value

_CHANGES_PER_BLOCK = 4.0  # rarely no change in a block (1.8 %), and few unused draws
_POISSON_CDF = np.cumsum(
    [math.exp(-_CHANGES_PER_BLOCK) * _CHANGES_PER_BLOCK**n / math.factorial(n) for n in range(40)]
)
_POISSON_CDF[-1] = 1.0


class TraceQuery(NamedTuple):
    """The devices whose trace is computed, with the seed and the nominal length of a round."""

    seed: int
    devices: IntArray
    round_seconds: float = 1.0
    address: tuple[Address, ...] = ("trace",)

    def sample_uniforms(
        self, block: IntArray | int, draw_index: IntArray | int, name: str
    ) -> tuple[FloatArray, FloatArray]:
        shape = (-1,) + (1,) * max(np.ndim(block) - 1, np.ndim(draw_index) - 1, 0)
        return sample_uniforms(
            self.seed, (*self.address, name), self.devices.reshape(shape), block, draw_index
        )


class ConstantTrace(Value, frozen=True, tag="constant"):
    """A constant speed: the same for all devices, or one drawn per device from low to high.

    >>> from pliant.devices import ConstantTrace, Fleet
    >>> Fleet(size=2, speed=ConstantTrace(0.5)).device(1).work(0.0, 4.0)
    2.0
    >>> 0.25 <= Fleet(size=2, speed=ConstantTrace(low=0.25, high=1.0)).device(1).speed(0.0) <= 1.0
    True
    """

    low: NonNegative = 1.0
    high: NonNegative | None = None  # None: same as low

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        _check_range(self.low, self.low if self.high is None else self.high, "ConstantTrace")

    def compute_speeds(self, query: TraceQuery, start: float, length: float) -> PiecewiseConstant:
        if self.high is None or self.high == self.low:
            return make_constant(np.full(len(query.devices), self.low), length)
        uniform = query.sample_uniforms(0, 0, "level")[0]
        return make_constant(self.low + (self.high - self.low) * uniform, length)


class ChangingTrace(Value, frozen=True, tag="changing"):
    """A speed redrawn from a range at exponential intervals, on average `per_round` times a round.

    The changes of a device are one Poisson process over all virtual time, so each round starts at
    the speed at which the last one ended. With `per_round = 0` it is `ConstantTrace(low, high)`.

    >>> from pliant.devices import ChangingTrace, Fleet
    >>> device = Fleet(size=9, speed=ChangingTrace(low=0.25, high=1.0, per_round=2.0)).device(3)
    >>> device.work(5.0, 7.0) == device.work(5.0, 7.0)
    True
    """

    low: NonNegative = 0.25
    high: NonNegative = 1.0
    per_round: NonNegative = 1.0

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        _check_range(self.low, self.high, "ChangingTrace")

    def compute_speeds(self, query: TraceQuery, start: float, length: float) -> PiecewiseConstant:
        block_seconds = math.inf
        if self.per_round:
            block_seconds = _CHANGES_PER_BLOCK * query.round_seconds / self.per_round
        if math.isinf(block_seconds):
            return ConstantTrace(self.low, self.high).compute_speeds(query, start, length)
        first = math.floor(start / block_seconds)
        blocks = np.arange(first, math.floor((start + length) / block_seconds) + 1)
        counts = _sample_counts(query, blocks[None, :])  # (device, block)
        index = np.arange(max(int(counts.max()), 1))
        offsets, draws = query.sample_uniforms(blocks[None, :, None], index[None, None], "change")
        # given their number, the changes of a block are uniform in it
        times = (blocks[None, :, None] + offsets) * block_seconds - start
        times = np.where(index < counts[:, :, None], np.maximum(times, 0.0), np.inf)
        times = np.sort(times, axis=2)  # levels are drawn independently, so they need not follow
        before = _find_level_before(query, first)[:, None]
        times = np.concatenate([np.zeros((len(times), 1)), times.reshape(len(times), -1)], axis=1)
        levels = np.concatenate([before, draws.reshape(len(times), -1)], axis=1)
        order = np.argsort(times, axis=1, kind="stable")
        levels = self.low + (self.high - self.low) * np.take_along_axis(levels, order, 1)
        return trim_columns(np.take_along_axis(times, order, 1), levels, length)


class SteppedTrace(Value, frozen=True, tag="steps"):
    """A speed for all devices that changes at fixed times and repeats if it has a period.

    >>> from pliant.devices import Fleet, SteppedTrace
    >>> speed = SteppedTrace(times=(0.0, 2.0), speeds=(1.0, 0.5))
    >>> Fleet(size=1, speed=speed).device(0).work(1.0, 3.0)
    1.5
    """

    times: tuple[NonNegative, ...]
    speeds: tuple[NonNegative, ...]
    period: Positive | None = None

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if len(self.times) != len(self.speeds) or not self.times:
            raise ValueError(
                f"Expected as many times as speeds ({len(self.speeds)}), at least one - "
                f"at `$.times` of SteppedTrace, got {len(self.times)}"
            )
        ends = (*self.times[1:], self.period or math.inf)
        if self.times[0] != 0 or any(a >= b for a, b in zip(self.times, ends, strict=True)):
            bound = "" if self.period is None else f" below {self.period}"
            raise ValueError(
                f"Expected times that start at 0 and rise{bound} - "
                f"at `$.times` of SteppedTrace, got {self.times}"
            )

    def compute_speeds(self, query: TraceQuery, start: float, length: float) -> PiecewiseConstant:
        pattern = SpeedPattern(np.array(self.times), np.array(self.speeds), self.period or math.inf)
        return expand_patterns([pattern], query.devices, start, length)


class OnOffWindows(Value, frozen=True, tag="windows"):
    """Speed 1 inside the windows and 0 outside, repeated every period: charging hours, say.

    >>> from pliant.devices import Fleet, OnOffWindows
    >>> night = OnOffWindows(windows=((0.0, 6.0), (22.0, 24.0)), period=24.0)
    >>> Fleet(size=1, speed=night).device(0).work(20.0, 26.0)
    4.0
    """

    windows: tuple[tuple[NonNegative, NonNegative], ...]
    period: Positive

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        make_on_off_pattern(self.windows, self.period, "OnOffWindows")

    def compute_speeds(self, query: TraceQuery, start: float, length: float) -> PiecewiseConstant:
        pattern = make_on_off_pattern(self.windows, self.period, "OnOffWindows")
        return expand_patterns([pattern], query.devices, start, length)


def _check_range(low: float, high: float, owner: str) -> None:
    if not low <= high < math.inf:
        raise ValueError(f"Expected finite low <= high - in {owner}, got low {low} and high {high}")


def _sample_counts(query: TraceQuery, blocks: IntArray | int) -> IntArray:
    return np.searchsorted(_POISSON_CDF, query.sample_uniforms(blocks, 0, "count")[0], side="right")


def _find_level_before(query: TraceQuery, block: int) -> FloatArray:
    """Return the level of each device's last change before a block, as far back as needed."""
    levels = np.zeros(len(query.devices))
    pending = np.arange(len(query.devices))
    while len(pending):
        block -= 1
        pending_query = query._replace(devices=query.devices[pending])
        counts = _sample_counts(pending_query, block)
        levels[pending] = pending_query.sample_uniforms(block, counts - 1, "change")[1]
        pending = pending[counts == 0]
    return levels
