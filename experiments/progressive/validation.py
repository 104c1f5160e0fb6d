"""CIFAR-10 for tuning: 5,000 of the training images serve as the test part."""

import numpy as np

from pliant.data import TrainTestData, load_dataset
from pliant.rng import rng_stream


def cifar10() -> TrainTestData:
    """Return CIFAR-10 without its test images."""
    train = load_dataset("cifar10").train
    order = rng_stream(0, "validation").permutation(len(train))
    return TrainTestData(
        train=train.select(np.sort(order[5000:])), test=train.select(np.sort(order[:5000]))
    )
