"""FedAvg: train the full network on every device and average, weighted by samples.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data",
AISTATS 2017.
"""

from collections.abc import Iterable, Sequence

from pliant.devices import FULL_NETWORK, BudgetPolicy
from pliant.methods.aggregation import Weighting, weight_by
from pliant.methods.base import (
    LocalTraining,
    ServerState,
    Step,
    Task,
    TaskKey,
    Update,
    train_locally,
)
from pliant.methods.robust import AnyMerge, Mean, merge_by_rule
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd
from pliant.nn.elastic import Elastic
from pliant.nn.subnet import Subnet
from pliant.value import Value


class FedAvg(Value, frozen=True, tag="fedavg"):
    """Train the full network on every device and average by samples.

    With a server optimiser it is FedAvgM (`ServerSgd(momentum=0.9)`) or FedAdam (`ServerAdam()`).

    >>> import pliant as pl
    >>> pl.FedAvg(server=pl.ServerSgd(momentum=0.9)).weighting
    'samples'
    """

    local: LocalTraining = LocalTraining()
    weighting: Weighting = "samples"
    merging: AnyMerge = Mean()  # or a Byzantine-robust rule
    server: AnyServerOptimiser = ServerSgd()

    def make_budget_policy(self, net: Elastic) -> BudgetPolicy:
        return FULL_NETWORK

    def select_subnet(self, net: Elastic, row: int, key: TaskKey, step: int) -> Subnet:
        return net.full

    def subnet_to_send(self, net: Elastic, row: int, key: TaskKey) -> Subnet | None:
        return None

    def train(self, net: Elastic, task: Task, steps: Iterable[Step]) -> Update:
        return train_locally(net, task, steps, self.local.optimiser)

    def merge(self, net: Elastic, state: ServerState, updates: Sequence[Update]) -> ServerState:
        if not updates:
            return state
        delta = merge_by_rule(self.merging, net, state.params, updates, weight_by(self.weighting))
        return self.server.step(net, state, delta)
