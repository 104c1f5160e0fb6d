"""The table of rate vectors that a device chooses from: rising cost, one vector a row."""

from functools import lru_cache
from itertools import pairwise

import numpy as np

from pliant.nn.elastic import Elastic
from pliant.value import Value


class Table(Value, frozen=True):
    """Rate vectors in the order of their expected training cost, for one network.

    >>> import torch
    >>> from pliant.nn.elastic import elastic
    >>> from pliant.search import uniform_table
    >>> net = torch.nn.Sequential(
    ...     torch.nn.Conv2d(1, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 2)
    ... )
    >>> uniform_table(elastic(net, torch.zeros(1, 1, 8, 8)), rows=3).rates
    ((0.5,), (0.25,), (0.0,))
    """

    network: str  # fingerprint of the elastic network
    rates: tuple[tuple[float, ...], ...]  # (row, site)
    shares: tuple[float, ...]  # of a row: expected MACs of a training step / the full network's

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if not self.rates or len(self.rates) != len(self.shares):
            raise ValueError(
                f"Expected as many rate vectors as costs, got {len(self.rates)} rate vectors "
                f"and {len(self.shares)} costs"
            )
        for row, (before, after) in enumerate(pairwise(self.shares), start=1):
            if after < before:
                raise ValueError(f"Expected rows of rising cost, got a cheaper row {row}")

    def check(self, net: Elastic) -> None:
        """Refuse a table that was made for another network."""
        if self.network != net.fingerprint:
            raise ValueError(
                f"Expected a table for this network ({len(net.sites)} sites), got one for another "
                f"({len(self.rates[0])} sites)"
            )


@lru_cache(maxsize=8)
def uniform_table(net: Elastic, rows: int = 64, highest: float = 0.5) -> Table:
    """Make a table of equal rates for all sites: what there is when no search was run."""
    full = net.macs(0.0, training=True)
    rates = [float(rate) for rate in np.linspace(highest, 0.0, rows)]
    costs = tuple(net.macs(rate, training=True) / full for rate in rates)
    return Table(net.fingerprint, tuple((rate,) * len(net.sites) for rate in rates), costs)


def fitting(table: Table | None, net: Elastic) -> Table:
    """Return a table for this network: the given one, checked, or equal rates."""
    if table is None:
        return uniform_table(net)
    table.check(net)
    return table
