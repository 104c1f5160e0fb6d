import numpy as np
import pytest
from tests.table_search.toy_problem import HIGHEST, make_problem, run_search, squared

from pliant.table_search.ask_tell import SearchProblem
from pliant.table_search.nsga2 import Nsga2
from pliant.table_search.pareto import hypervolume
from pliant.table_search.surrogate import (
    Quadratic,
    fit_quadratic,
    minimise_trade_off,
    probe_quadratic,
)
from pliant.table_search.surrogate_search import SurrogateSearch, make_design, select_front_points


def uneven(vectors):
    """Return a loss in which some sites matter much and others not at all."""
    weights = np.array([0.5, 0.3, 0.15, 0.05, 0.0, 0.0])
    return (vectors / HIGHEST) @ weights


def test_every_site_is_at_each_end_in_half_of_the_first_vectors():
    points = make_design(36, 6, seed=0)
    assert points.shape == (36, 6)
    assert points[:30].sum(axis=0).tolist() == [15.0] * 6
    assert set(points[:30].ravel()) == {0.0, 1.0}
    assert (points[30:] == points[30:, :1]).all()  # equal rates, to see the curvature of the loss


def test_two_sites_are_spread_over_their_whole_range():
    points = make_design(32, 2, seed=0)
    assert len(np.unique(points, axis=0)) == 32
    assert sorted(points[:27, 0]) == sorted(points[:27, 1]) == np.linspace(0, 1, 27).tolist()


def test_a_quadratic_cost_is_probed_exactly():
    rng = np.random.default_rng(0)
    square = rng.normal(size=(4, 4))
    cost = Quadratic(rng.normal(size=4), square + square.T)
    form = probe_quadratic(cost, 4)
    assert form.linear == pytest.approx(cost.linear)
    assert form.square == pytest.approx(cost.square)


def test_a_fit_without_noise_finds_which_sites_matter():
    rng = np.random.default_rng(0)
    points = make_design(60, 6, seed=1)
    form = fit_quadratic(points, uneven(points * HIGHEST), rng.random(60))
    probe = rng.uniform(0, 1, (50, 6))
    assert np.abs(form(probe) - uneven(probe * HIGHEST)).max() < 0.05


def test_a_high_price_drops_everything_and_a_low_one_nothing():
    loss = Quadratic(np.full(3, 0.2), np.diag([0.1, 0.2, 0.3]))
    cost = Quadratic(np.full(3, -1 / 3), np.zeros((3, 3)))
    points = minimise_trade_off(loss, cost, np.array([0.01, 1.0, 100.0]))
    assert points[0].tolist() == [0.0] * 3
    assert points[2].tolist() == [1.0] * 3
    # in between, where the derivative 0.2 + 2 s u = 1/3 holds for each site by itself
    assert points[1] == pytest.approx([2 / 3, 1 / 3, 2 / 9])


def test_the_front_is_the_analytic_one():
    problem = make_problem()
    front, trainings = run_search(SurrogateSearch().propose(problem), squared)
    costs, losses = problem.cost(front), squared(front)
    assert trainings == SurrogateSearch().count_trainings(6, 3) == 64
    assert np.abs(losses - (1 - costs) ** 2).max() < 0.02


def test_the_front_of_rates_and_levels_is_that_of_all_combinations():
    sides = np.array([1.0, 0.75, 0.5])

    def split(vectors):
        levels = np.clip(np.floor(vectors[:, 2] / HIGHEST * 3), 0, 2).astype(int)
        return vectors[:, :2] / HIGHEST, levels

    def cost(vectors):  # a product of widths and of the area
        rates, levels = split(vectors)
        return (1 - rates[:, 0] / 2) * (1 - rates[:, 1] / 2) * sides[levels] ** 2

    def loss(vectors):  # the middle side costs next to nothing, and so does the second rate
        assert np.isin(vectors[:, 2] / HIGHEST, [0, 0.5, 1]).all(), "trained in between"
        rates, levels = split(vectors)
        return 0.5 * rates[:, 0] + 0.1 * rates[:, 1] + np.array([0.0, 0.05, 0.4])[levels]

    problem = SearchProblem(3, HIGHEST, cost, tuple(range(10)), 3, 0, level_counts=(3,))
    front, _ = run_search(SurrogateSearch().propose(problem), loss)
    grid = np.linspace(0, HIGHEST, 21)
    everything = np.stack(np.meshgrid(grid, grid, [0.0, 0.25, 0.5]), axis=-1).reshape(-1, 3)
    found, best = (hypervolume(cost(v), loss(v)) for v in (front, everything))
    assert found > 0.96 * best  # of 24 vectors instead of 1,323
    costs = cost(front)
    is_middle = split(front)[1][(costs > 0.3) & (costs < 0.48)] == 1
    assert is_middle.all()
    assert is_middle.size


def test_a_twentieth_of_the_trainings_gives_as_good_a_front_under_noise():
    pytest.importorskip("pymoo")
    problem, genetic = make_problem(), Nsga2(population=24, generations=20)
    ours, few = run_search(SurrogateSearch().propose(problem), uneven, noise=0.1)
    theirs, many = run_search(genetic.propose(problem), uneven, noise=0.1)
    assert few * 20 < many
    our_volume, their_volume = (hypervolume(problem.cost(v), uneven(v)) for v in (ours, theirs))
    assert our_volume > 0.99 * their_volume


def test_points_of_a_front_lie_evenly_and_reach_both_ends():
    loss = Quadratic(np.full(3, 0.2), np.diag([0.1, 0.2, 0.3]))
    cost = Quadratic(np.full(3, -1 / 3), np.zeros((3, 3)))
    points = select_front_points(loss, {(): cost}, 5)
    assert points[0].tolist() == [1.0] * 3
    assert points[-1].tolist() == [0.0] * 3
    assert np.abs(cost(points) - np.linspace(-1, 0, 5)).max() < 0.05
