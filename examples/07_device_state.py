"""Write a method whose devices remember: each adds a share of its last delta to the new one."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

import pliant as pl

Params = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LastDelta:
    """What a device keeps between rounds; deployed devices keep it on their own disk."""

    delta: Params = field(default_factory=dict)


class DeviceMomentum(pl.Value, frozen=True):
    """FedAvg with a momentum on each device."""

    local: pl.LocalTraining = pl.LocalTraining()
    beta: float = 0.5

    def init_device_state(self, params: Params) -> LastDelta:
        return LastDelta()

    def train(self, net: pl.Elastic, task: pl.Task, steps: Iterable[pl.Step]) -> pl.Update:
        update = pl.train_locally(net, task, steps, self.local.optimiser)
        last: Params = task.device_state.delta
        delta = {n: d + self.beta * last[n] if n in last else d for n, d in update.delta.items()}
        trained = {n: d for n, d in delta.items() if n in net.trainable_names}
        return replace(update, delta=delta, device_state=LastDelta(trained))


if __name__ == "__main__":
    data = pl.data.digits().share(pl.Iid(), devices=5)
    net, fleet = pl.models.digits_cnn(classes=10), pl.Fleet(size=5)
    for record in pl.simulate(DeviceMomentum(), net, data, fleet, rounds=2):
        print(record.round, record.accuracy)
