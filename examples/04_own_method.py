"""Write your own method: devices train the full network, and the server takes the median."""

from collections.abc import Iterable, Sequence

import torch

import pliant as pl
from pliant.devices import FULL_NETWORK, BudgetPolicy
from pliant.methods.base import ServerState, Step, Task, TaskKey, Update, train_locally
from pliant.value import Value


class Median(Value, frozen=True):
    """FedAvg with a coordinate-wise median; fields of a method are what users can set."""

    local: pl.LocalTraining = pl.LocalTraining()

    def make_budget_policy(self, net: pl.Elastic) -> BudgetPolicy:
        return FULL_NETWORK  # every mini-batch costs as much as the full network

    def select_subnet(self, net: pl.Elastic, row: int, key: TaskKey, step: int) -> pl.Subnet:
        return net.full

    def subnet_to_send(self, net: pl.Elastic, row: int, key: TaskKey) -> pl.Subnet | None:
        return None  # send the full network

    def train(self, net: pl.Elastic, task: Task, steps: Iterable[Step]) -> Update:
        return train_locally(net, task, steps, self.local.optimiser)

    def merge(self, net: pl.Elastic, state: ServerState, updates: Sequence[Update]) -> ServerState:
        if not updates:
            return state
        ordered = sorted(updates, key=lambda update: update.device)  # arrival order must not matter
        delta = {
            name: torch.stack([update.delta[name] for update in ordered]).median(dim=0).values
            for name in state.params
        }
        return ServerState({name: old + delta[name] for name, old in state.params.items()})


if __name__ == "__main__":
    data = pl.data.digits().share(pl.Iid(), devices=10)
    fleet = pl.Fleet(size=10, speed=pl.ChangingTrace(low=0.5, high=1.0, per_round=1.0))
    settings = pl.RunSettings(per_round=5, rules=pl.RoundRules(late="partial"))
    net = pl.models.digits_cnn(classes=10)
    for record in pl.simulate(Median(), net, data, fleet, rounds=2, settings=settings):
        print(record.round, record.accuracy)
