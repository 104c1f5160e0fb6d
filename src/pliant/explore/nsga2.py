"""NSGA-II behind ask and tell: the paper's search, by pymoo (Blank and Deb, IEEE Access 2020).

Deb et al., "A fast and elitist multiobjective genetic algorithm: NSGA-II", 2002.
"""

from collections.abc import Generator
from typing import Any

import numpy as np

from pliant.explore.front import FloatArray, front
from pliant.explore.problem import Problem, Proposal, same_seeds
from pliant.extras import need
from pliant.rng import number, stream
from pliant.value import Count, Fraction, Positive, Value

Evolution = Generator[FloatArray, FloatArray, FloatArray]


class Nsga2(Value, frozen=True, tag="nsga2"):
    """The paper's search: a population that holds the two corners from the beginning.

    >>> import pliant as pl
    >>> pl.Nsga2(population=64, generations=50).trainings(sites=39, seeds=3)
    9792
    """

    population: Count = 64
    generations: Count = 50  # behind the initial population
    crossover: Fraction = 0.95  # as in the paper's library
    crossover_eta: Positive = 10.0
    mutation: Fraction | None = None  # of a gene; None: one gene a vector
    mutation_eta: Positive = 20.0

    def trainings(self, sites: int, seeds: int) -> int:
        """Return how many short trainings it takes."""
        return self.population * (self.generations + 1) * seeds

    def propose(self, problem: Problem) -> Proposal:
        """Evolve a population on mean losses at the usual seeds."""
        evolution = evolve(self, corners(problem), problem.highest, problem.seed)
        seeds = problem.seeds[: problem.usual]
        try:
            vectors = next(evolution)
            while True:
                answer = yield same_seeds(vectors, seeds)
                losses = np.array([row.mean() for row in answer.accuracy])
                vectors = evolution.send(np.stack([problem.cost(vectors), losses], axis=1))
        except StopIteration as end:
            found: FloatArray = end.value
            return found


def corners(problem: Problem) -> FloatArray:
    """Return the full network and the highest rates."""
    return np.stack([np.zeros(problem.sites), np.full(problem.sites, problem.highest)])


def evolve(how: Nsga2, injected: FloatArray, highest: float, seed: int) -> Evolution:
    """Yield the vectors of each generation, be sent their objectives, return the last front."""
    algorithm = _algorithm(how, injected, highest, seed)
    static = need("pymoo.problems.static", "search").StaticProblem
    evaluator = need("pymoo.core.evaluator", "search").Evaluator()
    while algorithm.has_next():
        infills = algorithm.ask()
        objectives = yield np.asarray(infills.get("X"), np.float64)
        evaluator.eval(static(algorithm.problem, F=objectives), infills)
        algorithm.tell(infills=infills)
    vectors = np.asarray(algorithm.pop.get("X"), np.float64)
    objectives = np.asarray(algorithm.pop.get("F"), np.float64)
    return vectors[front(objectives[:, 0], objectives[:, 1])]


def _algorithm(how: Nsga2, injected: FloatArray, highest: float, seed: int) -> Any:
    sites = injected.shape[1]
    nsga2 = need("pymoo.algorithms.moo.nsga2", "search").NSGA2
    sbx = need("pymoo.operators.crossover.sbx", "search").SBX
    polynomial = need("pymoo.operators.mutation.pm", "search").PolynomialMutation
    space = need("pymoo.core.problem", "search").Problem(n_var=sites, n_obj=2, xl=0.0, xu=highest)
    drawn = stream(seed, "population").uniform(
        0.0, highest, (max(0, how.population - len(injected)), sites)
    )
    mutation = how.mutation if how.mutation is not None else 1.0 / sites
    algorithm = nsga2(
        pop_size=how.population,
        sampling=np.concatenate([injected[: how.population], drawn]),
        crossover=sbx(prob=how.crossover, eta=how.crossover_eta),
        mutation=polynomial(prob_var=mutation, eta=how.mutation_eta),
    )
    # pymoo takes a seed of 32 bits
    algorithm.setup(
        space,
        termination=("n_gen", how.generations + 1),
        seed=number(seed, "evolution") % 2**32,
        verbose=False,
    )
    return algorithm


class Random(Value, frozen=True, tag="random"):
    """Random vectors and the two corners: what a search must beat."""

    vectors: Count = 64 * 51

    def trainings(self, sites: int, seeds: int) -> int:
        """Return how many short trainings it takes."""
        return self.vectors * seeds

    def propose(self, problem: Problem) -> Proposal:
        """Draw rates independently and keep the front."""
        count = max(0, self.vectors - 2)
        drawn = stream(problem.seed, "random").uniform(0, problem.highest, (count, problem.sites))
        vectors = np.concatenate([corners(problem), drawn])
        answer = yield same_seeds(vectors, problem.seeds[: problem.usual])
        losses = np.array([row.mean() for row in answer.accuracy])
        return vectors[front(problem.cost(vectors), losses)]


class Uniform(Value, frozen=True, tag="uniform"):
    """Equal rates for all sites: what there is without a search."""

    vectors: Count = 64

    def trainings(self, sites: int, seeds: int) -> int:
        """Return how many short trainings it takes."""
        return 0

    def propose(self, problem: Problem) -> Proposal:
        """Ask for nothing."""
        rates = np.linspace(problem.highest, 0.0, self.vectors)
        yield from ()
        return np.repeat(rates[:, None], problem.sites, axis=1)
