"""CIFAR-10 at 16x16 pixels: the mean of each 2x2, so that a short training costs a seventh."""

from dataclasses import replace

import numpy as np
import torch

from pliant.data import ImageDataset, TrainTestData, load_dataset
from pliant.rng import rng_stream

HELD_OUT = 5000


def cifar10() -> TrainTestData:
    """Load CIFAR-10 and halve both sides of its images."""
    full = load_dataset("cifar10")
    return TrainTestData(_halve(full.train), _halve(full.test))


def cifar10_validation() -> TrainTestData:
    """Do the same to the training images alone, of which some serve as the test part."""
    train = _halve(load_dataset("cifar10").train)
    order = rng_stream(0, "validation").permutation(len(train))
    return TrainTestData(
        train=train.select(np.sort(order[HELD_OUT:])), test=train.select(np.sort(order[:HELD_OUT]))
    )


def _halve(images: ImageDataset) -> ImageDataset:
    count, channels, height, width = images.pixels.shape
    tiles = images.pixels.view(count, channels, height // 2, 2, width // 2, 2)
    means = tiles.to(torch.int16).sum(dim=(3, 5)).add_(2).div_(4, rounding_mode="floor")
    return replace(images, pixels=means.to(torch.uint8), name=f"{images.name} 16x16")
