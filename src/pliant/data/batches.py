"""Mini-batches drawn by address, so that any of them can be computed alone."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pliant.data.images import ImageDataset, Indices, resize
from pliant.rng import Address, rng_stream
from pliant.value import Count, Natural, Value

Batch = tuple[Tensor, Tensor]  # (batch, channel, h, w) float32 and (batch,) int64


class CropFlip(Value, frozen=True, tag="crop_flip"):
    """Shift each image by up to `pad` pixels, filled with black, and mirror half of them.

    >>> import torch
    >>> import pliant as pl
    >>> pl.CropFlip(pad=2).apply(torch.ones(4, 1, 8, 8), pl.rng_stream(0, "crop")).shape
    torch.Size([4, 1, 8, 8])
    """

    pad: Natural = 4
    flip: bool = True

    def apply(self, pixels: Tensor, rng: np.random.Generator) -> Tensor:
        """Return augmented pixels of the same shape."""
        if pixels.ndim != 4:
            raise ValueError(f"Expected images to crop, got samples {tuple(pixels.shape[1:])}")
        count, _, height, width = pixels.shape
        top = torch.from_numpy(rng.integers(0, 2 * self.pad + 1, count))
        left = torch.from_numpy(rng.integers(0, 2 * self.pad + 1, count))
        is_mirrored = torch.from_numpy(rng.random(count) < 0.5) & self.flip
        padded = torch.nn.functional.pad(pixels, (self.pad,) * 4)
        rows = top[:, None] + torch.arange(height)
        columns = left[:, None] + torch.arange(width)
        columns = torch.where(is_mirrored[:, None], columns.flip(1), columns)
        image = torch.arange(count)[:, None, None]
        # indexing around the channel axis moves it to the end: (batch, h, w, channel)
        cropped = padded[image, :, rows[:, :, None], columns[:, None, :]]
        return cropped.permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True, eq=False)
class Batches:
    """The numbered mini-batches of one pass over a set of images."""

    images: ImageDataset
    order: Tensor  # image indices in the order of this pass
    size: int
    seed: int
    address: tuple[Address, ...]
    drop_short: bool = False
    augment: CropFlip | None = None

    def __len__(self) -> int:
        return count_batches(len(self.order), self.size, drop_short=self.drop_short)

    def __getitem__(self, number: int) -> Batch:
        """Return batch `number`, augmented and normalised, with its labels."""
        if not 0 <= number < len(self):
            raise IndexError(f"Expected a batch from 0 to {len(self) - 1}, got {number}")
        indices = self.order[number * self.size : (number + 1) * self.size]
        pixels = self.images.pixels[indices]
        if self.augment is not None:
            rng = rng_stream(self.seed, "augment", *self.address, number)
            pixels = self.augment.apply(pixels, rng)
        return self.images.normalise(pixels, indices), self.images.labels[indices]

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
    augment: CropFlip | None = None,
) -> Batches:
    """Shuffle the images at `indices` by (seed, "batch", *address) and cut them into batches.

    The address identifies the pass: round, device and epoch for a device's training. Images are
    augmented at the address of their batch, which adds its number. With `drop_short`, a last batch
    that is not full is left out, unless it is the only one.
    """
    if size < 1:
        raise ValueError(f"Expected batches of at least 1 image, got {size}")
    order = rng_stream(seed, "batch", *address).permutation(np.asarray(indices, np.int64))
    return Batches(images, torch.from_numpy(order), size, seed, address, drop_short, augment)


def cycle_batches(
    images: ImageDataset,
    indices: Indices,
    size: Count,
    seed: int,
    *address: Address,
    drop_short: bool = False,
    augment: CropFlip | None = None,
) -> Iterator[Batch]:
    """Yield the batches of one pass after another, without end; each pass adds its number."""
    make = partial(make_batches, images, indices, size, seed, *address)
    for epoch in count():
        yield from make(epoch, drop_short=drop_short, augment=augment)


MIN_SAMPLES = 4  # of a shrunken mini-batch: batch norm needs a few


class InputScale(NamedTuple):
    """How a step shrinks its mini-batch: the side of the images, and the share of samples.

    >>> import pliant as pl
    >>> [pl.InputScale(side=16, batch=0.5).count_samples(size) for size in (32, 5, 2)]
    [16, 4, 2]
    """

    side: int | None = None  # pixels; None: as they are
    batch: float = 1.0

    def count_samples(self, size: int) -> int:
        """Return how many samples of a mini-batch are used: a few, however small the share."""
        return min(size, max(MIN_SAMPLES, math.floor(self.batch * size + 1e-9)))

    def apply(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shrunken mini-batch."""
        count = self.count_samples(len(y))
        return resize(x[:count], self.side), y[:count]


AS_IS = InputScale()
