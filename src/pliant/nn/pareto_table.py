"""The table of steps that a device chooses from: rates, image side and share of the mini-batch."""

from itertools import groupby, pairwise, zip_longest
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from pliant.html_table import make_html_table
from pliant.nn.elastic import Elastic, Rates
from pliant.nn.net_cache import cache_on_net
from pliant.nn.subnet import Sampling, Subnet
from pliant.value import Count, Fraction, NonNegative, Value

Share = Annotated[float, Meta(gt=0.0, le=1.0)]


class ParetoTable(Value, frozen=True):
    """Rate vectors for one network, in order of their expected training cost.

    A search adds the accuracy gain of each row in a short training, and the seconds of a step if
    the device was profiled. Both rise with the cost. A row may also shrink the images and the
    mini-batch. With `stages`, the rows of one stage follow those of the stage before.

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
    sides: tuple[Count | None, ...] = ()  # of the images, in pixels; None: as they are
    batch_shares: tuple[Share, ...] = ()  # of the samples of a mini-batch
    stages: tuple[Fraction, ...] = ()  # progress of training at which a row was measured

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
        rising = {"cost": self.shares, "gain": self.gains, "time": self.seconds}
        others = {"side": self.sides, "batch share": self.batch_shares, "stage": self.stages}
        for name, column in (rising | others).items():
            if column and len(column) != len(self.rates):
                raise ValueError(f"Expected {len(self.rates)} values of {name}, got {len(column)}")
        for name, column in rising.items():
            self._check_rising(name, column)
        if any(before > after for before, after in pairwise(self.stages)):
            raise ValueError("Expected rows in the order of their stages, got an earlier one later")

    def __repr__(self) -> str:
        low, high = self.shares[0], self.shares[-1]
        rows, sites = len(self.rates), len(self.rates[0])
        return f"ParetoTable({rows} rows of {sites} rates, cost {low:.3g} to {high:.3g})"

    def _repr_html_(self) -> str:
        columns: dict[str, list[object]] = {"row": list(range(len(self.rates)))}
        columns["cost share"] = [f"{share:.3f}" for share in self.shares]
        if self.gains:
            columns["gain"] = [f"{gain:.4f}" for gain in self.gains]
        if self.sides:
            columns["side"] = [side or "full" for side in self.sides]
        rates = [" ".join(f"{rate:.2f}" for rate in vector) for vector in self.rates]
        columns["rates by site"] = list(rates)
        return make_html_table(
            repr(self), tuple(columns), list(zip(*columns.values(), strict=True))
        )

    def _check_rising(self, name: str, column: tuple[float, ...]) -> None:
        stages = self.stages or (0.0,) * len(column)
        for row, (before, after) in enumerate(pairwise(column), start=1):
            if not after >= before and stages[row] == stages[row - 1]:
                raise ValueError(f"Expected rows of rising {name}, got a lower one in row {row}")

    def split_stages(self) -> "list[ParetoTable]":
        """Return one table per stage; each still says at which stage it was measured."""
        stages = self.stages or (0.0,) * len(self.rates)
        groups = [list(rows) for _, rows in groupby(range(len(stages)), key=stages.__getitem__)]
        return [self.select_rows(rows) for rows in groups]

    def select_rows(self, rows: list[int]) -> "ParetoTable":
        """Return a table of some of the rows."""
        names = ("rates", "shares", "gains", "seconds", "sides", "batch_shares", "stages")
        columns = {name: getattr(self, name) for name in names}
        selected = {name: tuple(col[row] for row in rows) for name, col in columns.items() if col}
        return msgspec.structs.replace(self, **selected)

    def get_scale(self, row: int) -> tuple[int | None, float]:
        """Return the image side and the share of the mini-batch of a row."""
        side = self.sides[row] if self.sides else None
        return side, self.batch_shares[row] if self.batch_shares else 1.0

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


def count_step_macs(
    net: Elastic,
    rates_or_subnet: Rates | Subnet,
    side: int | None = None,
    batch_share: float = 1.0,
    sampling: Sampling = "blocks",
) -> float:
    """Return the MACs of a training step per sample of a whole mini-batch, in closed form.

    >>> import torch
    >>> import pliant as pl
    >>> from pliant.nn.pareto_table import count_step_macs
    >>> net = pl.elastic(pl.models.resnet20(), torch.zeros(1, 3, 32, 32))
    >>> round(count_step_macs(net, 0.0, 16, 0.5) / count_step_macs(net, 0.0), 3)
    0.125
    """
    net = net if side is None else net.at(side, side)
    return batch_share * net.macs(rates_or_subnet, training=True, sampling=sampling)


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
    rates = np.linspace(highest_rate, 0.0, rows).tolist()
    return _make_table(net, tuple((rate,) * len(net.sites) for rate in rates), sampling)


@cache_on_net
def linear_table(
    net: Elastic, rows: int = 64, highest_rate: float = 0.9, sampling: Sampling = "blocks"
) -> ParetoTable:
    """Make a table whose rates rise linearly from site to site, as those of stochastic depth do.

    The rate of site l of L is l/L times that of the last (Huang et al., "Deep networks with
    stochastic depth", ECCV 2016).

    >>> import torch
    >>> import pliant as pl
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> pl.linear_table(net, rows=3, highest_rate=0.8).rates
    ((0.4, 0.8), (0.2, 0.4), (0.0, 0.0))
    """
    sites = len(net.sites)
    last = np.linspace(highest_rate, 0.0, rows).tolist()
    rates = tuple(tuple(rate * site / sites for site in range(1, sites + 1)) for rate in last)
    return _make_table(net, rates, sampling)


def _make_table(
    net: Elastic, rates: tuple[tuple[float, ...], ...], sampling: Sampling
) -> ParetoTable:
    full = net.macs(0.0, training=True)
    shares = tuple(net.macs(row, training=True, sampling=sampling) / full for row in rates)
    layers = describe_layers(net)
    return ParetoTable(net.fingerprint, rates, shares, layers=layers, full_macs=full)


def resolve_table(
    table: ParetoTable | None,
    net: Elastic,
    sampling: Sampling = "blocks",
    *,
    can_scale: bool = False,
) -> ParetoTable:
    """Check the table against the network, or make a uniform one if there is none.

    Rows with smaller images or mini-batches are accepted if the caller can use them.
    """
    if table is None:
        return uniform_table(net, sampling=sampling)
    table.check_network(net)
    if len(set(table.stages)) > 1:
        raise ValueError(
            f"Expected a table of one stage, got one of {len(set(table.stages))} stages, which "
            "only progressive training can use"
        )
    if not can_scale and any(
        table.get_scale(row) != (None, 1.0) for row in range(len(table.rates))
    ):
        raise ValueError(
            "Expected a table of rates alone, got one with image sides or batch shares"
        )
    return table
