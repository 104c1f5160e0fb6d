"""Differential privacy: clipping, noise, what is refused, and epsilon by independent formulas."""

import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pliant as pl
from pliant.engine.checks import check_privacy
from pliant.methods import ServerAdam, ServerExtrapolation, ServerSgd
from pliant.methods.privacy import (
    DevicePrivacy,
    Release,
    add_release,
    clip_delta,
    compute_epsilon,
    merge_privately,
)
from pliant.methods.robust import Median
from pliant.rng import rng_stream

LINEAR = pl.elastic(nn.Linear(50, 40, bias=False), torch.zeros(1, 50))
NORMED = pl.elastic(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)), torch.zeros(2, 1, 3, 3))
EQUAL = pl.FedAvg(weighting="equal")


def make_update(device, delta):
    return pl.Update(device, delta, 1, 1, 1.0, 0.0)


def merge(updates, privacy, *, net=LINEAR, target=4, round=0, seed=0, method=EQUAL):
    state = pl.ServerState(pl.get_params(net.module))
    rng = rng_stream(seed, "privacy", round)
    return merge_privately(
        privacy, net, state, updates, lambda s, u: method.merge(net, s, u), target=target, rng=rng
    )


def make_random_updates(count, scale=1.0):
    generator = torch.Generator().manual_seed(3)
    return [
        make_update(device, {"weight": scale * torch.randn(40, 50, generator=generator)})
        for device in range(count)
    ]


@pytest.mark.parametrize("server", [ServerSgd(), ServerSgd(momentum=0.9), ServerAdam()])
def test_without_noise_and_with_a_wide_clip_it_is_fedavg_bit_for_bit(server):
    method, updates = pl.FedAvg(weighting="equal", server=server), make_random_updates(4)
    state = pl.ServerState(pl.get_params(LINEAR.module))
    expected = method.merge(LINEAR, state, updates)
    found = merge(updates, DevicePrivacy(clip=1e9, noise=0.0), method=method)
    assert torch.equal(found.params["weight"], expected.params["weight"])
    assert found.momentum.keys() == expected.momentum.keys()
    for name, tensor in expected.momentum.items():
        assert torch.equal(found.momentum[name], tensor)


@given(scale=st.floats(1e-4, 1e2), share=st.floats(0.01, 2.0))
def test_a_clipped_delta_has_at_most_the_norm_and_the_same_direction(scale, share):
    [update] = make_random_updates(1, scale)
    before = update.delta["weight"].double()
    norm = share * float(before.norm())
    after = clip_delta(LINEAR, update, norm).delta["weight"]
    assert float(after.double().norm()) <= norm * (1 + 1e-12)
    assert torch.cosine_similarity(before.flatten(), after.double().flatten(), 0) > 1 - 1e-12
    if share > 1.001:
        assert torch.equal(after, update.delta["weight"])


def test_norm_statistics_and_counters_are_not_merged():
    before = pl.get_params(NORMED.module)
    update = make_update(0, {name: torch.ones_like(tensor) for name, tensor in before.items()})
    after = merge([update], DevicePrivacy(clip=1.0, noise=1.0), net=NORMED, target=1).params
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(NORMED.trainable_names)


def test_the_noise_has_the_variance_of_the_formula_and_is_new_in_every_round():
    zero = [make_update(device, {"weight": torch.zeros(40, 50)}) for device in range(4)]
    privacy, start = DevicePrivacy(clip=3.0, noise=2.0), pl.get_params(LINEAR.module)["weight"]
    noise = [
        (merge(zero, privacy, round=round).params["weight"] - start).double().flatten()
        for round in range(2)
    ]
    expected = (2.0 * 3.0 / 4) ** 2  # of each of 2,000 coordinates: noise² · clip² / target²
    for sample in noise:
        assert abs(float(sample.mean())) < 4 * math.sqrt(expected / 2000)
        assert float(sample.var()) == pytest.approx(expected, rel=4 * math.sqrt(2 / 2000))
    assert abs(float(torch.corrcoef(torch.stack(noise))[0, 1])) < 4 / math.sqrt(2000)
    again = merge(zero, privacy, round=1).params["weight"]
    assert torch.equal((again - start).double().flatten(), noise[1])


def test_missing_updates_do_not_raise_the_weight_of_others():
    # two of four devices answer: each moves the weight by a quarter of its clipped delta
    updates = [make_update(d, {"weight": torch.full((40, 50), 1.0)}) for d in (0, 2)]
    norm = math.sqrt(2000)
    after = merge(updates, DevicePrivacy(clip=norm / 2, noise=0.0)).params["weight"]
    start = pl.get_params(LINEAR.module)["weight"]
    torch.testing.assert_close(after - start, torch.full((40, 50), 2 * 0.5 / 4))


def test_a_round_without_updates_releases_nothing():
    privacy, state = DevicePrivacy(clip=1.0, noise=1.0), pl.get_params(LINEAR.module)
    assert torch.equal(merge([], privacy).params["weight"], state["weight"])


PRIVATE = pl.RunSettings(privacy=DevicePrivacy(clip=1.0, noise=0.0))


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (pl.HeteroFl(), "whose merge depends on more than their sum"),
        (pl.FedAvg(weighting="equal", merging=Median()), "clipping bounds no single coordinate"),
        (pl.Scaffold(weighting="equal"), "whose merge depends on more than their sum"),
        (pl.FedDf(EQUAL), "whose merge depends on more than their sum"),
        (pl.Distreal(), 'Distreal weighted by "macs"'),
        (pl.Distreal(merging="counts"), "whose merge depends on more than their sum"),
        (pl.FedAvg(), 'FedAvg weighted by "samples"'),
        (pl.FedBuff(), "whose merges depend on who is fast"),
        (pl.FedAvg(weighting="equal", server=ServerExtrapolation()), "the norm of every single"),
    ],
)
def test_a_merge_that_clipping_does_not_bound_is_refused(method, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        check_privacy(method, nn.Linear(1, 1), PRIVATE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "method",
    [
        EQUAL,
        pl.FedProx(weighting="equal"),
        pl.Ditto(weighting="equal"),
        pl.FedPer(weighting="equal"),
        pl.Distreal(merging="equal"),
    ],
)
def test_means_of_whole_updates_are_accepted(method):
    check_privacy(method, nn.Linear(1, 1), PRIVATE)


def test_other_selections_and_running_statistics_are_refused():
    chosen = pl.RunSettings(privacy=PRIVATE.privacy, select="available")
    with pytest.raises(ValueError, match="an equal chance for every device"):
        check_privacy(EQUAL, nn.Linear(1, 1), chosen)
    running = pl.RunSettings(
        privacy=PRIVATE.privacy, evaluation=pl.Evaluation(statistics=pl.RunningStats())
    )
    with pytest.raises(ValueError, match="running statistics are not merged"):
        check_privacy(EQUAL, nn.BatchNorm2d(2), running)


def test_without_noise_there_is_no_epsilon():
    assert compute_epsilon(DevicePrivacy(clip=1.0, noise=0.0), [Release(10, 2)]) == math.inf
    assert compute_epsilon(DevicePrivacy(clip=1.0, noise=0.0), []) == 0.0


def compute_gaussian_delta(epsilon, noise):
    """Return the exact delta of one release (Balle and Wang, ICML 2018, Theorem 8)."""
    phi = NormalDist().cdf
    left, right = 1 / (2 * noise), epsilon * noise
    return phi(left - right) - math.exp(epsilon) * phi(-left - right)


@pytest.mark.parametrize("noise", [4.0, 10.0, 30.0])
def test_epsilon_of_one_full_round_is_close_above_the_exact_one(noise):
    pytest.importorskip("dp_accounting")
    epsilon = compute_epsilon(DevicePrivacy(clip=1.0, noise=noise), [Release(8, 8)])
    # exchanging a device moves the sum by twice the clip: half the noise for the formula
    assert compute_gaussian_delta(epsilon, noise / 2) < 1e-5
    assert compute_gaussian_delta(epsilon * 0.8, noise / 2) > 1e-5


def bound_sampled_renyi(order, share, noise):
    """Return the bounds of Wang, Balle and Kasiviswanathan: Theorem 9 and Proposition 11."""

    def moment(j):  # exp((j - 1) · epsilon(j)) of the Gaussian mechanism
        return math.exp((j - 1) * j / (2 * noise**2))

    terms = [share**j * math.comb(order, j) * 2 * moment(j) for j in range(3, order + 1)]
    first = min(4 * (moment(2) - 1), 2 * moment(2))
    upper = math.log(1 + share**2 * math.comb(order, 2) * first + sum(terms)) / (order - 1)
    odds = share / (1 - share)
    ratio = sum(math.comb(order, j) * odds**j * moment(j) for j in range(2, order + 1))
    lower = order / (order - 1) * math.log(1 - share)
    return lower + math.log(1 + order * odds + ratio) / (order - 1), upper


@pytest.mark.parametrize(("noise", "population", "drawn"), [(2.0, 1000, 10), (4.0, 200, 40)])
def test_epsilon_of_sampled_rounds_lies_between_the_bounds_of_the_paper(noise, population, drawn):
    pytest.importorskip("dp_accounting")
    rounds, delta = 200, 1e-6
    privacy = DevicePrivacy(clip=1.0, noise=noise, delta=delta)
    found = compute_epsilon(privacy, [Release(population, drawn, rounds)])
    orders = range(2, 30)
    bounds = [bound_sampled_renyi(order, drawn / population, noise / 2) for order in orders]
    upper = min(
        rounds * bound[1] + math.log(1 / delta) / (order - 1)
        for order, bound in zip(orders, bounds, strict=True)
    )
    # the conversion of Canonne, Kamath and Steinke (2020), Proposition 12
    lower = min(
        rounds * bound[0] + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        for order, bound in zip(orders, bounds, strict=True)
    )
    assert 0.95 * lower <= found <= upper  # our orders are coarser than the accountant's


# By the authors of the bound: autodp 0.2.3.1, anaRDPacct.compose_subsampled_mechanism of
# RDP_gaussian with sigma = noise / 2, improved_bound_flag=True (Theorem 27). Rényi divergences of
# all rounds by order, and its epsilon, for which it converts them less tightly.
AUTODP = [
    (
        Release(1000, 50, 100),
        4.0,
        {7: 1.1002753074880898, 8: 1.2784276621227084, 9: 1.4602463290520764},
        2.8993620247903134,
    ),
    (
        Release(10_000, 100, 1000),
        8.0,
        {24: 0.32038384830792366, 25: 0.3342072927191719, 26: 0.3480649692609806},
        0.8008261687117595,
    ),
]


@pytest.mark.parametrize(("release", "noise", "divergences", "bound"), AUTODP)
def test_epsilon_of_draws_without_replacement_is_that_of_the_authors(
    release, noise, divergences, bound
):
    pytest.importorskip("dp_accounting")
    delta = 1e-5
    # the conversion of Canonne, Kamath and Steinke (2020), Proposition 12
    expected = min(
        divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        for order, divergence in divergences.items()
    )
    found = compute_epsilon(DevicePrivacy(clip=1.0, noise=noise, delta=delta), [release])
    assert found == pytest.approx(expected, rel=1e-9)
    assert found < bound
    # their conversion of the same divergences, over few orders
    loose = min(value + math.log(1 / delta) / (order - 1) for order, value in divergences.items())
    assert loose == pytest.approx(bound, rel=0.03)


def test_the_accountant_gives_the_published_epsilon():
    library = pytest.importorskip("dp_accounting")
    # Mironov, Talwar, Zhang (2019) and Abadi et al. (CCS 2016, Section 5.1): q = 0.01, sigma = 4,
    # 10,000 steps and delta = 1e-5 give epsilon = 1.26 by the moments accountant
    accountant = library.rdp.RdpAccountant()
    event = library.PoissonSampledDpEvent(0.01, library.GaussianDpEvent(4.0))
    accountant.compose(event, 10_000)
    orders = accountant._orders
    by_moments = min(accountant._rdp + math.log(1e5) / (orders - 1))  # their conversion
    assert by_moments == pytest.approx(1.26, abs=0.005)
    assert 0.75 * by_moments < accountant.get_epsilon(1e-5) < by_moments


def test_rounds_that_draw_alike_are_counted_together():
    releases = add_release(add_release(add_release((), 9, 3), 8, 3), 9, 3)
    assert releases == (Release(9, 3, 2), Release(8, 3, 1))
