"""SCAFFOLD: control variates correct the drift of local steps towards each device's own data.

Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning", ICML 2020;
variates by option II.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pliant.devices import FULL_NETWORK, BudgetPolicy
from pliant.methods.aggregation import Weighting, apply_scaled_delta, average_deltas, weight_by
from pliant.methods.base import (
    BROADCAST,
    LocalTraining,
    ServerState,
    Step,
    Task,
    TaskKey,
    Update,
    make_step,
    train_locally,
)
from pliant.nn.elastic import Elastic
from pliant.nn.optimisers import Sgd
from pliant.nn.subnet import Subnet
from pliant.nn.trainer import Correction, SubnetTrainer
from pliant.params import Params
from pliant.value import Count, Positive, Value


class Scaffold(Value, frozen=True, tag="scaffold"):
    """Step along ``gradient - device variate + server variate``; devices keep their variates.

    `devices` is the paper's N, the number of variates that the server's averages; by default it is
    the number of devices seen so far.

    >>> import pliant as pl
    >>> pl.Scaffold(devices=100).lr
    1.0
    """

    local: LocalTraining = LocalTraining()
    lr: Positive = 1.0  # of the server
    devices: Count | None = None
    weighting: Weighting = "samples"

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        optimiser = self.local.optimiser
        if not isinstance(optimiser, Sgd) or optimiser.momentum:
            raise ValueError("Expected SGD without momentum, as variates average its gradients")

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        return FULL_NETWORK

    def select_subnet(self, net: Elastic, row: int, key: TaskKey, step: int) -> Subnet:
        return net.full

    def subnet_to_send(self, net: Elastic, row: int, key: TaskKey) -> Subnet | None:
        return None

    def extra_upload_bytes(self, net: Elastic) -> int:
        named = net.module.named_parameters()
        return sum(p.numel() * p.element_size() for name, p in named if name in net.trainable_names)

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        local = _fill_variates(net, task, task.device_state)
        common = _fill_variates(net, task, task.extra)

        def make_variate_term(trainer: SubnetTrainer) -> Correction:
            shift = trainer.flatten_params({name: common[name] - local[name] for name in local})

            def add_shift(grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
                return list(torch._foreach_add(grads, trainer.gather_subnet(shift)))

            return add_shift

        step_fn = make_step(task, make_correction=make_variate_term)
        update = train_locally(net, task, steps, self.local.optimiser, step_fn=step_fn)
        scale = 1.0 / (max(1, update.steps) * task.lr)
        new = {name: local[name] - common[name] - scale * update.delta[name] for name in local}
        extra = {name: new[name] - local[name] for name in local}
        return replace(update, extra=extra, device_state=new)

    def merge(self, net: Elastic, state: ServerState, updates: Sequence[Update]) -> ServerState:
        if not updates:
            return state
        delta = average_deltas(net, state.params, updates, weight_by(self.weighting))
        params = apply_scaled_delta(net, state.params, delta, self.lr)
        seen = state.extra.get("seen", {}).get("devices", torch.zeros(0, dtype=torch.int64))
        seen = torch.tensor(sorted({*seen.tolist(), *(update.device for update in updates)}))
        total = dict(state.extra.get("total", {}))
        for update in sorted(updates, key=lambda update: update.device):
            for name, shift in update.extra.items():
                total[name] = total.get(name, torch.zeros_like(shift, dtype=torch.float64)) + shift
        count = self.devices or len(seen)
        common = {name: (sums / count).to(params[name].dtype) for name, sums in total.items()}
        return ServerState(params, {BROADCAST: common, "total": total, "seen": {"devices": seen}})


def _fill_variates(net: Elastic, task: Task, stored: Params) -> Params:
    """Return the stored variates, with zeros for those not yet known."""
    trained = (name for name in task.params if name in net.trainable_names)
    return {n: stored[n] if n in stored else torch.zeros_like(task.params[n]) for n in trained}
