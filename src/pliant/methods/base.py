"""What every federated method is made of: tasks, steps, updates, local training, merging."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from pliant.devices import Plan
from pliant.nn.elastic import Elastic
from pliant.nn.learner import Correction, Learner, Loss
from pliant.nn.optimiser import Optimiser, Sgd
from pliant.nn.subnet import Subnet
from pliant.params import Params, shares, subtract
from pliant.rng import stream
from pliant.value import Count, Fraction, Value


class Schedule(Value, frozen=True):
    """How the learning rate falls over the rounds: not at all, by steps, or along a cosine."""

    kind: Literal["constant", "steps", "cosine"] = "constant"
    at: tuple[Fraction, ...] = (0.6, 0.8)  # shares of the rounds at which a step is taken
    factor: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.1  # of one step, or of the cosine's end

    def rate(self, lr: float, round: int, rounds: int) -> float:
        """Return the learning rate of a round."""
        done = round / max(1, rounds)
        if self.kind == "steps":
            return lr * self.factor ** sum(done >= share for share in self.at)
        if self.kind == "cosine":
            return lr * (self.factor + (1 - self.factor) * (1 + math.cos(math.pi * done)) / 2)
        return lr


class Local(Value, frozen=True):
    """How a device trains: optimiser, batch size, passes over its data."""

    optimiser: Optimiser = Sgd(lr=0.1)
    batch: Count = 32
    epochs: Count = 1
    schedule: Schedule = Schedule()


@dataclass(frozen=True)
class Place:
    """Where and when something random happens."""

    seed: int
    round: int
    device: int

    def stream(self, *address: str | int) -> Any:
        """Return the generator for this device in this round."""
        return stream(self.seed, *address, self.round, self.device)


@dataclass(frozen=True)
class Task:
    """What a device is sent, and what it still has of its own."""

    place: Place
    params: Params  # of the full network, or packed
    lr: float
    subnet: Subnet | None = None  # the packed sub-network
    extra: Params = field(default_factory=dict)  # sent too
    memory: Params = field(default_factory=dict)  # kept on the device since its last round


@dataclass(frozen=True)
class Step:
    """One mini-batch and the subnet that trains on it."""

    x: Tensor
    y: Tensor
    subnet: Subnet
    macs: float  # expected, as the device reports it


@dataclass(frozen=True)
class Update:
    """What a device sends back, and what it keeps."""

    device: int
    change: Params  # of what it was sent
    samples: int
    steps: int
    macs: float  # the compute it reports
    loss: float  # mean over its steps
    subnet: Subnet | None = None  # where a packed change belongs
    extra: Params = field(default_factory=dict)  # sent too
    memory: Params = field(default_factory=dict)  # kept on the device


@dataclass(frozen=True)
class State:
    """What the server has: the network, and a method's own memory."""

    params: Params
    extra: Mapping[str, Params] = field(default_factory=dict)


class Method(Protocol):
    """A federated method: both halves, as a value."""

    @property
    def local(self) -> Local: ...

    def plan(self, net: Elastic) -> Plan:
        """Return how devices choose what a mini-batch costs."""

    def subnet(self, net: Elastic, row: int, place: Place, step: int) -> Subnet:
        """Return the filters that a step of this row trains."""

    def sends(self, net: Elastic, row: int, place: Place) -> Subnet | None:
        """Return the sub-network that a device is sent; None for the whole network."""

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        """Train on a device."""

    def merge(self, net: Elastic, state: State, updates: Sequence[Update]) -> State:
        """Merge what came back into the network; updates are in the order of devices."""


def local_training(
    net: Elastic,
    task: Task,
    steps: Iterable[Step],
    optimiser: Optimiser,
    *,
    correct: Correction | None = None,
) -> Update:
    """Train what a device was sent on its mini-batches and return the change."""
    learner = Learner(net, task.params, optimiser)
    samples, count, macs, losses = 0, 0, 0.0, 0.0
    for step in steps:
        learner.switch(step.subnet)
        loss = learner.step(step.x, against(step.y), lr=task.lr, correct=correct)
        samples, count, macs = samples + len(step.y), count + 1, macs + step.macs
        losses += float(loss)
    return Update(
        task.place.device,
        subtract(learner.params(), task.params),
        samples,
        count,
        macs,
        losses / max(1, count),
    )


def against(labels: Tensor) -> Loss:
    """Return the cross-entropy against these labels."""
    return lambda output: F.cross_entropy(output, labels)


def add_mean(params: Params, updates: Sequence[Update], weights: Sequence[float]) -> Params:
    """Add the weighted mean change, summed in float64 in the order of devices."""
    if not updates:
        return params
    return {
        name: _moved(tensor, [update.change[name] for update in updates], shares(weights))
        for name, tensor in params.items()
    }


def _moved(tensor: Tensor, changes: Sequence[Tensor], parts: Sequence[float]) -> Tensor:
    total = torch.zeros(tensor.shape, dtype=torch.float64, device=tensor.device)
    for change, part in zip(changes, parts, strict=True):
        total.add_(change.to(torch.float64), alpha=part)
    moved = tensor.to(torch.float64) + total
    return (
        moved.round().to(tensor.dtype) if not tensor.is_floating_point() else moved.to(tensor.dtype)
    )
