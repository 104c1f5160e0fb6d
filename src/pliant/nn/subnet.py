"""Which filters of each site are kept, and the ways to choose them.

The paper's choice is one independent coin per filter (Rapp et al., DISTREAL, AAAI 2022).
Randomised rounding has the same mean and less noise. A prefix is HeteroFL's (Diao et al., ICLR
2021) and FjORD's (Horváth et al., NeurIPS 2021) choice, a rolling window FedRolex' (Alam et al.,
NeurIPS 2022). All but the coin are "the first n filters of an order", and differ in n and in the
order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pliant.nn.channels import Mask

Choice = Literal["bernoulli", "rounded"]
Order = tuple[NDArray[np.int64], ...]


@dataclass(frozen=True, eq=False)
class Subnet:
    """The kept filters of every site of one network, and the factor that survivors carry."""

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


def coins(sizes: Sequence[int], keep: NDArray[np.float64], rng: np.random.Generator) -> list[Mask]:
    """Keep each filter with its site's probability; a site that would lose all keeps one."""
    chances = np.repeat(keep, sizes)
    drawn = rng.random(len(chances))
    flat = drawn < chances
    masks = np.split(flat, np.cumsum(sizes)[:-1])
    if not all(mask.any() for mask in masks):
        rows = np.split(drawn, np.cumsum(sizes)[:-1])
        for mask, row in zip(masks, rows, strict=True):
            if not mask.any():
                mask[row.argmin()] = True  # each filter is the survivor equally often
    return masks


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


def rounded(sizes: Sequence[int], keep: NDArray[np.float64], rng: np.random.Generator) -> list[int]:
    """Round keep × size up or down at random so that the mean is exact; never to zero."""
    wanted = keep * np.asarray(sizes)
    whole = np.floor(wanted + 1e-9)
    counts = whole + (rng.random(len(sizes)) < wanted - whole)
    return [max(1, int(number)) for number in counts]


def ceiled(sizes: Sequence[int], keep: NDArray[np.float64]) -> list[int]:
    """Round keep × size up, as HeteroFL does."""
    wanted = np.ceil(keep * np.asarray(sizes) - 1e-9)
    return [max(1, int(number)) for number in wanted]


def moments(size: int, keep: float, choice: Choice) -> tuple[float, float]:
    """Return E[n] and E[n²] of the number of kept filters, the rule "never none" included."""
    if choice == "bernoulli":
        none = (1 - keep) ** size
        mean = size * keep
        return mean + none, mean**2 + mean * (1 - keep) + none
    wanted = size * keep
    low = float(np.floor(wanted + 1e-9))
    chance = max(0.0, wanted - low)
    down, up = max(1.0, low), max(1.0, low + 1)
    return (1 - chance) * down + chance * up, (1 - chance) * down**2 + chance * up**2
