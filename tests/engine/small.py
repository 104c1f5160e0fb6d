"""A small network, small data and small methods for the tests of the engine."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from pliant.data import Iid, Images
from pliant.data.federated import Source
from pliant.devices import FULL, Changing, Fleet
from pliant.engine.evaluate import Evaluation
from pliant.engine.ledger import Record
from pliant.engine.rules import Rules
from pliant.engine.simulate import Setting, simulate
from pliant.engine.workers import Inline
from pliant.methods import FedAvg, Local
from pliant.methods.base import State, Update, local_training
from pliant.nn.models import digits_cnn
from pliant.record import read

LOCAL = Local(batch=8)
FEDAVG = FedAvg(LOCAL)
FLEET = Fleet(size=12, speed=Changing(low=0.4, high=1.2, per_round=2.0))
SETTING = Setting(
    rounds=6,
    per_round=4,
    rules=Rules(late="partial", dropout=0.1),
    evaluation=Evaluation(every=2),
    checkpoint_every=2,
)


def images(count, seed=0):
    """Noise with a bright row that tells the class: a few steps learn it."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 5
    pixels = torch.randint(0, 128, (count, 1, 16, 16), generator=draws, dtype=torch.uint8)
    pixels[torch.arange(count), 0, 3 * labels] += 127
    return Images.from_tensors(pixels, labels, classes=5)


def data(devices=12):
    return Source(images(320), images(60, seed=1)).share(Iid(), devices, proxy=20)


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return digits_cnn(5, filters=(4, 6), hidden=16, side=16)


def run(method=FEDAVG, *, fleet=FLEET, setting=SETTING, workers=Inline(), folder=None, **options):  # noqa: B008
    return list(
        simulate(
            method,
            network(),
            data(),
            fleet,
            setting=setting,
            workers=workers,
            folder=folder,
            **options,
        )
    )


def events(folder):
    return list(read(folder / "events.jsonl", Record))


class Nothing:
    """A method that trains nothing."""

    local: ClassVar[Local] = LOCAL

    def plan(self, net):
        return FULL

    def subnet(self, net, row, place, step):
        return net.full

    def sends(self, net, row, place):
        return None

    def train(self, net, task, steps):
        still = {name: torch.zeros_like(tensor) for name, tensor in task.params.items()}
        device, trained = task.place.device, ((net.full, 1),)
        return Update(device, still, 1, 1, 1.0, 0.0, owned=task.owned, trained=trained)

    def merge(self, net, state, updates):
        return state


@dataclass(frozen=True)
class Remembering(Nothing):
    """FedAvg by count, with a memory on each device and one at the server that both matter."""

    def train(self, net, task, steps):
        update = local_training(net, task, steps, self.local.optimiser)
        before = task.memory or {name: 0 * tensor for name, tensor in update.change.items()}
        change = {name: tensor + 0.5 * before[name] for name, tensor in update.change.items()}
        return replace(update, change=change, memory=change)

    def merge(self, net, state, updates):
        params, momentum = dict(state.params), dict(state.extra.get("momentum", {}))
        for update in updates:
            for name, change in update.change.items():
                momentum[name] = 0.5 * momentum.get(name, torch.zeros_like(change)) + change
                params[name] = params[name] + momentum[name] / len(updates)
        return State(params, {"momentum": momentum})
