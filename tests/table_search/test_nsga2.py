from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.table_search.toy_problem import HIGHEST, make_problem, run_search, squared

from pliant.experiment.config import load_search
from pliant.rng import derive_seed
from pliant.table_search.nsga2 import Nsga2, RandomSearch, UniformRates, _make_algorithm
from pliant.table_search.pareto import hypervolume

pytest.importorskip("pymoo")


def test_the_front_is_the_analytic_one():
    problem = make_problem(sites=4)
    front, trainings = run_search(Nsga2(population=32, generations=60).propose(problem), squared)
    costs, losses = problem.cost(front), squared(front)
    assert trainings == Nsga2(population=32, generations=60).count_trainings(4, 3)
    excess = losses - (1 - costs) ** 2
    assert excess.min() > -1e-12  # nothing lies below the analytic front
    assert excess.mean() < 0.02
    assert hypervolume(costs, losses) > 0.95 * 2 / 3  # the area over (1 - c)²
    assert front.min() >= 0
    assert front.max() <= HIGHEST


def test_the_front_equals_that_of_pymoos_own_loop():
    from pymoo.algorithms.moo.nsga2 import NSGA2
    from pymoo.core.problem import Problem
    from pymoo.operators.crossover.sbx import SBX
    from pymoo.operators.mutation.pm import PolynomialMutation
    from pymoo.optimize import minimize

    problem = replace(make_problem(sites=3, seed=5), search_seed_count=1)
    settings = Nsga2(population=16, generations=10)
    first = next(settings.propose(problem)).vectors
    ours, _ = run_search(settings.propose(problem), squared)

    def objectives(x):
        return np.stack([problem.cost(x), squared(x)], axis=1)

    class Space(Problem):
        def _evaluate(self, x, out, *args, **kwargs):
            out["F"] = objectives(x)

    result = minimize(
        Space(n_var=3, n_obj=2, xl=0.0, xu=HIGHEST),
        NSGA2(
            pop_size=16,
            sampling=first,
            crossover=SBX(prob=settings.crossover, eta=settings.crossover_eta),
            mutation=PolynomialMutation(prob_var=1 / 3, eta=settings.mutation_eta),
        ),
        ("n_gen", settings.generations + 1),
        seed=derive_seed(5, "evolution") % 2**32,
    )
    assert sorted(map(tuple, ours)) == sorted(map(tuple, np.unique(result.X, axis=0)))


def mutate_once(settings, vectors):
    """Return the vectors after the mutation of one generation."""
    from pymoo.core.population import Population

    algorithm = _make_algorithm(settings, make_problem(sites=vectors.shape[1]))
    mutation, rng = algorithm.mating.mutation, np.random.default_rng(0)
    children = mutation.do(algorithm.problem, Population.new("X", vectors.copy()), random_state=rng)
    return children.get("X")


def test_the_fig4_search_mutates_genes_as_pygmo_does():
    path = Path(__file__).parents[2] / "experiments" / "distreal" / "fig4.toml"
    settings = load_search(path).search.full_algorithm
    assert (settings.population, settings.generations) == (64, 50)
    vectors = np.full((2000, 39), HIGHEST / 2)
    moved = mutate_once(settings, vectors) - vectors
    share = (moved != 0).mean()  # pymoo's default of 0.9 of the vectors would give 0.009
    assert abs(share - 0.01) < 3 * (0.01 * 0.99 / moved.size) ** 0.5
    # far from the bounds, 1 - (1 - |delta|)^(1 + 50) is uniform over [0, 1]
    size = np.abs(moved[moved != 0]) / HIGHEST
    quantiles = 1 - (1 - size) ** 51
    assert abs(quantiles.mean() - 0.5) < 3 * (1 / 12 / len(size)) ** 0.5


def test_both_corners_are_in_the_first_population():
    first = next(Nsga2(population=8, generations=1).propose(make_problem(sites=3))).vectors
    assert [0.0] * 3 in first.tolist()
    assert [HIGHEST] * 3 in first.tolist()


def test_the_front_depends_on_the_seed_alone():
    settings = Nsga2(population=8, generations=3)
    problems = [make_problem(seed=seed) for seed in (0, 0, 1)]
    first, again, other = (run_search(settings.propose(p), squared)[0] for p in problems)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_equal_rates_need_no_training_and_random_ones_one_per_vector_and_seed():
    problem = make_problem(sites=3)
    vectors, trainings = run_search(UniformRates(vectors=5).propose(problem), squared)
    assert trainings == 0
    assert vectors[:, 0].tolist() == vectors[:, 2].tolist() == [0.5, 0.375, 0.25, 0.125, 0.0]
    front, trainings = run_search(RandomSearch(vectors=20).propose(problem), squared)
    assert trainings == 60
    assert len(front) <= 20
