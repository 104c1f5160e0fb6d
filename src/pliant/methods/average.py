"""Weighted means of changes in float64, exact in their weights.

Sums run in the order of devices, whatever order updates came in. Weights are taken relative to the
largest, exactly: so methods whose weights have equal ratios agree bit for bit, whatever the unit,
and so do a plain mean and one per coordinate where everybody has trained everything.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from pliant.params import Params


def relative(weights: Sequence[float | Fraction]) -> list[float]:
    """Divide weights by the largest, exactly, so that equal ratios give equal bits.

    >>> relative([2.0, 6.0]) == relative([300, 900]) == [1 / 3, 1.0]
    True
    """
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights or [1]):
        raise ValueError(f"Expected weights >= 0, not all 0, got {[*map(float, weights)]}")
    largest = Fraction(max(weights, default=1))
    return [float(Fraction(weight) / largest) for weight in weights]


def nothing(params: Params) -> Params:
    """Return zeros to sum up in."""
    return {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in params.items()}


def accumulate(total: Params, terms: Params, part: float) -> None:
    """Add a part of every tensor to a running sum, in place."""
    for name, term in terms.items():
        total[name].add_(term.to(torch.float64), alpha=part)


def move(params: Params, change: Params, *, lr: float = 1.0) -> Params:
    """Add a change to the network; integers are rounded."""
    return {name: _added(tensor, change[name], lr) for name, tensor in params.items()}


def _added(tensor: Tensor, change: Tensor, lr: float) -> Tensor:
    moved = torch.add(tensor.to(torch.float64), change, alpha=lr)
    return (moved if tensor.is_floating_point() else moved.round()).to(tensor.dtype)
