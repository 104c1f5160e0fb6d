import numpy as np
import pytest
from toy import HIGHEST, play, problem, squared

from pliant.explore.fast import Fast, chosen, design
from pliant.explore.front import hypervolume
from pliant.explore.nsga2 import Nsga2
from pliant.explore.surrogate import Quadratic, fitted, probed, trade_off


def uneven(vectors):
    """Some sites count much, others nothing."""
    weights = np.array([0.5, 0.3, 0.15, 0.05, 0.0, 0.0])
    return (vectors / HIGHEST) @ weights


def test_every_site_is_at_each_end_in_half_of_the_first_vectors():
    points = design(36, 6, seed=0)
    assert points.shape == (36, 6)
    assert points[:30].sum(axis=0).tolist() == [15.0] * 6
    assert set(points[:30].ravel()) == {0.0, 1.0}
    assert (points[30:] == points[30:, :1]).all()  # equal rates, to see how the loss bends


def test_two_sites_are_spread_over_their_whole_range():
    points = design(32, 2, seed=0)
    assert len(np.unique(points, axis=0)) == 32
    assert sorted(points[:27, 0]) == sorted(points[:27, 1]) == np.linspace(0, 1, 27).tolist()


def test_a_probed_form_is_the_cost_where_that_is_quadratic():
    rng = np.random.default_rng(0)
    square = rng.normal(size=(4, 4))
    cost = Quadratic(rng.normal(size=4), square + square.T)
    found = probed(cost, 4)
    assert found.linear == pytest.approx(cost.linear)
    assert found.square == pytest.approx(cost.square)


def test_a_fit_without_noise_finds_which_sites_count():
    rng = np.random.default_rng(0)
    points = design(60, 6, seed=1)
    form = fitted(points, uneven(points * HIGHEST), rng.random(60))
    probe = rng.uniform(0, 1, (50, 6))
    assert np.abs(form(probe) - uneven(probe * HIGHEST)).max() < 0.05


def test_a_high_price_drops_everything_and_a_low_one_nothing():
    loss = Quadratic(np.full(3, 0.2), np.diag([0.1, 0.2, 0.3]))
    cost = Quadratic(np.full(3, -1 / 3), np.zeros((3, 3)))
    points = trade_off(loss, cost, np.array([0.01, 1.0, 100.0]))
    assert points[0].tolist() == [0.0] * 3
    assert points[2].tolist() == [1.0] * 3
    # in between, where the derivative 0.2 + 2 s u = 1/3 holds for each site by itself
    assert points[1] == pytest.approx([2 / 3, 1 / 3, 2 / 9])


def test_the_front_is_the_analytic_one():
    toy = problem()
    found, trainings = play(Fast().propose(toy), squared)
    costs, losses = toy.cost(found), squared(found)
    assert trainings == Fast().trainings(6, 3) == 64
    assert np.abs(losses - (1 - costs) ** 2).max() < 0.02


def test_a_twentieth_of_the_trainings_gives_as_good_a_front_under_noise():
    pytest.importorskip("pymoo")
    toy = problem()
    fast, few = play(Fast().propose(toy), uneven, noise=0.1)
    full, many = play(Nsga2(population=24, generations=20).propose(toy), uneven, noise=0.1)
    assert few * 20 < many
    ours, theirs = (hypervolume(toy.cost(v), uneven(v)) for v in (fast, full))
    assert ours > 0.99 * theirs


def test_points_of_a_front_lie_evenly_and_reach_both_ends():
    loss = Quadratic(np.full(3, 0.2), np.diag([0.1, 0.2, 0.3]))
    cost = Quadratic(np.full(3, -1 / 3), np.zeros((3, 3)))
    points = chosen(loss, cost, 5)
    assert points[0].tolist() == [1.0] * 3
    assert points[-1].tolist() == [0.0] * 3
    assert np.abs(cost(points) - np.linspace(-1, 0, 5)).max() < 0.05
