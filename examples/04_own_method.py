"""Write your own method: FedAvg whose server keeps a momentum. What it leaves out is FedAvg's."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

import pliant as pl

Params = dict[str, torch.Tensor]


@dataclass(frozen=True)
class MomentumState:
    """What the server keeps between rounds; checkpoints save and restore it."""

    params: Params
    velocity: Params = field(default_factory=dict)


class Momentum(pl.Value, frozen=True):
    """Move along a running mean of the devices' deltas; fields are what users can set."""

    local: pl.LocalTraining = pl.LocalTraining()
    beta: float = 0.5

    def init_state(self, params: Params) -> MomentumState:
        return MomentumState(params)

    def merge(
        self, net: pl.Elastic, state: MomentumState, updates: Sequence[pl.Update]
    ) -> MomentumState:
        if not updates:
            return state
        delta = pl.average_deltas(net, state.params, updates, pl.weight_by("samples"))
        velocity = {n: d + self.beta * state.velocity.get(n, 0.0) for n, d in delta.items()}
        return MomentumState(pl.apply_delta(state.params, velocity), velocity)


if __name__ == "__main__":
    data = pl.data.digits().share(pl.Iid(), devices=10)
    fleet = pl.Fleet(size=10, speed=pl.ChangingTrace(low=0.5, high=1.0, per_round=1.0))
    settings = pl.RunSettings(per_round=5, rules=pl.RoundRules(late="partial"))
    net = pl.models.digits_cnn(classes=10)
    for record in pl.simulate(Momentum(), net, data, fleet, rounds=2, settings=settings):
        print(record.round, record.accuracy)
