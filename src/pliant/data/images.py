"""Labelled images, signals or token sequences; images and signals are normalised on access."""

from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Indices = NDArray[np.int64]
ChannelStatistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std per channel


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Images, or other samples, with their labels and normalisation statistics.

    Signals are (n, channel, time), token sequences (n, length) of integers. For uint8 pixels `mean`
    and `std` are those of pixels / 255; for float pixels they are in the unit of the pixels.

    >>> import torch
    >>> import pliant as pl
    >>> images = pl.ImageDataset.from_tensors(torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 0, 1]))
    >>> len(images), images.classes, images.shape
    (4, 2, (1, 8, 8))
    """

    pixels: Tensor  # (n, channel, h, w) or (n, channel, time), uint8 or float32; tokens: int64
    labels: Tensor  # (n,), int64
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    groups: Tensor | None = None  # (n,), int64: the writer or user of each image
    name: str = "images"
    group_statistics: tuple[ChannelStatistics, ...] = ()  # per group, instead of mean and std

    def __post_init__(self) -> None:
        _check_images(self)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"ImageDataset({self.name}: {len(self):,} of {shape}, {self.classes} classes)"

    @staticmethod
    def from_tensors(
        pixels: Tensor,
        labels: Tensor,
        *,
        classes: int | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        groups: Tensor | None = None,
        name: str = "images",
    ) -> "ImageDataset":
        """Wrap a pair of tensors; infer whatever is not given."""
        _check_dims(pixels, name)
        if labels.dtype.is_floating_point or labels.dtype.is_complex:
            raise ValueError(f"{name}: expected integer labels, got {labels.dtype}")
        statistics: ChannelStatistics = (), ()
        if pixels.ndim == 2 and not (pixels.is_floating_point() or pixels.is_complex()):
            pixels = pixels.to(torch.int64)
        elif pixels.is_floating_point():
            pixels = pixels.to(torch.float32)
            statistics = (0.0,) * pixels.shape[1], (1.0,) * pixels.shape[1]
        elif pixels.dtype == torch.uint8 and (mean is None or std is None):
            statistics = compute_channel_statistics(pixels)
        if classes is None:
            classes = int(labels.max()) + 1 if labels.numel() else 1
        return ImageDataset(
            pixels=pixels,
            labels=labels.to(torch.int64),
            classes=classes,
            mean=statistics[0] if mean is None else tuple(mean),
            std=statistics[1] if std is None else tuple(std),
            groups=None if groups is None else groups.to(torch.int64),
            name=name,
        )

    def __len__(self) -> int:
        return self.pixels.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (channel, h, w) of one image, (channel, time) of a signal, (length,) of tokens."""
        return tuple(self.pixels.shape[1:])

    @property
    def vocabulary(self) -> int:
        """Return the number of different tokens, from 0 to the largest; 0 if these are not any."""
        is_empty = self.pixels.dtype != torch.int64 or not self.pixels.numel()
        return 0 if is_empty else int(self.pixels.max()) + 1

    def compute_digest(self) -> str:
        """Return a digest of the images, their labels and their normalisation."""
        facts = (self.shape, self.pixels.dtype, self.classes, self.mean, self.std)
        hasher = blake2b(repr((facts, self.group_statistics)).encode(), digest_size=16)
        for start in range(0, len(self), 1024):  # in blocks: pixels need not be contiguous
            hasher.update(self.pixels[start : start + 1024].contiguous().numpy().data)
        for column in (self.labels, self.groups):
            hasher.update(b"" if column is None else column.numpy().tobytes())
        return hasher.hexdigest()

    def select(self, indices: Indices | Tensor) -> "ImageDataset":
        """Return a copy of the images at these indices, in this order."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        return replace(
            self,
            pixels=self.pixels[index],
            labels=self.labels[index],
            groups=None if self.groups is None else self.groups[index],
        )

    def get_normalised(self, indices: Indices | Tensor | slice | None = None) -> Tensor:
        """Return the images at these indices (default: all) as normalised float32."""
        if indices is None:
            indices = slice(None)
        if not isinstance(indices, slice):
            indices = torch.as_tensor(indices, dtype=torch.int64)
        return self.normalise(self.pixels[indices], indices)

    def normalise(self, pixels: Tensor, indices: Tensor | slice) -> Tensor:
        """Return pixels as normalised float32, by the statistics of the images at these indices.

        Tokens stay as they are.
        """
        if pixels.dtype == torch.int64:
            return pixels
        ones = (1,) * (pixels.ndim - 2)
        unit = 255.0 if pixels.dtype == torch.uint8 else 1.0
        if self.group_statistics and self.groups is not None:
            statistics = torch.tensor(self.group_statistics)[self.groups[indices]] * unit
            mean, std = (part.view(*part.shape, *ones) for part in statistics.unbind(1))
        else:
            mean = torch.tensor([value * unit for value in self.mean]).view(-1, *ones)
            std = torch.tensor([value * unit for value in self.std]).view(-1, *ones)
        return (pixels.to(torch.float32) - mean).div_(std)


def resize(images: Tensor, side: int | None) -> Tensor:
    """Return square images of this side, smoothed so that fine patterns do not alias."""
    if side is None or images.shape[2:] == (side, side):
        return images
    if images.ndim != 4:
        raise ValueError(f"Expected images to resize, got samples {tuple(images.shape[1:])}")
    return F.interpolate(images, (side, side), mode="bilinear", antialias=True)


def compute_channel_statistics(pixels: Tensor) -> ChannelStatistics:
    """Return mean and standard deviation per channel of uint8 pixels / 255."""
    channels = pixels.shape[1]
    count = pixels.numel() // channels if channels else 0
    if count == 0:
        return (0.0,) * channels, (1.0,) * channels
    total = torch.zeros(channels, dtype=torch.float64)
    squares = torch.zeros(channels, dtype=torch.float64)
    for start in range(0, len(pixels), 1024):  # in blocks: doubles take eight times the memory
        block = pixels[start : start + 1024].to(torch.float64)
        dims = (0, *range(2, block.ndim))
        total += block.sum(dim=dims)
        squares += block.square().sum(dim=dims)
    mean = total / count
    std = (squares / count - mean.square()).clamp_min(0.0).sqrt()
    # a channel of one colour has no deviation to divide by
    std = torch.where(std > 0, std, torch.full_like(std, 255.0))
    return tuple((mean / 255).tolist()), tuple((std / 255).tolist())


def _check_images(images: ImageDataset) -> None:
    pixels, labels, name = images.pixels, images.labels, images.name
    _check_dims(pixels, name)
    is_tokens = pixels.ndim == 2
    if not is_tokens and pixels.dtype not in (torch.uint8, torch.float32):
        raise ValueError(f"{name}: expected images as uint8 or float, got {pixels.dtype}")
    if is_tokens and pixels.dtype != torch.int64:
        raise ValueError(f"{name}: expected tokens as int64, got {pixels.dtype}")
    _check_column(labels, "labels", len(pixels), name)
    if images.groups is not None:
        _check_column(images.groups, "groups", len(pixels), name)
    for field, values in (("mean", images.mean), ("std", images.std)):
        num_channels = 0 if is_tokens else pixels.shape[1]
        if len(values) != num_channels:
            raise ValueError(
                f"{name}: expected {num_channels} values of {field}, one per channel, got {values}"
            )
    if any(value <= 0 for value in images.std):
        raise ValueError(f"{name}: expected std > 0, got {images.std}")
    if images.classes < 1:
        raise ValueError(f"{name}: expected at least one class, got {images.classes}")
    check_labels(labels, images.classes, name)


def _check_dims(pixels: Tensor, name: str) -> None:
    if pixels.ndim not in (2, 3, 4):
        raise ValueError(
            f"{name}: expected images (n, channel, h, w), signals (n, channel, time) or tokens "
            f"(n, length), got {tuple(pixels.shape)}"
        )


def check_labels(labels: Tensor, classes: int, where: object) -> None:
    """Raise ValueError if a label is not from 0 to `classes` - 1."""
    wrong = torch.nonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            f"{where}: expected labels from 0 to {classes - 1}, got {int(labels[first])} at {first}"
        )


def _check_column(column: Tensor, field: str, length: int, name: str) -> None:
    if column.dtype != torch.int64 or tuple(column.shape) != (length,):
        raise ValueError(
            f"{name}: expected {length} {field} as int64, got {tuple(column.shape)} {column.dtype}"
        )
