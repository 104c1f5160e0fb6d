"""FedAvg: train the full network on every device and average, weighted by samples.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data",
AISTATS 2017.
"""

from pliant.methods.aggregation import Updates, Weighting
from pliant.methods.base import LocalTraining, ServerState
from pliant.methods.robust import AnyMerge, Mean
from pliant.methods.server_optimisers import AnyServerOptimiser, ServerSgd, merge_average
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

    @property
    def merges_stream(self) -> bool:
        return isinstance(self.merging, Mean)  # the robust rules compare all updates

    @property
    def delta_weighting(self) -> Weighting | None:
        return self.weighting if isinstance(self.merging, Mean) else None

    def merge(self, net: Elastic, state: ServerState, updates: Updates) -> ServerState:
        return merge_average(self.server, net, state, updates, self.weighting, rule=self.merging)
