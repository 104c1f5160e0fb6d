"""MNIST for tuning: the images of 60 writers serve as the test part."""

import torch

from pliant.data import TrainTestData, load_dataset
from pliant.rng import rng_stream

WRITERS = 60


def mnist() -> TrainTestData:
    """Return the training images of MNIST, divided by writer."""
    train = load_dataset("mnist").train
    if train.groups is None:
        raise ValueError("Expected MNIST with its writers, got no `writer_ids.npz` beside it")
    groups = torch.as_tensor(train.groups)
    writers = groups.unique()
    chosen = rng_stream(0, "held-out writers").permutation(len(writers))[:WRITERS]
    is_held_out = torch.isin(groups, writers[torch.from_numpy(chosen)])
    return TrainTestData(
        train=train.select((~is_held_out).nonzero().ravel().numpy()),
        test=train.select(is_held_out.nonzero().ravel().numpy()),
    )
