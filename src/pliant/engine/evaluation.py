"""Evaluate the full network on the test images, with the configured norm statistics."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pliant.data import FederatedData
from pliant.nn.compiler.fast_lrn import FastLrnMode
from pliant.nn.norm_statistics import NormStatistics, ReestimatedStats, prepare_norm_statistics
from pliant.params import Params
from pliant.value import Count, Value


class Evaluation(Value, frozen=True):
    """How, and how often, to evaluate the network.

    >>> import pliant as pl
    >>> pl.Evaluation(every=5, statistics=pl.RunningStats()).every
    5
    """

    every: Count = 1  # rounds; the last one is always evaluated
    statistics: NormStatistics = ReestimatedStats()
    batch: Count = 500


class Score(Value, frozen=True):
    """Accuracy and loss on the test images."""

    accuracy: float
    loss: float | None  # None if not finite
    per_class: tuple[float, ...]


class PersonalScore(Value, frozen=True):
    """Accuracy on each device's own test images."""

    per_device: tuple[float, ...]  # accuracy, device by device
    after_training: tuple[float | None, ...] = ()  # of each device's locally trained network
    thresholded: tuple[float, ...] = ()  # with gates below the threshold closed

    @property
    def accuracy(self) -> float:
        """Return the mean over devices."""
        return sum(self.per_device) / len(self.per_device)

    @property
    def local_accuracy(self) -> float | None:
        """Return the mean after local training, over the devices whose updates were merged."""
        accuracies = [accuracy for accuracy in self.after_training if accuracy is not None]
        return sum(accuracies) / len(accuracies) if accuracies else None


def measure_accuracy(
    net: nn.Module, params: Params, data: FederatedData, device: int, evaluation: Evaluation
) -> float:
    """Return a network's accuracy on one device's own test images."""
    indices = torch.from_numpy(data.get_test_indices(device))
    starts = range(0, len(indices), evaluation.batch)
    batches = [indices[start : start + evaluation.batch] for start in starts]
    hits = 0
    for rows, logits in zip(batches, _predict(net, params, data, batches, evaluation), strict=True):
        hits += int((logits.argmax(1) == data.test.labels[rows]).sum())
    return hits / max(1, len(indices))


def evaluate_per_device(
    net: nn.Module,
    params: Params,
    trained_params: Mapping[int, Params],
    data: FederatedData,
    evaluation: Evaluation,
) -> PersonalScore:
    """Score the shared network, and each locally trained one, on the devices' own test images."""
    devices = range(len(data))
    return PersonalScore(
        tuple(measure_accuracy(net, params, data, device, evaluation) for device in devices),
        tuple(
            measure_accuracy(net, {**params, **trained_params[device]}, data, device, evaluation)
            if device in trained_params
            else None
            for device in devices
        ),
    )


def _set_norm_statistics(
    net: nn.Module, params: Params, data: FederatedData, evaluation: Evaluation
) -> Params:
    """Return parameters with norm statistics set by the configured policy."""

    def iter_proxy_batches(samples: int, batch: int) -> Iterator[Tensor]:
        count = min(samples, len(data.proxy))
        for start in range(0, count, batch):
            yield data.proxy.get_normalised(slice(start, min(start + batch, count)))

    return prepare_norm_statistics(net, params, evaluation.statistics, iter_proxy_batches)


def evaluate(net: nn.Module, params: Params, data: FederatedData, evaluation: Evaluation) -> Score:
    """Return accuracy, loss and accuracy per class of the full network."""
    starts = range(0, len(data.test), evaluation.batch)
    batches = [slice(start, min(start + evaluation.batch, len(data.test))) for start in starts]
    correct = torch.zeros(data.test.classes, dtype=torch.int64)
    totals = torch.zeros(data.test.classes, dtype=torch.int64)
    loss = 0.0
    for rows, logits in zip(batches, _predict(net, params, data, batches, evaluation), strict=True):
        labels = data.test.labels[rows]
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
        correct += torch.bincount(labels[logits.argmax(1) == labels], minlength=len(correct))
        totals += torch.bincount(labels, minlength=len(totals))
    mean_loss = loss / len(data.test)
    counts = zip(correct.tolist(), totals.tolist(), strict=True)
    per_class = tuple(hits / total if total else 0.0 for hits, total in counts)
    accuracy = int(correct.sum()) / int(totals.sum())
    return Score(accuracy, mean_loss if math.isfinite(mean_loss) else None, per_class)


def _predict(
    net: nn.Module,
    params: Params,
    data: FederatedData,
    batches: Sequence[slice | Tensor],
    evaluation: Evaluation,
) -> Iterator[Tensor]:
    """Yield the logits of each batch of test images."""
    settled = _set_norm_statistics(net, params, data, evaluation)
    was_training = net.training
    net.eval()
    try:
        for rows in batches:
            x = data.test.get_normalised(rows).contiguous(memory_format=torch.channels_last)
            with torch.no_grad(), FastLrnMode():
                output: Any = functional_call(net, settled, (x,))
            yield output[0] if isinstance(output, tuple) else output
    finally:
        net.train(was_training)
