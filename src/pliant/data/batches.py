"""Mini-batches drawn by address, so that any of them can be computed alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from pliant.data.images import ImageDataset, Indices
from pliant.rng import Address, rng_stream
from pliant.value import Count

Batch = tuple[Tensor, Tensor]  # (batch, channel, h, w) float32 and (batch,) int64


@dataclass(frozen=True, eq=False)
class Batches:
    """The numbered mini-batches of one pass over a set of images."""

    images: ImageDataset
    order: Tensor  # image indices in the order of this pass
    size: int
    drop_short: bool = False

    def __len__(self) -> int:
        return count_batches(len(self.order), self.size, drop_short=self.drop_short)

    def __getitem__(self, number: int) -> Batch:
        """Return batch `number`, normalised, with its labels."""
        if not 0 <= number < len(self):
            raise IndexError(f"Expected a batch from 0 to {len(self) - 1}, got {number}")
        indices = self.order[number * self.size : (number + 1) * self.size]
        return self.images.get_normalised(indices), self.images.labels[indices]

    def __iter__(self) -> Iterator[Batch]:
        return (self[number] for number in range(len(self)))


def count_batches(samples: int, size: int, *, drop_short: bool = False) -> int:
    """Return the number of mini-batches in one pass over the samples."""
    full, rest = divmod(samples, size)
    return full if not rest or (drop_short and full) else full + 1


def make_batches(
    images: ImageDataset,
    indices: Indices,
    size: Count,
    seed: int,
    *address: Address,
    drop_short: bool = False,
) -> Batches:
    """Shuffle the images at `indices` by (seed, "batch", *address) and cut them into batches.

    The address identifies the pass: round, device and epoch for a device's training. With
    `drop_short`, a last batch that is not full is left out, unless it is the only one.
    """
    if size < 1:
        raise ValueError(f"Expected batches of at least 1 image, got {size}")
    order = rng_stream(seed, "batch", *address).permutation(np.asarray(indices, np.int64))
    return Batches(images, torch.from_numpy(order), size, drop_short)


def cycle_batches(
    images: ImageDataset,
    indices: Indices,
    size: Count,
    seed: int,
    *address: Address,
    drop_short: bool = False,
) -> Iterator[Batch]:
    """Yield the batches of one pass after another, without end; each pass adds its number."""
    for epoch in count():
        yield from make_batches(images, indices, size, seed, *address, epoch, drop_short=drop_short)
