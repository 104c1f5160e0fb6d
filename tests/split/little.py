"""A small LeNet, small images and short split runs for tests."""

from itertools import islice

import numpy as np
import torch

from pliant.data import Federated, Images
from pliant.devices import Fleet
from pliant.engine.evaluate import Evaluation
from pliant.engine.simulate import Setting
from pliant.engine.split import simulate_split
from pliant.nn.models import lenet
from pliant.split import AdaSplit, Local

LOCAL = Local(batch=8)
ADASPLIT = AdaSplit(local=LOCAL, kappa=0.5)
SIZES = (24, 17, 8)  # the second ends with a batch of one


def images(count, seed=0, classes=3):
    """Noise with a bright row that tells the class: a few steps learn it."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    pixels = torch.randint(0, 128, (count, 1, 16, 16), generator=draws, dtype=torch.uint8)
    pixels[torch.arange(count), 0, 4 * labels] += 127
    return Images.from_tensors(pixels, labels, classes=classes)


def data(sizes=SIZES, only=None):
    """Share images among clients; `only` maps a client to the one class that it has."""
    train, test = images(sum(sizes)), images(12 * len(sizes), seed=1)
    shares = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    for client, label in (only or {}).items():
        train.labels[shares[client]] = label
    own = tuple(np.split(np.arange(len(test)), len(sizes)))
    return Federated(train, test, train.subset([0]), tuple(shares), np.zeros(0, np.int64), own)


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return lenet(3, filters=(4, 6), hidden=(16, 12), channels=1, side=16)


def setting(rounds=4, **options):
    return Setting(rounds=rounds, evaluation=Evaluation(every=2), checkpoint_every=2, **options)


def run(method=ADASPLIT, *, fleet=None, rounds=4, given=None, most=None, **options):
    given = given or data()
    how = options.pop("setting", None) or setting(rounds)
    records = simulate_split(
        method, network(), given, fleet or Fleet(size=len(given)), setting=how, **options
    )
    return list(islice(records, most))
