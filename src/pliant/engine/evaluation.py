"""Evaluate the full network on the test images, with the configured norm statistics."""

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from pliant.data import FederatedData, resize
from pliant.nn.compiler.fast_lrn import FastLrnMode
from pliant.nn.evaluation import EvaluationTotals, evaluate_batches, make_slices
from pliant.nn.norm_statistics import NormStatistics, ReestimatedStats, prepare_norm_statistics
from pliant.params import Params
from pliant.value import Count, Positive, Value


class Evaluation(Value, frozen=True):
    """How, and how often, to evaluate the network.

    >>> import pliant as pl
    >>> pl.Evaluation(every=5, statistics=pl.RunningStats()).every
    5
    """

    every: Count = 1  # rounds; the last one is always evaluated
    every_seconds: Positive | None = None  # virtual, instead: after the round that passes each
    statistics: NormStatistics = ReestimatedStats()
    batch: Count = 125  # larger ones leave the caches, and DenseNet-16 takes twice as long

    def is_due(self, round: int, start: float, end: float) -> bool:
        """Return whether to evaluate after a round that lasted from `start` to `end`."""
        if self.every_seconds is None:
            return (round + 1) % self.every == 0
        before, after = (math.floor(time / self.every_seconds + 1e-9) for time in (start, end))
        return after > before


class Score(Value, frozen=True):
    """Accuracy and loss on the test images."""

    accuracy: float
    loss: float | None  # None if not finite
    per_class: tuple[float, ...]


class PersonalScore(Value, frozen=True):
    """Accuracy on each device's own test images."""

    # accuracy, device by device; None of a device that should test its network and is absent
    per_device: tuple[float | None, ...]
    after_training: tuple[float | None, ...] = ()  # of each device's locally trained network
    thresholded: tuple[float | None, ...] = ()  # with gates below the threshold closed
    sent: int = 0  # bytes in both directions, if devices tested their networks themselves

    @property
    def accuracy(self) -> float:
        """Return the mean over devices."""
        accuracies = [accuracy for accuracy in self.per_device if accuracy is not None]
        return sum(accuracies) / len(accuracies)

    @property
    def local_accuracy(self) -> float | None:
        """Return the mean after local training, over the devices whose updates were merged."""
        accuracies = [accuracy for accuracy in self.after_training if accuracy is not None]
        return sum(accuracies) / len(accuracies) if accuracies else None


def evaluate(
    net: nn.Module,
    params: Params,
    data: FederatedData,
    evaluation: Evaluation,
    side: int | None = None,
) -> Score:
    """Return accuracy, loss and accuracy per class of the full network, at an image size."""
    rows = make_slices(len(data.test), evaluation.batch)
    settled = settle_statistics(net, params, data, evaluation, side)
    totals = _evaluate_rows(net, settled, data, rows, side)
    loss = totals.loss / len(data.test)
    counts = zip(totals.correct.tolist(), totals.total.tolist(), strict=True)
    per_class = tuple(correct / total if total else 0.0 for correct, total in counts)
    accuracy = totals.num_correct / len(data.test)
    return Score(accuracy, loss if math.isfinite(loss) else None, per_class)


def measure_accuracy(
    net: nn.Module,
    params: Params,
    data: FederatedData,
    device: int,
    evaluation: Evaluation,
    side: int | None = None,
) -> float:
    """Return a network's accuracy on one device's own test images, at an image size."""
    settled = settle_statistics(net, params, data, evaluation, side)
    return _measure_settled(net, settled, data, device, evaluation, side)


def _measure_settled(
    net: nn.Module,
    settled: Params,
    data: FederatedData,
    device: int,
    evaluation: Evaluation,
    side: int | None,
) -> float:
    indices = torch.from_numpy(data.get_test_indices(device))
    rows = (indices[part] for part in make_slices(len(indices), evaluation.batch))
    return _evaluate_rows(net, settled, data, rows, side).num_correct / max(1, len(indices))


def evaluate_per_device(
    net: nn.Module,
    params: Params,
    trained_params: Mapping[int, Params],
    data: FederatedData,
    evaluation: Evaluation,
    side: int | None = None,
    own_nets: Mapping[int, nn.Module] | None = None,
) -> PersonalScore:
    """Score the shared network, and each locally trained one, on the devices' own test images.

    Devices in `own_nets` use another part of the network than the one that is shared.
    """
    own_nets = own_nets or {}

    def measure_trained(device: int) -> float | None:
        trained = trained_params.get(device)
        if trained is None:
            return None
        own = own_nets.get(device, net)
        return measure_accuracy(own, params | trained, data, device, evaluation, side)

    def measure_shared(device: int) -> float:
        return _measure_settled(net, settled, data, device, evaluation, side)

    devices = range(len(data))
    settled = settle_statistics(net, params, data, evaluation, side)  # once, for all devices
    return PersonalScore(tuple(map(measure_shared, devices)), tuple(map(measure_trained, devices)))


def settle_statistics(
    net: nn.Module,
    params: Params,
    data: FederatedData,
    evaluation: Evaluation,
    side: int | None = None,
) -> Params:
    """Return parameters with the norm statistics to evaluate with."""

    def iter_proxy_batches(samples: int, batch: int) -> Iterator[Tensor]:
        parts = make_slices(min(samples, len(data.proxy)), batch)
        return (resize(data.proxy.get_normalised(part), side) for part in parts)

    return prepare_norm_statistics(net, params, evaluation.statistics, iter_proxy_batches)


def _evaluate_rows(
    net: nn.Module,
    settled: Params,
    data: FederatedData,
    rows: Iterable[slice | Tensor],
    side: int | None = None,
) -> EvaluationTotals:
    """Evaluate a network on batches of test images."""
    batches = (
        (resize(data.test.get_normalised(part), side), data.test.labels[part]) for part in rows
    )
    with FastLrnMode():
        return evaluate_batches(net, settled, batches, data.test.classes)
