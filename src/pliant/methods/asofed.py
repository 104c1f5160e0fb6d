"""ASO-Fed: asynchronous training on streams of data that grow on every device.

Chen, Ning, Slawski and Rangwala, "Asynchronous online federated learning for edge devices with
non-IID data", IEEE Big Data 2020.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import msgspec
import torch
from torch import Tensor

from pliant.methods.aggregation import apply_delta
from pliant.methods.base import LocalTraining, Step, Task, Update, make_step, train_locally
from pliant.methods.verbs import Work
from pliant.nn.elastic import Elastic
from pliant.nn.optimisers import Sgd
from pliant.nn.trainer import Correction, SubnetTrainer
from pliant.params import Params
from pliant.value import Count, Fraction, NonNegative, Value


@dataclass(frozen=True)
class AsoFedState:
    """The network, and what is known of devices: their samples, and the lengths of their tasks."""

    params: Params
    samples: dict[int, Tensor] = field(default_factory=dict)
    seconds: dict[int, Tensor] = field(default_factory=dict)  # sum and number


@dataclass(frozen=True)
class AsoFedDeviceState:
    """The balance of a device's past gradients, and its last one."""

    balance: Params = field(default_factory=dict)
    gradient: Params = field(default_factory=dict)


class AsoFed(Value, frozen=True, tag="asofed"):
    """Add each delta by its device's share of all samples; devices balance past gradients.

    A step goes along ``gradient - last gradient + balance``, where the gradient has the extra term
    ``mu · (w - w_sent)``. Devices whose tasks take long have a larger learning rate. All samples
    are the mean of the devices seen so far times the number of `devices`, by default the fleet's.
    `features` reweights the first layer after each merge, as in the paper; it is off because this
    shrinks the layer every time.

    >>> import pliant as pl
    >>> pl.AsoFed(mu=0.1).beta
    0.001
    """

    buffer: ClassVar[int] = 1

    local: LocalTraining = LocalTraining(Sgd(lr=0.001), epochs=2)
    mu: NonNegative = 1.0
    beta: Fraction = 0.001
    features: bool = False
    devices: Count | None = None
    concurrency: Count | None = None  # tasks in flight; None: `per_round`
    work: Work = "pass"

    def fit_fleet(self, size: int) -> "AsoFed":
        return self if self.devices else msgspec.structs.replace(self, devices=size)

    def scale_lr(self, state: AsoFedState, device: int) -> float:
        if device not in state.seconds:
            return 1.0
        total, number = state.seconds[device].tolist()
        return max(1.0, math.log(total / number))

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        kept = task.device_state
        memory = [_fill_zeros(net, task, part) for part in (kept.balance, kept.gradient)]
        trainers: list[SubnetTrainer] = []
        flats: list[list[Tensor]] = []  # of the memory, while it changes

        def make_correction(trainer: SubnetTrainer) -> Correction:
            trainers.append(trainer)
            flats.extend(trainer.flatten_params(part) for part in memory)
            sent = trainer.flatten_params(task.params)

            def correct(grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
                balance, last = flats
                drift = torch._foreach_sub(params, sent)
                new = torch._foreach_add(grads, drift, alpha=self.mu)
                direction = torch._foreach_add(torch._foreach_sub(new, last), balance)
                older = torch._foreach_mul(balance, self.beta)
                flats[:] = [list(torch._foreach_add(older, last, alpha=1 - self.beta)), list(new)]
                return list(direction)

            return correct

        step_fn = make_step(task, make_correction=make_correction)
        update = train_locally(net, task, steps, self.local.optimiser, step_fn=step_fn)
        if trainers:
            memory = [trainers[0].unflatten_params(part) for part in flats]
        return replace(update, device_state=AsoFedDeviceState(*memory))

    def init_state(self, params: Params) -> AsoFedState:
        return AsoFedState(params)

    def init_device_state(self, params: Params) -> AsoFedDeviceState:
        return AsoFedDeviceState()

    def merge(self, net: Elastic, state: AsoFedState, updates: Sequence[Update]) -> AsoFedState:
        for update in updates:
            samples = state.samples | {update.device: torch.tensor(update.num_samples)}
            known = sum(int(count) for count in samples.values())
            total = known / len(samples) * max(self.devices or 0, len(samples))
            params = apply_delta(state.params, update.delta, lr=update.num_samples / total)
            if self.features:
                params = _weight_features(net, params)
            new = torch.tensor([update.seconds, 1.0], dtype=torch.float64)
            seconds = state.seconds | {update.device: state.seconds.get(update.device, 0.0) + new}
            state = AsoFedState(params, samples, seconds)
        return state


def _fill_zeros(net: Elastic, task: Task, stored: Params) -> Params:
    """Return stored tensors, with zeros for those not yet known."""
    trained = (name for name in task.params if name in net.trainable_names)
    return {n: stored[n] if n in stored else torch.zeros_like(task.params[n]) for n in trained}


def _weight_features(net: Elastic, params: Params) -> Params:
    """Multiply the weights into each unit of the first layer by the softmax of their sizes."""
    name = next(n for n in params if n in net.trainable_names and params[n].dim() > 1)
    rows = params[name].flatten(1)
    weighted = rows * torch.softmax(rows.abs(), dim=1)
    return params | {name: weighted.view_as(params[name])}
