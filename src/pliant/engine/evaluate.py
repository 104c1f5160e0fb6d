"""Evaluation: the full network on the test images, with norm statistics by the declared policy."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pliant.data import Federated
from pliant.nn.response import Quick
from pliant.nn.statistics import Reestimated, Statistics, settle
from pliant.params import Params
from pliant.value import Count, Value


class Evaluation(Value, frozen=True):
    """How often and how the network is evaluated.

    >>> import pliant as pl
    >>> pl.Evaluation(every=5, statistics=pl.Running()).every
    5
    """

    every: Count = 1  # rounds; the last one always is
    statistics: Statistics = Reestimated()
    batch: Count = 500


class Score(Value, frozen=True):
    """How good a network is on the test images."""

    accuracy: float
    loss: float | None  # None where it is not finite
    per_class: tuple[float, ...]


class Personal(Value, frozen=True):
    """How good networks are for each device on the test images of its own."""

    each: tuple[float, ...]  # accuracy, device by device
    trained: tuple[float | None, ...] = ()  # of each device's own network after local training
    shut: tuple[float, ...] = ()  # with gates below a threshold shut

    @property
    def accuracy(self) -> float:
        """Return the mean over devices."""
        return sum(self.each) / len(self.each)

    @property
    def local(self) -> float | None:
        """Return the mean after local training, over the devices that came back."""
        found = [accuracy for accuracy in self.trained if accuracy is not None]
        return sum(found) / len(found) if found else None


def accuracy_of(
    net: nn.Module, params: Params, data: Federated, device: int, how: Evaluation
) -> float:
    """Return a network's accuracy on one device's own test images."""
    settled = settled_for(net, params, data, how)
    chosen = torch.from_numpy(data.test_of(device))
    was, hits = net.training, 0
    net.eval()
    try:
        with torch.no_grad(), Quick():
            for start in range(0, len(chosen), how.batch):
                rows = chosen[start : start + how.batch]
                x = data.test.normalised(rows).contiguous(memory_format=torch.channels_last)
                out: Any = functional_call(net, settled, (x,))
                logits = out[0] if isinstance(out, tuple) else out
                hits += int((logits.argmax(1) == data.test.labels[rows]).sum())
    finally:
        net.train(was)
    return hits / max(1, len(chosen))


def personal(
    net: nn.Module,
    params: Params,
    trained: Mapping[int, Params],
    data: Federated,
    how: Evaluation,
) -> Personal:
    """Test a network on each device's own images, and what devices have made of it on theirs."""
    devices = range(len(data))
    return Personal(
        tuple(accuracy_of(net, params, data, device, how) for device in devices),
        tuple(
            accuracy_of(net, {**params, **trained[device]}, data, device, how)
            if device in trained
            else None
            for device in devices
        ),
    )


def settled_for(net: nn.Module, params: Params, data: Federated, how: Evaluation) -> Params:
    """Return parameters whose norm statistics are settled by the declared policy."""

    def proxy(samples: int, batch: int) -> Iterator[Tensor]:
        count = min(samples, len(data.proxy))
        for start in range(0, count, batch):
            yield data.proxy.normalised(slice(start, min(start + batch, count)))

    return settle(net, params, how.statistics, proxy)


def evaluate(net: nn.Module, params: Params, data: Federated, how: Evaluation) -> Score:
    """Return accuracy, loss and accuracy per class of the full network."""

    settled = settled_for(net, params, data, how)
    was = net.training
    net.eval()
    right = torch.zeros(data.test.classes, dtype=torch.int64)
    seen = torch.zeros(data.test.classes, dtype=torch.int64)
    loss = 0.0
    try:
        with torch.no_grad(), Quick():
            for start in range(0, len(data.test), how.batch):
                rows = slice(start, min(start + how.batch, len(data.test)))
                labels = data.test.labels[rows]
                x = data.test.normalised(rows).contiguous(memory_format=torch.channels_last)
                out: Any = functional_call(net, settled, (x,))
                logits = out[0] if isinstance(out, tuple) else out
                loss += float(F.cross_entropy(logits, labels, reduction="sum"))
                hits = labels[logits.argmax(1) == labels]
                right += torch.bincount(hits, minlength=len(right))
                seen += torch.bincount(labels, minlength=len(seen))
    finally:
        net.train(was)
    mean = loss / len(data.test)
    counts = zip(right.tolist(), seen.tolist(), strict=True)
    shares = tuple(hits / total if total else 0.0 for hits, total in counts)
    accuracy = int(right.sum()) / int(seen.sum())
    return Score(accuracy, mean if math.isfinite(mean) else None, shares)
