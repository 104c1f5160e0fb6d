"""Optimisers that update only the entries of a subnet.

An absent entry is neither moved nor decayed, and keeps its momentum. Adam counts steps once for all
entries, like torch's SparseAdam.
"""

from math import sqrt
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from pliant.value import NonNegative, Positive, Value

MomentumFactor = Annotated[float, Meta(ge=0.0, lt=1.0)]
Tensors = list[Tensor]  # one per parameter


class Sgd(Value, frozen=True, tag="sgd"):
    """Stochastic gradient descent with momentum, L2 decay and clipping by norm (0 is off).

    >>> import pliant as pl
    >>> pl.Sgd(lr=0.1, momentum=0.9, weight_decay=5e-4).num_state_tensors
    1
    """

    lr: Positive = 0.1
    momentum: MomentumFactor = 0.0
    weight_decay: NonNegative = 0.0
    clip: NonNegative = 0.0

    @property
    def num_state_tensors(self) -> int:
        """Return the number of state tensors per parameter."""
        return 1 if self.momentum else 0

    def step(
        self, params: Tensors, grads: Tensors, state: list[Tensors], lr: float, step_count: int
    ) -> None:
        """Update parameters in place, at this step's learning rate."""
        grads = _clip_and_decay(params, grads, self.weight_decay, self.clip)
        if self.momentum:
            torch._foreach_mul_(state[0], self.momentum)
            torch._foreach_add_(state[0], grads)
            grads = state[0]
        torch._foreach_add_(params, grads, alpha=-lr)


class Adam(Value, frozen=True, tag="adam"):
    """Adam (Kingma and Ba, ICLR 2015) with L2 decay added to the gradient, and clipping by norm.

    >>> import pliant as pl
    >>> pl.LocalTraining(optimiser=pl.Adam(lr=1e-3, weight_decay=1e-5)).optimiser.lr
    0.001
    """

    lr: Positive = 1e-3
    beta1: MomentumFactor = 0.9
    beta2: MomentumFactor = 0.999
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    clip: NonNegative = 0.0

    @property
    def num_state_tensors(self) -> int:
        return 2

    def step(
        self, params: Tensors, grads: Tensors, state: list[Tensors], lr: float, step_count: int
    ) -> None:
        """Update parameters in place; steps count from 1."""
        grads = _clip_and_decay(params, grads, self.weight_decay, self.clip)
        first, second = state
        torch._foreach_lerp_(first, grads, 1 - self.beta1)
        torch._foreach_mul_(second, self.beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - self.beta2)
        root = list(torch._foreach_sqrt(second))
        torch._foreach_div_(root, sqrt(1 - self.beta2**step_count))
        torch._foreach_add_(root, self.eps)
        torch._foreach_addcdiv_(params, first, root, -lr / (1 - self.beta1**step_count))


Optimiser = Sgd | Adam


def _clip_and_decay(params: Tensors, grads: Tensors, decay: float, clip: float) -> Tensors:
    if clip and grads:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        grads = list(torch._foreach_mul(grads, torch.clamp(clip / (norm + 1e-6), max=1.0)))
    if decay:
        grads = list(torch._foreach_add(grads, params, alpha=decay))
    return grads
