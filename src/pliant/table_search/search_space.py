"""What a search varies: one rate per site and, on request, the image side and the batch share.

All of it is one vector of genes from 0, the full step, to the highest rate, the cheapest step. A
gene of sides or shares has one level for each of them, from the largest to the smallest.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np

from pliant.nn.elastic import Elastic
from pliant.table_search.pareto import FloatArray
from pliant.table_search.short_training import Trial


@dataclass(frozen=True)
class SearchSpace:
    """The genes of a vector, and what they stand for.

    >>> import numpy as np
    >>> from pliant.table_search.search_space import SearchSpace
    >>> space = SearchSpace(2, 0.5, sides=(None, 24, 16))
    >>> space.make_trial(np.array([0.25, 0.0, 0.5]), seed=7)
    Trial(rates=(0.25, 0.0), seed=7, side=16, batch=1.0)
    """

    sites: int
    highest_rate: float
    sides: tuple[int | None, ...] = (None,)
    batch_shares: tuple[float, ...] = (1.0,)

    @property
    def level_counts(self) -> tuple[int, ...]:
        """Return the number of levels of each gene that is not a rate."""
        return tuple(len(axis) for axis in (self.sides, self.batch_shares) if len(axis) > 1)

    @property
    def genes(self) -> int:
        return self.sites + len(self.level_counts)

    def round(self, vectors: FloatArray) -> FloatArray:
        """Round rates to the 32 bits that a table file holds, and other genes to their levels."""
        if self.level_counts:
            snapped = snap_levels(vectors / self.highest_rate, self.level_counts)
            rates = vectors[:, : self.sites]
            vectors = np.hstack([rates, snapped[:, self.sites :] * self.highest_rate])
        return round_rates(vectors)

    def make_equal_vectors(self, rates: FloatArray) -> FloatArray:
        """Return vectors with the same rate at all sites, of full images and mini-batches."""
        levels = np.zeros((len(rates), self.genes - self.sites))
        return np.hstack([np.repeat(rates[:, None], self.sites, axis=1), levels])

    def make_trial(self, vector: FloatArray, seed: int) -> Trial:
        """Return the short training of a vector."""
        genes = (vector[self.sites :] / self.highest_rate).tolist()
        levels = [find_level(*pair) for pair in zip(genes, self.level_counts, strict=True)]
        side = self.sides[levels[0] if len(self.sides) > 1 else 0]
        batch = self.batch_shares[levels[-1] if len(self.batch_shares) > 1 else 0]
        return Trial(tuple(vector[: self.sites].tolist()), seed, side, batch)


def make_search_space(
    net: Elastic, highest_rate: float, sides: tuple[int, ...], batch_shares: tuple[float, ...]
) -> SearchSpace:
    """Make the space of a network; full images and whole mini-batches always belong to it."""
    size = net.program.input_shapes[0][1:]
    largest = max(size, default=0)  # token sequences have no size
    if max(sides, default=0) > largest:
        raise ValueError(f"Expected search.sides of at most {largest} pixels, got {max(sides)}")
    smaller = [side for side in sorted(set(sides), reverse=True) if net.at(side, side) is not net]
    shares = sorted({1.0, *batch_shares}, reverse=True)
    return SearchSpace(len(net.sites), highest_rate, (None, *smaller), tuple(shares))


def find_level(gene: float, count: int) -> int:
    """Return the level of a gene from 0 to 1: each has an equal part of the range."""
    return min(max(int(gene * count), 0), count - 1)


def snap_levels(points: FloatArray, level_counts: tuple[int, ...]) -> FloatArray:
    """Move the last genes, from 0 to 1, to their levels."""
    snapped, first = points.copy(), points.shape[1] - len(level_counts)
    for gene, count in enumerate(level_counts, start=first):
        levels = [find_level(value, count) for value in points[:, gene].tolist()]
        snapped[:, gene] = np.array(levels) / (count - 1)
    return snapped


def list_levels(level_counts: tuple[int, ...]) -> list[tuple[float, ...]]:
    """Return all combinations of levels; without such genes, the empty one.

    >>> from pliant.table_search.search_space import list_levels
    >>> list_levels((3,)), list_levels(())
    ([(0.0,), (0.5,), (1.0,)], [()])
    """
    return list(product(*(np.linspace(0, 1, count).tolist() for count in level_counts)))


def round_rates(vectors: FloatArray) -> FloatArray:
    """Round rates to the 32 bits that a table file holds."""
    return vectors.astype(np.float32).astype(np.float64)
