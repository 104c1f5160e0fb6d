"""The building blocks of federated methods: tasks, steps, updates and local training."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from pliant.devices import BudgetPolicy
from pliant.nn.elastic import Elastic
from pliant.nn.optimisers import Optimiser, Sgd
from pliant.nn.subnet import Subnet
from pliant.nn.trainer import Correction, LossFn, SubnetTrainer
from pliant.params import Params, subtract
from pliant.rng import rng_stream
from pliant.value import Count, Fraction, Value


class LrSchedule(Value, frozen=True):
    """The learning rate over the rounds: constant, in steps, or along a cosine.

    >>> import pliant as pl
    >>> schedule = pl.LrSchedule(kind="steps", at=(0.6, 0.8), factor=0.1)
    >>> [round(schedule.lr_at(0.1, number, 100), 4) for number in (0, 60, 80)]
    [0.1, 0.01, 0.001]
    """

    kind: Literal["constant", "steps", "cosine"] = "constant"
    at: tuple[Fraction, ...] = (0.6, 0.8)  # when to step, as shares of all rounds
    factor: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.1  # per step, or at the end of the cosine

    def lr_at(self, lr: float, round: int, rounds: int) -> float:
        """Return the learning rate of a round."""
        done = round / max(1, rounds)
        if self.kind == "steps":
            return lr * self.factor ** sum(done >= share for share in self.at)
        if self.kind == "cosine":
            return lr * (self.factor + (1 - self.factor) * (1 + math.cos(math.pi * done)) / 2)
        return lr


class LocalTraining(Value, frozen=True):
    """How a device trains: optimiser, batch size and epochs.

    >>> import pliant as pl
    >>> pl.LocalTraining(optimiser=pl.Sgd(lr=0.05), batch=16, epochs=2).batch
    16
    """

    optimiser: Optimiser = Sgd(lr=0.1)
    batch: Count = 32
    epochs: Count = 1
    schedule: LrSchedule = LrSchedule()


@dataclass(frozen=True)
class TaskKey:
    """One device's task in one round of a seeded run; the address of its random numbers."""

    seed: int
    round: int
    device: int

    def rng_stream(self, *address: str | int) -> np.random.Generator:
        """Make the random generator of this device in this round."""
        return rng_stream(self.seed, *address, self.round, self.device)


@dataclass(frozen=True)
class Task:
    """A device's work for one round: what it is sent and what it already has."""

    key: TaskKey
    params: Params  # of the full network, or packed
    lr: float
    subnet: Subnet | None = None  # of packed params
    extra: Params = field(default_factory=dict)  # sent along with the params
    device_state: Params = field(default_factory=dict)  # kept on the device since its last round
    num_samples: int = 0  # on the device
    classes: tuple[int, ...] = ()  # of these samples


@dataclass(frozen=True)
class Step:
    """One mini-batch and the subnet that trains on it."""

    x: Tensor
    y: Tensor
    subnet: Subnet
    macs: float  # expected, as the device reports it


SubnetSteps = tuple[tuple[Subnet, int], ...]  # subnets and their numbers of steps


@dataclass(frozen=True)
class Update:
    """The result of a task: what the device sends back and what it keeps."""

    device: int
    delta: Params  # trained params minus those it was sent
    samples: int
    steps: int
    macs: float  # as reported by the device
    loss: float  # mean over its steps
    subnet: Subnet | None = None  # of a packed delta
    extra: Params = field(default_factory=dict)  # sent along with the delta
    device_state: Params = field(default_factory=dict)  # kept on the device
    num_samples: int = 0  # on the device
    subnet_steps: SubnetSteps = ()


BROADCAST = "sent"


@dataclass(frozen=True)
class ServerState:
    """The network's parameters and the method's own state on the server."""

    params: Params
    extra: Mapping[str, Params] = field(default_factory=dict)

    @property
    def broadcast(self) -> Params:
        """Return the part of `extra` that is sent to devices along with the network."""
        return self.extra.get(BROADCAST, {})


class Method(Protocol):
    """A federated method: its device half and its server half, as one value."""

    @property
    def local(self) -> LocalTraining: ...

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        """Return the policy by which devices choose a row, and so the cost, of each mini-batch."""

    def select_subnet(self, net: Elastic, row: int, key: TaskKey, step: int) -> Subnet:
        """Return the subnet that a step at this row trains."""

    def subnet_to_send(self, net: Elastic, row: int, key: TaskKey) -> Subnet | None:
        """Return the subnet that a device is sent, or None for the full network."""

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        """Train on a device."""

    def merge(self, net: Elastic, state: ServerState, updates: Sequence[Update]) -> ServerState:
        """Merge updates into the network; their order must not matter."""


# Optional parts of a method; engines check for them with `isinstance`.


@runtime_checkable
class HasExtraUpload(Protocol):
    """A method whose devices upload more than their delta."""

    def extra_upload_bytes(self, net: Elastic) -> int:
        """Return how many bytes a device uploads on top of its delta."""


@runtime_checkable
class HasStepCost(Protocol):
    """A method whose step costs more than one pass of its subnet."""

    def macs(self, net: Elastic, row: int, key: TaskKey, step: int) -> float:
        """Return the MACs per sample of a step, forward and backward."""


@runtime_checkable
class SelectsFilters(Protocol):
    """A method whose devices select the filters they train."""

    def select_filters(self, net: Elastic, subnet: Subnet, extra: Params, key: TaskKey) -> Subnet:
        """Return a subnet of the same size, selected by the `extra` that the device was sent."""


@runtime_checkable
class TracksCoverage(Protocol):
    """A method that may never train some of the filters."""

    def find_trained_subnet(self, net: Elastic, state: ServerState) -> Subnet | None:
        """Return the subnet of all filters trained so far, or None if every filter was."""


StepFn = Callable[[SubnetTrainer, Step], Tensor]  # trains on one mini-batch and returns its loss
CorrectionFactory = Callable[[SubnetTrainer], Correction]


def train_locally(
    net: Elastic,
    task: Task,
    steps: Iterable[Step],
    optimiser: Optimiser,
    *,
    step_fn: StepFn | None = None,
) -> Update:
    """Train on a device's mini-batches and return the update."""
    packed = task.subnet
    params = task.params if packed is None else unpack_params(net, task.params, packed)
    trainer = SubnetTrainer(net, params, optimiser)
    step_fn = step_fn or make_step(task)
    subnet_steps: list[tuple[Subnet, int]] = []
    samples, count, macs, loss_sum = 0, 0, 0.0, 0.0
    for step in steps:
        loss_sum += float(step_fn(trainer, step))
        samples, count, macs = samples + len(step.y), count + 1, macs + step.macs
        if subnet_steps and subnet_steps[-1][0] is step.subnet:
            subnet_steps[-1] = (step.subnet, subnet_steps[-1][1] + 1)
        else:
            subnet_steps.append((step.subnet, 1))
    trained = trainer.params()
    return Update(
        task.key.device,
        subtract(trained if packed is None else net.take(trained, packed), task.params),
        samples,
        count,
        macs,
        loss_sum / max(1, count),
        packed,
        num_samples=task.num_samples,
        subnet_steps=tuple(subnet_steps),
    )


def make_step(
    task: Task,
    *,
    make_loss: Callable[[Tensor], LossFn] | None = None,
    make_correction: CorrectionFactory | None = None,
) -> StepFn:
    """Make the plain step: compute the loss, correct its gradient, update once."""
    make_loss = make_loss or make_cross_entropy
    corrections: list[Correction] = []  # at most one, made for the trainer of the first step

    def run_step(trainer: SubnetTrainer, step: Step) -> Tensor:
        if make_correction is not None and not corrections:
            corrections.append(make_correction(trainer))
        correction = corrections[0] if corrections else None
        trainer.switch(step.subnet)
        return trainer.step(step.x, make_loss(step.y), lr=task.lr, correction=correction)

    return run_step


def make_cross_entropy(labels: Tensor) -> LossFn:
    """Make the cross-entropy loss against these labels."""
    return lambda output: F.cross_entropy(output, labels)


def unpack_params(net: Elastic, packed: Params, subnet: Subnet) -> Params:
    """Expand a packed subnet to full size, with zeros elsewhere."""
    named = (*net.module.named_parameters(), *net.module.named_buffers())
    zeros = {name: torch.zeros_like(tensor) for name, tensor in named if name in packed}
    return net.put(zeros, packed, subnet)
