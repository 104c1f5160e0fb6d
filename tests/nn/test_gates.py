"""Parts of one layer that gate each other: they share a mask, so the mean over draws is exact."""

from collections.abc import Callable, Iterator
from itertools import combinations, product

import numpy as np
import pytest
import torch
from tests.nn.compare_masked import assert_compact_equals_masked, sample_subnets
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pliant.nn.elastic import Elastic, elastic
from pliant.nn.filter_counts import make_count_costs
from pliant.nn.optimisers import Sgd
from pliant.nn.subnet import Subnet
from pliant.nn.trainer import SubnetTrainer
from pliant.params import get_params

Gate = Callable[[Tensor], Tensor]


class Gated(nn.Module):
    """A convolution whose parts meet, and a head that is linear in the result."""

    def __init__(self, gate: Gate, filters: int, width: int) -> None:
        super().__init__()
        self.conv, self.head, self.gate = nn.Conv2d(3, filters, 3), nn.Linear(width, 2), gate

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.gate(self.conv(x)).mean((2, 3)))
        return out


def multiply_halves(x: Tensor) -> Tensor:
    p, q = x.chunk(2, 1)
    return p * q


def gate_by_sigmoid(x: Tensor) -> Tensor:
    p, q = x.split(4, dim=1)
    return torch.tanh(p) * torch.sigmoid(q)


def multiply_slices(x: Tensor) -> Tensor:
    return x[:, :4] * x[:, 4:]


def update_cell(x: Tensor) -> Tensor:
    inner, forget, value, state = x.chunk(4, 1)
    return forget.sigmoid() * state + inner.sigmoid() * value


def divide_halves(x: Tensor) -> Tensor:
    p, q = x.chunk(2, 1)
    return p / q.exp()


def multiply_overlap(x: Tensor) -> Tensor:
    return x[:, :5] * x[:, 3:]


GATES: dict[str, tuple[Gate, int, int, list[int]]] = {  # filters, width of the result, sites
    "halves": (multiply_halves, 8, 4, [4]),
    "sigmoid": (gate_by_sigmoid, 8, 4, [4]),
    "slices": (multiply_slices, 8, 4, [4]),
    "cell": (update_cell, 16, 4, [8]),
    "quotient": (divide_halves, 8, 4, [4]),
    "overlap": (multiply_overlap, 8, 5, []),
}


def make_gated(name: str) -> tuple[nn.Module, Tensor]:
    gate, filters, width, _ = GATES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Gated(gate, filters, width).double(), torch.randn(2, 3, 5, 5, dtype=torch.float64)


def iter_halves(net: Elastic) -> Iterator[Subnet]:
    """Yield every subnet that keeps half of the filters of each site."""
    masks = [
        [np.isin(np.arange(size), kept) for kept in combinations(range(size), size // 2)]
        for size in net.sizes
    ]
    for chosen in product(*masks):
        yield Subnet(net.fingerprint, chosen, (2.0,) * len(chosen))


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("name", GATES)
def test_the_mean_over_all_draws_is_the_full_network(name: str, coupled: bool) -> None:
    module, x = make_gated(name)
    net, params = elastic(module, x, coupled=coupled), get_params(module)
    assert [site.filters for site in net.sites] == GATES[name][3]
    outputs = [net.run(net.take(params, subnet), subnet, x) for subnet in iter_halves(net)]
    torch.testing.assert_close(torch.stack(outputs).mean(0), module(x))


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("name", GATES)
def test_gates_are_computed_as_with_masks(name: str, coupled: bool) -> None:
    assert_compact_equals_masked(*make_gated(name), coupled=coupled)


def test_a_shared_mask_is_counted_exactly() -> None:
    module, x = make_gated("halves")
    net, params = elastic(module, x), get_params(module)
    for subnet in sample_subnets(net, 0):
        with FlopCounterMode(display=False) as counter:
            net.run(net.take(params, subnet), subnet, x)
        assert int(counter.get_total_flops()) == 2 * len(x) * net.macs(subnet)
    # two filters of 27 x 9 positions and two weights of the head for each kept pair
    assert net.macs(0.5, sampling="rounded") == 2 * (2 * 27 * 9 + 2)
    costs = make_count_costs(net)
    assert costs is not None
    assert costs.macs(np.array([[2]]))[0] == net.macs(net.select_prefix(0.5), training=True)


class Recurrent(nn.Module):
    """A gated layer that reads its own output, so that its inputs and outputs share a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(2):
            x = x + multiply_halves(self.gate(x))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def test_costs_are_the_mean_over_all_draws_if_inputs_share_the_mask() -> None:
    module = Recurrent().double()
    net = elastic(module, torch.zeros(1, 3, 2, 2, dtype=torch.float64))
    assert [site.filters for site in net.sites] == [4]
    costs = [net.macs(subnet) for subnet in iter_halves(net)]
    assert net.macs(0.5, sampling="rounded") == pytest.approx(sum(costs) / len(costs))
    assert_compact_equals_masked(module, torch.randn(2, 3, 2, 2, dtype=torch.float64), coupled=True)


def test_training_moves_both_parts_of_kept_filters_only() -> None:
    module, x = make_gated("halves")
    net, start = elastic(module, x), get_params(module)
    trainer = SubnetTrainer(net, start, Sgd(lr=0.1))
    trainer.switch(net.select_prefix(0.5))
    trainer.step(x, lambda out: out.square().mean())
    moved = (trainer.params()["conv.weight"] != start["conv.weight"]).flatten(1).any(1)
    assert moved.tolist() == [True, True, False, False] * 2
