"""Running means under dropout fit the full network; variances need re-estimation."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pliant.nn.elastic import elastic
from pliant.nn.norm_statistics import ReestimatedStats, RunningStats, prepare_norm_statistics
from pliant.params import Params, get_params
from pliant.rng import rng_stream

BATCH, DRAWS = 64, 400


def make_network() -> nn.Sequential:
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


def make_images(index: int) -> Tensor:
    return torch.from_numpy(
        rng_stream(0, "images", index).standard_normal((BATCH, 3, 8, 8))
    ).float()


def collect_statistics(rate: float) -> tuple[Params, Tensor]:
    """Return mean statistics over many masks, and the error of the second layer's means."""
    net = make_network()
    flexible, params = elastic(net, make_images(0)), get_params(net)
    rows_by_name: dict[str, list[Tensor]] = {}
    for index in range(DRAWS if rate else 20):
        subnet = flexible.draw(rate, rng_stream(1, "dropout", index))
        # a fresh cumulative average each time, so it equals the batch's statistics
        small = flexible.take(params, subnet)
        with torch.no_grad():
            flexible.run(small, subnet, make_images(index % 20))
        full = flexible.put(
            {n: torch.full_like(t.float(), torch.nan) for n, t in params.items()},
            {n: t.float() for n, t in small.items()},
            subnet,
        )
        for name in ("1.running_mean", "4.running_mean", "7.running_mean", "4.running_var"):
            rows_by_name.setdefault(name, []).append(full[name])
    stacked = {name: torch.stack(rows) for name, rows in rows_by_name.items()}
    means = {name: rows.nanmean(0) for name, rows in stacked.items()}
    rows = stacked["4.running_mean"]
    error = (rows - means["4.running_mean"]).square().nanmean(0).sqrt() / (DRAWS / 2) ** 0.5
    return means, error


def test_means_under_dropout_are_those_of_the_full_network() -> None:
    full, _ = collect_statistics(0.0)
    half, error = collect_statistics(0.5)
    assert torch.allclose(half["1.running_mean"], full["1.running_mean"], atol=0.02)
    # only sampling error; with the factor 1/q before the norm, means would be twice as large
    gap = (half["4.running_mean"] - full["4.running_mean"]).abs()
    assert (gap < 5 * error).all()
    # the means are far from zero compared with the error, so the test has power
    assert (full["4.running_mean"].abs() > 10 * error).sum() >= 6


def test_dropout_inflates_variances() -> None:
    full, _ = collect_statistics(0.0)
    half, _ = collect_statistics(0.5)
    inflation = (half["4.running_var"] / full["4.running_var"]).mean()
    assert 1.3 < inflation < 3.0  # about twice: the known variance shift


def make_proxy(samples: int, batch: int) -> list[Tensor]:
    return [make_images(index) for index in range(samples // batch)]


def test_reestimated_statistics_average_over_the_full_network() -> None:
    net = make_network()
    prepared = prepare_norm_statistics(
        net, get_params(net), ReestimatedStats(samples=20 * BATCH, batch=BATCH), make_proxy
    )
    reference = copy.deepcopy(net).train()
    with torch.no_grad():
        for index in range(20):
            reference(make_images(index))
    for name, tensor in reference.state_dict().items():
        if "running" in name:
            assert torch.allclose(prepared[name], tensor, rtol=1e-5, atol=1e-6), name


def test_running_statistics_are_kept_unchanged() -> None:
    net = make_network()
    before = get_params(net)
    prepared = prepare_norm_statistics(net, before, RunningStats(), make_proxy)
    assert all(torch.equal(prepared[name], before[name]) for name in before)


def test_preparation_changes_neither_the_network_nor_its_arguments() -> None:
    net = make_network()
    before, params = get_params(net), get_params(net)
    prepare_norm_statistics(net, params, ReestimatedStats(samples=128, batch=64), make_proxy)
    after = get_params(net)
    assert all(
        torch.equal(before[n], after[n]) and torch.equal(before[n], params[n]) for n in before
    )


@pytest.mark.parametrize("policy", [RunningStats(), ReestimatedStats()])
def test_a_network_without_norms_needs_no_proxy(policy: RunningStats | ReestimatedStats) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))

    def refuse(samples: int, batch: int) -> list[Tensor]:
        raise AssertionError("requested proxy data")

    prepared = prepare_norm_statistics(net, get_params(net), policy, refuse)
    assert prepared.keys() == get_params(net).keys()


class ProxyColumn:
    """A proxy of single numbers, cut into batches as the evaluation cuts images."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = torch.tensor(numbers, dtype=torch.float32).view(-1, 1)

    def __call__(self, samples: int, batch: int) -> list[Tensor]:
        return list(self.numbers[:samples].split(batch)) if len(self.numbers) else []


def reestimate(proxy: ProxyColumn, batch: int) -> tuple[float, float]:
    """Return the mean and the variance that a norm layer gets."""
    net = nn.Sequential(nn.BatchNorm1d(1))
    policy = ReestimatedStats(samples=100, batch=batch)
    prepared = prepare_norm_statistics(net, get_params(net), policy, proxy)
    return prepared["0.running_mean"].item(), prepared["0.running_var"].item()


def test_a_short_batch_counts_by_its_samples() -> None:
    # variances of 0, 0, 6, 6 and of 0, 2 are 12 and 2; means are 3 and 1
    mean, variance = reestimate(ProxyColumn(0, 0, 6, 6, 0, 2), batch=4)
    assert mean == pytest.approx((4 * 3 + 2 * 1) / 6)
    assert variance == pytest.approx((4 * 12 + 2 * 2) / 6)


def test_a_lone_image_joins_the_batch_before_it() -> None:
    lone = ProxyColumn(0, 4, 0, 0, 9)
    mean, variance = reestimate(lone, batch=2)  # 0, 4 and 0, 0, 9
    assert mean == pytest.approx((2 * 2 + 3 * 3) / 5)
    assert variance == pytest.approx((2 * 8 + 3 * 27) / 5)


@pytest.mark.parametrize("numbers", [(), (5.0,)])
def test_a_proxy_without_a_variance_is_refused(numbers: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=f"at least 2 proxy images .*, got {len(numbers)}$"):
        reestimate(ProxyColumn(*numbers), batch=2)


def test_a_batch_of_one_image_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected `int` >= 2"):
        ReestimatedStats(batch=1)


def test_equal_batches_give_torchs_plain_average_to_the_bit() -> None:
    net = make_network()
    policy = ReestimatedStats(samples=7 * BATCH, batch=BATCH)
    prepared = prepare_norm_statistics(net, get_params(net), policy, make_proxy)
    reference = copy.deepcopy(net).train()
    with torch.no_grad():
        for index in range(7):
            reference(make_images(index))
    for name, tensor in reference.state_dict().items():
        if "running" in name:
            assert torch.equal(prepared[name], tensor), name


def test_a_frozen_norm_keeps_its_statistics() -> None:
    net = make_network()
    net[1].eval()
    params = get_params(net)
    batch = torch.randn(8, 3, 8, 8)
    prepared = prepare_norm_statistics(net, params, ReestimatedStats(), lambda *_: [batch])
    assert torch.equal(prepared["1.running_var"], params["1.running_var"])
    assert not torch.equal(prepared["4.running_var"], params["4.running_var"])
    net.eval()  # a network in evaluation mode as a whole is not frozen
    prepared = prepare_norm_statistics(net, params, ReestimatedStats(), lambda *_: [batch])
    assert not torch.equal(prepared["1.running_var"], params["1.running_var"])
