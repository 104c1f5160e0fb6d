"""The table of rate vectors that a device chooses from: rising cost, one vector a row."""

from bisect import bisect_right
from functools import lru_cache
from itertools import pairwise, zip_longest

import numpy as np

from pliant.nn.elastic import Elastic
from pliant.value import NonNegative, Value

ROUNDING = 1e-9  # a row that fits exactly must not be lost to rounding


class Table(Value, frozen=True):
    """Rate vectors in the order of their expected training cost, for one network.

    What a search has found is there too: the gain of accuracy in a short training, which rises with
    the cost, and the seconds of a step where a profile of the device was given.

    >>> import torch
    >>> from pliant.nn.elastic import elastic
    >>> from pliant.explore import uniform_table
    >>> net = torch.nn.Sequential(
    ...     torch.nn.Conv2d(1, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 2)
    ... )
    >>> table = uniform_table(elastic(net, torch.zeros(1, 1, 8, 8)), rows=3)
    >>> table.rates
    ((0.5,), (0.25,), (0.0,))
    >>> table.row(0.8), table.row(0.1)  # the largest that fits, else the smallest
    (1, 0)
    """

    network: str  # fingerprint of the elastic network
    rates: tuple[tuple[float, ...], ...]  # (row, site)
    shares: tuple[float, ...]  # of a row: expected MACs of a training step / the full network's
    gains: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    layers: tuple[str, ...] = ()  # of the network, to tell which one differs
    full_macs: NonNegative = 0.0  # of a training step of the full network, per sample

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if not self.rates or len(self.rates) != len(self.shares):
            raise ValueError(
                f"Expected as many rate vectors as costs, got {len(self.rates)} rate vectors "
                f"and {len(self.shares)} costs"
            )
        for row, vector in enumerate(self.rates):
            if len(vector) != len(self.rates[0]) or not all(0.0 <= rate < 1.0 for rate in vector):
                raise ValueError(
                    f"Expected {len(self.rates[0])} rates in [0, 1) in every row, got "
                    f"{vector} in row {row}"
                )
        columns = (("cost", self.shares), ("gain", self.gains), ("time", self.seconds))
        for name, column in columns:
            if column and len(column) != len(self.rates):
                raise ValueError(f"Expected {len(self.rates)} values of {name}, got {len(column)}")
            for row, (before, after) in enumerate(pairwise(column), start=1):
                if not after >= before:
                    raise ValueError(
                        f"Expected rows of rising {name}, got a lower one in row {row}"
                    )

    def row(self, share: float) -> int:
        """Return the largest row that costs no more than this share, or the smallest."""
        return max(0, bisect_right(self.shares, share * (1.0 + ROUNDING)) - 1)

    def check(self, net: Elastic) -> None:
        """Refuse a table that was made for another network, and say where they differ."""
        if self.network == net.fingerprint:
            return
        told = f"{len(net.sites)} sites here, {len(self.rates[0])} in the table"
        if self.layers:
            told = _difference(described(net), self.layers) or told
        raise ValueError(f"Expected a table for this network, got one for another: {told}")


def _difference(here: tuple[str, ...], there: tuple[str, ...]) -> str | None:
    for ours, theirs in zip_longest(here, there, fillvalue="nothing"):
        if ours != theirs:
            return f"{ours} here, {theirs} in the table"
    return None


def described(net: Elastic) -> tuple[str, ...]:
    """Return the name, the shape and the size of the output of each layer that costs MACs."""
    return tuple(
        f"{work.layer.removesuffix('.weight')} "
        f"{'x'.join(map(str, net.plan.shapes.get(work.layer, ())))} ({work.each})"
        for work in net.plan.works
    )


@lru_cache(maxsize=8)
def uniform_table(net: Elastic, rows: int = 64, highest: float = 0.5) -> Table:
    """Make a table of equal rates for all sites: what there is when no search was run.

    >>> import torch
    >>> import pliant as pl
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> pl.uniform_table(net, rows=3).rates
    ((0.5, 0.5), (0.25, 0.25), (0.0, 0.0))
    """
    full = net.macs(0.0, training=True)
    rates = [float(rate) for rate in np.linspace(highest, 0.0, rows)]
    costs = tuple(net.macs(rate, training=True) / full for rate in rates)
    vectors = tuple((rate,) * len(net.sites) for rate in rates)
    return Table(net.fingerprint, vectors, costs, layers=described(net), full_macs=full)


def fitting(table: Table | None, net: Elastic) -> Table:
    """Return a table for this network: the given one, checked, or equal rates."""
    if table is None:
        return uniform_table(net)
    table.check(net)
    return table
