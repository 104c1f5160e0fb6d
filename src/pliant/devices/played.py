"""Traces that are played: steps and windows written down, or recordings of real devices."""

import math
from typing import Annotated

import numpy as np
from msgspec import Meta

from pliant.devices import recording
from pliant.devices.drawn import Asked
from pliant.devices.draws import FloatArray
from pliant.devices.path import Path
from pliant.devices.recording import Pattern
from pliant.value import NonNegative, Positive, Value


class Steps(Value, frozen=True, tag="steps"):
    """A speed for all devices that changes at given times, repeated each period if there is one.

    >>> from pliant.devices import Fleet, Steps
    >>> Fleet(size=1, speed=Steps(times=(0.0, 2.0), speeds=(1.0, 0.5))).device(0).work(1.0, 3.0)
    1.5
    """

    times: tuple[NonNegative, ...]
    speeds: tuple[NonNegative, ...]
    period: Positive | None = None

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if len(self.times) != len(self.speeds) or not self.times:
            wanted = f"as many times as speeds ({len(self.speeds)}), at least one"
            raise ValueError(f"Expected {wanted} - at `$.times` of Steps, got {len(self.times)}")
        end = math.inf if self.period is None else self.period
        if self.times[0] != 0 or any(
            a >= b for a, b in zip(self.times, (*self.times[1:], end), strict=True)
        ):
            wanted = "times that start at 0 and rise" + (
                "" if self.period is None else f" below {end}"
            )
            raise ValueError(f"Expected {wanted} - at `$.times` of Steps, got {self.times}")

    def over(self, asked: Asked, start: float, length: float) -> Path:
        pattern = Pattern(np.array(self.times), np.array(self.speeds), self.period or math.inf)
        return _played([pattern], asked, start, length)


class Windows(Value, frozen=True, tag="windows"):
    """Speed 1 inside the windows and 0 outside, repeated each period: charging hours, say.

    >>> from pliant.devices import Fleet, Windows
    >>> night = Windows(windows=((0.0, 6.0), (22.0, 24.0)), period=24.0)
    >>> Fleet(size=1, speed=night).device(0).work(20.0, 26.0)
    4.0
    """

    windows: tuple[tuple[NonNegative, NonNegative], ...]
    period: Positive

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        recording.on_off(self.windows, self.period, "Windows")

    def over(self, asked: Asked, start: float, length: float) -> Path:
        pattern = recording.on_off(self.windows, self.period, "Windows")
        return _played([pattern], asked, start, length)


class Recorded(Value, frozen=True, tag="recorded"):
    """Speeds from a CSV or JSON-lines file; device i plays recording i modulo their number.

    The file's columns or keys are `seconds`, `speed` and, if it holds several devices, `device`.

    >>> import tempfile
    >>> from pliant.devices import Fleet, Recorded
    >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
    ...     _ = file.write("seconds,speed\\n0,1.0\\n2,0.5\\n")
    ...     file.flush()
    ...     Fleet(size=1, speed=Recorded(file.name)).device(0).work(0.0, 4.0)
    3.0
    """

    path: Annotated[str, Meta(min_length=1)]
    period: Positive | None = None

    def over(self, asked: Asked, start: float, length: float) -> Path:
        return _played(recording.read_speeds(self.path, self.period), asked, start, length)


class Availability(Value, frozen=True, tag="availability"):
    """On (speed 1) and off (0) from a FedScale availability file; device i plays entry i.

    >>> import tempfile
    >>> from pliant.devices import Availability, Fleet
    >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    ...     _ = file.write('[{"active": [1, 5], "inactive": [3, 6], "finish_time": 8}]')
    ...     file.flush()
    ...     Fleet(size=1, speed=Availability(file.name)).device(0).work(0.0, 16.0)
    6.0
    """

    path: Annotated[str, Meta(min_length=1)]

    def over(self, asked: Asked, start: float, length: float) -> Path:
        return _played(recording.read_windows(self.path), asked, start, length)


def _played(patterns: list[Pattern], asked: Asked, start: float, length: float) -> Path:
    """Return the path of devices of which number i plays pattern i modulo their number."""
    chosen, inverse = np.unique(asked.devices % len(patterns), return_inverse=True)
    cuts = [_cut(patterns[number], start, length) for number in chosen]
    width = max(len(times) for times, _ in cuts)
    times = np.full((len(cuts), width), np.inf)
    levels = np.zeros((len(cuts), width))
    for row, (moments, speeds) in enumerate(cuts):
        times[row, : len(moments)] = moments
        levels[row, : len(moments)] = speeds
    return Path(times[inverse], levels[inverse], length)


def _cut(pattern: Pattern, start: float, length: float) -> tuple[FloatArray, FloatArray]:
    times, levels, period = pattern
    if math.isfinite(period):
        turns = np.arange(math.floor(start / period), math.floor((start + length) / period) + 1)
        # rounding may not put the end of one turn behind the start of the next
        times = np.maximum.accumulate((turns[:, None] * period + times).ravel())
        levels = np.tile(levels, len(turns))
    first = max(int(np.searchsorted(times, start, side="right")) - 1, 0)
    last = max(int(np.searchsorted(times, start + length, side="left")), first + 1)
    return np.maximum(times[first:last] - start, 0.0), levels[first:last]
