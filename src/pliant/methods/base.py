"""What every federated method is made of: tasks, steps, updates, and training on a device."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from pliant.devices import Plan
from pliant.nn.elastic import Elastic
from pliant.nn.learner import Correction, Learner, Loss
from pliant.nn.optimiser import Optimiser, Sgd
from pliant.nn.subnet import Subnet
from pliant.params import Params, subtract
from pliant.rng import stream
from pliant.value import Count, Fraction, Value


class Schedule(Value, frozen=True):
    """How the learning rate falls over the rounds: not at all, by steps, or along a cosine.

    >>> import pliant as pl
    >>> schedule = pl.Schedule(kind="steps", at=(0.6, 0.8), factor=0.1)
    >>> [round(schedule.rate(0.1, number, 100), 4) for number in (0, 60, 80)]
    [0.1, 0.01, 0.001]
    """

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
    """How a device trains: optimiser, batch size, passes over its data.

    >>> import pliant as pl
    >>> pl.Local(optimiser=pl.Sgd(lr=0.05), batch=16, epochs=2).batch
    16
    """

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

    def stream(self, *address: str | int) -> np.random.Generator:
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
    owned: int = 0  # samples that the device has
    classes: tuple[int, ...] = ()  # of these samples


@dataclass(frozen=True)
class Step:
    """One mini-batch and the subnet that trains on it."""

    x: Tensor
    y: Tensor
    subnet: Subnet
    macs: float  # expected, as the device reports it


Trained = tuple[tuple[Subnet, int], ...]  # subnets, and how many steps each of them had


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
    owned: int = 0  # samples that the device has
    trained: Trained = ()


SENT = "sent"


@dataclass(frozen=True)
class State:
    """What the server has: the network, and a method's own memory."""

    params: Params
    extra: Mapping[str, Params] = field(default_factory=dict)

    @property
    def sent(self) -> Params:
        """Return the part of the memory that devices are sent beside the network."""
        return self.extra.get(SENT, {})


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
        """Merge what came back into the network, in whatever order it came."""


# Verbs that only some methods need; an engine asks for them with `isinstance`.


@runtime_checkable
class Answering(Protocol):
    """A method whose devices send back more than their change."""

    def answer_bytes(self, net: Elastic) -> int:
        """Return how many bytes a device sends beside its change."""


@runtime_checkable
class Costing(Protocol):
    """A method whose step is more than one pass of its subnet."""

    def macs(self, net: Elastic, row: int, place: Place, step: int) -> float:
        """Return the MACs per sample of a step, forward and backward."""


@runtime_checkable
class Choosing(Protocol):
    """A method whose devices find out themselves which filters they train."""

    def chosen(self, net: Elastic, subnet: Subnet, extra: Params, place: Place) -> Subnet:
        """Return the filters in the place of as many others, by what a device was sent."""


@runtime_checkable
class Narrow(Protocol):
    """A method that may leave some filters untrained for ever."""

    def widest(self, net: Elastic, state: State) -> Subnet | None:
        """Return the filters that were trained at all; None if all were."""


Advance = Callable[[Learner, Step], Tensor]  # train on one mini-batch and return the loss
Corrector = Callable[[Learner], Correction]


def local_training(
    net: Elastic,
    task: Task,
    steps: Iterable[Step],
    optimiser: Optimiser,
    *,
    advance: Advance | None = None,
) -> Update:
    """Train what a device was sent on its mini-batches and return the change."""
    packed = task.subnet
    params = task.params if packed is None else unpacked(net, task.params, packed)
    learner = Learner(net, params, optimiser)
    advance = advance or stepping(task)
    trained: list[tuple[Subnet, int]] = []
    samples, count, macs, losses = 0, 0, 0.0, 0.0
    for step in steps:
        losses += float(advance(learner, step))
        samples, count, macs = samples + len(step.y), count + 1, macs + step.macs
        if trained and trained[-1][0] is step.subnet:
            trained[-1] = (step.subnet, trained[-1][1] + 1)
        else:
            trained.append((step.subnet, 1))
    found = learner.params()
    return Update(
        task.place.device,
        subtract(found if packed is None else net.take(found, packed), task.params),
        samples,
        count,
        macs,
        losses / max(1, count),
        packed,
        owned=task.owned,
        trained=tuple(trained),
    )


def stepping(
    task: Task,
    *,
    against: Callable[[Tensor], Loss] | None = None,
    correct: Corrector | None = None,
) -> Advance:
    """Return the plain step: the loss against the labels, its gradient corrected, one move."""
    against = against or cross_entropy
    made: list[Correction] = []  # one learner, one correction

    def advance(learner: Learner, step: Step) -> Tensor:
        if correct is not None and not made:
            made.append(correct(learner))
        learner.switch(step.subnet)
        return learner.step(step.x, against(step.y), lr=task.lr, correct=made[0] if made else None)

    return advance


def cross_entropy(labels: Tensor) -> Loss:
    """Return the cross-entropy against these labels."""
    return lambda output: F.cross_entropy(output, labels)


def unpacked(net: Elastic, small: Params, subnet: Subnet) -> Params:
    """Return full-size parameters that have a packed sub-network in its place, zeros elsewhere."""
    named = (*net.net.named_parameters(), *net.net.named_buffers())
    empty = {name: torch.zeros_like(tensor) for name, tensor in named if name in small}
    return net.put(empty, small, subnet)
