"""FedProx: a spring to what was sent, so that unfinished work can be merged too.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pliant.devices import FULL, Plan
from pliant.methods.average import move
from pliant.methods.base import (
    Local,
    Place,
    State,
    Step,
    Task,
    Update,
    local_training,
    stepping,
)
from pliant.methods.merge import Weigh, weight_by
from pliant.methods.robust import AnyMerge, Mean, merged_change
from pliant.nn.elastic import Elastic
from pliant.nn.learner import Correction, Learner
from pliant.nn.subnet import Subnet
from pliant.value import NonNegative, Value


class FedProx(Value, frozen=True, tag="fedprox"):
    """FedAvg whose local loss has the extra term ``mu/2 · |w - w_sent|²``.

    With mu = 0 and the deadline rule `partial` it is the plain rival of every method that trains
    parts: the full network, sent as far as it got.

    >>> import pliant as pl
    >>> rival, rules = pl.FedProx(mu=0.0), pl.Rules(late="partial")
    >>> rival.mu, rules.late
    (0.0, 'partial')
    """

    mu: NonNegative = 0.01
    local: Local = Local()
    weigh: Weigh = "samples"
    merging: AnyMerge = Mean()

    def plan(self, net: Elastic) -> Plan:
        return FULL

    def subnet(self, net: Elastic, row: int, place: Place, step: int) -> Subnet:
        return net.full

    def sends(self, net: Elastic, row: int, place: Place) -> Subnet | None:
        return None

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        def spring(learner: Learner) -> Correction:
            sent = learner.laid(task.params)

            def pull(grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
                away = torch._foreach_sub(params, learner.part(sent))
                return list(torch._foreach_add(grads, away, alpha=self.mu))

            return pull

        advance = stepping(task, correct=spring)
        return local_training(net, task, steps, self.local.optimiser, advance=advance)

    def merge(self, net: Elastic, state: State, updates: Sequence[Update]) -> State:
        if not updates:
            return state
        change = merged_change(self.merging, net, state.params, updates, weight_by(self.weigh))
        return State(move(state.params, change))
