"""Sub-networks that are kept for a while: what they cost, and orders of filters to take them from.

A kept sub-network has the first filters of an order, rounded up. A device goes on with the very
same object for as long as its row does not change, so that switching costs nothing.
"""

from functools import lru_cache

import numpy as np

from pliant.explore.table import Table
from pliant.methods.base import Place
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Order, Subnet
from pliant.rng import stream

Rates = tuple[float, ...]
FINE = 128  # rows of a table that stands for a continuous choice


@lru_cache(maxsize=16)
def counted_table(net: Elastic, rates: tuple[Rates, ...]) -> Table:
    """Make a table whose costs are those of the first filters, rounded up, at these rates."""
    full = net.macs(net.full, training=True)
    costs = [net.macs(net.first(row), training=True) / full for row in rates]
    order = sorted(range(len(rates)), key=lambda row: (costs[row], row))
    return Table(
        net.fingerprint,
        tuple(rates[row] for row in order),
        tuple(costs[row] for row in order),
    )


@lru_cache(maxsize=16)
def widths_table(net: Elastic, widths: tuple[float, ...]) -> Table:
    """Make a table of widths: the same share of every site's filters."""
    return counted_table(net, tuple((1.0 - width,) * len(net.sites) for width in sorted(widths)))


def fine_widths(least: float) -> tuple[float, ...]:
    """Return so many widths from the least to 1 that the choice is as good as continuous."""
    return tuple(np.linspace(least, 1.0, FINE).tolist())


@lru_cache(maxsize=256)
def taken_first(net: Elastic, rates: Rates, order: "Ordered", scaled: bool = False) -> Subnet:
    """Keep the first filters of an order at these rates."""
    if not any(rates):
        return net.full
    return net.first(rates, order.places, scaled=scaled)


class Ordered:
    """An order of every site's filters that can be asked for again."""

    def __init__(self, places: Order) -> None:
        self.places = places


@lru_cache(maxsize=4)
def own_order(net: Elastic) -> Ordered:
    """Return the filters' own order: prefixes."""
    return Ordered(net.rolled(0))


@lru_cache(maxsize=256)
def rolled_order(net: Elastic, shift: int) -> Ordered:
    """Return the order of a window that has rolled on by so many filters."""
    return Ordered(net.rolled(shift))


@lru_cache(maxsize=256)
def random_order(net: Elastic, place: Place) -> Ordered:
    """Return the random order of a device in a round."""
    return Ordered(net.order(place.stream("order")))


@lru_cache(maxsize=4)
def common_order(net: Elastic, seed: int, round: int) -> Ordered:
    """Return the random order of a round, the same for all its devices."""
    return Ordered(net.order(stream(seed, "order", round)))
