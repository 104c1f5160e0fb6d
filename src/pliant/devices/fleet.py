"""Fleets: how many devices there are and what each of them is, drawn by (seed, device)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from pliant.devices.drawn import Asked, Constant
from pliant.devices.draws import DEVICES, FloatArray, IntArray, uniforms
from pliant.devices.energy import Traits
from pliant.devices.path import Path, constant, stacked
from pliant.devices.trace import Trace
from pliant.value import NonNegative, Positive, Value


class DeviceClass(Value, frozen=True):
    """A kind of device: its share of the fleet, its speed, its link and its two energy constants.

    >>> from pliant.devices import Constant, DeviceClass
    >>> DeviceClass(name="gateway", share=0.2, speed=Constant(0.5, 1.0), up=1e6).down is None
    True
    """

    name: str = "device"
    share: Positive = 1.0  # relative to the other classes
    speed: Trace | None = None  # None: the fleet's
    up: Positive | None = None  # bytes per second; None: no time is charged
    down: Positive | None = None
    latency: NonNegative = 0.0  # seconds, each way
    joules_per_mac: NonNegative = 0.0
    joules_per_byte: NonNegative = 0.0


class Fleet(Value, frozen=True):
    """All devices of a run. It costs nothing until a device is looked at, whatever its size.

    `round_seconds` is the nominal length of a round, to which `per_round` of a trace refers.
    `macs_per_second` is what speed 1.0 means; without it, 1.0 is the speed at which a device's own
    full task just fills the round.

    >>> from pliant.devices import Changing, Fleet
    >>> fleet = Fleet(size=1_000_000, speed=Changing(low=0.25, high=1.0, per_round=2.0))
    >>> 0.25 <= fleet.device(999_999).speed(0.0) <= 1.0
    True
    """

    size: Annotated[int, Meta(ge=1, le=DEVICES)]
    speed: Trace = Constant(1.0)
    classes: Annotated[tuple[DeviceClass, ...], Meta(min_length=1)] = (DeviceClass(),)
    round_seconds: Positive = 1.0
    macs_per_second: Positive | None = None

    def device(self, index: int, *, seed: int = 0) -> "Device":
        """Return one device."""
        self.check(np.array([index]))
        return Device(self, index, seed)

    def check(self, devices: IntArray) -> None:
        """Refuse numbers that are no device of this fleet."""
        wrong = devices[(devices < 0) | (devices >= self.size)]
        if len(wrong):
            raise LookupError(f"Expected a device from 0 to {self.size - 1}, got {wrong[0]}")

    def class_of(self, devices: IntArray, *, seed: int = 0) -> IntArray:
        """Return the place in `classes` of each device's class."""
        if len(self.classes) == 1:
            return np.zeros(len(devices), np.int64)
        shares = np.cumsum([kind.share for kind in self.classes])
        drawn = uniforms(seed, ("class",), devices)[0] * shares[-1]
        place: IntArray = np.searchsorted(shares, drawn, side="right")
        return place

    def traits(self, devices: IntArray, *, seed: int = 0) -> Traits:
        """Return the links and energy constants of these devices."""
        kinds = self.class_of(devices, seed=seed)

        def column(values: Sequence[float | None]) -> FloatArray:
            return np.array([math.inf if value is None else value for value in values])[kinds]

        return Traits(
            up=column([kind.up for kind in self.classes]),
            down=column([kind.down for kind in self.classes]),
            latency=column([kind.latency for kind in self.classes]),
            joules_per_mac=column([kind.joules_per_mac for kind in self.classes]),
            joules_per_byte=column([kind.joules_per_byte for kind in self.classes]),
        )

    def speeds(self, devices: IntArray, time: float, *, seed: int = 0) -> FloatArray:
        """Return the relative speeds of these devices at one time; 0 is not available.

        >>> import numpy as np
        >>> from pliant.devices import Fleet, Windows
        >>> fleet = Fleet(size=5, speed=Windows(windows=((1.0, 2.0),), period=4.0))
        >>> fleet.speeds(np.array([4, 2]), 9.5).tolist()
        [1.0, 1.0]
        """
        path = self.path(devices, time, self.round_seconds, seed=seed)
        return path.speed(np.zeros(len(devices)))

    def path(self, devices: IntArray, start: float, length: float, *, seed: int = 0) -> Path:
        """Return the relative speeds of these devices from `start` on, exactly.

        >>> import numpy as np
        >>> from pliant.devices import Constant, Fleet
        >>> Fleet(size=5, speed=Constant(0.5)).path(np.array([4, 2]), 10.0, 3.0).total.tolist()
        [1.5, 1.5]
        """
        self.check(devices)
        if not len(devices):
            return constant(np.zeros(0), length)
        kinds = self.class_of(devices, seed=seed)
        parts, places = [], []
        for number in np.unique(kinds):
            place = np.flatnonzero(kinds == number)
            trace = self.classes[number].speed or self.speed
            asked = Asked(seed, devices[place], self.round_seconds)
            parts.append(trace.over(asked, start, length))
            places.append(place)
        return stacked(parts, places) if len(parts) != 1 else parts[0]


@dataclass(frozen=True)
class Device:
    """One device of a fleet; its work is in seconds at speed 1.0 (times MAC/s, in MACs).

    >>> from pliant.devices import Fleet, Steps
    >>> device = Fleet(size=1, speed=Steps(times=(0.0, 1.0), speeds=(1.0, 0.25))).device(0)
    >>> device.speed(1.0), device.work(0.0, 2.0), device.finish(0.5, 1.0)
    (0.25, 1.25, 3.0)
    """

    fleet: Fleet
    index: int
    seed: int = 0

    @property
    def kind(self) -> DeviceClass:
        """Return the class of this device."""
        place = self.fleet.class_of(np.array([self.index]), seed=self.seed)
        return self.fleet.classes[int(place[0])]

    def path(self, start: float, length: float) -> Path:
        """Return this device's speeds from `start` on."""
        return self.fleet.path(np.array([self.index]), start, length, seed=self.seed)

    def speed(self, time: float) -> float:
        """Return the speed at this time."""
        return float(self.fleet.speeds(np.array([self.index]), time, seed=self.seed)[0])

    def work(self, start: float, end: float) -> float:
        """Return the exact integral of the speed from start to end."""
        if end < start:
            raise ValueError(f"Expected an end of at least {start}, got {end}")
        return float(self.path(start, end - start).total[0])

    def finish(self, start: float, work: float, *, rounds: int = 2**16) -> float:
        """Return the first time at which this work is done; infinity if not in these rounds."""
        length = self.fleet.round_seconds
        while True:
            end = float(self.path(start, length).finish(np.zeros(1), np.full(1, work))[0])
            if math.isfinite(end) or length >= rounds * self.fleet.round_seconds:
                return start + end
            length *= 4.0
