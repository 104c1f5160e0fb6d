"""Write a method of your own: devices train the full network, the server keeps the median."""

from collections.abc import Iterable, Sequence

import torch

import pliant as pl
from pliant.devices import FULL, Plan
from pliant.methods.base import Place, State, Step, Task, Update, local_training
from pliant.value import Value


class Median(Value, frozen=True):
    """A method is a frozen value with both halves in it; its fields are what users can choose."""

    local: pl.Local = pl.Local()

    def plan(self, net: pl.Elastic) -> Plan:
        return FULL  # every mini-batch costs what the full network costs

    def subnet(self, net: pl.Elastic, row: int, place: Place, step: int) -> pl.Subnet:
        return net.full

    def sends(self, net: pl.Elastic, row: int, place: Place) -> pl.Subnet | None:
        return None  # the whole network travels

    def train(self, net: pl.Elastic, task: Task, steps: Iterable[Step]) -> Update:
        return local_training(net, task, steps, self.local.optimiser)

    def merge(self, net: pl.Elastic, state: State, updates: Sequence[Update]) -> State:
        if not updates:
            return state
        ordered = sorted(updates, key=lambda update: update.device)  # whatever came first
        changes = {
            name: torch.stack([update.change[name] for update in ordered]).median(dim=0).values
            for name in state.params
        }
        return State({name: old + changes[name] for name, old in state.params.items()})


if __name__ == "__main__":
    data = pl.data.digits().share(pl.Iid(), devices=10)
    fleet = pl.Fleet(size=10, speed=pl.Changing(low=0.5, high=1.0, per_round=1.0))
    setting = pl.Setting(per_round=5, rules=pl.Rules(late="partial"))
    net = pl.models.digits_cnn(classes=10)
    for record in pl.simulate(Median(), net, data, fleet, rounds=2, setting=setting):
        print(record.round, record.accuracy)
