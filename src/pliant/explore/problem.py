"""What a search is told and what it may ask: costs in closed form, losses for short trainings."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NamedTuple

from pliant.explore.front import FloatArray


@dataclass(frozen=True, eq=False)
class Problem:
    """A search space with its normalised cost: 0 at the highest rates, 1 for the full network."""

    sites: int
    highest: float  # rate
    cost: Callable[[FloatArray], FloatArray]  # (vector, site) -> (vector,)
    seeds: tuple[int, ...]  # at which both corners are known; the first `usual` are for searching
    usual: int
    seed: int  # of the search itself


class Ask(NamedTuple):
    """Short trainings that are wanted: each vector at the seeds in its row."""

    vectors: FloatArray  # (vector, site)
    seeds: tuple[tuple[int, ...], ...]


class Answer(NamedTuple):
    """Normalised losses, one for each pair of vector and seed, as they were asked for.

    Each is a difference to the full network at the same seed, over the mean difference between the
    full network and the highest rates: equation (1) with common random numbers.
    """

    accuracy: list[FloatArray]  # loss of accuracy gain
    entropy: list[FloatArray]  # gain of cross-entropy: the same thing with less noise


# A search yields what it asks, is sent the answers, and returns the vectors of its front.
Proposal = Generator[Ask, Answer, FloatArray]


def same_seeds(vectors: FloatArray, seeds: tuple[int, ...]) -> Ask:
    """Ask for every vector at the same seeds."""
    return Ask(vectors, (seeds,) * len(vectors))
