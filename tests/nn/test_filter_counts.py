"""Counts and costs of many subnets at once against the subnets themselves, one at a time."""

import numpy as np
import pytest
import torch
from tests.nn.zoo import ZOO
from torch import Tensor, nn

from pliant.nn.elastic import Elastic, elastic
from pliant.nn.filter_counts import count_drawn_filters, count_prefix_filters, make_count_costs
from pliant.nn.models import INPUT_SHAPES, MODELS
from pliant.nn.subnet import Sampling
from pliant.params import get_params, nbytes
from pliant.rng import rng_stream

RATES = (0.9, 0.5, 0.2, 0.0)
ROWS = np.arange(12) % len(RATES)


def check_draws(net: Elastic, sampling: Sampling) -> bool:
    """Compare draws with their subnets, and return whether costs are functions of counts."""
    table = tuple((rate,) * len(net.sizes) for rate in RATES)
    counts = count_drawn_filters(
        net, table, ROWS, sampling, seed=3, address=("dropout", 5), numbers=range(100, 112)
    )
    subnets = [
        net.draw(table[row], rng_stream(3, "dropout", 5, 100 + index), sampling)
        for index, row in enumerate(ROWS)
    ]
    costs = make_count_costs(net)
    if costs is None:
        return False
    assert counts.tolist() == [list(subnet.counts) for subnet in subnets]
    assert costs.macs(counts).tolist() == [net.macs(subnet, training=True) for subnet in subnets]
    params = get_params(net.module)
    expected_bytes = [nbytes(net.take(params, subnet)) for subnet in subnets]
    assert costs.nbytes(counts).tolist() == expected_bytes
    prefixes = [list(net.select_prefix(row).counts) for row in table]
    assert count_prefix_filters(net, table).tolist() == prefixes
    return True


@pytest.mark.parametrize("name", MODELS)
def test_every_bundled_network_has_costs_by_counts(name: str) -> None:
    net = elastic(MODELS[name](), torch.zeros(1, *INPUT_SHAPES[name]), check=False)
    assert check_draws(net, "bernoulli")
    assert check_draws(net, "blocks")


@pytest.mark.parametrize("coupled", [True, False])
def test_counts_are_right_wherever_there_are_any(coupled: bool) -> None:
    nets = [elastic(*make(), coupled=coupled, check=False) for make in ZOO.values()]
    assert sum(check_draws(net, "rounded") for net in nets if net.sites) > 10


class Halves(nn.Module):
    """Two halves of one convolution: each layer reads part of a site."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.left, self.right = nn.Conv2d(1, 8, 3), nn.Conv2d(4, 3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        left, _right = self.wide(x).chunk(2, 1)
        return self.right(self.left(left).mean((2, 3)))


class Summed(nn.Module):
    """A sum of two sites whose masks differ: its channels are a union."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 8, 3), nn.Conv2d(1, 8, 3)
        self.c, self.head = nn.Conv2d(8, 4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.c(self.a(x) + self.b(x)).mean((2, 3)))


@pytest.mark.parametrize(("make", "coupled"), [(Halves, True), (Summed, False)])
def test_costs_that_depend_on_which_filters_are_kept_have_no_formula(
    make: type[nn.Module], coupled: bool
) -> None:
    net = elastic(make(), torch.zeros(1, 1, 9, 9), coupled=coupled)
    assert make_count_costs(net) is None
