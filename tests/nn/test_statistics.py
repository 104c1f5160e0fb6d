"""Norm statistics: gathered means fit the full network, variances do not; that can be mended."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pliant.nn.elastic import elastic
from pliant.nn.statistics import Reestimated, Running, settle
from pliant.params import Params, params_of
from pliant.rng import stream

BATCH, DRAWS = 64, 400


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 16, 3, bias=True),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, bias=True),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3),
            nn.BatchNorm2d(16),
            nn.Flatten(),
            nn.Linear(64, 4),
        )
        with torch.no_grad():
            for module in net:
                if isinstance(module, nn.BatchNorm2d):
                    module.weight.uniform_(0.5, 1.5)
                    module.bias.uniform_(-0.5, 1.0)
                    module.momentum = None  # a plain average
    return net


def images(number: int) -> Tensor:
    return torch.from_numpy(stream(0, "images", number).standard_normal((BATCH, 3, 8, 8))).float()


def gathered(rate: float) -> tuple[Params, Tensor]:
    """Running statistics over many draws, and the spread of the second layer's batch means."""
    net = network()
    flexible, params = elastic(net, images(0)), params_of(net)
    total: dict[str, list[Tensor]] = {}
    for number in range(DRAWS if rate else 20):
        subnet = flexible.draw(rate, stream(1, "dropout", number))
        # a fresh cumulative average each time: the first batch's statistics are the average
        small = flexible.take(params, subnet)
        with torch.no_grad():
            flexible.run(small, subnet, images(number % 20))
        full = flexible.put(
            {n: torch.full_like(t.float(), torch.nan) for n, t in params.items()},
            {n: t.float() for n, t in small.items()},
            subnet,
        )
        for name in ("1.running_mean", "4.running_mean", "7.running_mean", "4.running_var"):
            total.setdefault(name, []).append(full[name])
    stacked = {name: torch.stack(rows) for name, rows in total.items()}
    means = {name: rows.nanmean(0) for name, rows in stacked.items()}
    rows = stacked["4.running_mean"]
    error = (rows - means["4.running_mean"]).square().nanmean(0).sqrt() / (DRAWS / 2) ** 0.5
    return means, error


def test_means_gathered_under_dropout_are_those_of_the_full_network() -> None:
    full, _ = gathered(0.0)
    half, error = gathered(0.5)
    assert torch.allclose(half["1.running_mean"], full["1.running_mean"], atol=0.02)
    # sampling error only; with the factor 1/q in front of the norm, means would be twice as large
    gap = (half["4.running_mean"] - full["4.running_mean"]).abs()
    assert (gap < 5 * error).all()
    # and the test can tell: the means are far from zero compared with the error
    assert (full["4.running_mean"].abs() > 10 * error).sum() >= 6


def test_variances_are_inflated_by_the_dropout_itself() -> None:
    full, _ = gathered(0.0)
    half, _ = gathered(0.5)
    inflation = (half["4.running_var"] / full["4.running_var"]).mean()
    assert 1.3 < inflation < 3.0  # about twice: the known variance shift


def proxy(samples: int, batch: int) -> list[Tensor]:
    return [images(number) for number in range(samples // batch)]


def test_reestimated_statistics_are_a_plain_average_over_the_full_network() -> None:
    net = network()
    settled = settle(net, params_of(net), Reestimated(samples=20 * BATCH, batch=BATCH), proxy)
    twin = copy.deepcopy(net).train()
    with torch.no_grad():
        for number in range(20):
            twin(images(number))
    for name, tensor in twin.state_dict().items():
        if "running" in name:
            assert torch.allclose(settled[name], tensor, rtol=1e-5, atol=1e-6), name


def test_running_leaves_everything_as_it_is() -> None:
    net = network()
    before = params_of(net)
    settled = settle(net, before, Running(), proxy)
    assert all(torch.equal(settled[name], before[name]) for name in before)


def test_settling_touches_neither_the_network_nor_what_it_was_given() -> None:
    net = network()
    before, given = params_of(net), params_of(net)
    settle(net, given, Reestimated(samples=128, batch=64), proxy)
    after = params_of(net)
    assert all(
        torch.equal(before[n], after[n]) and torch.equal(before[n], given[n]) for n in before
    )


@pytest.mark.parametrize("policy", [Running(), Reestimated()])
def test_a_network_without_norms_needs_no_proxy(policy: Running | Reestimated) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))

    def never(samples: int, batch: int) -> list[Tensor]:
        raise AssertionError("asked for proxy data")

    assert settle(net, params_of(net), policy, never).keys() == params_of(net).keys()
