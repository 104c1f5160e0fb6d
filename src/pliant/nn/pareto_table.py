"""The table of dropout-rate vectors that a device chooses from, in order of cost."""

from itertools import pairwise, zip_longest

import numpy as np

from pliant.nn.elastic import Elastic, cache_on_net
from pliant.nn.subnet import Sampling
from pliant.value import NonNegative, Value


class ParetoTable(Value, frozen=True):
    """Rate vectors for one network, in order of their expected training cost.

    A search adds the accuracy gain of each row in a short training, and the seconds of a step if
    the device was profiled. Both rise with the cost.

    >>> import torch
    >>> from pliant.nn.elastic import elastic
    >>> from pliant.nn.pareto_table import uniform_table
    >>> net = torch.nn.Sequential(
    ...     torch.nn.Conv2d(1, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 2)
    ... )
    >>> table = uniform_table(elastic(net, torch.zeros(1, 1, 8, 8)), rows=3)
    >>> table.rates
    ((0.5,), (0.25,), (0.0,))
    """

    network: str  # fingerprint of the elastic network
    rates: tuple[tuple[float, ...], ...]  # (row, site)
    shares: tuple[float, ...]  # expected MACs of a training step / the full network's
    gains: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    layers: tuple[str, ...] = ()  # to report which layer of another network differs
    full_macs: NonNegative = 0.0  # per sample, of a training step of the full network

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if not self.rates or len(self.rates) != len(self.shares):
            raise ValueError(
                f"Expected one cost per rate vector, got {len(self.rates)} rate vectors "
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

    def check_network(self, net: Elastic) -> None:
        """Raise unless the table was made for this network, and name the first difference."""
        if self.network == net.fingerprint:
            return
        difference = f"{len(net.sites)} sites here, {len(self.rates[0])} in the table"
        layers = describe_layers(net) if self.layers else ()
        for here, there in zip_longest(layers, self.layers, fillvalue="nothing"):
            if here != there:
                difference = f"{here} here, {there} in the table"
                break
        raise ValueError(f"Expected a table for this network, got one for another: {difference}")


def describe_layers(net: Elastic) -> tuple[str, ...]:
    """Return the name, weight shape and unit cost of each layer that costs MACs."""
    return tuple(
        f"{cost.layer.removesuffix('.weight')} "
        f"{'x'.join(map(str, net.program.param_shapes.get(cost.layer, ())))} ({cost.unit_macs})"
        for cost in net.program.layer_costs
    )


@cache_on_net
def uniform_table(
    net: Elastic, rows: int = 64, highest_rate: float = 0.5, sampling: Sampling = "blocks"
) -> ParetoTable:
    """Make a table that gives all sites the same rate, for use without a search.

    Costs are those of subnets drawn by `sampling`.

    >>> import torch
    >>> import pliant as pl
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> pl.uniform_table(net, rows=3).rates
    ((0.5, 0.5), (0.25, 0.25), (0.0, 0.0))
    """
    full = net.macs(0.0, training=True)
    rates = [float(rate) for rate in np.linspace(highest_rate, 0.0, rows)]
    shares = tuple(net.macs(rate, training=True, sampling=sampling) / full for rate in rates)
    vectors = tuple((rate,) * len(net.sites) for rate in rates)
    return ParetoTable(
        net.fingerprint, vectors, shares, layers=describe_layers(net), full_macs=full
    )


def resolve_table(
    table: ParetoTable | None, net: Elastic, sampling: Sampling = "blocks"
) -> ParetoTable:
    """Check the table against the network, or make a uniform one if there is none."""
    if table is None:
        return uniform_table(net, sampling=sampling)
    table.check_network(net)
    return table
