"""FedAvg: train the full network on every device and average, weighted by samples.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data",
AISTATS 2017.
"""

from collections.abc import Sequence

from pliant.methods.aggregation import Weighting, weight_by
from pliant.methods.base import LocalTraining, ServerState, Update
from pliant.methods.robust import AnyMerge, Mean, merge_by_rule
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd, take_server_step
from pliant.nn.elastic import Elastic
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

    def merge(self, net: Elastic, state: ServerState, updates: Sequence[Update]) -> ServerState:
        weight = weight_by(self.weighting)
        delta = merge_by_rule(self.merging, net, state.params, updates, weight)
        return take_server_step(self.server, net, state, delta, updates, weight)
