"""Fleets: the devices of a run, their classes, speeds and costs, drawn by (seed, device)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple, TypeGuard

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from pliant.devices.links import LinkRates
from pliant.devices.piecewise import PiecewiseConstant, make_constant, stack_devices
from pliant.devices.synthetic_traces import ConstantTrace, TraceQuery
from pliant.devices.traces import Trace
from pliant.devices.vector_rng import MAX_DEVICES, FloatArray, IntArray, sample_uniforms
from pliant.html_table import make_html_table
from pliant.rng import Address
from pliant.value import NonNegative, Positive, Value

LinkDirection = Literal["up", "down"]


class DeviceClass(Value, frozen=True):
    """A kind of device: its share of the fleet, speed, link, energy constants and memory.

    A link is a number of bytes per second, or a trace of it. Idle power is drawn from the end of
    a device's own work and transfers until the round closes or the device leaves it.

    >>> from pliant.devices import ConstantTrace, DeviceClass
    >>> DeviceClass(name="gateway", share=0.2, speed=ConstantTrace(0.5, 1.0), up=1e6).down is None
    True
    """

    name: str = "device"
    share: Positive = 1.0  # relative to the other classes
    speed: Trace | None = None  # None: the fleet's
    up: Positive | Trace | None = None  # bytes per second; None: uploads take no time
    down: Positive | Trace | None = None
    latency: NonNegative = 0.0  # seconds, each way
    joules_per_mac: NonNegative = 0.0
    joules_per_byte: NonNegative = 0.0
    idle_watts: NonNegative = 0.0  # while it waits for the others of its round
    memory: Positive | None = None  # bytes for a training step; None: any step fits


class DeviceCosts(NamedTuple):
    """The latency, energy constants and memory of several devices, one number per device.

    >>> import numpy as np
    >>> from pliant.devices import DeviceClass, Fleet
    >>> fleet = Fleet(size=3, classes=(DeviceClass(latency=0.5),))
    >>> fleet.get_costs(np.array([0, 2])).latency.tolist()
    [0.5, 0.5]
    """

    latency: FloatArray  # seconds
    joules_per_mac: FloatArray
    joules_per_byte: FloatArray
    idle_watts: FloatArray
    memory: FloatArray  # bytes; infinity where it is not limited


def compute_joules(
    costs: DeviceCosts,
    macs: FloatArray,
    transferred_bytes: FloatArray,
    idle_seconds: FloatArray | float,
) -> FloatArray:
    """Return the joules that each device spends on compute, on its radio and on waiting.

    >>> import numpy as np
    >>> from pliant.devices import DeviceClass, Fleet, compute_joules
    >>> phone = DeviceClass(name="phone", joules_per_mac=2.0, joules_per_byte=0.5)
    >>> costs = Fleet(size=3, classes=(phone,)).get_costs(np.array([1]))
    >>> compute_joules(costs, np.array([10.0]), np.array([4.0]), idle_seconds=0.0).tolist()
    [22.0]
    """
    active = costs.joules_per_mac * macs + costs.joules_per_byte * transferred_bytes
    return active + costs.idle_watts * idle_seconds


class Fleet(Value, frozen=True):
    """All devices of a run; devices are drawn only when used, so size costs nothing.

    `round_seconds` is the nominal length of a round, to which `per_round` of a trace refers.
    `macs_per_second` is what speed 1.0 means; without it, 1.0 is the speed at which a device's own
    full task just fills the round.

    >>> from pliant.devices import ChangingTrace, Fleet
    >>> fleet = Fleet(size=1_000_000, speed=ChangingTrace(low=0.25, high=1.0, per_round=2.0))
    >>> 0.25 <= fleet.device(999_999).speed(0.0) <= 1.0
    True
    """

    size: Annotated[int, Meta(ge=1, le=MAX_DEVICES)]
    speed: Trace = ConstantTrace(1.0)
    classes: Annotated[tuple[DeviceClass, ...], Meta(min_length=1)] = (DeviceClass(),)
    round_seconds: Positive = 1.0
    macs_per_second: Positive | None = None

    def __repr__(self) -> str:
        kinds = ", ".join(device_class.name for device_class in self.classes)
        return f"Fleet({self.size:,} devices, {kinds}, speed={self.speed})"

    def _repr_html_(self) -> str:
        total = sum(device_class.share for device_class in self.classes)
        header = ("class", "share", "speed", "up", "down", "latency", "memory")
        rows = [
            (
                kind.name, f"{kind.share / total:.0%}", kind.speed or self.speed,
                _describe_link(kind.up), _describe_link(kind.down), f"{kind.latency:g} s",
                "any" if kind.memory is None else f"{kind.memory / 1e6:g} MB",
            )
            for kind in self.classes
        ]  # fmt: skip
        title = f"{self.size:,} devices, rounds of {self.round_seconds:g} s"
        return make_html_table(title, header, rows)

    def device(self, index: int, *, seed: int = 0) -> "FleetDevice":
        self.check_devices(np.array([index]))
        return FleetDevice(self, index, seed)

    def check_devices(self, devices: IntArray) -> None:
        """Raise LookupError unless every number is a device of this fleet."""
        wrong = devices[(devices < 0) | (devices >= self.size)]
        if len(wrong):
            raise LookupError(f"Expected a device from 0 to {self.size - 1}, got {wrong[0]}")

    def check_traces(self) -> None:
        """Raise ValueError unless the trace of every class can be used, recordings included."""
        query = TraceQuery(0, np.zeros(1, np.int64), self.round_seconds)
        for device_class in self.classes:
            links = (device_class.up, device_class.down)
            traces = [device_class.speed or self.speed, *filter(_is_trace, links)]
            for trace in traces:
                trace.compute_speeds(query, 0.0, self.round_seconds)

    def get_class_indices(self, devices: IntArray, *, seed: int = 0) -> IntArray:
        """Return the index into `classes` of each device's class."""
        if len(self.classes) == 1:
            return np.zeros(len(devices), np.int64)
        shares = np.cumsum([device_class.share for device_class in self.classes])
        positions = sample_uniforms(seed, ("class",), devices)[0] * shares[-1]
        return np.asarray(np.searchsorted(shares, positions, side="right"))

    def get_costs(self, devices: IntArray, *, seed: int = 0) -> DeviceCosts:
        """Return the latency, energy constants and memory of these devices."""
        table = _tabulate_costs(self.classes)
        return DeviceCosts(*table[:, self.get_class_indices(devices, seed=seed)])

    def compute_links(
        self,
        devices: IntArray,
        direction: LinkDirection,
        start: float,
        length: float,
        *,
        seed: int = 0,
    ) -> LinkRates:
        """Return the exact rates of these devices' links over `length` seconds from `start`."""
        rates_of_classes, is_traced = _tabulate_links(self.classes, direction)
        indices = self.get_class_indices(devices, seed=seed)
        constant, traced = rates_of_classes[indices], np.flatnonzero(is_traced[indices])
        if not len(traced):
            return LinkRates(constant, traced)
        links = [getattr(device_class, direction) for device_class in self.classes]
        rates = self._compute_traces(links, (direction,), devices[traced], start, length, seed=seed)
        first = rates.levels[:, 0]
        kinds = np.array([isinstance(link, ConstantTrace) for link in links])[indices[traced]]
        is_constant = kinds & (first > 0)
        constant[traced] = np.where(is_constant, first, 1.0)
        changing = np.flatnonzero(~is_constant)
        rest = rates.select(changing) if len(changing) else None
        return LinkRates(constant, traced[changing], rest)

    def speeds_at(self, devices: IntArray, time: float, *, seed: int = 0) -> FloatArray:
        """Return the relative speeds of these devices at one time; 0 means unavailable.

        >>> import numpy as np
        >>> from pliant.devices import Fleet, OnOffWindows
        >>> fleet = Fleet(size=5, speed=OnOffWindows(windows=((1.0, 2.0),), period=4.0))
        >>> fleet.speeds_at(np.array([4, 2]), 9.5).tolist()
        [1.0, 1.0]
        """
        speeds = self.compute_speeds(devices, time, self.round_seconds, seed=seed)
        return speeds.speed(np.zeros(len(devices)))

    def compute_speeds(
        self, devices: IntArray, start: float, length: float, *, seed: int = 0
    ) -> PiecewiseConstant:
        """Return the exact relative speeds of these devices over `length` seconds from `start`.

        >>> import numpy as np
        >>> from pliant.devices import ConstantTrace, Fleet
        >>> fleet = Fleet(size=5, speed=ConstantTrace(0.5))
        >>> fleet.compute_speeds(np.array([4, 2]), 10.0, 3.0).total.tolist()
        [1.5, 1.5]
        """
        self.check_devices(devices)
        traces = [device_class.speed or self.speed for device_class in self.classes]
        return self._compute_traces(traces, ("trace",), devices, start, length, seed=seed)

    def _compute_traces(
        self,
        traces: Sequence[Trace],  # one per class
        address: tuple[Address, ...],
        devices: IntArray,
        start: float,
        length: float,
        *,
        seed: int,
    ) -> PiecewiseConstant:
        if not len(devices):
            return make_constant(np.zeros(0), length)
        if len(traces) == 1:
            query = TraceQuery(seed, devices, self.round_seconds, address)
            return traces[0].compute_speeds(query, start, length)
        indices = self.get_class_indices(devices, seed=seed)
        parts, positions = [], []
        for class_index in np.unique(indices):
            members = np.flatnonzero(indices == class_index)
            query = TraceQuery(seed, devices[members], self.round_seconds, address)
            parts.append(traces[class_index].compute_speeds(query, start, length))
            positions.append(members)
        return stack_devices(parts, positions) if len(parts) != 1 else parts[0]


def _describe_link(link: float | Trace | None) -> str:
    if link is None:
        return "no limit"
    return f"{link / 1e6:g} MB/s" if isinstance(link, float) else str(link)


def _is_trace(link: float | Trace | None) -> TypeGuard[Trace]:
    return isinstance(link, Value)


@lru_cache(maxsize=16)
def _tabulate_costs(classes: tuple[DeviceClass, ...]) -> FloatArray:
    """Return the fields of `DeviceCosts` by class: (field, class)."""
    names = DeviceCosts._fields
    values = [[getattr(device_class, name) for device_class in classes] for name in names]
    return np.array([[math.inf if x is None else x for x in row] for row in values])


@lru_cache(maxsize=16)
def _tabulate_links(
    classes: tuple[DeviceClass, ...], direction: LinkDirection
) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Return the rate of each class if it is constant, and whether it has a trace."""
    links = [getattr(device_class, direction) for device_class in classes]
    rates = [1.0 if _is_trace(x) else math.inf if x is None else x for x in links]
    return np.array(rates), np.array([_is_trace(link) for link in links])


@dataclass(frozen=True)
class FleetDevice:
    """One device of a fleet; its work is in seconds at speed 1.0 (times MAC/s, in MACs).

    >>> from pliant.devices import Fleet, SteppedTrace
    >>> device = Fleet(size=1, speed=SteppedTrace(times=(0.0, 1.0), speeds=(1.0, 0.25))).device(0)
    >>> device.speed(1.0), device.work(0.0, 2.0), device.finish_time(0.5, 1.0)
    (0.25, 1.25, 3.0)
    """

    fleet: Fleet
    index: int
    seed: int = 0

    def compute_speeds(self, start: float, length: float) -> PiecewiseConstant:
        return self.fleet.compute_speeds(np.array([self.index]), start, length, seed=self.seed)

    def speed(self, time: float) -> float:
        return float(self.fleet.speeds_at(np.array([self.index]), time, seed=self.seed)[0])

    def work(self, start: float, end: float) -> float:
        """Return the exact integral of the speed from start to end."""
        if end < start:
            raise ValueError(f"Expected an end of at least {start}, got {end}")
        return float(self.compute_speeds(start, end - start).total[0])

    def finish_time(self, start: float, work: float, *, max_rounds: int = 2**16) -> float:
        """Return when this work is done, or infinity if it takes more than `max_rounds`."""
        length = self.fleet.round_seconds
        while True:
            speeds = self.compute_speeds(start, length)
            end = float(speeds.finish_time(np.zeros(1), np.full(1, work))[0])
            if math.isfinite(end) or length >= max_rounds * self.fleet.round_seconds:
                return start + end
            length *= 4.0
