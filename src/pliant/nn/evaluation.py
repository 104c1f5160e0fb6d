"""Evaluate a network on batches of labelled inputs, one batch at a time."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pliant.params import Params, find_device


class EvaluationTotals(NamedTuple):
    """Sums over all batches."""

    correct: Tensor  # (class,): right predictions
    total: Tensor  # (class,): inputs
    loss: float  # cross-entropy

    @property
    def num_correct(self) -> int:
        """Return the number of right predictions of all classes."""
        return int(self.correct.sum())


def evaluate_batches(
    net: nn.Module, params: Params, batches: Iterable[tuple[Tensor, Tensor]], classes: int
) -> EvaluationTotals:
    """Return the totals of a network in evaluation mode with the given parameters.

    Of a network that returns a tuple, the first element counts.
    """
    correct, total = (torch.zeros(classes, dtype=torch.int64) for _ in range(2))
    device = find_device(net)
    loss, modes = 0.0, {module: module.training for module in net.modules()}
    net.eval()
    try:
        with torch.no_grad():
            for x, labels in batches:
                x = x.to(device)
                if x.dim() == 4:
                    x = x.contiguous(memory_format=torch.channels_last)
                output: Any = functional_call(net, params, (x,))
                logits = (output[0] if isinstance(output, tuple) else output).to(labels.device)
                loss += float(F.cross_entropy(logits, labels, reduction="sum"))
                correct += torch.bincount(labels[logits.argmax(1) == labels], minlength=classes)
                total += torch.bincount(labels, minlength=classes)
    finally:
        for module, training in modes.items():  # some may be frozen in evaluation mode
            module.training = training
    return EvaluationTotals(correct, total, loss)


def make_slices(count: int, size: int) -> Iterator[slice]:
    """Yield the slices that cut `count` rows into batches of at most `size`."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
