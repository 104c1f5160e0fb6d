"""The protocol between a search and its driver: requests for short trainings, losses in reply."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pliant.table_search.pareto import FloatArray


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """A search space with its normalised cost: 0 at the highest rates, 1 for the full network."""

    genes: int  # one per site, then those with levels
    highest_rate: float
    cost: Callable[[FloatArray], FloatArray]  # (vector, gene) -> (vector,)
    seeds: tuple[int, ...]  # both corners are measured at all of them
    search_seed_count: int  # how many of them, from the first, a search uses per vector
    seed: int  # of the search itself
    level_counts: tuple[int, ...] = ()  # of the last genes


class TrialRequest(NamedTuple):
    """Short trainings to run: each vector at the seeds in its row."""

    vectors: FloatArray  # (vector, gene)
    seeds: tuple[tuple[int, ...], ...]


class TrialLosses(NamedTuple):
    """Normalised losses, one per vector and seed, in the order of the request.

    Each is the difference to the full network at the same seed, divided by the mean difference
    between the full network and the highest rates: equation (1) with common random numbers.
    """

    accuracy: list[FloatArray]  # loss of accuracy gain
    entropy: list[FloatArray]  # rise of cross-entropy: the same signal with less noise


# A search yields requests, is sent losses, and returns the vectors of its front.
SearchGenerator = Generator[TrialRequest, TrialLosses, FloatArray]


def request_same_seeds(vectors: FloatArray, seeds: tuple[int, ...]) -> TrialRequest:
    """Request every vector at the same seeds."""
    return TrialRequest(vectors, (seeds,) * len(vectors))


def average_over_seeds(losses: list[FloatArray]) -> FloatArray:
    """Return the mean loss of each vector."""
    return np.array([row.mean() for row in losses])
