"""Score a rate vector by the accuracy that a short training from a snapshot gains with it.

Rapp et al., DISTREAL, AAAI 2022, equation (1). Only proxy images are used: one part, distorted, for
the snapshot, one for the short training, one for the accuracy. A short training is a pure function
of (snapshot, trial); at one seed all vectors see the same mini-batches and the same random draws,
so that only the vector differs. A smaller side or batch share is that of these mini-batches.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from itertools import islice

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.data import ImageDataset, InputScale, cycle_batches
from pliant.nn.elastic import Elastic, elastic
from pliant.nn.evaluation import evaluate_batches, make_slices
from pliant.nn.norm_statistics import NormStatistics, ReestimatedStats, prepare_norm_statistics
from pliant.nn.optimisers import Optimiser, Sgd
from pliant.nn.sites import ElasticOptions
from pliant.nn.subnet import Sampling
from pliant.nn.trainer import SubnetTrainer
from pliant.params import Params, find_device, get_params
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
    choice: Sampling = "blocks"  # that of the method which will use the table
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
    side: int | None = None  # of the images, in pixels; None: as they are
    batch: float = 1.0  # share of the samples of each mini-batch


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
        images, slices = self.eval_images, make_slices(len(self.eval_images), EVAL_BATCH)
        return [(_get_channels_last(images, rows), images.labels[rows]) for rows in slices]

    @cached_property
    def digest(self) -> str:
        """Return a digest of everything an outcome depends on besides snapshot and trial."""
        hasher = blake2b(msgspec.json.encode((self.net.fingerprint, self.settings)), digest_size=16)
        for images in (self.snapshot_images, self.train_images, self.eval_images):
            hasher.update(images.pixels.contiguous().numpy().tobytes())
            hasher.update(images.labels.numpy().tobytes())
        return hasher.hexdigest()


def make_search_context(
    net: nn.Module,
    proxy: ImageDataset,
    settings: ShortTrainingSettings,
    options: ElasticOptions | None = None,
    *,
    check: bool = True,
) -> SearchContext:
    """Divide the proxy images into three parts and compile the network."""
    total = len(proxy)
    eval_count = min(settings.eval_images, total // 3)
    snapshot_count = round((total - eval_count) * settings.snapshot_share)
    train_count = total - eval_count - snapshot_count
    if min(eval_count, snapshot_count, train_count) < MIN_IMAGES:
        raise ValueError(
            f"Expected proxy images for a snapshot, a short training and its accuracy, at least "
            f"{MIN_IMAGES} each, got {snapshot_count}, {train_count} and {eval_count} of {total}"
        )
    order = rng_stream(settings.seed, "proxy parts").permutation(total)
    parts = np.split(order, [snapshot_count, snapshot_count + train_count])
    snapshot_images, train_images, eval_images = (proxy.select(np.sort(part)) for part in parts)
    snapshot_images = distort_images(snapshot_images, settings.distortion, settings.seed)
    example = proxy.get_normalised(slice(0, 1))
    options = options or ElasticOptions()
    elastic_net = elastic(net, example, coupled=options.coupled, hidden=options.hidden, check=check)
    return SearchContext(elastic_net, snapshot_images, train_images, eval_images, settings)


def train_snapshot(context: SearchContext, stage: float = 1.0) -> Params:
    """Train the full network briefly on distorted images, up to this share of the training."""
    settings = context.settings
    trainer = SubnetTrainer(context.net, get_params(context.net.module), settings.optimiser)
    steps = settings.snapshot_batches
    trial, last_step = Trial((), settings.seed), round(stage * steps)
    batches = _iter_batches(context.snapshot_images, settings, trial, "snapshot")
    _train_steps(trainer, context, islice(batches, last_step), steps, trial)
    return trainer.params()


def run_short_training(
    context: SearchContext, snapshot_params: Params, trial: Trial
) -> TrialOutcome:
    """Train for a few mini-batches as the trial says and evaluate the full network."""
    trainer = SubnetTrainer(context.net, snapshot_params, context.settings.optimiser)
    steps = context.settings.batches
    batches = _iter_batches(context.train_images, context.settings, trial, "short")
    _train_steps(trainer, context, islice(batches, steps), steps, trial)
    return evaluate_on_proxy(context, trainer.params())


def _iter_batches(
    images: ImageDataset, settings: ShortTrainingSettings, trial: Trial, stream_name: str
) -> Iterator[tuple[Tensor, Tensor]]:
    rows, scale = np.arange(len(images)), InputScale(trial.side, trial.batch)
    batches = cycle_batches(images, rows, settings.batch, trial.seed, stream_name)
    return (scale.apply(x, y) for x, y in batches)


def _train_steps(
    trainer: SubnetTrainer,
    context: SearchContext,
    batches: Iterable[tuple[Tensor, Tensor]],
    steps: int,
    trial: Trial,
) -> None:
    settings, device = context.settings, find_device(context.net.module)
    for step, batch in enumerate(batches):
        x, y = (part.to(device) for part in batch)
        if trial.rates:
            rng = rng_stream(trial.seed, "dropout", step)
            trainer.switch(context.net.draw(trial.rates, rng, settings.choice), x.shape[2:])
        lr = settings.optimiser.lr * lr_factor(step, steps, settings.cooling)
        trainer.step(x, partial(F.cross_entropy, target=y), lr=lr)


def lr_factor(step: int, steps: int, cooling: float) -> float:
    """Return the share of the learning rate at a step.

    A final step at the full rate would change the accuracy by more than most vectors differ.
    """
    return min(1.0, (steps - step) / (cooling * steps)) if cooling else 1.0


def evaluate_on_proxy(context: SearchContext, params: Params) -> TrialOutcome:
    """Return accuracy and loss of the full network on the evaluation images."""
    net, total = context.net.module, len(context.eval_images)

    def iter_norm_batches(samples: int, batch: int) -> Iterator[Tensor]:
        slices = make_slices(min(samples, len(context.train_images)), batch)
        return (_get_channels_last(context.train_images, rows) for rows in slices)

    prepared = prepare_norm_statistics(net, params, context.settings.statistics, iter_norm_batches)
    totals = evaluate_batches(net, prepared, context.eval_batches, context.eval_images.classes)
    loss = totals.loss / total
    # the log needs a finite number even where training diverged
    return TrialOutcome(totals.num_correct / total, loss if loss < MAX_LOSS else MAX_LOSS)


def _get_channels_last(images: ImageDataset, rows: slice) -> Tensor:
    """Return images in the memory format in which a CPU convolves fastest."""
    x = images.get_normalised(rows)
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
