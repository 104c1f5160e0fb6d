"""The building blocks of federated methods: tasks, steps, updates and local training."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, Literal

import numpy as np
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from pliant.data import AS_IS, CropFlip, InputScale
from pliant.devices.vector_rng import IntArray
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

    def lr_at(self, lr: float, round: float, rounds: int) -> float:
        """Return the learning rate of a round, or after a part of one."""
        done = round / max(1, rounds)
        if self.kind == "steps":
            return lr * self.factor ** sum(done >= share for share in self.at)
        if self.kind == "cosine":
            return lr * (self.factor + (1 - self.factor) * (1 + math.cos(math.pi * done)) / 2)
        return lr


class LocalTraining(Value, frozen=True):
    """How a device trains: optimiser, batch size, epochs and augmentation.

    >>> import pliant as pl
    >>> pl.LocalTraining(optimiser=pl.Sgd(lr=0.05), batch=16, epochs=2).batch
    16
    """

    optimiser: Optimiser = Sgd(lr=0.1)
    batch: Count = 32
    epochs: Count = 1
    schedule: LrSchedule = LrSchedule()
    drop_short: bool = False  # leave out a last mini-batch that is not full, unless it is the only
    augment: CropFlip | None = None  # of the training images


@dataclass(frozen=True)
class TaskKey:
    """One device's task in one round of a seeded run; the address of its random numbers.

    >>> import pliant as pl
    >>> key = pl.TaskKey(seed=0, round=3, device=7)
    >>> [int(key.rng_stream("order").integers(100)) for _ in range(2)]
    [97, 97]
    """

    seed: int
    round: int
    device: int

    def rng_stream(self, *address: str | int) -> np.random.Generator:
        """Make the random generator of this device in this round."""
        return rng_stream(self.seed, *address, self.round, self.device)


@dataclass(frozen=True, eq=False)
class TaskKeys:
    """The tasks of several devices in one round."""

    seed: int
    round: int
    devices: IntArray


@dataclass(frozen=True)
class Task:
    """A device's work for one round: what it is sent and what it already has.

    >>> import pliant as pl
    >>> pl.Task(pl.TaskKey(0, 0, 7), params={}, lr=0.1).extra
    {}
    """

    key: TaskKey
    params: Params  # of the full network, or packed
    lr: float
    subnet: Subnet | None = None  # of packed params
    extra: Params = field(default_factory=dict)  # sent along with the params
    device_state: Any = None  # the method's own; kept on the device since its last round
    num_samples: int = 0  # on the device
    classes: tuple[int, ...] = ()  # of these samples


@dataclass(frozen=True)
class Step:
    """One mini-batch and the subnet that trains on it.

    >>> import torch
    >>> import pliant as pl
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> pl.Step(torch.zeros(8, 1, 28, 28), torch.zeros(8).long(), net.full, macs=1e6).macs
    1000000.0
    """

    x: Tensor
    y: Tensor
    subnet: Subnet
    macs: float  # expected, as the device reports it
    scale: InputScale = AS_IS  # of the mini-batch, already applied
    row: int = 0  # that the device chose


SubnetSteps = tuple[tuple[Subnet, int], ...]  # subnets and their numbers of steps


@dataclass(frozen=True)
class Update:
    """The result of a task: what the device sends back and what it keeps.

    >>> import pliant as pl
    >>> pl.Update(device=7, delta={}, samples=32, steps=2, macs=1e6, loss=0.3).extra
    {}
    """

    device: int
    delta: Params  # trained params minus those it was sent
    samples: int
    steps: int
    macs: float  # as reported by the device
    loss: float  # mean over its steps
    subnet: Subnet | None = None  # of a packed delta
    extra: Params = field(default_factory=dict)  # sent along with the delta
    device_state: Any = None  # the method's own; kept on the device
    num_samples: int = 0  # on the device
    subnet_steps: SubnetSteps = ()
    residual: Params = field(default_factory=dict)  # of compression; kept on the device
    staleness: int = 0  # merges since its task was sent; 0 in rounds
    base: Params = field(default_factory=dict)  # what it was sent; empty in rounds
    seconds: float = 0.0  # virtual, from sending the task to its arrival; 0 in rounds


@dataclass(frozen=True)
class ServerState:
    """What the server keeps between rounds: the network's parameters, and an optimiser's moments.

    A method that keeps more returns a frozen dataclass of its own from `init_state`, with a field
    `params`. The fields of a state are tensors, ints, floats, or dictionaries of tensors or of
    `Params` by str or int.

    >>> import pliant as pl
    >>> list(pl.ServerState(pl.get_params(pl.models.digits_cnn())).params)[0]
    'features.0.weight'
    """

    params: Params
    momentum: Params = field(default_factory=dict)  # of a server optimiser
    square: Params = field(default_factory=dict)  # likewise


StepFn = Callable[[SubnetTrainer, Step], Tensor]  # trains on one mini-batch and returns its loss
CorrectionFactory = Callable[[SubnetTrainer], Correction]
# Changes gradients, given them, the params and constants of the same shapes.
ConstantCorrection = Callable[[list[Tensor], list[Tensor], list[Tensor]], Sequence[Tensor]]


def train_locally(
    net: Elastic,
    task: Task,
    steps: Iterable[Step],
    optimiser: Optimiser,
    *,
    step_fn: StepFn | None = None,
) -> Update:
    """Train on a device's mini-batches and return the update.

    >>> import torch
    >>> import pliant as pl
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> task = pl.Task(pl.TaskKey(0, 0, 7), pl.get_params(net.module), lr=0.1)
    >>> step = pl.Step(torch.rand(8, 1, 28, 28), torch.zeros(8).long(), net.full, macs=1e6)
    >>> pl.train_locally(net, task, [step], pl.Sgd(lr=0.1)).steps
    1
    """
    packed = task.subnet
    params = task.params if packed is None else unpack_params(net, task.params, packed)
    trainer = SubnetTrainer(net, params, optimiser)
    step_fn = step_fn or make_step(task)
    subnets: list[Subnet] = []
    samples, count, macs, loss_sum = 0, 0, 0.0, 0.0
    for step in steps:
        loss_sum += float(step_fn(trainer, step))
        samples, count, macs = samples + len(step.y), count + 1, macs + step.macs
        subnets.append(step.subnet)
    trained = trainer.params()
    return Update(
        task.key.device,
        subtract(trained if packed is None else net.take(trained, packed), task.params),
        samples,
        count,
        macs,
        loss_sum / max(1, count),
        packed,
        device_state=task.device_state,
        num_samples=task.num_samples,
        subnet_steps=count_steps(subnets),
    )


def count_steps(subnets: Iterable[Subnet]) -> SubnetSteps:
    """Count how many consecutive steps each subnet trains."""
    runs = (list(run) for _, run in groupby(subnets, key=id))
    return tuple((run[0], len(run)) for run in runs)


def train_corrected(
    net: Elastic,
    task: Task,
    steps: Iterable[Step],
    optimiser: Optimiser,
    constants: Params,
    correct: ConstantCorrection,
) -> Update:
    """Train with corrected gradients; `constants` are tensors that the correction uses."""

    def make_correction(trainer: SubnetTrainer) -> Correction:
        flat = trainer.flatten_params(constants)
        return lambda grads, params: list(correct(grads, params, trainer.gather_subnet(flat)))

    step_fn = make_step(task, make_correction=make_correction)
    return train_locally(net, task, steps, optimiser, step_fn=step_fn)


def make_step(
    task: Task,
    *,
    make_loss: Callable[[Tensor], LossFn] | None = None,
    make_correction: CorrectionFactory | None = None,
) -> StepFn:
    """Make the plain step: compute the loss, correct its gradient, update once.

    >>> import pliant as pl
    >>> callable(pl.make_step(pl.Task(pl.TaskKey(0, 0, 7), params={}, lr=0.1)))
    True
    """
    make_loss = make_loss or make_cross_entropy
    corrections: list[Correction] = []  # at most one, made for the trainer of the first step

    def run_step(trainer: SubnetTrainer, step: Step) -> Tensor:
        if make_correction is not None and not corrections:
            corrections.append(make_correction(trainer))
        correction = corrections[0] if corrections else None
        trainer.switch(step.subnet, step.x.shape[2:])
        return trainer.step(step.x, make_loss(step.y), lr=task.lr, correction=correction)

    return run_step


def make_cross_entropy(labels: Tensor) -> LossFn:
    """Make the cross-entropy loss against these labels."""
    return lambda output: F.cross_entropy(output, labels)


def unpack_params(net: Elastic, packed: Params, subnet: Subnet) -> Params:
    """Expand a packed subnet to full size, with zeros elsewhere."""
    named = (*net.module.named_parameters(), *net.module.named_buffers())
    params = {name: tensor.detach() for name, tensor in named if name in packed}
    return net.expand(params, packed, subnet)
