"""Subnets that last longer than a mini-batch: their costs, and the orders of filters they follow.

Such a subnet has the first filters of an order, rounded up. Everything is cached on the
network, so that a device keeps using the same `Subnet` object while its row stays the same, and
switching costs nothing.
"""

from itertools import zip_longest
from typing import Annotated

import numpy as np
from msgspec import Meta

from pliant.devices.vector_rng import IntArray
from pliant.methods.base import TaskKey
from pliant.nn.elastic import Elastic
from pliant.nn.filter_counts import count_prefix_filters
from pliant.nn.net_cache import cache_on_net
from pliant.nn.pareto_table import ParetoTable, count_step_macs
from pliant.nn.subnet import FilterOrders, Subnet
from pliant.rng import rng_stream

Width = Annotated[float, Meta(gt=0.0, le=1.0)]  # share of a site's filters
Widths = Annotated[tuple[Width, ...], Meta(min_length=1)]
SiteRates = tuple[float, ...]
FINE_ROWS = 128  # rows of a table that approximates a continuous choice


@cache_on_net
def make_count_table(
    net: Elastic,
    rates: tuple[SiteRates, ...],
    sides: tuple[int | None, ...] = (),
    batch_shares: tuple[float, ...] = (),
) -> ParetoTable:
    """Make a table with the costs of whole filters, rounded up, at these rates."""
    full = net.macs(net.full, training=True)
    scales = zip_longest(rates, sides, batch_shares)
    costs = [
        count_step_macs(net, net.select_prefix(row), side, batch_share or 1.0) / full
        for row, side, batch_share in scales
    ]
    order = sorted(range(len(rates)), key=lambda row: (costs[row], row))
    return ParetoTable(
        net.fingerprint,
        tuple(rates[row] for row in order),
        tuple(costs[row] for row in order),
        sides=tuple(sides[row] for row in order if sides),
        batch_shares=tuple(batch_shares[row] for row in order if batch_shares),
    )


@cache_on_net
def make_width_table(net: Elastic, widths: tuple[float, ...]) -> ParetoTable:
    """Make a table of widths, each the same share of every site's filters."""
    return make_count_table(net, tuple((1.0 - width,) * len(net.sites) for width in sorted(widths)))


def select_width(net: Elastic, widths: tuple[float, ...], row: int, scaled: bool = False) -> Subnet:
    """Return the subnet of a row of widths: the first filters of every site."""
    return select_prefix(net, make_width_table(net, widths).rates[row], scaled=scaled)


def count_width_filters(net: Elastic, widths: tuple[float, ...]) -> IntArray:
    """Return how many filters each site keeps at each row of widths: (row, site)."""
    return count_prefix_filters(net, make_width_table(net, widths).rates)


def make_fine_widths(min_width: float) -> tuple[float, ...]:
    """Return closely spaced widths from `min_width` to 1."""
    return tuple(np.linspace(min_width, 1.0, FINE_ROWS).tolist())


@cache_on_net
def select_prefix(
    net: Elastic, rates: SiteRates, order: "CachedOrders | None" = None, scaled: bool = False
) -> Subnet:
    """Return the subnet of the first filters at these rates, by default in their natural order."""
    if not any(rates):
        return net.full
    return net.select_prefix(rates, order.orders if order else None, rescale=scaled)


class CachedOrders:
    """Filter orders of all sites, hashable by identity so that they can be a cache key."""

    def __init__(self, orders: FilterOrders) -> None:
        self.orders = orders


@cache_on_net
def make_rolling_order(net: Elastic, shift: int) -> CachedOrders:
    """Return the natural order rotated by `shift` filters."""
    return CachedOrders(net.make_rolling_orders(shift))


@cache_on_net
def make_device_order(net: Elastic, key: TaskKey) -> CachedOrders:
    """Return a random order for one device in one round."""
    return CachedOrders(net.sample_orders(key.rng_stream("order")))


@cache_on_net
def make_round_order(net: Elastic, seed: int, round: int) -> CachedOrders:
    """Return a random order for one round, the same for all devices."""
    return CachedOrders(net.sample_orders(rng_stream(seed, "order", round)))
