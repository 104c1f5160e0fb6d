"""Which filters each site keeps, and the ways to choose them.

DISTREAL (Rapp et al., AAAI 2022) samples each filter independently. Randomised rounding has the
same mean and less noise; in blocks it also runs faster. HeteroFL (Diao et al., ICLR 2021) and FjORD
(Horváth et al., NeurIPS 2021) keep a prefix, FedRolex (Alam et al., NeurIPS 2022) a rolling window.
All but the first keep the first n filters of an order, and differ in n and in the order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import perm
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pliant.nn.compiler.channels import Mask

Sampling = Literal["bernoulli", "rounded", "blocks"]
BLOCK = 4  # filters; convolutions run faster in few shapes, each a multiple of this
FilterOrders = tuple[NDArray[np.int64], ...]


@dataclass(frozen=True, eq=False)
class Subnet:
    """The kept filters of every site of one network, and the factor that rescales them.

    >>> import torch
    >>> import pliant as pl
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> net.select_prefix(0.5).counts
    (6, 12)
    """

    network: str  # fingerprint of the elastic network
    masks: tuple[Mask, ...]
    scales: tuple[float, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Return how many filters each site keeps."""
        return tuple(int(mask.sum()) for mask in self.masks)


def check_sampling(sampling: Sampling) -> None:
    if sampling not in get_args(Sampling):
        raise ValueError(f"Expected one of {', '.join(get_args(Sampling))}, got {sampling!r}")


def make_full_masks(sizes: Sequence[int]) -> tuple[Mask, ...]:
    """Return masks that keep all filters; as they cannot change, they need not be copied."""
    masks = tuple(np.ones(size, np.bool_) for size in sizes)
    for mask in masks:
        mask.flags.writeable = False
    return masks


@lru_cache(maxsize=64)
def _flatten_sites(
    sizes: tuple[int, ...],
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[slice]]:
    """Return, for all filters end to end, their site, their index in it, and each site's slice."""
    site = np.repeat(np.arange(len(sizes)), sizes)
    ends = np.cumsum([0, *sizes])
    filter_index = np.arange(len(site)) - ends[site]
    return site, filter_index, [slice(*pair) for pair in pairwise(ends.tolist())]


def sample_bernoulli_masks(
    sizes: Sequence[int], keep: NDArray[np.float64], rng: np.random.Generator
) -> list[Mask]:
    """Keep each filter with its site's probability, and at least one per site."""
    site, _, parts = _flatten_sites(tuple(sizes))
    uniform = rng.random(len(site))
    flat = uniform < keep[site]
    masks = [flat[part] for part in parts]
    for mask, part in zip(masks, parts, strict=True):
        if not mask.any():
            mask[uniform[part].argmin()] = True  # each filter is equally likely to survive
    return masks


def sample_uniform_masks(
    sizes: Sequence[int], counts: Sequence[int], rng: np.random.Generator
) -> list[Mask]:
    """Keep a number of filters per site, every subset being equally likely."""
    site, filter_index, parts = _flatten_sites(tuple(sizes))
    order = np.argsort(site + rng.random(len(site)))  # shuffled within each site
    flat = np.empty(len(site), np.bool_)
    flat[order] = filter_index < np.asarray(counts, np.int64)[site]
    return [flat[part] for part in parts]


def sample_orders(sizes: Sequence[int], rng: np.random.Generator) -> FilterOrders:
    return tuple(rng.permutation(size) for size in sizes)


def make_rolling_orders(sizes: Sequence[int], shift: int) -> FilterOrders:
    """Return the orders that start at filter `shift` and wrap around."""
    return tuple(np.roll(np.arange(size), -shift) for size in sizes)


def make_prefix_masks(counts: Sequence[int], orders: Sequence[NDArray[np.int64]]) -> list[Mask]:
    """Keep the first filters of each order."""
    masks = []
    for count, order in zip(counts, orders, strict=True):
        mask = np.zeros(len(order), np.bool_)
        mask[order[:count]] = True
        masks.append(mask)
    return masks


def round_randomly(
    sizes: Sequence[int], keep: NDArray[np.float64], sampling: Sampling, rng: np.random.Generator
) -> list[int]:
    """Round keep × size up or down at random, with the exact mean but never to zero."""
    uniform = rng.random(len(sizes))
    counts = []
    for size, share, u in zip(sizes, keep.tolist(), uniform.tolist(), strict=True):
        low, high, probability = find_rounding_levels(size, share, sampling)
        counts.append(high if u < probability else low)
    return counts


@lru_cache(maxsize=4096)  # called for every site and mini-batch, at the same few rates
def find_rounding_levels(size: int, keep: float, sampling: Sampling) -> tuple[int, int, float]:
    """Return the filter counts below and above keep × size, and the probability of the upper.

    Counts are multiples of `BLOCK` if sampling in blocks from a site of at least three blocks.
    """
    grain = BLOCK if sampling == "blocks" and size >= 3 * BLOCK else 1
    mean = size * keep
    low = grain * int((mean + 1e-9) // grain)
    high = min(low + grain, size)
    probability = (mean - low) / (high - low) if high > low else 0.0
    return max(min(grain, size), low), max(min(grain, size), high), min(max(probability, 0.0), 1.0)


def round_up(sizes: Sequence[int], keep: NDArray[np.float64]) -> list[int]:
    """Round keep × size up, as HeteroFL does."""
    counts = np.ceil(keep * np.asarray(sizes) - 1e-9)
    return [max(1, int(count)) for count in counts]


def keep_probability(
    size: int, keep: float, sampling: Sampling, num_kept: int, num_dropped: int
) -> float:
    """Return the probability that a site keeps these many filters and drops those many others.

    It does not depend on which filters, and accounts for the rule to keep at least one.
    """

    def fixed_count(count: int) -> float:  # if that many are kept in total
        ways = perm(count, num_kept) * perm(size - count, num_dropped)
        return ways / perm(size, num_kept + num_dropped)

    if num_kept + num_dropped > size:
        return 0.0
    if sampling == "bernoulli":
        all_dropped = (1 - keep) ** size
        independent = keep**num_kept * (1 - keep) ** num_dropped
        return max(0.0, independent + all_dropped * (fixed_count(1) - fixed_count(0)))
    low, high, probability = find_rounding_levels(size, keep, sampling)
    return (1 - probability) * fixed_count(low) + probability * fixed_count(high)
