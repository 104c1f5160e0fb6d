"""FedProx: a proximal term keeps local training near the global network.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pliant.methods.aggregation import Updates, Weighting
from pliant.methods.base import LocalTraining, ServerState, Step, Task, Update, train_corrected
from pliant.methods.robust import AnyMerge, Mean
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd, merge_average
from pliant.nn.elastic import Elastic
from pliant.value import NonNegative, Value


class FedProx(Value, frozen=True, tag="fedprox"):
    """FedAvg with the extra term ``mu/2 · |w - w_sent|²`` in the local loss.

    With mu = 0 and the deadline rule `partial` it is the plain baseline for methods that train
    sub-networks: the full network, trained as far as time allows.

    >>> import pliant as pl
    >>> baseline, rules = pl.FedProx(mu=0.0), pl.RoundRules(late="partial")
    >>> baseline.mu, rules.late
    (0.0, 'partial')
    """

    mu: NonNegative = 0.01
    local: LocalTraining = LocalTraining()
    weighting: Weighting = "samples"
    merging: AnyMerge = Mean()
    server: AnyServerOptimiser = ServerSgd()

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        def add_proximal_term(
            grads: list[Tensor], params: list[Tensor], sent: list[Tensor]
        ) -> Sequence[Tensor]:
            return torch._foreach_add(grads, torch._foreach_sub(params, sent), alpha=self.mu)

        optimiser, sent = self.local.optimiser, task.params
        return train_corrected(net, task, steps, optimiser, sent, add_proximal_term)

    @property
    def merges_stream(self) -> bool:
        return isinstance(self.merging, Mean)  # the robust rules compare all updates

    @property
    def delta_weighting(self) -> Weighting | None:
        return self.weighting if isinstance(self.merging, Mean) else None

    def merge(self, net: Elastic, state: ServerState, updates: Updates) -> ServerState:
        return merge_average(self.server, net, state, updates, self.weighting, rule=self.merging)
