"""Score a rate vector by the accuracy that a short training from a snapshot gains with it.

Rapp et al., DISTREAL, AAAI 2022, equation (1). Only proxy images are used: one part, distorted, for
the snapshot, one for the short training, one for the accuracy. A short training is a pure function
of (snapshot, rates, seed); at one seed all vectors see the same mini-batches and the same random
draws, so that only the vector differs.
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

from pliant.data import ImageDataset, make_batches
from pliant.nn.elastic import Elastic, elastic
from pliant.nn.norm_statistics import NormStatistics, ReestimatedStats, prepare_norm_statistics
from pliant.nn.optimisers import Optimiser, Sgd
from pliant.nn.subnet import Sampling
from pliant.nn.trainer import LossFn, SubnetTrainer
from pliant.params import Params, get_params
from pliant.rng import rng_stream
from pliant.table_search.distortion import Distortion, distort_images
from pliant.value import Count, Fraction, Value

MIN_IMAGES = 8  # in any part
MAX_LOSS = 1e3  # cross-entropy
EVAL_BATCH = 64  # images per evaluation pass: activations should stay in the cache


class ShortTrainingSettings(Value, frozen=True):
    """How a vector is scored; defaults follow the paper where it states them.

    >>> import pliant as pl
    >>> settings = pl.ShortTrainingSettings(batches=32, batch=64)
    >>> settings.batches * settings.batch  # images of a short training
    2048
    """

    batches: Count = 64  # of the short training, §4.1
    batch: Count = 64
    seeds: Count = 3
    optimiser: Optimiser = Sgd(lr=0.05, clip=5.0)
    cooling: Fraction = 0.5  # final share of the steps, over which the learning rate falls to 0
    choice: Sampling = "bernoulli"
    snapshot_batches: Count = 64  # of partial training on distorted images
    snapshot_share: Fraction = 0.5  # of the proxy images used for training
    distortion: Distortion = Distortion()
    eval_images: Count = 1000  # for the accuracy; at most a third of the proxy images
    statistics: NormStatistics = ReestimatedStats(samples=500, batch=250)
    seed: int = 0  # of parts, distortion and snapshot


class Trial(Value, frozen=True):
    """One short training."""

    rates: tuple[float, ...]
    seed: int


class TrialOutcome(Value, frozen=True):
    """The result of a short training on the evaluation images."""

    accuracy: float
    loss: float  # cross-entropy


@dataclass(frozen=True, eq=False)
class SearchContext:
    """What a worker keeps for short trainings: the network and the three parts of the proxy."""

    net: Elastic
    snapshot_images: ImageDataset  # distorted, for the snapshot
    train_images: ImageDataset  # for the short training
    eval_images: ImageDataset  # for the accuracy
    settings: ShortTrainingSettings

    @cached_property
    def eval_batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return the evaluation images, ready for the network, with their labels."""
        return [
            (
                _convert_to_channels_last(self.eval_images.get_normalised(rows)),
                self.eval_images.labels[rows],
            )
            for rows in _make_slices(len(self.eval_images), EVAL_BATCH)
        ]

    @cached_property
    def digest(self) -> str:
        """Return a digest of everything an outcome depends on besides snapshot and trial."""
        hasher = blake2b(msgspec.json.encode((self.net.fingerprint, self.settings)), digest_size=16)
        for images in (self.snapshot_images, self.train_images, self.eval_images):
            hasher.update(images.pixels.contiguous().numpy().tobytes())
            hasher.update(images.labels.numpy().tobytes())
        return hasher.hexdigest()


def make_search_context(
    net: nn.Module, proxy: ImageDataset, settings: ShortTrainingSettings
) -> SearchContext:
    """Divide the proxy images into three parts and compile the network."""
    count = len(proxy)
    eval_count = min(settings.eval_images, count // 3)
    snapshot_count = round((count - eval_count) * settings.snapshot_share)
    train_count = count - eval_count - snapshot_count
    if min(eval_count, snapshot_count, train_count) < MIN_IMAGES:
        raise ValueError(
            f"Expected proxy images for a snapshot, a short training and its accuracy, at least "
            f"{MIN_IMAGES} each, got {snapshot_count}, {train_count} and {eval_count} of {count}"
        )
    order = rng_stream(settings.seed, "proxy parts").permutation(count)
    snapshot_images = distort_images(
        proxy.select(np.sort(order[:snapshot_count])), settings.distortion, settings.seed
    )
    return SearchContext(
        elastic(net, proxy.get_normalised(slice(0, 1))),
        snapshot_images,
        proxy.select(np.sort(order[snapshot_count : count - eval_count])),
        proxy.select(np.sort(order[count - eval_count :])),
        settings,
    )


def train_snapshot(context: SearchContext) -> Params:
    """Train the full network briefly on distorted images."""
    settings = context.settings
    trainer = SubnetTrainer(context.net, get_params(context.net.module), settings.optimiser)
    trial = Trial((), settings.seed)
    images, steps = context.snapshot_images, settings.snapshot_batches
    _train_steps(trainer, context, images, steps, trial, "snapshot")
    return trainer.params()


def run_short_training(
    context: SearchContext, snapshot_params: Params, trial: Trial
) -> TrialOutcome:
    """Train for a few mini-batches at the trial's rates and evaluate the full network."""
    trainer = SubnetTrainer(context.net, snapshot_params, context.settings.optimiser)
    _train_steps(trainer, context, context.train_images, context.settings.batches, trial, "short")
    return evaluate_on_proxy(context, trainer.params())


def _train_steps(
    trainer: SubnetTrainer,
    context: SearchContext,
    images: ImageDataset,
    steps: int,
    trial: Trial,
    stream_name: str,
) -> None:
    settings = context.settings
    rows = np.arange(len(images))
    batches = make_batches(images, rows, settings.batch, trial.seed, stream_name, 0)
    for step in range(steps):
        epoch, index = divmod(step, len(batches))
        if epoch and index == 0:
            batches = make_batches(images, rows, settings.batch, trial.seed, stream_name, epoch)
        x, y = batches[index]
        if trial.rates:
            rng = rng_stream(trial.seed, "dropout", step)
            trainer.switch(context.net.draw(trial.rates, rng, settings.choice))
        lr = settings.optimiser.lr * lr_factor(step, steps, settings.cooling)
        trainer.step(x, _make_loss(y), lr=lr)


def _make_loss(labels: Tensor) -> LossFn:
    return lambda output: F.cross_entropy(output, labels)


def lr_factor(step: int, steps: int, cooling: float) -> float:
    """Return the share of the learning rate at a step.

    A final step at the full rate would change the accuracy by more than most vectors differ.
    """
    return min(1.0, (steps - step) / (cooling * steps)) if cooling else 1.0


def evaluate_on_proxy(context: SearchContext, params: Params) -> TrialOutcome:
    """Return accuracy and loss of the full network on the evaluation images."""
    net = context.net.module

    def make_batches(samples: int, batch: int) -> list[Tensor]:
        slices = _make_slices(min(samples, len(context.train_images)), batch)
        images = (context.train_images.get_normalised(rows) for rows in slices)
        return [_convert_to_channels_last(batch_images) for batch_images in images]

    prepared = prepare_norm_statistics(net, params, context.settings.statistics, make_batches)
    was_training, correct, loss = net.training, 0, 0.0
    net.eval()
    try:
        with torch.no_grad():
            for x, labels in context.eval_batches:
                out: Any = functional_call(net, prepared, (x,))
                logits = out[0] if isinstance(out, tuple) else out
                correct += int((logits.argmax(1) == labels).sum())
                loss += float(F.cross_entropy(logits, labels, reduction="sum"))
    finally:
        net.train(was_training)
    mean = loss / len(context.eval_images)
    # the log needs a finite number even where training diverged
    return TrialOutcome(correct / len(context.eval_images), mean if mean < MAX_LOSS else MAX_LOSS)


def _convert_to_channels_last(images: Tensor) -> Tensor:
    """Return images in the memory format in which a CPU convolves fastest."""
    return images.contiguous(memory_format=torch.channels_last)


def _make_slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
