"""NSGA-II with an ask-and-tell interface: the paper's search, by pymoo (Blank and Deb, 2020).

Deb et al., "A fast and elitist multiobjective genetic algorithm: NSGA-II", 2002.
"""

from typing import Any

import numpy as np

from pliant.extras import require
from pliant.rng import derive_seed, rng_stream
from pliant.table_search.ask_tell import (
    SearchGenerator,
    SearchProblem,
    average_over_seeds,
    request_same_seeds,
)
from pliant.table_search.pareto import FloatArray, find_pareto_front
from pliant.value import Count, Fraction, Positive, Value


class Nsga2(Value, frozen=True, tag="nsga2"):
    """The paper's search: a population that contains the two corners from the start.

    >>> import pliant as pl
    >>> pl.Nsga2(population=64, generations=50).count_trainings(genes=39, seeds=3)
    9792
    """

    population: Count = 64
    generations: Count = 50  # after the initial population
    crossover: Fraction = 0.95  # as in the paper's library
    crossover_eta: Positive = 10.0
    mutation: Fraction | None = None  # probability per gene; None: one gene per vector
    mutation_eta: Positive = 20.0
    mutated: Fraction = 0.9  # share of vectors that may mutate at all, as in pymoo

    def count_trainings(self, genes: int, seeds: int) -> int:
        """Return the number of short trainings the search needs."""
        return self.population * (self.generations + 1) * seeds

    def propose(self, problem: SearchProblem) -> SearchGenerator:
        """Evolve a population on mean losses at the first seeds."""
        algorithm = _make_algorithm(self, problem)
        static = require("pymoo.problems.static", "search").StaticProblem
        evaluator = require("pymoo.core.evaluator", "search").Evaluator()
        seeds = problem.seeds[: problem.search_seed_count]
        while algorithm.has_next():
            infills = algorithm.ask()
            vectors = np.asarray(infills.get("X"), np.float64)
            reply = yield request_same_seeds(vectors, seeds)
            losses = average_over_seeds(reply.accuracy)
            objectives = np.stack([problem.cost(vectors), losses], axis=1)
            evaluator.eval(static(algorithm.problem, F=objectives), infills)
            algorithm.tell(infills=infills)
        vectors = np.asarray(algorithm.pop.get("X"), np.float64)
        objectives = np.asarray(algorithm.pop.get("F"), np.float64)
        return vectors[find_pareto_front(objectives[:, 0], objectives[:, 1])]


def make_corners(problem: SearchProblem) -> FloatArray:
    """Return the full network and the highest rates."""
    return np.stack([np.zeros(problem.genes), np.full(problem.genes, problem.highest_rate)])


def _make_algorithm(settings: Nsga2, problem: SearchProblem) -> Any:
    genes, highest_rate, seed = problem.genes, problem.highest_rate, problem.seed
    nsga2 = require("pymoo.algorithms.moo.nsga2", "search").NSGA2
    sbx = require("pymoo.operators.crossover.sbx", "search").SBX
    polynomial = require("pymoo.operators.mutation.pm", "search").PolynomialMutation
    make_space = require("pymoo.core.problem", "search").Problem
    random_count = max(0, settings.population - 2)
    random_vectors = rng_stream(seed, "population").uniform(0, highest_rate, (random_count, genes))
    corners = make_corners(problem)[: settings.population]
    mutation = settings.mutation if settings.mutation is not None else 1.0 / genes
    algorithm = nsga2(
        pop_size=settings.population,
        sampling=np.concatenate([corners, random_vectors]),
        crossover=sbx(prob=settings.crossover, eta=settings.crossover_eta),
        mutation=polynomial(prob=settings.mutated, prob_var=mutation, eta=settings.mutation_eta),
    )
    algorithm.setup(
        make_space(n_var=genes, n_obj=2, xl=0.0, xu=highest_rate),
        termination=("n_gen", settings.generations + 1),
        seed=derive_seed(seed, "evolution") % 2**32,  # pymoo takes 32 bits
        verbose=False,
    )
    return algorithm


class RandomSearch(Value, frozen=True, tag="random"):
    """Random vectors and the two corners: the baseline a search must beat."""

    vectors: Count = 64 * 51

    def count_trainings(self, genes: int, seeds: int) -> int:
        return self.vectors * seeds

    def propose(self, problem: SearchProblem) -> SearchGenerator:
        shape = max(0, self.vectors - 2), problem.genes
        rng = rng_stream(problem.seed, "random")
        random_vectors = rng.uniform(0, problem.highest_rate, shape)
        vectors = np.concatenate([make_corners(problem), random_vectors])
        reply = yield request_same_seeds(vectors, problem.seeds[: problem.search_seed_count])
        losses = average_over_seeds(reply.accuracy)
        return vectors[find_pareto_front(problem.cost(vectors), losses)]


class UniformRates(Value, frozen=True, tag="uniform"):
    """Equal rates for all sites, without any search."""

    vectors: Count = 64

    def count_trainings(self, genes: int, seeds: int) -> int:
        return 0

    def propose(self, problem: SearchProblem) -> SearchGenerator:
        rates = np.linspace(problem.highest_rate, 0.0, self.vectors)
        yield from ()
        return np.repeat(rates[:, None], problem.genes, axis=1)
