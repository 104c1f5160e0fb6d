"""SCAFFOLD: control variates take the drift of each device's own data out of its steps.

Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning", ICML 2020;
variates by option II.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pliant.devices import FULL, Plan
from pliant.methods.base import (
    SENT,
    Local,
    Place,
    State,
    Step,
    Task,
    Update,
    local_training,
    stepping,
)
from pliant.methods.merge import Weigh, mean_change, move_trained, weight_by
from pliant.nn.elastic import Elastic
from pliant.nn.learner import Correction, Learner
from pliant.nn.optimiser import Sgd
from pliant.nn.subnet import Subnet
from pliant.params import Params
from pliant.value import Count, Positive, Value


class Scaffold(Value, frozen=True, tag="scaffold"):
    """Step along ``gradient - own variate + server's variate``; a device keeps its own variate.

    `devices` is the paper's N, over which the server's variate is the mean; without it, the mean is
    over the devices that have been seen so far.

    >>> import pliant as pl
    >>> pl.Scaffold(devices=100).lr
    1.0
    """

    local: Local = Local()
    lr: Positive = 1.0  # of the server
    devices: Count | None = None
    weigh: Weigh = "samples"

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        optimiser = self.local.optimiser
        if not isinstance(optimiser, Sgd) or optimiser.momentum:
            raise ValueError("Expected SGD without momentum, as variates are means of its steps")

    def plan(self, net: Elastic) -> Plan:
        return FULL

    def subnet(self, net: Elastic, row: int, place: Place, step: int) -> Subnet:
        return net.full

    def sends(self, net: Elastic, row: int, place: Place) -> Subnet | None:
        return None

    def answer_bytes(self, net: Elastic) -> int:
        named = net.net.named_parameters()
        return sum(p.numel() * p.element_size() for name, p in named if name in net.trained)

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        own, common = _variates(net, task, task.memory), _variates(net, task, task.extra)

        def variates(learner: Learner) -> Correction:
            shift = learner.laid({name: common[name] - own[name] for name in own})

            def shifted(grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
                return list(torch._foreach_add(grads, learner.part(shift)))

            return shifted

        advance = stepping(task, correct=variates)
        update = local_training(net, task, steps, self.local.optimiser, advance=advance)
        back = 1.0 / (max(1, update.steps) * task.lr)
        fresh = {n: own[n] - common[n] - back * update.change[n] for n in own}
        extra = {name: fresh[name] - own[name] for name in own}
        return replace(update, extra=extra, memory=fresh)

    def merge(self, net: Elastic, state: State, updates: Sequence[Update]) -> State:
        if not updates:
            return state
        change = mean_change(net, state.params, updates, weight_by(self.weigh))
        params = move_trained(net, state.params, change, self.lr)
        seen = state.extra.get("seen", {}).get("devices", torch.zeros(0, dtype=torch.int64))
        seen = torch.tensor(sorted({*seen.tolist(), *(update.device for update in updates)}))
        total = dict(state.extra.get("total", {}))
        for update in sorted(updates, key=lambda update: update.device):
            for name, moved in update.extra.items():
                total[name] = total.get(name, torch.zeros_like(moved, dtype=torch.float64)) + moved
        count = self.devices or len(seen)
        common = {name: (sums / count).to(params[name].dtype) for name, sums in total.items()}
        return State(params, {SENT: common, "total": total, "seen": {"devices": seen}})


def _variates(net: Elastic, task: Task, known: Params) -> Params:
    """Return variates as they are known: zeros in the beginning."""
    trained = (name for name in task.params if name in net.trained)
    return {n: known[n] if n in known else torch.zeros_like(task.params[n]) for n in trained}
