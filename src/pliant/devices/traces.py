"""Traces: the speed of a device at any time, as a pure function of (seed, device, time).

A speed is relative: at 1.0 the full network just fits the round. Times are virtual seconds.
Every trace has `compute_speeds(query, start, length)`, which returns the exact speeds.
"""

from typing import Annotated

from msgspec import Meta

from pliant.devices.piecewise import PiecewiseConstant, multiply
from pliant.devices.recorded_traces import RecordedAvailability, RecordedTrace
from pliant.devices.synthetic_traces import (
    ChangingTrace,
    ConstantTrace,
    OnOffWindows,
    SteppedTrace,
    TraceQuery,
)
from pliant.value import Value


class ProductTrace(Value, frozen=True, tag="product"):
    """The product of traces: say, a changing speed while the device is available and charging.

    The first factor has the speeds it has alone; the others draw at addresses of their own.

    >>> from pliant.devices import ConstantTrace, Fleet, OnOffWindows, ProductTrace
    >>> speed = ProductTrace((ConstantTrace(0.5), OnOffWindows(windows=((1.0, 2.0),), period=4.0)))
    >>> Fleet(size=1, speed=speed).device(0).work(0.0, 8.0)
    1.0
    """

    parts: Annotated[tuple["Trace", ...], Meta(min_length=1)]

    def compute_speeds(self, query: TraceQuery, start: float, length: float) -> PiecewiseConstant:
        product = self.parts[0].compute_speeds(query, start, length)
        for index, part in enumerate(self.parts[1:], start=1):
            part_query = query._replace(address=(*query.address, index))
            product = multiply(product, part.compute_speeds(part_query, start, length))
        return product


Trace = (
    ConstantTrace
    | ChangingTrace
    | SteppedTrace
    | OnOffWindows
    | RecordedTrace
    | RecordedAvailability
    | ProductTrace
)
