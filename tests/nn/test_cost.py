"""Costs: the papers' numbers, numbers on paper, all draws enumerated, torch's own counter."""

from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from math import comb, prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode
from zoo import ZOO

from pliant.nn.elastic import Elastic, elastic
from pliant.nn.models import INPUT_SHAPES, MODELS, densenet40, densenet100, femnist_cnn
from pliant.nn.subnet import Choice, Subnet
from pliant.params import params_of
from pliant.rng import stream

CHOICES: tuple[Choice, ...] = ("bernoulli", "rounded", "blocks")


@pytest.fixture(scope="module")
def densenet() -> Elastic:
    return elastic(densenet40(), torch.zeros(1, 3, 32, 32))


def near(number: float) -> object:
    return pytest.approx(number, rel=1e-4)  # a site never loses its last filter: 3e-5 more


def test_densenet_40_costs_what_the_formula_of_the_paper_gives(densenet: Elastic) -> None:
    assert len(densenet.sites) == 39
    assert densenet.macs(0.0) == 72_365_352
    assert densenet.macs(0.25) == near(40.8302e6)
    assert densenet.macs(0.5) == near(18.2576e6)


def test_densenet_100_costs_what_the_formula_of_the_paper_gives() -> None:
    net = elastic(densenet100(classes=100), torch.zeros(1, 3, 32, 32))
    assert net.macs(0.0) == 287_960_472
    assert net.macs(0.25) == near(162.1086e6)
    assert net.macs(0.5) == near(72.1646e6)


def test_the_femnist_cnn_costs_what_the_formula_of_the_paper_gives() -> None:
    net = elastic(femnist_cnn(), torch.zeros(1, 1, 28, 28))
    assert net.macs(0.0) == 4_015_616
    assert net.macs(0.5) == near(1_196_544)
    assert net.macs(0.5, choice="rounded") == 1_196_544


@pytest.mark.parametrize(("choice", "draws"), [("bernoulli", 2000), ("rounded", 300)])
def test_the_closed_form_is_the_mean_over_draws(
    densenet: Elastic, choice: Choice, draws: int
) -> None:
    for rates in (0.5,) if choice == "bernoulli" else (0.5, np.linspace(0.1, 0.7, 39)):
        found = [
            densenet.macs(densenet.draw(rates, stream(0, number), choice))
            for number in range(draws)
        ]
        assert np.mean(found) == pytest.approx(densenet.macs(rates, choice=choice), rel=0.005)


class Framed(nn.Module):
    """A stem of four channels, a middle, a last convolution and a head."""

    def __init__(self, middle: str) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, padding=1)
        self.last, self.head = nn.Conv2d(4, 3, 1), nn.Linear(3, 2)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.middle == "residual":
            x = x + self.body(x)
        elif self.middle == "gate":
            x = x * torch.sigmoid(self.body(x))
        elif self.middle == "joined":
            x = self.body(torch.cat([x[:, 2:], x[:, :2]], 1))
        else:  # the two halves of one draw are added, also in front of a layer of the same draw
            left, right = x.chunk(2, 1)
            both = torch.cat([left + right, right], 1)
            x = x + self.body(both) if self.middle == "halves of itself" else self.body(both)
        return self.head(self.last(x).mean((2, 3)))


def every(size: int, keep: float, choice: Choice) -> Iterator[tuple[np.ndarray, float]]:
    """All sets of filters of one site with their probability, by the definition of the choice."""
    for number in range(1, size + 1):
        for places in combinations(range(size), number):
            mask = np.isin(np.arange(size), places)
            if choice == "bernoulli":
                likely = keep**number * (1 - keep) ** (size - number)
                likely += (1 - keep) ** size / size if number == 1 else 0.0
            else:  # rounded up as often as the fraction says, then any set of that size
                share = max(0.0, 1 - abs(number - max(1.0, size * keep)))
                likely = share / comb(size, number)
            if likely:
                yield mask, likely


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    ("middle", "coupled"),
    [
        (middle, coupled)
        for middle in ("residual", "gate", "joined", "halves", "halves of itself")
        for coupled in (True, False)
        if coupled or middle != "gate"  # a product that loses all channels is mended
    ],
)
def test_the_closed_form_is_the_sum_over_all_draws(
    middle: str, coupled: bool, choice: Choice
) -> None:
    net = elastic(Framed(middle), torch.zeros(1, 2, 5, 5), coupled=coupled)
    keep = np.linspace(0.45, 0.7, len(net.sites))
    sites = zip(net.sites, keep, strict=True)
    sets = [list(every(site.filters, q, choice)) for site, q in sites]
    macs = written = likely = 0.0
    for row in product(*sets):
        subnet = Subnet(net.fingerprint, tuple(mask for mask, _ in row), (1.0,) * len(row))
        chance = prod(p for _, p in row)
        likely += chance
        macs += chance * net.macs(subnet)
        written += chance * net.activations(subnet)
    assert likely == pytest.approx(1)
    assert net.macs(1 - keep, choice=choice) == pytest.approx(macs, rel=1e-10)
    if choice == "bernoulli":
        assert net.activations(1 - keep) == pytest.approx(written, rel=1e-10)


@cache
def member(name: str, *, coupled: bool) -> Elastic:
    return elastic(*ZOO[name](), coupled=coupled)


@given(st.data())
@settings(max_examples=30)
def test_cost_falls_when_a_rate_rises(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["dense", "projected_residual", "inception", "slice_spread"]))
    net = member(name, coupled=data.draw(st.booleans()))
    choice: Choice = data.draw(st.sampled_from(CHOICES))
    rate = st.floats(0, 0.99)
    rates = np.array(data.draw(st.lists(rate, min_size=len(net.sites), max_size=len(net.sites))))
    higher = rates.copy()
    site = data.draw(st.integers(0, len(rates) - 1))
    higher[site] = data.draw(st.floats(rates[site], 0.99))
    for training in (False, True):
        before = net.macs(rates, training=training, choice=choice)
        assert net.macs(higher, training=training, choice=choice) <= before * (1 + 1e-12)


def counted(net: Elastic, module: nn.Module, subnet: Subnet, x: Tensor) -> int:
    """MACs of one forward and backward pass, by torch."""
    small = net.take(params_of(module), subnet)
    leaves = [t.requires_grad_() for name, t in small.items() if name not in net.buffers]
    with FlopCounterMode(display=False) as counter:
        outputs = pytree.tree_leaves(net.run(small, subnet, x))
        total = torch.stack([output.sum() for output in outputs]).sum()
        torch.autograd.grad(total, leaves, allow_unused=True)
    return int(counter.get_total_flops()) // 2


# torch counts the weight gradient of a grouped convolution as if it had no groups
GROUPED = {"depthwise_separable", "depthwise_multiplier", "grouped", "channel_shuffle", "convnext"}


@pytest.mark.parametrize("name", [name for name in ZOO if name not in GROUPED])
def test_a_training_step_costs_what_torch_counts(name: str) -> None:
    module, x = ZOO[name]()
    net = elastic(module, x)
    for subnet in (net.full, net.draw(0.4, stream(0))):
        found = counted(net, module, subnet, x)
        assert len(x) * net.macs(subnet, training=True) == found


@pytest.mark.parametrize("name", ["digits_cnn_bn", "lenet_small", "resnet20"])
def test_a_training_step_of_a_bundled_network_costs_what_torch_counts(name: str) -> None:
    module, x = MODELS[name](), torch.zeros(2, *INPUT_SHAPES[name])
    net = elastic(module, x)
    subnet = net.draw(0.5, stream(0))
    assert 2 * net.macs(subnet, training=True) == counted(net, module, subnet, x)


def test_a_depthwise_layer_costs_three_times_its_forward_pass() -> None:
    net = elastic(
        nn.Sequential(
            nn.Conv2d(2, 4, 1),
            nn.Conv2d(4, 4, 3, groups=4),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 5),
        ),
        torch.zeros(1, 2, 5, 5),
    )
    half = net.first(0.5)
    assert half.counts == (2,)
    first, depthwise, last = 2 * 2 * 25, 2 * 9 * 9, 2 * 5
    assert net.macs(half) == first + depthwise + last
    assert net.macs(half, training=True) == 2 * first + 3 * depthwise + 3 * last
    # in expectation: 2 filters, and 1/16 for the draws that keep none of them
    assert net.macs(0.5) == (2 + 1 / 16) * (2 * 25 + 9 * 9 + 5)


def test_what_is_cut_off_from_the_gradient_has_no_backward_pass() -> None:
    class CutOff(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.gate = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 1, 1)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            with torch.no_grad():
                gate = torch.sigmoid(self.gate(x))
            return self.head((x * gate).mean((2, 3)))

    module, x = CutOff(), torch.randn(1, 2, 5, 5)
    net = elastic(module, x)
    assert net.macs(net.full, training=True) == 2 * 2 * 4 * 25 + 4 * 25 + 3 * 4 * 2
    assert counted(net, module, net.full, x) == net.macs(net.full, training=True)


@pytest.mark.parametrize("name", ZOO)
def test_parameters_are_the_numbers_that_travel(name: str) -> None:
    module, x = ZOO[name]()
    net, params = elastic(module, x), params_of(module)
    for subnet in (net.full, net.draw(0.5, stream(0))):
        small = net.take(params, subnet)
        assert net.parameters(subnet) == sum(tensor.numel() for tensor in small.values())


def test_activations_are_what_each_layer_writes() -> None:
    net = elastic(
        nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, padding=1),
            nn.ReLU(inplace=True),  # overwrites
            nn.Flatten(),  # is a view
            nn.Linear(96, 3),
        ),
        torch.zeros(1, 1, 8, 8),
    )
    assert net.activations(net.full) == 4 * (64 + 64 + 16) + 6 * 16 + 3
    assert net.activations(net.first(0.5)) == 2 * (64 + 64 + 16) + 3 * 16 + 3
    assert net.activations(0.5) == (2 + 1 / 16) * (64 + 64 + 16) + (3 + 1 / 64) * 16 + 3


def test_joining_writes_again_and_so_does_making_dense() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.more = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 2, 1)
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = torch.cat([x, self.more(x)], 1)
            return self.head(torch.logcumsumexp(x, 1).mean((2, 3)))

    net = elastic(Joined(), torch.zeros(1, 1, 3, 3))
    half = net.first(0.5)
    assert half.counts == (2, 1)
    stem, more, joined, dense, unknown = 2 * 9, 1 * 9, 3 * 9, 6 * 9, 6 * 9
    assert net.activations(half) == stem + more + joined + dense + unknown + 6 + 3
