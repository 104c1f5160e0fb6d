"""Evaluation: the full network on the test images, with norm statistics by the declared policy."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pliant.data import Federated
from pliant.nn.statistics import Reestimated, Statistics, settle
from pliant.params import Params
from pliant.value import Count, Value


class Evaluation(Value, frozen=True):
    """How often and how the network is evaluated."""

    every: Count = 1  # rounds; the last one always is
    statistics: Statistics = Reestimated()
    batch: Count = 500


class Score(Value, frozen=True):
    """How good a network is on the test images."""

    accuracy: float
    loss: float | None  # None where it is not finite
    per_class: tuple[float, ...]


def evaluate(net: nn.Module, params: Params, data: Federated, how: Evaluation) -> Score:
    """Return accuracy, loss and accuracy per class of the full network."""

    def proxy(samples: int, batch: int) -> Iterator[Tensor]:
        count = min(samples, len(data.proxy))
        for start in range(0, count, batch):
            yield data.proxy.normalised(slice(start, min(start + batch, count)))

    settled = settle(net, params, how.statistics, proxy)
    was = net.training
    net.eval()
    right = torch.zeros(data.test.classes, dtype=torch.int64)
    seen = torch.zeros(data.test.classes, dtype=torch.int64)
    loss = 0.0
    try:
        with torch.no_grad():
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
