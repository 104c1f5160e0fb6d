"""Which filters of each site are kept, and the ways to choose them.

The paper's choice is one independent coin per filter (Rapp et al., DISTREAL, AAAI 2022).
Randomised rounding has the same mean and less noise; in blocks it runs faster too. A prefix is
HeteroFL's (Diao et al., ICLR 2021) and FjORD's (Horváth et al., NeurIPS 2021) choice, a rolling
window FedRolex' (Alam et al., NeurIPS 2022). All but the coin are "the first n filters of an
order", and differ in n and in the order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import perm
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pliant.nn.channels import Mask

Choice = Literal["bernoulli", "rounded", "blocks"]
BLOCK = 4  # filters; convolutions of few different shapes, each a multiple of this, run faster
Order = tuple[NDArray[np.int64], ...]


@dataclass(frozen=True, eq=False)
class Subnet:
    """The kept filters of every site of one network, and the factor that survivors carry.

    >>> import torch
    >>> import pliant as pl
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> net.first(0.5).counts
    (6, 12)
    """

    network: str  # fingerprint of the elastic network that it belongs to
    masks: tuple[Mask, ...]
    scales: tuple[float, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Return how many filters each site keeps."""
        return tuple(int(mask.sum()) for mask in self.masks)

    @property
    def is_full(self) -> bool:
        """Tell whether nothing is dropped and nothing rescaled."""
        return all(mask.all() for mask in self.masks) and all(scale == 1 for scale in self.scales)


def check(choice: Choice) -> None:
    """Refuse a choice that there is not."""
    if choice not in get_args(Choice):
        raise ValueError(f"Expected a choice of {', '.join(get_args(Choice))}, got {choice!r}")


@lru_cache(maxsize=64)
def _lying(sizes: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64], list[slice]]:
    """Return for filters that lie end to end: whose they are, their number, and each site's part.

    This is asked before every mini-batch and never changes.
    """
    site = np.repeat(np.arange(len(sizes)), sizes)
    ends = np.cumsum([0, *sizes])
    number = np.arange(len(site)) - ends[site]
    return site, number, [slice(*pair) for pair in pairwise(ends.tolist())]


def coins(sizes: Sequence[int], keep: NDArray[np.float64], rng: np.random.Generator) -> list[Mask]:
    """Keep each filter with its site's probability; a site that would lose all keeps one."""
    site, _, own = _lying(tuple(sizes))
    drawn = rng.random(len(site))
    flat = drawn < keep[site]
    masks = [flat[part] for part in own]
    for mask, part in zip(masks, own, strict=True):
        if not mask.any():
            mask[drawn[part].argmin()] = True  # each filter is the survivor equally often
    return masks


def drawn(sizes: Sequence[int], counts: Sequence[int], rng: np.random.Generator) -> list[Mask]:
    """Keep a given number of each site's filters, every choice equally likely."""
    site, number, own = _lying(tuple(sizes))
    order = np.argsort(site + rng.random(len(site)))  # shuffled within each site
    flat = np.empty(len(site), np.bool_)
    flat[order] = number < np.asarray(counts, np.int64)[site]
    return [flat[part] for part in own]


def orders(sizes: Sequence[int], rng: np.random.Generator) -> Order:
    """Draw a random order of each site's filters: what stays put for a round."""
    return tuple(rng.permutation(size) for size in sizes)


def rolled(sizes: Sequence[int], shift: int) -> Order:
    """Return the order that begins at filter `shift` and goes round."""
    return tuple(np.roll(np.arange(size), -shift) for size in sizes)


def first(counts: Sequence[int], order: Sequence[NDArray[np.int64]]) -> list[Mask]:
    """Keep the first filters of each order."""
    masks = []
    for number, places in zip(counts, order, strict=True):
        mask = np.zeros(len(places), np.bool_)
        mask[places[:number]] = True
        masks.append(mask)
    return masks


def rounded(
    sizes: Sequence[int], keep: NDArray[np.float64], choice: Choice, rng: np.random.Generator
) -> list[int]:
    """Round keep × size up or down at random so that the mean is exact; never to zero."""
    drawn = rng.random(len(sizes))
    counts = []
    for size, share, luck in zip(sizes, keep.tolist(), drawn.tolist(), strict=True):
        low, high, up = levels(size, share, choice)
        counts.append(high if luck < up else low)
    return counts


@lru_cache(maxsize=4096)  # every site, before every mini-batch, at the same few rates
def levels(size: int, keep: float, choice: Choice) -> tuple[int, int, float]:
    """Return the two numbers of filters that keep × size lies between, and the chance of the upper.

    Whole numbers, or multiples of `BLOCK` for a site of three blocks or more.
    """
    grain = BLOCK if choice == "blocks" and size >= 3 * BLOCK else 1
    wanted = size * keep
    low = grain * int((wanted + 1e-9) // grain)
    high = min(low + grain, size)
    up = (wanted - low) / (high - low) if high > low else 0.0
    return max(min(grain, size), low), max(min(grain, size), high), min(max(up, 0.0), 1.0)


def ceiled(sizes: Sequence[int], keep: NDArray[np.float64]) -> list[int]:
    """Round keep × size up, as HeteroFL does."""
    wanted = np.ceil(keep * np.asarray(sizes) - 1e-9)
    return [max(1, int(number)) for number in wanted]


def chance(size: int, keep: float, choice: Choice, kept: int, dropped: int) -> float:
    """Return how likely `kept` given filters are all kept and `dropped` others all dropped.

    Which filters are given does not matter. The rule "never none" is included.
    """

    def among(number: int) -> float:  # when that many are kept in all
        ways = perm(number, kept) * perm(size - number, dropped)
        return ways / perm(size, kept + dropped)

    if kept + dropped > size:
        return 0.0
    if choice == "bernoulli":
        none = (1 - keep) ** size
        coins = keep**kept * (1 - keep) ** dropped
        return max(0.0, coins + none * (among(1) - among(0)))
    low, high, up = levels(size, keep, choice)
    return (1 - up) * among(low) + up * among(high)
