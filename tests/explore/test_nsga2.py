import numpy as np
import pytest
from toy import HIGHEST, play, problem, squared

from pliant.explore.front import hypervolume
from pliant.explore.nsga2 import Nsga2, Random, Uniform, corners, evolve
from pliant.rng import number

pytest.importorskip("pymoo")


def test_the_front_is_the_analytic_one():
    toy = problem(sites=4)
    found, trainings = play(Nsga2(population=32, generations=60).propose(toy), squared)
    costs, losses = toy.cost(found), squared(found)
    assert trainings == Nsga2(population=32, generations=60).trainings(4, 3)
    over = losses - (1 - costs) ** 2
    assert over.min() > -1e-12  # nothing lies below the analytic front
    assert over.mean() < 0.02
    assert hypervolume(costs, losses) > 0.95 * 2 / 3  # the area over (1 - c)²
    assert found.min() >= 0
    assert found.max() <= HIGHEST


def test_it_finds_what_pymoo_finds_by_itself():
    from pymoo.algorithms.moo.nsga2 import NSGA2
    from pymoo.core.problem import Problem
    from pymoo.operators.crossover.sbx import SBX
    from pymoo.operators.mutation.pm import PolynomialMutation
    from pymoo.optimize import minimize

    toy, how = problem(sites=3), Nsga2(population=16, generations=10)
    evolution = evolve(how, corners(toy), toy.highest, seed=5)
    first = next(evolution)
    vectors = first

    def objectives(x):
        return np.stack([toy.cost(x), squared(x)], axis=1)

    try:
        while True:
            vectors = evolution.send(objectives(vectors))
    except StopIteration as end:
        ours = end.value

    class Space(Problem):
        def _evaluate(self, x, out, *args, **kwargs):
            out["F"] = objectives(x)

    result = minimize(
        Space(n_var=3, n_obj=2, xl=0.0, xu=HIGHEST),
        NSGA2(
            pop_size=16,
            sampling=first,
            crossover=SBX(prob=how.crossover, eta=how.crossover_eta),
            mutation=PolynomialMutation(prob_var=1 / 3, eta=how.mutation_eta),
        ),
        ("n_gen", how.generations + 1),
        seed=number(5, "evolution") % 2**32,
    )
    assert sorted(map(tuple, ours)) == sorted(map(tuple, np.unique(result.X, axis=0)))


def test_both_corners_are_in_the_first_population():
    toy = problem(sites=3)
    first = next(Nsga2(population=8, generations=1).propose(toy)).vectors
    assert [0.0] * 3 in first.tolist()
    assert [HIGHEST] * 3 in first.tolist()


def test_the_same_seed_finds_the_same_front_and_another_another():
    how = Nsga2(population=8, generations=3)
    fronts = [play(how.propose(problem(seed=seed)), squared)[0] for seed in (0, 0, 1)]
    assert np.array_equal(fronts[0], fronts[1])
    assert not np.array_equal(fronts[0], fronts[2])


def test_equal_rates_ask_for_nothing_and_random_ones_for_as_many_as_they_are():
    toy = problem(sites=3)
    vectors, trainings = play(Uniform(vectors=5).propose(toy), squared)
    assert trainings == 0
    assert vectors[:, 0].tolist() == vectors[:, 2].tolist() == [0.5, 0.375, 0.25, 0.125, 0.0]
    found, trainings = play(Random(vectors=20).propose(toy), squared)
    assert trainings == 60
    assert len(found) <= 20
