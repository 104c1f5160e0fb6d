"""Traces: how fast a device is at any time, as a pure function of (seed, device, time).

A speed is relative: at 1.0 the full network just finishes its round. Times are virtual seconds.
Every trace answers `over(asked, start, length)` with the exact path of the devices asked for.
"""

from typing import Annotated

from msgspec import Meta

from pliant.devices.drawn import Asked, Changing, Constant
from pliant.devices.path import Path, product
from pliant.devices.played import Availability, Recorded, Steps, Windows
from pliant.value import Value


class Product(Value, frozen=True, tag="product"):
    """The product of traces: a changing speed, but only while the device is available and charging.

    The first part has the speeds that it has alone; the others draw at addresses of their own.

    >>> from pliant.devices import Constant, Fleet, Product, Windows
    >>> speed = Product((Constant(0.5), Windows(windows=((1.0, 2.0),), period=4.0)))
    >>> Fleet(size=1, speed=speed).device(0).work(0.0, 8.0)
    1.0
    """

    parts: Annotated[tuple["Trace", ...], Meta(min_length=1)]

    def over(self, asked: Asked, start: float, length: float) -> Path:
        whole = self.parts[0].over(asked, start, length)
        for place, part in enumerate(self.parts[1:], start=1):
            apart = asked._replace(address=(*asked.address, place))
            whole = product(whole, part.over(apart, start, length))
        return whole


Trace = Constant | Changing | Steps | Windows | Recorded | Availability | Product
