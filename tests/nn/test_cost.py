"""Costs against the papers, numbers by hand, all masks enumerated, and torch's counter."""

from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from math import comb, prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nn.zoo import ZOO
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from pliant.nn.elastic import Elastic, elastic
from pliant.nn.models import INPUT_SHAPES, MODELS, densenet40, densenet100, femnist_cnn
from pliant.nn.subnet import Sampling, Subnet
from pliant.params import get_params, nbytes
from pliant.rng import rng_stream

SAMPLINGS: tuple[Sampling, ...] = ("bernoulli", "rounded", "blocks")


@pytest.fixture(scope="module")
def densenet() -> Elastic:
    return elastic(densenet40(), torch.zeros(1, 3, 32, 32), check=False)


def approx(number: float) -> object:
    return pytest.approx(number, rel=1e-4)  # a site always keeps a filter, which adds 3e-5


def test_densenet_40_matches_the_formula_of_the_paper(densenet: Elastic) -> None:
    assert len(densenet.sites) == 39
    assert densenet.macs(0.0) == 72_365_352
    assert densenet.macs(0.25, sampling="bernoulli") == approx(40.8302e6)
    assert densenet.macs(0.5, sampling="bernoulli") == approx(18.2576e6)


def test_densenet_100_matches_the_formula_of_the_paper() -> None:
    net = elastic(densenet100(classes=100), torch.zeros(1, 3, 32, 32), check=False)
    assert net.macs(0.0) == 287_960_472
    assert net.macs(0.25, sampling="bernoulli") == approx(162.1086e6)
    assert net.macs(0.5, sampling="bernoulli") == approx(72.1646e6)


def test_the_femnist_cnn_matches_the_formula_of_the_paper() -> None:
    net = elastic(femnist_cnn(), torch.zeros(1, 1, 28, 28))
    assert net.macs(0.0) == 4_015_616
    assert net.macs(0.5, sampling="bernoulli") == approx(1_196_544)
    assert net.macs(0.5, sampling="rounded") == 1_196_544


@pytest.mark.parametrize(("sampling", "draws"), [("bernoulli", 2000), ("rounded", 300)])
def test_the_closed_form_is_the_mean_over_draws(
    densenet: Elastic, sampling: Sampling, draws: int
) -> None:
    for rates in (0.5,) if sampling == "bernoulli" else (0.5, np.linspace(0.1, 0.7, 39)):
        macs = [
            densenet.macs(densenet.draw(rates, rng_stream(0, draw), sampling))
            for draw in range(draws)
        ]
        assert np.mean(macs) == pytest.approx(densenet.macs(rates, sampling=sampling), rel=0.005)


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
        else:  # add two halves of one mask, also before a layer with that mask
            left, right = x.chunk(2, 1)
            both = torch.cat([left + right, right], 1)
            x = x + self.body(both) if self.middle == "halves of itself" else self.body(both)
        return self.head(self.last(x).mean((2, 3)))


def iter_masks(size: int, keep: float, sampling: Sampling) -> Iterator[tuple[np.ndarray, float]]:
    """Yield all masks of one site and their probabilities, by the definition of the sampling."""
    for count in range(1, size + 1):
        for filters in combinations(range(size), count):
            mask = np.isin(np.arange(size), filters)
            if sampling == "bernoulli":
                probability = keep**count * (1 - keep) ** (size - count)
                probability += (1 - keep) ** size / size if count == 1 else 0.0
            else:  # round up with the probability of the fraction, then pick any set of that size
                share = max(0.0, 1 - abs(count - max(1.0, size * keep)))
                probability = share / comb(size, count)
            if probability:
                yield mask, probability


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    ("middle", "coupled"),
    [
        (middle, coupled)
        for middle in ("residual", "gate", "joined", "halves", "halves of itself")
        for coupled in (True, False)
        if coupled or middle != "gate"  # an empty product gets a channel back
    ],
)
def test_the_closed_form_is_the_sum_over_all_masks(
    middle: str, coupled: bool, sampling: Sampling
) -> None:
    net = elastic(Framed(middle), torch.zeros(1, 2, 5, 5), coupled=coupled)
    keep = np.linspace(0.45, 0.7, len(net.sites))
    sites = zip(net.sites, keep, strict=True)
    masks_by_site = [list(iter_masks(site.filters, q, sampling)) for site, q in sites]
    macs = activations = total = 0.0
    for draw in product(*masks_by_site):
        subnet = Subnet(net.fingerprint, tuple(mask for mask, _ in draw), (1.0,) * len(draw))
        probability = prod(p for _, p in draw)
        total += probability
        macs += probability * net.macs(subnet)
        activations += probability * net.count_activations(subnet)
    assert total == pytest.approx(1)
    assert net.macs(1 - keep, sampling=sampling) == pytest.approx(macs, rel=1e-10)
    expected = net.count_activations(1 - keep, sampling=sampling)
    assert expected == pytest.approx(activations, rel=1e-10)


@cache
def make_elastic(name: str, *, coupled: bool) -> Elastic:
    return elastic(*ZOO[name](), coupled=coupled, check=False)


@given(st.data())
@settings(max_examples=30)
def test_cost_falls_when_a_rate_rises(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["dense", "projected_residual", "inception", "slice_spread"]))
    net = make_elastic(name, coupled=data.draw(st.booleans()))
    sampling: Sampling = data.draw(st.sampled_from(SAMPLINGS))
    rate = st.floats(0, 0.99)
    rates = np.array(data.draw(st.lists(rate, min_size=len(net.sites), max_size=len(net.sites))))
    higher = rates.copy()
    site = data.draw(st.integers(0, len(rates) - 1))
    higher[site] = data.draw(st.floats(rates[site], 0.99))
    for training in (False, True):
        before = net.macs(rates, training=training, sampling=sampling)
        assert net.macs(higher, training=training, sampling=sampling) <= before * (1 + 1e-12)


def count_training_macs(net: Elastic, module: nn.Module, subnet: Subnet, x: Tensor) -> int:
    """Count the MACs of one forward and backward pass with torch."""
    small = net.take(get_params(module), subnet)
    leaves = [t.requires_grad_() for name, t in small.items() if name not in net.buffer_names]
    with FlopCounterMode(display=False) as counter:
        outputs = pytree.tree_leaves(net.run(small, subnet, x))
        loss = torch.stack([output.sum() for output in outputs]).sum()
        torch.autograd.grad(loss, leaves, allow_unused=True)
    return int(counter.get_total_flops()) // 2


# torch ignores groups in the weight gradient of a convolution
GROUPED = {"depthwise_separable", "depthwise_multiplier", "grouped", "channel_shuffle", "convnext"}


@pytest.mark.parametrize("name", [name for name in ZOO if name not in GROUPED])
def test_the_macs_of_a_training_step_match_torch(name: str) -> None:
    module, x = ZOO[name]()
    net = elastic(module, x)
    for subnet in (net.full, net.draw(0.4, rng_stream(0))):
        macs = count_training_macs(net, module, subnet, x)
        assert len(x) * net.macs(subnet, training=True) == macs


@pytest.mark.parametrize("name", ["digits_cnn_bn", "lenet_small", "resnet20"])
def test_the_macs_of_a_bundled_networks_training_step_match_torch(name: str) -> None:
    module, x = MODELS[name](), torch.zeros(2, *INPUT_SHAPES[name])
    net = elastic(module, x)
    subnet = net.draw(0.5, rng_stream(0))
    assert 2 * net.macs(subnet, training=True) == count_training_macs(net, module, subnet, x)


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
    half = net.select_prefix(0.5)
    assert half.counts == (2,)
    first, depthwise, last = 2 * 2 * 25, 2 * 9 * 9, 2 * 5
    assert net.macs(half) == first + depthwise + last
    assert net.macs(half, training=True) == 2 * first + 3 * depthwise + 3 * last
    # in expectation 2 filters, plus 1/16 for masks that would keep none
    assert net.macs(0.5, sampling="bernoulli") == (2 + 1 / 16) * (2 * 25 + 9 * 9 + 5)


def test_layers_without_gradient_cost_no_backward_pass() -> None:
    class GateWithoutGradient(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.gate = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 1, 1)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            with torch.no_grad():
                gate = torch.sigmoid(self.gate(x))
            return self.head((x * gate).mean((2, 3)))

    module, x = GateWithoutGradient(), torch.randn(1, 2, 5, 5)
    net = elastic(module, x)
    assert net.macs(net.full, training=True) == 2 * 2 * 4 * 25 + 4 * 25 + 3 * 4 * 2
    assert count_training_macs(net, module, net.full, x) == net.macs(net.full, training=True)


@pytest.mark.parametrize("name", ZOO)
def test_the_parameter_count_is_the_size_of_the_subnet(name: str) -> None:
    module, x = ZOO[name]()
    net, params = elastic(module, x), get_params(module)
    for subnet in (net.full, net.draw(0.5, rng_stream(0))):
        small = net.take(params, subnet)
        assert net.count_params(subnet) == sum(tensor.numel() for tensor in small.values())
        assert net.count_bytes(params, subnet) == nbytes(small)


def test_activations_count_what_each_layer_writes() -> None:
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
    assert net.count_activations(net.full) == 4 * (64 + 64 + 16) + 6 * 16 + 3
    assert net.count_activations(net.select_prefix(0.5)) == 2 * (64 + 64 + 16) + 3 * 16 + 3
    expected = (2 + 1 / 16) * (64 + 64 + 16) + (3 + 1 / 64) * 16 + 3
    assert net.count_activations(0.5, sampling="bernoulli") == expected


def test_concatenations_and_dense_fallbacks_write_activations() -> None:
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
    half = net.select_prefix(0.5)
    assert half.counts == (2, 1)
    stem, more, concatenated, dense, unknown = 2 * 9, 1 * 9, 3 * 9, 6 * 9, 6 * 9
    assert net.count_activations(half) == stem + more + concatenated + dense + unknown + 6 + 3
