"""Data sets for tuning: a part of the training images serves as the test part."""

import numpy as np

from pliant.data import TrainTestData, load_dataset
from pliant.rng import rng_stream


def digits() -> TrainTestData:
    """Return the bundled digits without their test images."""
    return hold_out("digits", 1000)


def cifar10() -> TrainTestData:
    """Return CIFAR-10 without its test images."""
    return hold_out("cifar10", 5000)


def fashion() -> TrainTestData:
    """Return Fashion-MNIST without its test images."""
    return hold_out("fashion_mnist", 6000)


def hold_out(name: str, count: int) -> TrainTestData:
    train = load_dataset(name).train
    order = rng_stream(0, "validation").permutation(len(train))
    return TrainTestData(
        train=train.select(np.sort(order[count:])), test=train.select(np.sort(order[:count]))
    )
