from dataclasses import replace

import numpy as np
import pytest
from tests.table_search.toy_problem import HIGHEST, make_problem, run_search, squared

from pliant.rng import derive_seed
from pliant.table_search.nsga2 import Nsga2, RandomSearch, UniformRates
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
