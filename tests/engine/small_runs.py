"""A small network, dataset and methods for the engine tests."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from pliant.data import Iid, ImageDataset
from pliant.data.federated import TrainTestData
from pliant.devices import ChangingTrace, Fleet
from pliant.engine.evaluation import Evaluation
from pliant.engine.round_loop import RunSettings
from pliant.engine.round_rules import RoundRules
from pliant.engine.simulate import simulate
from pliant.methods import FedAvg, LocalTraining
from pliant.methods.base import Update, train_locally
from pliant.nn.models import digits_cnn
from pliant.params import Params

LOCAL = LocalTraining(batch=8)
FEDAVG = FedAvg(LOCAL)
FLEET = Fleet(size=12, speed=ChangingTrace(low=0.4, high=1.2, per_round=2.0))
SETTINGS = RunSettings(
    rounds=6,
    per_round=4,
    rules=RoundRules(late="partial", dropout=0.1),
    evaluation=Evaluation(every=2),
    checkpoint_every=2,
)


def images(count, seed=0):
    """Return noise with a bright row that marks the class, learnt in a few steps."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 5
    pixels = torch.randint(0, 128, (count, 1, 16, 16), generator=generator, dtype=torch.uint8)
    pixels[torch.arange(count), 0, 3 * labels] += 127
    return ImageDataset.from_tensors(pixels, labels, classes=5)


def data(devices=12):
    return TrainTestData(images(320), images(60, seed=1)).share(Iid(), devices, proxy=20)


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return digits_cnn(5, filters=(4, 6), hidden=16, side=16)


def run(method=FEDAVG, *, fleet=FLEET, settings=SETTINGS, **options):
    return list(simulate(method, network(), data(), fleet, settings=settings, **options))


class NoTraining:
    """A method that trains nothing."""

    local: ClassVar[LocalTraining] = LOCAL

    def train(self, net, task, steps):
        delta = {name: torch.zeros_like(tensor) for name, tensor in task.params.items()}
        device, subnets, samples = task.key.device, ((net.full, 1),), task.num_samples
        return Update(device, delta, 1, 1, 1.0, 0.0, num_samples=samples, subnet_steps=subnets)

    def merge(self, net, state, updates):
        return state


@dataclass(frozen=True)
class MomentumState:
    params: Params
    momentum: Params = field(default_factory=dict)


@dataclass(frozen=True)
class LastDelta:
    delta: Params = field(default_factory=dict)


@dataclass(frozen=True)
class StatefulFedAvg(NoTraining):
    """Unweighted FedAvg whose result depends on state on the devices and on the server."""

    local: LocalTraining = LOCAL

    def init_state(self, params):
        return MomentumState(params)

    def init_device_state(self, params):
        return LastDelta()

    def train(self, net, task, steps):
        update = train_locally(net, task, steps, self.local.optimiser)
        last = task.device_state.delta
        delta = {name: d + 0.5 * last.get(name, 0 * d) for name, d in update.delta.items()}
        return replace(update, delta=delta, device_state=LastDelta(delta))

    def merge(self, net, state, updates):
        params, momentum = dict(state.params), dict(state.momentum)
        for update in updates:
            for name, delta in update.delta.items():
                momentum[name] = 0.5 * momentum.get(name, torch.zeros_like(delta)) + delta
                params[name] = params[name] + momentum[name] / len(updates)
        return MomentumState(params, momentum)
