"""What a rate vector is worth: the accuracy that a short training from a snapshot gains with it.

Rapp et al., DISTREAL, AAAI 2022, equation (1). Only proxy images are seen: one part, distorted, for
the snapshot, another for the short training, a third for the accuracy. A short training is a pure
function of (snapshot, rates, seed); at one seed all vectors see the same mini-batches and the same
coins, so that what they differ in is the vector.
"""

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pliant.data import Images, batches
from pliant.explore.distort import Distortion, distorted
from pliant.nn.elastic import Elastic, elastic
from pliant.nn.learner import Learner, Loss
from pliant.nn.optimiser import Optimiser, Sgd
from pliant.nn.statistics import Reestimated, Statistics, settle
from pliant.nn.subnet import Choice
from pliant.params import Params, params_of
from pliant.rng import stream
from pliant.value import Count, Fraction, Value

LEAST = 8  # images in any part
WORST = 1e3  # cross-entropy
JUDGED = 64  # images in a pass that judges: what it writes should stay in the cache


class Objective(Value, frozen=True):
    """How the worth of a vector is measured; the numbers of the paper where it tells them.

    >>> import pliant as pl
    >>> how = pl.Objective(batches=32, batch=64)
    >>> how.batches * how.batch  # images of a short training
    2048
    """

    batches: Count = 64  # of the short training, §4.1
    batch: Count = 64
    seeds: Count = 3
    optimiser: Optimiser = Sgd(lr=0.05, clip=5.0)
    cooling: Fraction = 0.5  # the last share of the steps, in which the learning rate falls to 0
    choice: Choice = "bernoulli"
    snapshot_batches: Count = 64  # of partial training on distorted images
    snapshot_share: Fraction = 0.5  # of the proxy images that are trained on
    distortion: Distortion = Distortion()
    evaluated: Count = 1000  # proxy images for the accuracy; a third of them at most
    statistics: Statistics = Reestimated(samples=500, batch=250)
    seed: int = 0  # of parts, distortion and snapshot


class Trial(Value, frozen=True):
    """One short training."""

    rates: tuple[float, ...]
    seed: int


class Outcome(Value, frozen=True):
    """What a short training came to, on the proxy images kept for that."""

    accuracy: float
    loss: float  # cross-entropy


@dataclass(frozen=True, eq=False)
class Bench:
    """What stays resident for short trainings: the network and the three parts of the proxy."""

    net: Elastic
    before: Images  # distorted, for the snapshot
    during: Images  # for the short training
    after: Images  # for the accuracy
    how: Objective

    @cached_property
    def judged(self) -> list[tuple[Tensor, Tensor]]:
        """Return the images for the accuracy, ready for the network, with their labels."""
        return [
            (_laid(self.after.normalised(rows)), self.after.labels[rows])
            for rows in _slices(len(self.after), JUDGED)
        ]

    @cached_property
    def context(self) -> str:
        """Return what an outcome depends on beside snapshot and trial, as a digest."""
        told = blake2b(msgspec.json.encode((self.net.fingerprint, self.how)), digest_size=16)
        for images in (self.before, self.during, self.after):
            told.update(images.pixels.contiguous().numpy().tobytes())
            told.update(images.labels.numpy().tobytes())
        return told.hexdigest()


def bench(net: nn.Module, proxy: Images, how: Objective) -> Bench:
    """Set up for short trainings on proxy images; no others are asked for."""
    count = len(proxy)
    judged = min(how.evaluated, count // 3)
    first = round((count - judged) * how.snapshot_share)
    if min(judged, first, count - judged - first) < LEAST:
        raise ValueError(
            f"Expected proxy images for a snapshot, a short training and its accuracy, at least "
            f"{LEAST} each, got {first}, {count - judged - first} and {judged} of {count}"
        )
    order = stream(how.seed, "proxy parts").permutation(count)
    before = distorted(proxy.subset(np.sort(order[:first])), how.distortion, how.seed)
    during = proxy.subset(np.sort(order[first : count - judged]))
    after = proxy.subset(np.sort(order[count - judged :]))
    return Bench(elastic(net, proxy.normalised(slice(0, 1))), before, during, after, how)


def snapshot(at: Bench) -> Params:
    """Train the full network for a while on distorted images."""
    learner = Learner(at.net, params_of(at.net.net), at.how.optimiser)
    _train(learner, at, at.before, at.how.snapshot_batches, Trial((), at.how.seed), "snapshot")
    return learner.params()


def short_training(at: Bench, start: Params, trial: Trial) -> Outcome:
    """Train for a few mini-batches at these rates and judge the full network."""
    learner = Learner(at.net, start, at.how.optimiser)
    _train(learner, at, at.during, at.how.batches, trial, "short")
    return judge(at, learner.params())


def _train(
    learner: Learner, at: Bench, images: Images, steps: int, trial: Trial, name: str
) -> None:
    everything = np.arange(len(images))
    order = batches(images, everything, at.how.batch, trial.seed, name, 0)
    for step in range(steps):
        number, place = divmod(step, len(order))
        if number and place == 0:
            order = batches(images, everything, at.how.batch, trial.seed, name, number)
        x, y = order[place]
        if trial.rates:
            coins = stream(trial.seed, "dropout", step)
            learner.switch(at.net.draw(trial.rates, coins, at.how.choice))
        learner.step(x, _against(y), lr=at.how.optimiser.lr * heat(step, steps, at.how.cooling))


def _against(labels: Tensor) -> Loss:
    return lambda output: F.cross_entropy(output, labels)


def heat(step: int, steps: int, cooling: float) -> float:
    """Return the share of the learning rate at a step.

    A last step at the full rate throws the accuracy about by more than most vectors differ in.
    """
    return min(1.0, (steps - step) / (cooling * steps)) if cooling else 1.0


def judge(at: Bench, params: Params) -> Outcome:
    """Return accuracy and loss of the full network on the images kept for that."""
    net = at.net.net

    def proxy(samples: int, batch: int) -> list[Tensor]:
        rows = _slices(min(samples, len(at.during)), batch)
        return [_laid(at.during.normalised(part)) for part in rows]

    settled = settle(net, params, at.how.statistics, proxy)
    was, right, loss = net.training, 0, 0.0
    net.eval()
    try:
        with torch.no_grad():
            for x, labels in at.judged:
                out: Any = functional_call(net, settled, (x,))
                logits = out[0] if isinstance(out, tuple) else out
                right += int((logits.argmax(1) == labels).sum())
                loss += float(F.cross_entropy(logits, labels, reduction="sum"))
    finally:
        net.train(was)
    mean = loss / len(at.after)
    # a training that diverged is worth nothing, but its record has to be a number
    return Outcome(right / len(at.after), mean if mean < WORST else WORST)


def _laid(x: Tensor) -> Tensor:
    """Put images into the memory format in which a CPU convolves fastest."""
    return x.contiguous(memory_format=torch.channels_last)


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
